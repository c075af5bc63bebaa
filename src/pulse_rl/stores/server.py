"""Shows a folder to readers over HTTP, and takes the heartbeats of workers (docs/protocol.md,
section 11); needs the extra ``serve``."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Awaitable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .._util.serial import Closing
from .._util.settings import checked_path
from ..errors import InputError, StoreError, StoreFull, StoreUnavailable
from ..events import Listener, Served, checked_listener
from ..store.base import MAX_NAME, is_name
from ..store.local import LocalStore
from ..stream.names import MAX_BEAT_BYTES, MAX_WORKERS, is_heartbeat
from .http import PAGE

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["FolderServer"]

_INSTALL = "Install it: pip install 'pulse-rl[serve]'."
_CHUNK_BYTES = 1 << 20
_LONGEST_PATH = 2 * MAX_NAME
_STALLED_SECONDS = 60.0
_START_SECONDS = 30.0
_KEEPALIVE_SECONDS = 75.0
_SILENT_SECONDS = 30.0
_LOG_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_ALL_INTERFACES = "Give an address of this machine; 0.0.0.0 stands for all of them."
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HIDDEN = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EMLINK,
    errno.EISDIR,
    errno.ENXIO,
    errno.ENAMETOOLONG,
)
T = TypeVar("T")


class FolderServer(Closing):
    """Serve the objects below a folder over HTTP, on a thread of its own, until `close`.

    It is a context manager. Links below the folder are not followed. Readers can change nothing but
    the heartbeats of workers (`pulse_rl.metrics.Heartbeat`) in streams that exist: at most 10,000
    for each stream, of at most 4 KiB.

    Args:
        folder: The folder of a store.
        bind: An address of this machine, at which others may read. Default: this machine only.
        port: The port. Default: a free one.
        on_event: Called with a `pulse_rl.events.Served` after each answer, on the server's thread.
    Raises:
        InputError: The extra ``serve`` is missing, there is no such folder, ``bind`` is empty, or
            the port cannot be had.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        on_event: Listener | None = None,
    ) -> None:
        try:
            import aiohttp.web  # noqa: F401
        except ImportError:
            raise InputError("serving needs aiohttp", hint=_INSTALL) from None
        if not bind:
            raise InputError("an empty address to serve at", hint=_ALL_INTERFACES)
        root = checked_path(folder).absolute()
        if not root.is_dir():
            raise InputError(
                f"there is no folder {root}", hint="Check the path, or create the folder first."
            )
        self._root = root
        self._listener = checked_listener(on_event)
        self._silent: dict[object, asyncio.TimerHandle] = {}
        self._bind, self._port = bind, port
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._started = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="pulse-serve", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_SECONDS) or self._error is not None:
            raise InputError(
                f"cannot serve at {bind}, port {port}: {self._error}", hint="Choose another port."
            )

    @property
    def url(self) -> str:
        """The address of the folder, for `open_store`."""
        host = f"[{self._bind}]" if ":" in self._bind else self._bind
        return f"http://{host}:{self._port}"

    def close(self) -> None:
        """Ends all connections, within seconds. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()

    def __repr__(self) -> str:
        return f"<FolderServer at {self.url}>"

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            self._error = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._started.set()

    async def _serve(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BEAT_BYTES)
        app.router.add_get("/{name:.*}", self._get)
        app.router.add_put("/{name:.*}", self._change)
        app.router.add_delete("/{name:.*}", self._change)
        app.on_response_prepare.append(_uncached)
        app.on_response_prepare.append(self._answering)
        log = logging.getLogger(__name__)
        log.addFilter(_short)
        # Such as a failed accept.
        self._loop.set_exception_handler(lambda _, context: log.error(context["message"]))
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=log,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=_KEEPALIVE_SECONDS,
        )
        await runner.setup()
        assert runner.server is not None
        inner = runner.server
        server = None
        try:
            server = await self._loop.create_server(
                lambda: _Connection(inner(), self._silent),
                self._bind,
                self._port,
                reuse_address=True,
            )
            self._port = server.sockets[0].getsockname()[1]
            self._started.set()
            await self._ending.wait()
        finally:
            if server is not None:
                server.close()
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        self._heard(request)
        name = request.path.removeprefix("/")
        if not name or name.endswith("/"):
            after = request.query.get("after", "")
            listing = await _answered(asyncio.to_thread(self._list, name[:-1], after))
            return web.Response(text=listing, charset="ascii")
        handle = await _answered(asyncio.to_thread(_open, self._root, name))
        if handle is None:
            raise web.HTTPNotFound
        try:
            return await _send(request, handle)
        finally:
            os.close(handle)

    async def _change(self, request: web.Request) -> web.Response:
        """Writes or deletes a heartbeat, and nothing else."""
        from aiohttp import web

        self._heard(request)
        where, name = _split(request.path.removeprefix("/"))
        if not is_heartbeat(name) or not _is_path(f"{where}{name}"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        body = None
        if request.method == "PUT":
            async with asyncio.timeout(_STALLED_SECONDS):
                body = await request.read()
        status = await _answered(asyncio.to_thread(self._beat, where, name, body))
        return web.Response(status=status)

    def _beat(self, where: str, name: str, body: bytes | None) -> int:
        """Replaces or (None) deletes a heartbeat in the store in the folder ``where``; the status
        of the answer."""
        folder, _, last = name.rpartition("/")
        stream = folder.partition("/")[0]
        with _opened_folder(self._root, f"{where}{stream}/versions") as versions:
            if versions is None:
                return 404
        with _opened_folder(self._root, f"{where}{folder}") as workers:
            known = os.listdir(workers) if workers is not None else []
        if body is not None and len(known) >= MAX_WORKERS and last not in known:
            return 507
        store = LocalStore(self._root / where, retry_timeout=_RETRY_SECONDS)
        try:
            if body is None:
                store.delete(name)
            else:
                store.put(name, body)
        except (StoreFull, StoreUnavailable):
            raise
        except StoreError:  # the folder is not the server's to write, or is a link
            return 403
        return 204

    def _heard(self, request: web.Request) -> None:
        if timer := self._silent.pop(request.transport, None):
            timer.cancel()

    async def _answering(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._listener:
            length = response.headers.get("Content-Length", "0")
            nbytes = int(length) if request.method == "GET" else 0
            name = request.path.removeprefix("/")[:MAX_NAME]
            self._listener(Served(request.method, name, response.status, nbytes))

    def _list(self, folder: str, after: str) -> str:
        """Lines of the objects of a folder behind a name, at most a page. Names are relative to the
        folder."""
        lines: list[str] = []
        if folder and not _is_path(folder):
            return ""
        with _opened_folder(self._root, folder) as handle:
            if handle is None:
                return ""
            with closing(_names_in(handle, folder, "", after)) as names:
                for name in names:
                    inner, _, last = name.rpartition("/")
                    # It may be deleted meanwhile.
                    with _opened_below(handle, inner) as above, suppress(FileNotFoundError):
                        if above is None:
                            continue
                        info = os.stat(last, dir_fd=above, follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            lines.append(f"{info.st_size} {max(int(info.st_mtime), 0)} {name}\n")
                    if len(lines) == PAGE:
                        break
        return "".join(lines)


class _Short(logging.Filter):
    """Lets a line through each second, without tracebacks: what strangers send must not fill a
    disk."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LOG_SECONDS
        return True


