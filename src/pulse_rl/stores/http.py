"""A store behind an HTTP server such as `pulse serve`: all of it to read, and heartbeats to write
(docs/protocol.md, section 11).

The server is not trusted to be right, to be brief or to be quick: lengths are compared, what is
read is bounded by what was asked for, and every request has a deadline.
"""

from __future__ import annotations

import io
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote, urlsplit

from .._util.addresses import shown
from .._util.retry import RETRY_SECONDS, Patience
from .._util.settings import checked_number
from ..errors import InputError, NotFound, StoreError, StoreFull, StoreUnavailable
from ..store.base import (
    MAX_LISTED,
    Data,
    ObjectInfo,
    ReadOnly,
    check_folder,
    check_name,
    check_range,
    is_name,
    joined,
)
from ..stream.names import is_heartbeat

#: Largest object that is read without saying how many bytes are expected.
MAX_WHOLE_BYTES: Final = 256 << 20
#: Objects in a page of a listing; one with fewer is the last.
PAGE: Final = 1000
LISTING_TIMEOUTS = 10
_PAGE_BYTES = 1 << 20
_KEPT_CONNECTIONS = 8
_IDLE_SECONDS = 30.0
_SMALL_BODY = 1 << 16
MIN_RATE = 16 << 10
_URL = re.compile(r"[!-~]+")
LENGTH = re.compile(r"[0-9]{1,18}")
#: Statuses of a server that may answer later, with all from 500 on but one: a method that it does
#: not have.
MAY_PASS = (408, 425, 429)
_NOT_IMPLEMENTED, _FULL = 501, 507
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:[0-9]{1,18}|\*)")
_LISTED = re.compile(r"([0-9]{1,18}) ([0-9]{1,12}) (\S{1,512})")
_NO_SUCH_SERVER = "Serve the folder with `pulse serve`."

T = TypeVar("T")


def checked_timeout(seconds: float) -> float:
    """What bounds a request of a store for readers. Raises InputError."""
    return checked_number("timeout_seconds", seconds, minimum=1e-3, maximum=1e6)


class _Transient(Exception):
    """The server says that it may answer later."""


