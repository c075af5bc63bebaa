"""Workers that read a folder over HTTP: the same states, few requests, and bounds against a server
that lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pulse_rl import LocalStore, Publisher, PulseError, Relay, Subscriber
from pulse_rl.stores.server import FolderServer
from tests.support.http import CountedHttpStore, Liar, answer, asked
from tests.support.states import Rng, history, present, publish_each, reach, roots, taken

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FolderServer]:
    (tmp_path / "run").mkdir()
    with FolderServer(tmp_path / "run") as server:
        yield server


@pytest.fixture
def publisher(served: FolderServer, tmp_path: Path) -> Publisher:
    return Publisher(LocalStore(tmp_path / "run"), stream="policy", threads=1)


def test_readers_and_a_relay_follow(
    served: FolderServer, publisher: Publisher, tmp_path: Path, rng: Rng
) -> None:
    states = history(rng, 5)
    publisher.publish(states[0])
    workers = [
        Subscriber(served.url, stream="policy", threads=1),
        Subscriber(served.url, stream="policy", cache=tmp_path / "cache", threads=1),
    ]
    part = Subscriber(served.url, stream="policy", select="embed.*", threads=1)
    for state, root in zip(states, roots(states), strict=True):
        if state is not states[0]:
            publisher.publish(state)
        for worker in workers:
            reach(worker, root)
        update = present(part.sync())
        assert [tensor.spec.name for tensor in update.tensors] in (["embed.weight"], [])
    Relay(served.url, tmp_path / "near", stream="policy").sync()
    reach(Subscriber(tmp_path / "near", stream="policy", threads=1), roots(states)[-1])


def test_an_idle_worker_makes_a_list_each_poll(
    served: FolderServer, publisher: Publisher, rng: Rng
) -> None:
    publisher.publish(history(rng, 1)[0])
    store = CountedHttpStore(served.url)
    worker = Subscriber(store, stream="policy", threads=1)
    taken(worker)
    asked(store)
    assert list(worker.updates(poll_seconds=0.2, timeout_seconds=1)) == []
    found = list(asked(store))
    assert set(found) == {"GET policy/versions/?after="}
    assert len(found) <= 8, found


def test_a_near_server_that_ends_and_comes_back(tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 4)
    origin, near = LocalStore(tmp_path / "origin"), LocalStore(tmp_path / "near")
    publisher = Publisher(origin, stream="policy", threads=1)
    relay = Relay(origin, near, stream="policy")
    publisher.publish(states[0])
    relay.sync()
    server = FolderServer(near.root)
    port = int(server.url.rsplit(":", 1)[1])
    worker = Subscriber([server.url, origin], stream="policy", threads=1)
    reach(worker, roots(states)[0])
    server.close()
    publisher.publish(states[1])
    reach(worker, roots(states)[1])
    publish_each(publisher, states[2:])
    relay.sync()
    with FolderServer(near.root, port=port):
        reach(worker, roots(states)[3])


def test_a_server_that_always_promises_news_is_asked_at_the_poll_s_pace() -> None:
    def promise(head: bytes, peer: object) -> None:
        body = b"policy/versions\n" if head.startswith(b"POST") else b""
        peer.sendall(answer("200 OK", body))  # type: ignore[attr-defined]

    with Liar(promise) as server:
        worker = Subscriber(server.url, stream="policy")
        assert list(worker.updates(poll_seconds=0.5, timeout_seconds=2)) == []
        assert server.requests <= 14


def test_a_payload_longer_than_the_manifest_says_is_not_read(
    served: FolderServer, publisher: Publisher, tmp_path: Path, rng: Rng
) -> None:
    """The server says one length when it is asked for it, and sends another."""
    publisher.publish(history(rng, 1)[0])
    Subscriber(served.url, stream="policy", threads=1).sync()
    publisher.publish(history(rng, 2)[1])
    honest = CountedHttpStore(served.url)
    sent = 0

    def lie(head: bytes, peer: object) -> None:
        nonlocal sent
        method, path, _ = head.split(b" ", 2)
        name = path.decode().removeprefix("/")
        if "?" in name or "payloads" not in name or method == b"HEAD":
            reply = _forwarded(served, method.decode(), path.decode())
            peer.sendall(reply)  # type: ignore[attr-defined]
            return
        size = honest.head(name).nbytes
        start = f"Content-Range: bytes 0-{size - 1}/{size}"
        peer.sendall(answer("206 Partial Content", b"", start, length=10**13))  # type: ignore[attr-defined]
        while True:
            peer.sendall(bytes(1 << 20))  # type: ignore[attr-defined]
            sent += 1 << 20

    with Liar(lie) as server:
        reader = Subscriber(server.url, stream="policy", threads=1)
        with pytest.raises(PulseError):
            reader.sync()
        assert reader.version is None
    assert sent < 64 << 20, "the connection's buffers"


def _forwarded(served: FolderServer, method: str, path: str) -> bytes:
    import http.client

    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
    connection.request(method, path)
    found = connection.getresponse()
    body = found.read()
    length = int(found.headers["Content-Length"])
    connection.close()
    return answer(
        f"{found.status} X",
        body,
        f"Last-Modified: {found.headers['Last-Modified']}",
        "Connection: close",
        length=length,
    )
