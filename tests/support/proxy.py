"""A small TCP proxy in front of an S3 server that breaks chosen requests the way networks do.

One request a connection: the proxy reads it whole, looks for the first rule that it meets, and does
what the rule says. Everything is bounded: connections, bytes of a request, seconds of a socket
call.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlparse

MAX_REQUEST = 64 << 20
MAX_CONNECTIONS = 64
SOCKET_SECONDS = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close() sends RST

ACTIONS = ("pass", "refuse", "lose", "cut", "garble", "stall", "throttle", "answer")


@dataclass
class Rule:
    """What happens to requests of ``method`` whose path holds ``path`` (both patterns): to the
    ``nth``, from 1, that comes after the rule was made, and to ``times`` in all.

    * "refuse": the connection is reset before anything is forwarded;
    * "lose": the server answers, the connection is reset instead of its reply;
    * "cut": half of the server's reply arrives, then a reset;
    * "garble": the server answers, but the client is told 500, as by a gateway that lost the reply;
    * "stall": nothing happens for ``seconds``, then the request is forwarded;
    * "throttle": the reply trickles at ``bytes_per_second``;
    * "answer": the server is not asked, the reply has ``status`` and the S3 error ``code``;
    * "pass": it is forwarded, after ``before`` was called.
    """

    action: str
    method: str = ".*"
    path: str = ""
    nth: int = 1
    times: int = 1
    seconds: float = 0.0
    bytes_per_second: int = 0
    status: int = 403
    code: str = "AccessDenied"
    before: Callable[[], object] | None = None
    seen: int = 0
    fired: int = 0

    def takes(self, method: str, path: str) -> bool:
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self.seen += 1
        due = self.nth <= self.seen < self.nth + self.times
        self.fired += due
        return due


class Proxy:
    """Listens on loopback, forwards to ``upstream`` (http://host:port). ``requests`` lists (method,
    path, action)."""

    def __init__(self, upstream: str) -> None:
        url = urlparse(upstream)
        assert url.hostname
        assert url.port
        self._upstream = (url.hostname, url.port)
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open = True
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=MAX_CONNECTIONS)
        self._listener.settimeout(0.02)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[tuple[str, str, str]] = []
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def add(self, rule: Rule) -> Rule:
        assert rule.action in ACTIONS
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Forgets all rules and requests."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            if not self._slots.acquire(blocking=False):
                _reset(client)
                continue
            threading.Thread(
                target=self._serve, args=(client,), name="proxied", daemon=True
            ).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.settimeout(SOCKET_SECONDS)
            with suppress(OSError, ValueError):  # whatever a client does, the proxy goes on
                self._handle(client)
        finally:
            client.close()
            self._slots.release()

    def _handle(self, client: socket.socket) -> None:
        request = _read_request(client)
        if request is None:
            return
        method, path = request.split(b" ", 2)[:2]
        rule = self._rule(method.decode(), path.decode())
        action = rule.action if rule else "pass"
        if rule and rule.before:
            rule.before()
        if action == "refuse":
            _reset(client)
            return
        if action == "stall" and rule:
            time.sleep(rule.seconds)
        if action == "answer" and rule:
            body = (
                f"<?xml version='1.0'?><Error><Code>{rule.code}</Code><Message>no</Message></Error>"
            ).encode()
            head = (
                f"HTTP/1.1 {rule.status} {HTTPStatus(rule.status).phrase}\r\nConnection: close\r\n"
            )
            client.sendall(
                f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body * (method != b"HEAD")
            )
            return
        reply = self._forward(request)
        if action == "lose":
            _reset(client)
        elif action == "cut":
            client.sendall(
                reply[: max(len(reply) // 2, reply.find(b"\r\n\r\n") + 4 + (len(reply) > 400))]
            )
            _reset(client)
        elif action == "garble":
            client.sendall(
                b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: "
                b"close\r\n\r\n"
            )
        elif action == "throttle" and rule:
            step = max(rule.bytes_per_second // 50, 1)
            for at in range(0, len(reply), step):
                client.sendall(reply[at : at + step])
                time.sleep(step / rule.bytes_per_second)
        else:
            client.sendall(reply)

    def _rule(self, method: str, path: str) -> Rule | None:
        with self._lock:
            taken = next((rule for rule in self._rules if rule.takes(method, path)), None)
            self.requests.append((method, path, taken.action if taken else "pass"))
            return taken

    def _forward(self, request: bytes) -> bytes:
        """The server's whole reply. It is asked to close the connection behind one that does not
        tell its length."""
        line, _, rest = request.partition(b"\r\n")
        with socket.create_connection(self._upstream, timeout=SOCKET_SECONDS) as server:
            server.sendall(line + b"\r\nConnection: close\r\n" + rest)
            reply = b""
            while not _is_complete(reply, line.startswith(b"HEAD ")):
                chunk = server.recv(1 << 16)
                if not chunk:
                    break
                reply += chunk
        if b"\r\nconnection:" not in reply[:4096].lower():
            reply = reply.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        return reply


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


def _read_request(client: socket.socket) -> bytes | None:
    """Head and body of one request; None where the client closes without one. Raises ValueError
    past the bounds."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = client.recv(1 << 16)
        if not chunk:
            return None
        data += chunk
        if len(data) > MAX_REQUEST:
            raise ValueError("the head of a request has no end")
    head, _, body = data.partition(b"\r\n\r\n")
    if re.search(rb"(?im)^transfer-encoding:", head):
        raise ValueError("this proxy reads no chunked requests")
    length = re.search(rb"(?im)^content-length:\s*(\d+)", head)
    missing = (int(length[1]) if length else 0) - len(body)
    if missing > MAX_REQUEST:
        raise ValueError(f"a request of {missing} bytes")
    parts = [data]
    while missing > 0:
        chunk = client.recv(min(missing, 1 << 20))
        if not chunk:
            return None
        parts.append(chunk)
        missing -= len(chunk)
    return re.sub(rb"(?im)^connection:[^\r]*\r\n", b"", b"".join(parts), count=1)


def _is_complete(reply: bytes, of_head: bool) -> bool:
    """Whether no more will come, as far as the reply tells; closing takes the server a moment that
    would add up."""
    head, end, body = reply.partition(b"\r\n\r\n")
    length = re.search(rb"(?im)^content-length:\s*(\d+)", head)
    return bool(end) and (of_head or (length is not None and len(body) >= int(length[1])))


def _reset(client: socket.socket) -> None:
    with suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    client.close()