class HttpStore(ReadOnly):
    """A `Store` for readers, behind an HTTP server such as ``pulse serve``, without credentials.

    Writing calls raise StoreError, except for the heartbeats of workers, which the server may take.
    Redirects are refused, proxies not asked. `get` without ``stop``
    reads up to 256 MiB, and else raises StoreError. It may be used from several threads, which
    share up to eight idle connections, kept for 30 s.

    Args:
        url: The server's address: ``http://host:port/prefix`` or ``https://…``.
        timeout_seconds: Bounds each request, to its first byte, and then at 16 KiB/s; ten times as
            long, a whole listing.
        retry_timeout: For how long a request is repeated that fails in a way that may pass, in
            seconds; 5 at most until the server has answered once. Default: 180.
    Raises:
        InputError: ``url`` is no such address.
    """

    writers_hint = "Give readers this address, and writers the store behind it."

    def __init__(
        self, url: str, *, timeout_seconds: float = 30.0, retry_timeout: float = RETRY_SECONDS
    ) -> None:
        self._timeout = checked_timeout(timeout_seconds)
        self._patience = Patience(shown(url), retry_timeout)
        self._connect, self._path = _parsed(url)
        self._url = url.rstrip("/")
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close_all, self._idle)
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"HttpStore({self._url!r})"

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        path = check_name(name)
        if start == 0 and stop is None:
            return self._ask("GET", path, lambda answer: self._body(answer, path, MAX_WHOLE_BYTES))
        if stop is not None and 0 <= start < stop:
            data = self._range(path, start, stop)
            if data is not None:
                return data
        start, stop = check_range(name, self.head(name).nbytes, start, stop)
        data = b"" if start == stop else self._range(path, start, stop)
        if data is None:
            raise StoreError(
                f"{self._url} does not send bytes {start} to {stop} of {name}", hint=_NO_SUCH_SERVER
            )
        return data

    def put(self, name: str, data: Data) -> None:
        if not is_heartbeat(name):
            self._refuse(name)
        self._ask("PUT", name, lambda _: None, body=joined(data))

    def delete(self, name: str) -> None:
        if not is_heartbeat(name):
            self._refuse(name)
        with suppress(NotFound):
            self._ask("DELETE", name, lambda _: None)

    def head(self, name: str) -> ObjectInfo:
        def read(answer: HTTPResponse) -> ObjectInfo:
            nbytes = self._length(answer, name)
            try:
                modified = parsedate_to_datetime(answer.getheader("Last-Modified", "")).timestamp()
            except (ValueError, TypeError, OverflowError):
                raise StoreError(
                    f"{self._url} does not say when {name} was written", hint=_NO_SUCH_SERVER
                ) from None
            return ObjectInfo(name, nbytes, modified)

        return self._ask("HEAD", check_name(name), read)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        prefix = check_folder(folder) and f"{folder}/"
        last = ""
        if start_after is not None and start_after > prefix:
            if not start_after.startswith(prefix):
                return
            last = start_after.removeprefix(prefix)
        count, given_up = 0, time.monotonic() + LISTING_TIMEOUTS * self._timeout
        while count < MAX_LISTED:
            # Of pages that come one after the other, each within its time.
            if time.monotonic() > given_up:
                raise StoreUnavailable(f"{self._url} takes too long to list {folder}")
            path = f"{prefix}?after={quote(last, safe='/')}"
            what = f"the answer to {path}"
            data = self._ask("GET", path, partial(self._body, name=what, most=_PAGE_BYTES))
            if not data.isascii() or (data and not data.endswith(b"\n")):
                raise StoreError(f"{self._url}: {what} is no lines of text", hint=_NO_SUCH_SERVER)
            page = data.decode("ascii").split("\n")[:-1]
            for line in page:
                found = _LISTED.fullmatch(line)
                name = f"{prefix}{found[3]}" if found else ""
                if found is None or not is_name(name) or name <= f"{prefix}{last}":
                    raise StoreError(
                        f"{self._url}: {line[:80]!r} has no place in the list of {folder}"
                    )
                last = found[3]
                yield ObjectInfo(name, int(found[1]), float(found[2]))
            if len(page) < PAGE:
                return
            count += len(page)
        raise StoreError(f"{self._url} lists more than {MAX_LISTED} objects in {folder}")

    # -- what answers must be

    def _range(self, name: str, start: int, stop: int) -> bytes | None:
        """These bytes; None where the server sends others, which may be for want of them."""

        def read(answer: HTTPResponse) -> bytes | None:
            if answer.status == 416:
                return None
            if answer.status == 206:
                sent = _RANGE.fullmatch(answer.getheader("Content-Range", ""))
                if sent is None or (int(sent[1]), int(sent[2])) != (start, stop - 1):
                    return None
            elif start or self._length(answer, name) != stop:
                return None
            return self._body(answer, name, stop - start, stop - start)

        return self._ask("GET", name, read, {"Range": f"bytes={start}-{stop - 1}"})

    def _length(self, answer: HTTPResponse, name: str) -> int:
        length = answer.getheader("Content-Length", "")
        encoding = answer.getheader("Content-Encoding", "identity")
        if not LENGTH.fullmatch(length) or answer.chunked or encoding != "identity":
            raise StoreError(
                f"{self._url} does not say how many bytes {name} has", hint=_NO_SUCH_SERVER
            )
        return int(length)

    def _body(self, answer: HTTPResponse, name: str, most: int, least: int = 0) -> bytes:
        nbytes = self._length(answer, name)
        if not least <= nbytes <= most:
            raise StoreError(
                f"{self._url} sends {nbytes} bytes for {name}, where {least} to {most} are right"
            )
        data = answer.read(nbytes)
        if len(data) < nbytes:
            raise _Transient(f"the connection broke after {len(data)} of {nbytes} bytes")
        return data

    # -- requests

    def _ask(
        self,
        method: str,
        path: str,
        read: Callable[[HTTPResponse], T],
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> T:
        """What ``read`` makes of the answer. Raises NotFound, StoreError, and StoreUnavailable
        after ``retry_timeout``."""

        sent, where = headers or {}, f"{self._path}/{path}"

        def ask() -> T:
            try:
                while True:
                    connection, answer = self._take(), None
                    try:
                        answer = connection.ask(method, where, sent, self._timeout, body)
                        return self._judged(answer, path, read, ranged="Range" in sent)
                    except (ConnectionError, HTTPException):
                        if answer is not None or not connection.reused:
                            raise
                        # The server has closed it meanwhile: another one is tried.
                    finally:
                        if answer is not None and answer.isclosed() and not answer.will_close:
                            self._give_back(connection)
                        else:
                            connection.close()
            except (OSError, HTTPException, _Transient) as error:
                reason = str(error) or type(error).__name__
                raise StoreUnavailable(f"{self._url}: {path}: {reason[:300]}") from error

        return self._patience(ask)

    def _judged(
        self, answer: HTTPResponse, path: str, read: Callable[[HTTPResponse], T], *, ranged: bool
    ) -> T:
        """What ``read`` makes of it. Raises the error that the status stands for."""
        status, where = answer.status, f"{self._url}: {path}"
        if status == _FULL:
            raise StoreFull(f"{where}: the server has no room for it")
        if status in MAY_PASS or (status >= 500 and status != _NOT_IMPLEMENTED):
            raise _Transient(f"the server answers with status {status}")
        if 300 <= status < 400:
            raise StoreError(
                f"{where}: the server redirects", hint="Give the address that it redirects to."
            )
        if status in (401, 403):
            raise StoreError(f"{where}: access denied, status {status}")
        if status not in (200, 204, 404) and not (ranged and status in (206, 416)):
            raise StoreError(f"{where}: status {status}", hint=_NO_SUCH_SERVER)
        found = read(answer) if status != 404 else None
        if answer.length is not None and answer.length <= _SMALL_BODY:
            answer.read(_SMALL_BODY)  # so that the connection can be used again
        if found is None and status == 404:
            raise NotFound(f"{path} is not in the store {self._url}")
        return cast(T, found)

    def _take(self) -> _Connection:
        with self._lock:
            if os.getpid() != self._process:  # what was open is the other process's
                _close_all(self._idle)
                self._process = os.getpid()
            oldest = time.monotonic() - _IDLE_SECONDS
            while self._idle and self._idle[0].idle_since < oldest:
                self._idle.pop(0).close()
            if self._idle:
                return self._idle.pop()
        return _Connection(self._connect(self._timeout))

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._idle) < _KEPT_CONNECTIONS and os.getpid() == self._process:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
                return
        connection.close()


