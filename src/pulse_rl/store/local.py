"""A store in a local folder (or a network file system that has atomic rename and hard links)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .._util.files import create_atomically, disk_error, write_atomically
from ..errors import AlreadyExists, NotFound, StoreError
from .base import Data, ObjectInfo, check_name, check_range, is_name

_ASIDE = ".unfinished"
_ABANDONED_SECONDS = 24 * 3600


class LocalStore:
    """A `Store` in a folder. Objects are files under ``root``, which the first write creates. Unfinished ones are kept
    in a hidden folder beside them, are never listed, and are removed when a store is opened a day later. Writing needs
    Linux or macOS and a file system with hard links; elsewhere it raises StoreError.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._aside = self.root / _ASIDE
        there = next((p for p in [self.root, *self.root.parents] if os.path.lexists(p)), self.root)
        if not there.is_dir():
            raise StoreError(f"cannot open the store {self.root}: {there} is not a folder")
        for left in self._aside.glob(".*"):
            with suppress(OSError):  # another process sweeps, or finishes it, at the same time
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    left.unlink()

    def put(self, name: str, data: Data) -> None:
        chunks = [data] if isinstance(data, bytes) else data
        write_atomically(self._path(name), chunks, aside=self._aside)

    def put_new(self, name: str, data: bytes) -> None:
        try:
            create_atomically(self._path(name), [data], aside=self._aside)
        except FileExistsError:
            raise AlreadyExists(f"{name} already exists") from None

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            with self._path(name).open("rb") as file:
                start, stop = check_range(name, file.seek(0, 2), start, stop)
                file.seek(start)
                return file.read(stop - start)
        except (FileNotFoundError, IsADirectoryError):
            raise NotFound(f"{name} is not in the store {self.root}") from None
        except OSError as error:
            raise disk_error(error, f"read {name}") from error

    def head(self, name: str) -> ObjectInfo:
        path = self._path(name)
        try:
            stat = path.stat()
        except FileNotFoundError:
            raise NotFound(f"{name} is not in the store {self.root}") from None
        except OSError as error:
            raise disk_error(error, f"read {name}") from error
        if not path.is_file():
            raise NotFound(f"{name} is not in the store {self.root}")
        return ObjectInfo(name, stat.st_size, stat.st_mtime)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        names: list[str] = []

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise disk_error(error, f"list {folder}") from error

        for parent, _, files in os.walk(self._path(folder), onerror=fail):
            prefix = Path(parent).relative_to(self.root).as_posix()
            names += [f"{prefix}/{file}" for file in files if is_name(f"{prefix}/{file}")]  # .DS_Store, .nfs…
        for name in sorted(n for n in names if start_after is None or n > start_after):
            try:
                yield self.head(name)
            except NotFound:
                continue  # deleted since the folder was read

    def delete(self, name: str) -> None:
        try:
            self._path(name).unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError) as error:
            if not self._path(name).is_dir():
                raise disk_error(error, f"delete {name}") from error
        except OSError as error:
            raise disk_error(error, f"delete {name}") from error

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)