_short = _Short()


class _Connection(asyncio.Protocol):
    """A connection, which ``handler`` serves. It ends where no request has come for half a minute:
    aiohttp minds connections between two requests only. The handler of a request takes it out of
    the ``silent`` ones."""

    def __init__(self, handler: Any, silent: dict[object, asyncio.TimerHandle]) -> None:
        self._silent = silent
        self._transport: asyncio.Transport | None = None
        self._handler = handler

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._silent[transport] = asyncio.get_running_loop().call_later(
            _SILENT_SECONDS, transport.abort
        )
        self._handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if timer := self._silent.pop(self._transport, None):
            timer.cancel()
        self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


async def _uncached(_: web.Request, response: web.StreamResponse) -> None:
    """Objects say for themselves how they may be kept; nothing else may be."""
    response.headers.setdefault("Cache-Control", "no-store")


async def _answered(work: Awaitable[T]) -> T:
    """What ``work`` returns; the status of what the disk says otherwise: it is not known whether
    there is an object."""
    from aiohttp import web

    try:
        return await work
    except PermissionError:
        raise web.HTTPForbidden from None
    except StoreFull:
        raise web.HTTPInsufficientStorage from None
    except (OSError, StoreError):
        raise web.HTTPServiceUnavailable from None


async def _send(request: web.Request, handle: int) -> web.StreamResponse:
    """Answers with the bytes of an open file that were asked for."""
    from aiohttp import web

    info = os.fstat(handle)
    headers = {
        "Content-Type": "application/octet-stream",
        "Last-Modified": formatdate(max(int(info.st_mtime), 0), usegmt=True),
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-cache",
    }
    start, stop, status = 0, info.st_size, 200
    if "Range" in request.headers:
        whole = {"Content-Range": f"bytes */{info.st_size}"}
        outside = web.HTTPRequestRangeNotSatisfiable(headers=whole)
        try:
            asked = request.http_range
        except ValueError:
            raise outside from None
        start, stop, _ = asked.indices(info.st_size)
        if start >= stop:
            raise outside
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{info.st_size}"
    headers["Content-Length"] = str(stop - start)
    response = web.StreamResponse(status=status, headers=headers)
    await response.prepare(request)
    while start < stop and request.method != "HEAD":
        chunk = await asyncio.to_thread(os.pread, handle, min(_CHUNK_BYTES, stop - start), start)
        if not chunk:  # it was cut meanwhile; the reader notices that bytes are missing
            raise ConnectionResetError
        async with asyncio.timeout(_STALLED_SECONDS):
            await response.write(chunk)
        start += len(chunk)
    return response