class _Connection:
    """One connection, which stays open between requests."""

    def __init__(self, connection: HTTPConnection) -> None:
        self._connection = connection
        self._socket: DeadlineSocket | None = None
        #: Whether the server has answered on it before.
        self.reused = False
        self.idle_since = 0.0

    def ask(
        self, method: str, path: str, headers: dict[str, str], seconds: float, body: bytes | None
    ) -> HTTPResponse:
        if self._socket is None:
            self._connection.connect()
            self._socket = DeadlineSocket(self._connection.sock)
            self._connection.sock = self._socket
        self._socket.begin(seconds, MIN_RATE)
        self._connection.request(method, path, body, {"Accept-Encoding": "identity", **headers})
        answer = self._connection.getresponse()
        self._socket.expect(answer.length or 0)
        self.reused = True
        return answer

    def close(self) -> None:
        self._connection.close()


def _close_all(connections: list[_Connection]) -> None:
    while connections:
        connections.pop().close()


def _parsed(url: str) -> tuple[Callable[[float], HTTPConnection], str]:
    """How to connect to the server of a URL, and the path of the store there."""
    hint = "Write http://host:port, or https://host/prefix."
    if not isinstance(url, str):
        raise InputError(f"{type(url).__name__} is not the address of a store", hint=hint)
    if "@" in url:  # before anything else: what is printed must not hold a password
        raise InputError(
            "an http store has no credentials", hint=f"Leave them out; write %40 in a path. {hint}"
        )
    if not _URL.fullmatch(url):
        raise InputError(f"{shown(url)!r} is not the address of a store", hint=hint)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(f"{shown(url)} is not a valid address: {error}", hint=hint) from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise InputError(f"{shown(url)} is not the address of a store", hint=hint)
    kind: Any = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return lambda timeout: kind(host, port, timeout=timeout), parts.path.rstrip("/")


class DeadlineSocket:
    """What `http.client`, which has a timeout for each packet only, needs of ``sock``, with a
    deadline that `begin` sets. Raises TimeoutError past it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline = 0.0
        self._rate = 1
        self._expected = 0

    def begin(self, seconds: float, min_rate: int) -> None:
        """The next exchange ends within ``seconds``, and a second more for each ``min_rate`` bytes
        received of what `expect` announces."""
        self._deadline = time.monotonic() + seconds
        self._rate = min_rate
        self._expected = 0

    def expect(self, nbytes: int) -> None:
        """So many bytes to come move the deadline."""
        self._expected = nbytes

    def sendall(self, data: Any) -> None:
        self._limit()
        self._sock.sendall(data)

    def makefile(self, mode: str, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self, self._sock.makefile("rb", buffering=0)))

    def close(self) -> None:
        self._sock.close()

    def received(self, nbytes: int) -> None:
        counted = min(nbytes, self._expected)
        self._expected -= counted
        self._deadline += counted / self._rate

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)


class _DeadlineReader(io.RawIOBase):
    def __init__(self, owner: DeadlineSocket, raw: socket.SocketIO) -> None:
        self._owner = owner
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._owner._limit()
        count = self._raw.readinto(buffer)
        self._owner.received(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
