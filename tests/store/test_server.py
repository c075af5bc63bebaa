"""A folder that is served: read-only, nothing beside it, ranges, bounded pages, and waits that end when they should."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulse_rl import HttpStore, InputError, LocalStore, NotFound
from pulse_rl.store.server import FolderServer
from tests.support.http import CountedHttpStore, asked
from tests.support.stores import names


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FolderServer]:
    root = tmp_path / "root"
    LocalStore(root).put("a/b", b"0123456789")
    (tmp_path / "secret").write_bytes(b"secret")
    with FolderServer(root) as server:
        yield server


def ask(server: FolderServer, method: str, path: str, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def test_it_answers_as_a_web_server_does(served: FolderServer) -> None:
    status, body, headers = ask(served, "GET", "/a/b")
    assert (status, body, headers["Accept-Ranges"]) == (200, b"0123456789", "bytes")
    assert "Last-Modified" in headers
    status, body, headers = ask(served, "HEAD", "/a/b")
    assert (status, body, headers["Content-Length"]) == (200, b"", "10")
    for asked_for, expected in (("2-4", b"234"), ("8-", b"89"), ("-3", b"789"), ("0-99", b"0123456789")):
        status, body, headers = ask(served, "GET", "/a/b", Range=f"bytes={asked_for}")
        assert (status, body) == (206, expected)
    assert headers["Content-Range"] == "bytes 0-9/10"
    for asked_for in ("10-", "10-12", "x", "5-3"):
        assert ask(served, "GET", "/a/b", Range=f"bytes={asked_for}")[0] == 416


def test_nothing_is_written(served: FolderServer) -> None:
    for method in ("PUT", "POST", "DELETE", "PATCH", "OPTIONS"):
        assert ask(served, method, "/a/b")[0] == 405


def test_nothing_beside_the_folder_is_shown(served: FolderServer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "f").write_bytes(b"secret")
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "a" / "file").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path / "beside")
    (root / ".hidden").write_bytes(b"secret")
    os.mkfifo(root / "a" / "fifo")
    paths = ("/file", "/a/file", "/folder/f", "/.hidden", "/../secret", "/a/../../secret", "/%2e%2e/secret", "//a/b")
    for path in (*paths, "/a/%2e%2e/%2e%2e/secret", f"/{tmp_path}/secret", "/a", "/a/fifo", "/", "/a/b/c", "/a%00b"):
        status, body, _ = ask(served, "GET", path)
        assert status == 404 or (path == "/" and body == b""), path
        assert b"secret" not in body
    store = HttpStore(served.url)
    assert names(store, "a") == ["a/b"]
    assert names(store, "folder") == []


def test_a_list_comes_in_pages(served: FolderServer, tmp_path: Path) -> None:
    folder = tmp_path / "root" / "many"
    folder.mkdir()
    for k in range(2500):
        (folder / f"{k:05d}").touch()
    store = CountedHttpStore(served.url)
    assert names(store, "many") == [f"many/{k:05d}" for k in range(2500)]
    assert asked(store) == [
        "GET many/?after=",
        "GET many/?after=00999",
        "GET many/?after=01999",
    ]
    assert ask(served, "GET", "/many/")[1].count(b"\n") == 1000


def test_a_wait_ends_with_the_first_new_object(served: FolderServer, tmp_path: Path) -> None:
    store, writer = HttpStore(served.url), LocalStore(tmp_path / "root")
    assert store.wait_for_new(["a/a"], 20) == {"a"}, "it is there already"
    for name, folder in (("a/c", "a"), ("later/x", "later"), ("a/d", "a")):
        started = time.monotonic()
        late = threading.Timer(0.3, writer.put, (name, b""))
        late.start()
        assert store.wait_for_new([f"{folder}/{'c' if name == 'a/d' else 'b'}"], 20) == {folder}
        assert 0.25 < time.monotonic() - started < 5
        late.join()


def test_a_wait_for_nothing_ends_in_time(served: FolderServer, tmp_path: Path) -> None:
    started = time.monotonic()
    threading.Timer(0.1, LocalStore(tmp_path / "root").put, ("a/a", b"")).start()
    assert HttpStore(served.url).wait_for_new(["a/b", "c/0"], 0.6) == set()
    assert 0.55 < time.monotonic() - started < 5


def test_many_wait_without_a_thread_each(served: FolderServer, tmp_path: Path) -> None:
    found: list[set[str]] = []

    def wait() -> None:
        found.append(HttpStore(served.url).wait_for_new(["a/b"], 20))

    before = threading.active_count()
    waiters = [threading.Thread(target=wait) for _ in range(100)]
    for waiter in waiters:
        waiter.start()
    time.sleep(1)
    assert threading.active_count() - before <= len(waiters) + 8, "threads of the server"
    LocalStore(tmp_path / "root").put("a/c", b"")
    for waiter in waiters:
        waiter.join(20)
    assert found == [{"a"}] * 100


def test_bad_waits_are_refused(served: FolderServer) -> None:
    many = b"\n".join(b"a%d/b" % k for k in range(4097))
    for query, body in (
        ("wait=1", many),
        ("wait=x", b"a/b"),
        ("wait=-1", b"a/b"),
        ("wait=nan", b"a/b"),
        ("wait=1", b"a"),
        ("", b".."),
    ):
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
        connection.request("POST", f"/?{query}", body)
        assert connection.getresponse().status == 400
        connection.close()
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
    connection.request("POST", "/?wait=1", b"a/b\n" * (1 << 19))
    assert connection.getresponse().status == 413
    connection.close()


def test_closing_ends_waits_and_connections(tmp_path: Path) -> None:
    server = FolderServer(tmp_path)
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(HttpStore(server.url, timeout_seconds=1).wait_for_new(["a/b"], 20))
        except Exception as error:
            ended.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.5)
    started = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - started < 5
    waiter.join(10)
    assert len(ended) == 1


def test_what_cannot_be_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no folder"):
        FolderServer(tmp_path / "nothing")
    with FolderServer(tmp_path) as server, pytest.raises(InputError, match="port"):
        FolderServer(tmp_path, port=int(server.url.rsplit(":", 1)[1]))
    with pytest.raises(InputError, match="cannot serve"):
        FolderServer(tmp_path, bind="host.invalid")
    monkeypatch.setitem(__import__("sys").modules, "aiohttp.web", None)
    with pytest.raises(InputError, match="aiohttp") as caught:
        FolderServer(tmp_path)
    assert "pulse-rl[serve]" in caught.value.hint


def test_a_file_that_shrinks_while_it_is_sent_is_missed(served: FolderServer, tmp_path: Path) -> None:
    """The reader asks again, and gets what is there."""
    big = tmp_path / "root" / "big"
    big.write_bytes(bytes(64 << 20))
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
    connection.request("GET", "/big")
    answer = connection.getresponse()
    os.truncate(big, 1)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    connection.close()
    with pytest.raises(NotFound):
        HttpStore(served.url).head("gone")
    assert HttpStore(served.url).get("big") == b"\0"