def _split(path: str) -> tuple[str, str]:
    """(the folder of the store, with a slash at its end, or ""; the name) of a heartbeat there."""
    parts = path.split("/")
    return "".join(f"{part}/" for part in parts[:-3]), "/".join(parts[-3:])


def _is_path(name: str) -> bool:
    """Whether it is an object's name, or that of one in a store in a folder below."""
    return len(name) <= _LONGEST_PATH and all(map(is_name, name.split("/")))


def _open(root: Path, name: str) -> int | None:
    """A file below ``root``, open; None where there is none that may be shown. No link is followed
    below ``root``."""
    folder, _, last = name.rpartition("/")
    if not _is_path(name):
        return None
    with _opened_folder(root, folder) as above:
        if above is None:
            return None
        try:
            handle = os.open(
                last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above
            )
        except OSError as error:
            _require_hidden(error)
            return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return handle


@contextmanager
def _opened_folder(root: Path, folder: str) -> Iterator[int | None]:
    """A folder below ``root``, open; None where there is none that may be shown. Raises OSError
    where the root cannot be opened: that it is gone says nothing about its objects."""
    handle = os.open(root, _FOLDER)
    try:
        with _opened_below(handle, folder) as inner:
            yield inner
    finally:
        os.close(handle)


@contextmanager
def _opened_below(folder: int, path: str) -> Iterator[int | None]:
    """The folder at ``path`` below an open one, without following a link; None where none may be
    shown."""
    handle = os.dup(folder)
    try:
        try:
            for part in path.split("/") if path else ():
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            shown = True
        except OSError as error:
            _require_hidden(error)
            shown = False
        yield handle if shown else None
    finally:
        os.close(handle)


def _names_in(handle: int, folder: str, prefix: str, after: str) -> Generator[str, None, None]:
    """What is listed in an open folder, and in those below, of the names behind ``after``, in
    order: relative to where ``prefix`` begins, in ``folder``. A folder is read when its turn comes.
    Nothing is looked up by its path, which may lead somewhere else by now."""
    found: list[str] = []
    with os.scandir(handle) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if not is_name(f"{folder}/{name}" if folder else name):  # .DS_Store, .nfs…
                continue
            if not entry.is_dir(follow_symlinks=False):
                if name > after:
                    found.append(name)
            elif f"{name}/" > after or after.startswith(f"{name}/"):
                found.append(f"{name}/")
    for name in sorted(found):
        if not name.endswith("/"):
            yield name
            continue
        with _opened_below(handle, name[len(prefix) : -1]) as inner:
            if inner is not None:
                yield from _names_in(inner, folder, name, after)


def _require_hidden(error: OSError) -> None:
    """Raises ``error`` unless it says that there is nothing to be shown."""
    if error.errno not in _HIDDEN:
        raise error
