"""Durable files, regular input files, and ranges of files in a store.

A durable file is written under another name, synced, and renamed once.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

from ..errors import PulseError, StoreError, StoreFull, StoreUnavailable

Chunks = Iterable[bytes | memoryview]
Writer = Callable[[BinaryIO], None]
_BUFFER_BYTES = 1 << 20

#: Returns bytes [start, stop) of a file in a store.
RangeReader = Callable[[int, int], bytes]
#: The most bytes of one request for a range.
MAX_BYTES = 8 << 20
# Two ranges that are at most this far apart share a request: the bytes between them cost less than
# another request.
_GAP_BYTES = 1 << 12

# The parts of POSIX that make a file durable: its mode, its atomic creation, and the sync of its
# folder.
_NEEDED = ("fchmod", "link", "O_DIRECTORY")
# Of network file systems, and of a process or a machine that is short of something for a moment.
_MAY_PASS = (
    errno.ESTALE,
    errno.EIO,
    errno.ETIMEDOUT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a FIFO or a device, which may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO without a writer opens at once
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def write_atomically(path: Path, content: Chunks | Writer, *, aside: Path | None = None) -> None:
    """Put a file at ``path`` whole or not at all, replacing any file there.

    ``aside`` is the folder for the unfinished file, on the same file system. Default: the folder of
    ``path``. Raises StoreFull and StoreError.
    """
    require_posix(f"write {path}")
    try:
        make_folder(path.parent)
        unfinished = _write_aside(aside or path.parent, path.name, content)
        try:
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(error, f"write {path}") from error


def create_atomically(path: Path, chunks: Chunks, *, aside: Path) -> None:
    """Like `write_atomically`, but raise FileExistsError, atomically, if ``path`` exists."""
    require_posix(f"create {path}")
    try:
        make_folder(path.parent)
        unfinished = _write_aside(aside, path.name, chunks)
        try:
            # A hard link fails if the name exists, and a rename would replace it. So creation
            # decides between two writers.
            _link(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise disk_error(error, f"create {path}") from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; the new entries survive a power cut."""
    missing = [p for p in [folder, *folder.parents] if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # A new folder is an entry of its parent, which must be on disk as well.
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def disk_error(error: OSError, doing: str) -> PulseError:
    """The typed error of a failed file operation."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFull(f"no space left to {doing}")
    if error.errno in _MAY_PASS:
        return StoreUnavailable(f"cannot {doing}: {error.strerror}")
    if error.errno == errno.EXDEV:
        return StoreError(
            f"cannot {doing}: a folder of the store is a mount of its own",
            hint="Mount the root of the store: files are renamed within it.",
        )
    return StoreError(
        f"cannot {doing}: {error.strerror or error}", hint="Check the path and its permissions."
    )


def require_posix(doing: str) -> None:
    """Raise StoreError on a platform, such as Windows, that cannot make a file durable."""
    missing = [name for name in _NEEDED if not hasattr(os, name)]
    if missing:
        raise StoreError(
            f"cannot {doing}: this platform has no {', '.join(f'os.{name}' for name in missing)}",
            hint="Files are written durably on Linux and macOS only; on Windows use WSL, or an "
            "object store.",
        )


def _link(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StoreError(
            f"cannot create {path}: its file system refuses hard links ({error.strerror})",
            hint="Use a file system that has hard links, or an object store.",
        ) from error


def _write_aside(folder: Path, name: str, content: Chunks | Writer) -> Path:
    make_folder(folder)
    handle, unfinished = tempfile.mkstemp(dir=folder, prefix=f".{name[:64]}.")
    try:
        with os.fdopen(handle, "wb", _BUFFER_BYTES) as file:
            # mkstemp makes the file private. Workers of other users must be able to read it if the
            # umask lets them.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            if callable(content):
                content(file)
            else:
                file.writelines(content)
            # Synced before the rename: after a power cut a name must not point to an empty file.
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return Path(unfinished)


@cache
def _umask() -> int:
    """The process's umask. Reading it means setting it, so it is read once, before threads
    write."""
    known = os.umask(0o022)
    os.umask(known)
    return known


def read_head(read: RangeReader, nbytes: int, first: int, end_of: Callable[[bytes], int]) -> bytes:
    """The start of a file of ``nbytes``, at least up to the end of its header.

    ``end_of`` finds that end in the ``first`` bytes. The result is shorter if the store returns
    fewer bytes.
    """
    head = read(0, min(first, nbytes))
    end = end_of(head)
    return head + read(len(head), end) if end > len(head) else head


def ranges(places: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Group the ascending ``places`` [start, stop) of a file into requests, as lists of their
    indices.

    A request covers neighbors of at most `MAX_BYTES` in all, or a longer one alone.
    """
    run: list[int] = []
    begin = end = 0
    for number, (start, stop) in enumerate(places):
        if run and (start - end > _GAP_BYTES or stop - begin > MAX_BYTES):
            yield run
            run = []
        begin = begin if run else start
        run.append(number)
        end = stop
    if run:
        yield run
