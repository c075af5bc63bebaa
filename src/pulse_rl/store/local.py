"""The store in a folder, or in a network file system that has atomic rename and hard links."""

from __future__ import annotations

import os
import re
import stat
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from .._util.files import create_atomically, disk_error, write_atomically
from .._util.retry import RETRY_SECONDS, Patience
from .._util.settings import checked_path
from ..errors import AlreadyExists, NotFound, StoreError, StoreUnavailable
from .base import Data, ObjectInfo, check_folder, check_name, check_range, is_name

T = TypeVar("T")
_ASIDE = ".unfinished"
_UNFINISHED = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.[a-z0-9_]{8}")
# A writer that is still at work after a day is not known; its file would be lost.
_ABANDONED_SECONDS = 24 * 3600
# A folder that was read less than this after its last change may have changed again within one tick
# of its clock (2 s on FAT, 1 s on some network file systems), so its listing is not kept.
_SETTLED_NS = 2_000_000_000
# The folder's clock may be coarse, and behind this machine's: no listing is kept for longer.
_KEPT_SECONDS = 5.0


class _Folder(NamedTuple):
    """The content of a folder when it was read at ``read_ns``; ``key`` changes with the folder. It
    is read again after ``ends`` of the monotonic clock."""

    key: tuple[int, int]
    read_ns: int
    ends: float
    names: list[str]
    folders: list[str]


