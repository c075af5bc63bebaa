"""HTTP servers of tests: ones that answer as a test says, and a folder that is served and
written."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from pulse_rl import LocalStore
from pulse_rl.store import Data, ObjectInfo
from pulse_rl.stores.http import HttpStore


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server that answers each request so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline:
                self.close_connection = True
            elif self.parse_request():
                answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def serving_json(answer: Callable[[str, Any], tuple[int, Any]]) -> AbstractContextManager[str]:
    """The address of a server. ``answer`` gets a path and the JSON of the body, None without one.
    It returns a status and what is sent: bytes as they are, anything else as JSON."""

    def respond(request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        status, found = answer(request.path, json.loads(body) if body else None)
        send(request, status, found if isinstance(found, bytes) else json.dumps(found).encode())

    return serving(respond)


class ServedStore:
    """Reads by HTTP what it writes into the folder."""

    def __init__(self, folder: LocalStore, reader: HttpStore) -> None:
        self.folder = folder
        self.reader = reader

    def put(self, name: str, data: Data) -> None:
        self.folder.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.folder.put_new(name, data)

    def delete(self, name: str) -> None:
        self.folder.delete(name)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.reader.get(name, start, stop)

    def head(self, name: str) -> ObjectInfo:
        return self.reader.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self.reader.list(folder, start_after)


class CountedHttpStore(HttpStore):
    """``requests`` are the methods and paths that were asked for."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requests: list[str] = []

    def _ask(self, method: str, path: str, *args: object, **options: object) -> object:  # type: ignore[override]
        self.requests.append(f"{method} {path}")
        return super()._ask(method, path, *args, **options)  # type: ignore[arg-type, misc]


class Liar:
    """A server that answers each request by ``answer``, which gets the request's head and sends
    what it likes."""

    def __init__(self, answer: Callable[[bytes, socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.requests = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._open.append(peer)
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with suppress(OSError), peer:
            head = b""
            while b"\r\n\r\n" not in head:
                more = peer.recv(65536)
                if not more:
                    return
                head += more
            self.requests += 1
            self._answer(head, peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        for peer in self._open:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def answering(data: bytes) -> Iterator[Liar]:
    """A server that answers everything with these bytes, then closes."""
    with Liar(lambda _, peer: peer.sendall(data)) as server:
        yield server


def answer(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def asked(store: CountedHttpStore) -> Collection[str]:
    found, store.requests = store.requests, []
    return found
