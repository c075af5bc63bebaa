"""A folder that is served: read-only, nothing next to it, ranges, bounded pages."""

from __future__ import annotations

import errno
import http.client
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pulse_rl import LocalStore, open_store
from pulse_rl.errors import InputError, NotFound, StoreError
from pulse_rl.stores.server import FolderServer
from tests.support.http import CountedHttpStore, asked
from tests.support.stores import names

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FolderServer]:
    root = tmp_path / "root"
    LocalStore(root).put("a/b", b"0123456789")
    (tmp_path / "secret").write_bytes(b"secret")
    with FolderServer(root) as server:
        yield server


def ask(
    server: FolderServer, method: str, path: str, **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
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
    for asked_for, expected in (
        ("2-4", b"234"),
        ("8-", b"89"),
        ("-3", b"789"),
        ("0-99", b"0123456789"),
    ):
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
    paths = (
        "/file",
        "/a/file",
        "/folder/f",
        "/.hidden",
        "/../secret",
        "/a/../../secret",
        "/%2e%2e/secret",
        "//a/b",
    )
    for path in (
        *paths,
        "/a/%2e%2e/%2e%2e/secret",
        f"/{tmp_path}/secret",
        "/a",
        "/a/fifo",
        "/",
        "/a/b/c",
        "/a%00b",
    ):
        status, body, _ = ask(served, "GET", path)
        assert status == 404 or (
            path == "/" and body.endswith(b" a/b\n") and body.count(b"\n") == 1
        ), path
        assert b"secret" not in body
    store = open_store(served.url)
    assert names(store, "a") == ["a/b"]
    assert names(store, "folder") == []


def test_a_list_comes_in_pages(served: FolderServer, tmp_path: Path) -> None:
    folder = tmp_path / "root" / "many"
    folder.mkdir()
    for k in range(2500):
        (folder / f"{k:05d}").touch()
    store = CountedHttpStore(served.url)
    assert names(store, "many") == [f"many/{k:05d}" for k in range(2500)]
    assert asked(store) == ["GET many/?after=", "GET many/?after=00999", "GET many/?after=01999"]
    assert ask(served, "GET", "/many/")[1].count(b"\n") == 1000


def test_closing_ends_connections(tmp_path: Path) -> None:
    server = FolderServer(tmp_path)
    where = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    with socket.create_connection(where, timeout=15) as peer:
        peer.sendall(b"GET /a/b HTTP/1.1\r\nHost: x\r\n\r\n")
        assert peer.recv(65536).startswith(b"HTTP/1.1 404")
        server.close()
        server.close()
        with suppress(ConnectionResetError):
            assert peer.recv(65536) == b""


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


def test_a_file_that_shrinks_while_it_is_sent_is_missed(
    served: FolderServer, tmp_path: Path
) -> None:
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
        open_store(served.url).head("gone")
    assert open_store(served.url).get("big") == b"\0"


def test_a_root_that_is_gone_is_no_empty_store(served: FolderServer, tmp_path: Path) -> None:
    (tmp_path / "root").rename(tmp_path / "moved")
    for path in ("/a/", "/a/b", "/a/c"):
        assert ask(served, "GET", path)[0] == 503
    assert ask(served, "HEAD", "/a/b")[0] == 503
    (tmp_path / "moved").rename(tmp_path / "root")
    assert ask(served, "GET", "/a/b")[0] == 200


def test_what_the_disk_refuses_is_not_missing(
    served: FolderServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def refused(path: str, *args: int, **options: int) -> int:
        if path in refusals:
            raise OSError(refusals[path], "refused")
        return really(path, *args, **options)

    refusals: dict[str, int] = {}
    monkeypatch.setattr(os, "open", refused)
    for part in ("a", "b"):
        for code, status in ((errno.EACCES, 403), (errno.EIO, 503), (errno.EMFILE, 503)):
            refusals = {part: code}
            assert ask(served, "GET", "/a/b")[0] == status
            assert ask(served, "GET", "/a/")[0] == (status if part == "a" else 200)
    assert ask(served, "GET", f"/a/{'x' * 300}")[0] == 404


def test_what_may_be_kept(served: FolderServer) -> None:
    assert ask(served, "GET", "/a/b")[2]["Cache-Control"] == "no-cache"
    assert ask(served, "GET", "/a/b", Range="bytes=2-4")[2]["Cache-Control"] == "no-cache"
    for method, path in (("GET", "/a/"), ("GET", "/a/c"), ("PUT", "/a/b")):
        assert ask(served, method, path)[2]["Cache-Control"] == "no-store", path


def test_idle_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl.stores.server._KEEPALIVE_SECONDS", 0.2)
    with (
        FolderServer(tmp_path) as server,
        socket.create_connection(
            ("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10
        ) as peer,
    ):
        peer.sendall(b"GET /a/b HTTP/1.1\r\nHost: x\r\n\r\n")
        while peer.recv(65536):
            pass


def test_connections_that_say_nothing_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_rl.stores.server._SILENT_SECONDS", 0.2)
    LocalStore(tmp_path).put("a/b", b"0123456789")
    with FolderServer(tmp_path) as server:
        where = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with (
            socket.create_connection(where, timeout=10) as silent,
            socket.create_connection(where, timeout=10) as slow,
        ):
            slow.sendall(b"GET /a/b HT")
            for peer in (silent, slow):
                with suppress(ConnectionResetError):
                    assert peer.recv(65536) == b""
        assert open_store(server.url).get("a/b") == b"0123456789"


def test_malformed_requests_do_not_fill_the_log(
    served: FolderServer, caplog: pytest.LogCaptureFixture
) -> None:
    where = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    for sent in (
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /a/b HTTP/1.1\r\nX Y: 1\r\n\r\n",
    ) * 7:
        with socket.create_connection(where, timeout=10) as peer:
            peer.sendall(sent)
            while peer.recv(65536):
                pass
    assert len(caplog.records) <= 3
    assert not any(record.exc_info for record in caplog.records)


def test_a_folder_that_is_swapped_for_a_link_shows_nothing_else(
    served: FolderServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who writes to the folder does it between the check and the listing."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    folder, scandir = tmp_path / "root" / "a", os.scandir

    def swapped(path: object) -> object:
        if folder.is_dir() and not folder.is_symlink():
            folder.rename(tmp_path / "root" / "aside")
            folder.symlink_to(outside)
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr("os.scandir", swapped)
    assert b"secret" not in ask(served, "GET", "/a/")[1]


def test_an_empty_address_is_not_every_address(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="empty") as caught:
        FolderServer(tmp_path, bind="")
    assert "0.0.0.0" in caught.value.hint


def test_heartbeats_are_all_that_it_takes(served: FolderServer, tmp_path: Path) -> None:
    root, beat = tmp_path / "root", "/s/workers/w-000000000001"

    def change(method: str, path: str, body: bytes = b"") -> int:
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
        connection.request(method, path, body)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    assert change("PUT", beat) == 404, "there is no such stream"
    LocalStore(root).put("s/versions/000000000000.json", b"{}")
    LocalStore(root).put("in/s/versions/000000000000.json", b"{}")
    assert change("PUT", beat, b"x" * 4096) == 204
    assert change("PUT", f"/in{beat}") == 204
    assert change("PUT", "/s/workers/w-none") == 204
    assert ask(served, "GET", beat)[:2] == (200, b"x" * 4096)
    assert change("PUT", beat, b"x" * 4097) == 413
    for name in ("/a/b", "/s/versions/000000000001.json", "/s/workers/w", "/s/workers/../x-none"):
        assert change("PUT", name) == change("DELETE", name) == 405
    assert change("POST", beat) == 405
    for _ in range(2):
        assert change("DELETE", beat) == 204
    assert names(LocalStore(root), "s/workers") == ["s/workers/w-none"]
    (tmp_path / "elsewhere" / "versions").mkdir(parents=True)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    assert change("PUT", "/linked/workers/w-none") == 404
    (root / "s" / "workers" / "w-none").unlink()
    (root / "s" / "workers").rmdir()
    (root / "s" / "workers").symlink_to(tmp_path / "elsewhere")
    assert change("PUT", beat) == 403
    assert [each.name for each in (tmp_path / "elsewhere").iterdir()] == ["versions"]
    (root / "s" / "workers").unlink()
    (root / "s" / "workers").mkdir()
    for number in range(10_000):
        (root / "s" / "workers" / f"w{number}-none").touch()
    assert change("PUT", beat) == 507
    assert change("PUT", "/s/workers/w9-none") == 204, "one that is there"


def test_a_store_for_readers_writes_heartbeats_alone(served: FolderServer, tmp_path: Path) -> None:
    store, beat = open_store(served.url), "s/workers/w-000000000001"
    with pytest.raises(NotFound):
        store.put(beat, b"")
    LocalStore(tmp_path / "root").put("s/versions/000000000000.json", b"{}")
    store.put(beat, b"x")
    assert store.get(beat) == b"x"
    store.delete(beat)
    store.delete(beat)
    assert names(store, "s/workers") == []
    for write in (lambda: store.put("a/b", b""), lambda: store.delete("a/b")):
        with pytest.raises(StoreError, match="for readers"):
            write()
