"""The S3-compatible server's front: an HTTP proxy that refuses, resets, delays and lies on demand.

It also does what the server behind it (moto) leaves out: it takes one create at a time, refuses
keys that are not valid, and requests whose clock is wrong by more than 15 minutes.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

_SKEW_SECONDS = 900
_LONGEST_HEAD = 1 << 16
_GONE = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, OSError)


@dataclass
class Fault:
    """What happens to a ``share`` of all requests: the answer ``status`` and ``code``; or it hangs;
    or the connection is reset."""

    kind: str
    share: float = 1.0
    status: int = 503
    code: str = "SlowDown"
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """A proxy in front of the server at ``host:port``; ``address`` is its own."""

    def __init__(self, upstream: str, key: str, seed: int) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = host, int(port)
        self.keys = {key}
        #: The code for a key that is not among ``keys``.
        self.refusal = "ExpiredToken"
        self.fault: Fault | None = None
        self.requests = self.taken = self.given = 0
        self._rng = random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self._loop = asyncio.new_event_loop()
        self._creating = asyncio.Lock()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.up()

    def up(self) -> None:
        self._run(self._listen())

    def down(self) -> None:
        """Refuses connections, and resets those that are open."""
        self._run(self._refuse())

    def begin(self, fault: Fault) -> None:
        self.fault = fault

    def end(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            self._loop.call_soon_threadsafe(fault.over.set)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(
                self._serve, "127.0.0.1", self._port, limit=_LONGEST_HEAD, backlog=256
            )

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *rest = head.decode("latin-1").split("\r\n")
                fields = (each.partition(":") for each in rest if each)
                headers = {name.strip().lower(): value.strip() for name, _, value in fields}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests += 1
                self.taken += len(body)
                if not await self._answer(line, headers, body, writer):
                    return
        except _GONE:
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort() if writer.is_closing() else writer.close()

    async def _answer(
        self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Answers one request; False where the connection ends."""
        fault, early = self.fault, self._rng.random() < 0.5
        if fault is not None and self._rng.random() >= fault.share:
            fault = None
        if fault is not None and fault.kind == "status":
            return await self._send(writer, _error(fault.status, fault.code))
        if fault is not None and fault.kind == "hang":
            await fault.over.wait()
            if early:  # it is lost; otherwise it is answered late, whoever still waits
                writer.transport.abort()
                return False
        if fault is not None and fault.kind == "reset" and early:
            writer.transport.abort()
            return False
        refused = self._refusal(headers)
        answer = _error(403, refused) if refused else await self._forward(line, headers, body)
        if fault is not None and fault.kind == "reset":
            # The request has done its work, and half of the answer arrives.
            writer.write(answer[: len(answer) // 2])
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.transport.abort()
            return False
        return await self._send(writer, answer)

    async def _send(self, writer: asyncio.StreamWriter, answer: bytes) -> bool:
        self.given += len(answer)
        writer.write(answer)
        await writer.drain()
        return True

    def _refusal(self, headers: dict[str, str]) -> str:
        key = re.search(r"Credential=([^/]+)/", headers.get("authorization", ""))
        if key is None:
            return "AccessDenied"
        if key[1] not in self.keys:
            return self.refusal
        said = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        skewed = abs((datetime.now(UTC) - said).total_seconds()) > _SKEW_SECONDS
        return "RequestTimeTooSkewed" if skewed else ""

    async def _forward(self, line: str, headers: dict[str, str], body: bytes) -> bytes:
        if "if-none-match" in headers:
            async with self._creating:
                return await self._forwarded(line, headers, body)
        return await self._forwarded(line, headers, body)

    async def _forwarded(self, line: str, headers: dict[str, str], body: bytes) -> bytes:
        headers = headers | {"connection": "close"}
        head = "\r\n".join([line, *(f"{name}: {value}" for name, value in headers.items())])
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(f"{head}\r\n\r\n".encode("latin-1") + body)
            await writer.drain()
            answer = await reader.read(-1)
        finally:
            writer.close()
        first, _, rest = answer.partition(b"\r\n\r\n")
        kept = [each for each in first.split(b"\r\n") if not each.lower().startswith(b"connection")]
        kept[0] = b"HTTP/1.1" + kept[0][8:]
        if not any(each.lower().startswith(b"content-length") for each in kept):
            kept.append(b"Content-Length: %d" % len(rest))
        return b"\r\n".join(kept) + b"\r\n\r\n" + rest


def _error(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    head = f"HTTP/1.1 {status} Error\r\nContent-Type: application/xml\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n{body}".encode()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