class LocalStore:
    """Store objects as files in a folder.

    Unfinished files lie in a hidden folder in ``root``. They are never listed, and a writer removes
    them after a day. Reading writes nothing. Writing needs Linux or macOS and a file system with
    hard links; elsewhere it raises StoreError.

    Args:
        root: The folder. The first write creates it.
        retry_timeout: For how long an operation is repeated that a network file system refuses for
            a moment (a stale handle, an error of input or output), in seconds. Default: 180.
    Raises:
        InputError: ``root`` is not a path.
        StoreError: ``root``, or a part of its path, is not a folder.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, retry_timeout: float = RETRY_SECONDS
    ) -> None:
        self.root = checked_path(root)
        self._patience = Patience(str(self.root), retry_timeout)
        self._aside = self.root / _ASIDE
        self._swept = False
        self._folders: dict[str, _Folder] = {}
        # The folder may not exist yet, but its nearest existing parent must be a folder.
        there = next((p for p in [self.root, *self.root.parents] if os.path.lexists(p)), self.root)
        if not there.is_dir():
            raise StoreError(f"cannot open the store {self.root}: {there} is not a folder")

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def put(self, name: str, data: Data) -> None:
        self._require_no_link(name)
        self._sweep()
        chunks = [data] if isinstance(data, bytes) else data
        write = partial(write_atomically, self._path(name), chunks, aside=self._aside)
        if isinstance(chunks, Iterator):  # it can be read once only
            write()
        else:
            self._patient(write)

    def put_new(self, name: str, data: bytes) -> None:
        self._require_no_link(name)
        self._sweep()
        try:
            self._patient(partial(create_atomically, self._path(name), [data], aside=self._aside))
        except FileExistsError:
            raise AlreadyExists(f"{name} already exists") from None

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._patient(partial(self._get, name, start, stop))

    def _get(self, name: str, start: int, stop: int | None) -> bytes:
        try:
            # O_NONBLOCK: a FIFO in place of the object would block the open for ever.
            handle = os.open(self._path(name), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            with open(handle, "rb") as file:
                self._require_file(name, os.fstat(handle))
                start, stop = check_range(name, file.seek(0, 2), start, stop)
                file.seek(start)
                return file.read(stop - start)
        except (FileNotFoundError, IsADirectoryError):
            raise NotFound(f"{name} is not in the store {self.root}") from None
        except OSError as error:
            raise disk_error(error, f"read {name}") from error

    def head(self, name: str) -> ObjectInfo:
        found = self._patient(partial(self._stat, name))
        self._require_file(name, found)
        return ObjectInfo(name, found.st_size, found.st_mtime)

    def _stat(self, name: str) -> os.stat_result:
        try:
            return self._path(name).stat()
        except FileNotFoundError:
            raise NotFound(f"{name} is not in the store {self.root}") from None
        except OSError as error:
            raise disk_error(error, f"read {name}") from error

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        for name in self._names_below(check_folder(folder), start_after):
            with suppress(NotFound):  # deleted since the folder was read
                info = self._patient(partial(self._stat, name))
                if stat.S_ISREG(info.st_mode):
                    yield ObjectInfo(name, info.st_size, info.st_mtime)

    def delete(self, name: str) -> None:
        self._require_no_link(name)
        try:
            self._path(name).unlink(missing_ok=True)
        # On macOS unlink of a folder raises PermissionError. A folder is no object, so there is
        # nothing to delete.
        except (IsADirectoryError, PermissionError) as error:
            if not self._path(name).is_dir():
                raise disk_error(error, f"delete {name}") from error
        except OSError as error:
            raise disk_error(error, f"delete {name}") from error

    def _patient(self, work: Callable[[], T]) -> T:
        """The result of ``work``, repeated while the file system refuses it for a moment."""
        try:
            return work()
        except StoreUnavailable:
            return self._patience(work)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _names_below(self, folder: str, start_after: str | None) -> Iterator[str]:
        """Names in a folder and its subfolders that are greater than ``start_after``, in order.

        Each subfolder is read when its turn comes.
        """
        found = self._patient(partial(self._folder, folder))
        if found is None:
            return
        names = found.names[bisect_right(found.names, start_after) if start_after else 0 :]
        # A folder whose name sorts before `start_after` still counts if `start_after` lies in it.
        folders = [f"{inner}/" for inner in found.folders]
        if start_after is not None:
            folders = [f for f in folders if f > start_after or start_after.startswith(f)]
        for name in sorted([*names, *folders]) if folders else names:
            if name.endswith("/"):
                yield from self._names_below(name[:-1], start_after)
            else:
                yield name

    def _folder(self, folder: str) -> _Folder | None:
        """The content of a folder, read again only if the folder has changed.

        A poll must not cost more the more versions there are.
        """
        path = self.root / folder
        try:
            info = path.stat()
            # A file that is created, renamed or deleted changes its folder's time; a replaced
            # folder has another inode.
            key = (info.st_mtime_ns, info.st_ino)
            kept = self._folders.get(folder)
            now = time.monotonic()
            if kept is None or kept.key != key or now > kept.ends:
                kept = _Folder(key, time.time_ns(), now + _KEPT_SECONDS, [], [])
                with os.scandir(path) as entries:
                    for entry in entries:
                        name = f"{folder}/{entry.name}" if folder else entry.name
                        if not is_name(name):  # .DS_Store, .nfs…
                            continue
                        is_folder = entry.is_dir(follow_symlinks=False)
                        (kept.folders if is_folder else kept.names).append(name)
                kept.names.sort()
                if kept.read_ns - info.st_mtime_ns > _SETTLED_NS:
                    self._folders[folder] = kept
                else:
                    self._folders.pop(folder, None)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise disk_error(error, f"list {folder}") from error
        return kept

    def _require_file(self, name: str, found: os.stat_result) -> None:
        """Raise NotFound for a folder and StoreError for anything else that is not a regular
        file."""
        if stat.S_ISDIR(found.st_mode):
            raise NotFound(f"{name} is not in the store {self.root}")
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(
                f"{name} in the store {self.root} is not a regular file", hint="Remove it."
            )

    def _require_no_link(self, name: str) -> None:
        """Raise StoreError if a folder on the path is a link, since its files may belong to
        somebody else."""
        for folder in Path(check_name(name)).parents[:-1]:
            if (self.root / folder).is_symlink():
                raise StoreError(
                    f"{name} in the store {self.root} is not changed: {folder} is a link",
                    hint="Put the folder itself in the place of the link.",
                )

    def sweep(self, older_than: float) -> int:
        """Remove the unfinished files of this class that are ``older_than`` some seconds, and
        return their bytes in total. It never follows a link."""
        removed = 0
        with suppress(OSError), os.scandir(self._aside) as entries:
            for entry in entries:
                with suppress(OSError):  # another process removed or finished the file
                    info = entry.stat(follow_symlinks=False)
                    ours = stat.S_ISREG(info.st_mode) and _UNFINISHED.fullmatch(entry.name)
                    if ours and time.time() - info.st_mtime >= older_than:
                        os.unlink(entry.path)
                        removed += info.st_size
        return removed

    def _sweep(self) -> None:
        """Remove files that writers left unfinished a day ago, once per process."""
        if self._swept:
            return
        self._swept = True
        if self._aside.is_symlink():
            raise StoreError(
                f"{self._aside} is a link",
                hint="Remove it: unfinished files must stay in the store.",
            )
        self.sweep(_ABANDONED_SECONDS)
