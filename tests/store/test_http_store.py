"""The HTTP store against servers that lie, send without end, or hardly send at all."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pulse_rl import LocalStore, Store, open_store
from pulse_rl.errors import InputError, NotFound, StoreError, StoreUnavailable
from pulse_rl.stores.server import FolderServer
from tests.support.http import Liar, answer, answering


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl._util.retry._FIRST_WAIT", 0.01)


DATE = "Last-Modified: Sun, 22 Nov 2026 05:48:56 GMT"


def test_addresses() -> None:
    for good in ("http://host", "http://host:1/", "https://host/a/b", "http://[::1]:80/a"):
        assert repr(open_store(good)).startswith("HttpStore")
    for bad in (
        *(
            "http://",
            "http:/host",
            "http://host:x",
            "http://host:99999",
            "http://ho st",
            "http://host/\r\nX: y",
        ),
        *("http://host/?a", "http://host/#a", "http://me:word@host", "ftp://host", "http://[::1"),
    ):
        with pytest.raises(InputError):
            open_store(bad)
    with pytest.raises(InputError, match="timeout_seconds"):
        open_store("http://host", timeout_seconds=0)


def test_writing_is_refused(tmp_path: Path) -> None:
    with FolderServer(tmp_path) as server:
        store = open_store(server.url)
        for write in (
            lambda: store.put("a/b", b"x"),
            lambda: store.put_new("a/b", b"x"),
            lambda: store.delete("a/b"),
        ):
            with pytest.raises(StoreError, match="for readers") as caught:
                write()
            assert not caught.value.retryable
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "sent"),
    [
        ("a redirect", answer("302 Found", b"", "Location: file:///etc/passwd")),
        ("no access", answer("403 Forbidden")),
        ("an odd status", answer("204 No Content")),
        ("no length", b"HTTP/1.1 200 OK\r\n\r\n0123456789"),
        (
            "chunks",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n",
        ),
        ("a coded body", answer("200 OK", b"0123456789", "Content-Encoding: gzip")),
        ("a negative length", answer("200 OK", b"", length=-1)),
        ("a huge length", answer("200 OK", b"x" * 100, length=10**15)),
        (
            "another range",
            answer("206 Partial Content", b"0123456789", "Content-Range: bytes 1-10/99", DATE),
        ),
        (
            "more than the range",
            answer("206 Partial Content", b"0" * 11, "Content-Range: bytes 0-9/10", DATE),
        ),
        (
            "less than the range",
            answer("206 Partial Content", b"0" * 9, "Content-Range: bytes 0-9/10", DATE),
        ),
        ("the whole object, longer", answer("200 OK", b"0" * 11, DATE)),
    ],
)
def test_wrong_answers_are_errors(what: str, sent: bytes) -> None:
    with answering(sent) as server:
        store = open_store(server.url)
        for read in (lambda: store.get("a/b", 0, 10), lambda: store.get("a/b", 2, 12)):
            with pytest.raises(StoreError) as caught:
                read()
            assert not isinstance(caught.value, NotFound | StoreUnavailable), what


READS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a/b"),
    "head": lambda store: store.head("a/b"),
    "list": lambda store: list(store.list("a")),
}
PART = "Content-Range: bytes 0-3/10"
FALSE = [
    ("get", answer("200 OK", b"x" * 1000, length=10**12), "1000000000000 bytes"),
    ("list", answer("200 OK", b"1 2 b\n" * (1 << 18)), "1572864"),
    ("head", answer("200 OK", b"", "X: y"), "when"),
    ("head", answer("200 OK", b"", "Last-Modified: yesterday"), "when"),
    ("head", answer("200 OK", b"", "Last-Modified: Sun, 99 Nov 99999 05:48:56 GMT"), "when"),
    *((call, answer("206 Partial Content", b"0123", PART, DATE), "status 206") for call in READS),
    *((call, answer("416 Not Satisfiable", b"0123", PART, DATE), "status 416") for call in READS),
]


@pytest.mark.parametrize(("call", "sent", "match"), FALSE, ids=[f"{c}-{m}" for c, _, m in FALSE])
def test_answers_without_bounds_without_a_time_and_of_parts(
    call: str, sent: bytes, match: str
) -> None:
    with answering(sent) as server, pytest.raises(StoreError, match=match):
        READS[call](open_store(server.url))


def test_what_breaks_is_asked_for_again() -> None:
    good = answer("200 OK", b"0123456789", DATE)
    bad = (answer("503 Busy"), answer("200 OK", b"0123", length=10), b"", good)
    answers = itertools.cycle(bad)
    with Liar(lambda _, peer: peer.sendall(next(answers))) as server:
        assert open_store(server.url).get("a/b") == b"0123456789"
        assert server.requests == 4


def test_what_goes_on_breaking_is_unavailable() -> None:
    for sent in (answer("500 Oops"), answer("200 OK", b"0123", length=10), b"SSH-2.0-x\r\n", b""):
        with answering(sent) as server:
            with pytest.raises(StoreUnavailable):
                open_store(server.url, retry_timeout=0.2).get("a/b")
            assert server.requests > 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreUnavailable):
            open_store(f"http://127.0.0.1:{taken.getsockname()[1]}").head("a/b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin", [b"", b"HTTP/1.1 200 OK\r\nX-", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"]
)
def test_slow_bytes_end_at_the_deadline(begin: bytes) -> None:
    """A byte now and then would keep a timeout for each packet alive."""

    def drip(_: bytes, peer: socket.socket) -> None:
        peer.sendall(begin)
        while True:
            peer.sendall(b"x")
            time.sleep(0.3)

    with Liar(drip) as server:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="timed out"):
            open_store(server.url, timeout_seconds=0.5).get("a/b", 0, 99)
        assert time.monotonic() - started < 15


@pytest.mark.slow
def test_endless_interim_answers_end() -> None:
    """`http.client` skips them, however many."""

    def flood(_: bytes, peer: socket.socket) -> None:
        stop = time.monotonic() + 60
        while time.monotonic() < stop:
            peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)

    with Liar(flood) as server:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="timed out"):
            open_store(server.url, timeout_seconds=0.5).get("a/b")
        assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_long_body_may_take_longer_than_the_timeout() -> None:
    def send(_: bytes, peer: socket.socket) -> None:
        peer.sendall(answer("200 OK", b"", DATE, length=1 << 18))
        for _ in range(16):
            peer.sendall(bytes(1 << 14))
            time.sleep(0.1)

    with Liar(send) as server:
        assert open_store(server.url, timeout_seconds=0.5).get("a/b") == bytes(1 << 18)
        assert server.requests == 1


def test_endless_headers_end() -> None:
    def flood(_: bytes, peer: socket.socket) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            peer.sendall(b"X-Y: z\r\n" * 100)

    with Liar(flood) as server, pytest.raises(StoreUnavailable):
        open_store(server.url, timeout_seconds=1).get("a/b")


@pytest.mark.parametrize(
    "lines",
    [
        b"<html><body>Index of /a</body></html>\n",
        b"1 2 b\n1 2 b\n",
        b"1 2 c\n1 2 b\n",
        b"1 2 /c\n",
        b"1 2 ../b\n",
        b"-1 2 b\n",
        b"1 2 b c\n",
        b"<html>maintenance</html>",
        b"1 2 b",
        b"1 2 b\n1 2 c",
        "1 2 ü\n".encode(),
        b"1" * 5000 + b" 2 b\n",
        b"1 2 b\n" * 1000,
    ],
)
def test_false_lists_are_errors(lines: bytes) -> None:
    with answering(answer("200 OK", lines)) as server, pytest.raises(StoreError) as caught:
        list(open_store(server.url).list("a"))
    assert not isinstance(caught.value, StoreUnavailable)


def test_an_endless_list_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl.stores.http.MAX_LISTED", 5000)
    pages = itertools.count()

    def page(_: bytes, peer: socket.socket) -> None:
        first = next(pages) * 1000
        peer.sendall(
            answer("200 OK", b"".join(b"1 2 %09d\n" % k for k in range(first, first + 1000)))
        )

    with Liar(page) as server:
        listed = open_store(server.url).list("a")
        assert len(list(itertools.islice(listed, 5000))) == 5000
        with pytest.raises(StoreError, match="more than 5000"):
            next(listed)
        assert server.requests == 5


def test_connections_are_kept_and_replaced(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("a/b", b"0123456789")
    with FolderServer(tmp_path) as server:
        store = open_store(server.url, retry_timeout=0.1)
        port = int(server.url.rsplit(":", 1)[1])
        for _ in range(5):
            assert store.get("a/b", 2, 4) == b"23"
            with pytest.raises(NotFound):
                store.head("a/c")
        assert len(store._idle) == 1
    with pytest.raises(StoreUnavailable):
        store.get("a/b")
    with FolderServer(tmp_path, port=port):
        assert store.get("a/b") == b"0123456789"
        kept = store._idle[0]
    with FolderServer(tmp_path, port=port):
        assert store.get("a/b") == b"0123456789", "the server has closed what was kept"
        assert store._idle[0] is not kept


def test_a_connection_is_not_kept_for_ever(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("a/b", b"0123456789")
    with FolderServer(tmp_path) as server:
        store = open_store(server.url)
        store.get("a/b")
        (kept,) = store._idle
        store.get("a/b")
        assert store._idle == [kept]
        kept.idle_since -= 31
        store.get("a/b")
        assert len(store._idle) == 1
        assert store._idle != [kept]
        assert kept._connection.sock is None


def test_a_forked_process_uses_connections_of_its_own(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("a/b", b"0123456789")
    with FolderServer(tmp_path) as server:
        store = open_store(server.url)
        store.get("a/b")
        (kept,) = store._idle
        child = os.fork()
        if child == 0:
            os._exit(0 if store.get("a/b", 0, 1) == b"0" and kept not in store._idle else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get("a/b", 0, 1) == b"0"
        assert store._idle == [kept]


def test_a_listing_of_late_pages_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page comes within the timeout; there are a thousand."""
    now, pages = [1000.0], itertools.count()

    def page(_: bytes, peer: socket.socket) -> None:
        now[0] += 24
        first = 1000 * next(pages)
        peer.sendall(
            answer(
                "200 OK",
                "".join(f"1 1 {name:09d}\n" for name in range(first, first + 1000)).encode(),
            )
        )

    with Liar(page) as server:
        store = open_store(server.url, timeout_seconds=30)
        monkeypatch.setattr("pulse_rl.stores.http.time.monotonic", lambda: now[0])
        with pytest.raises(StoreUnavailable, match="too long to list"):
            list(store.list("a"))
        assert server.requests < 20
