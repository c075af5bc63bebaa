"""A store with a cache folder in front of it, so that a restart does not download everything
again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from hashlib import file_digest, sha256
from pathlib import Path

from ..errors import NotFound, StoreError
from ..store.base import BoundedStore, ObjectInfo, Store
from ..store.local import LocalStore

CACHE_FOLDER = "pulse-cache"
DEFAULT_MAX_BYTES = 64 << 30
_CHUNK_BYTES = 16 << 20


class CachedStore(BoundedStore):
    """``store`` with a cache of the objects that are named by their content, up to ``max_bytes``,
    in the folder ``pulse-cache`` below ``folder``. The least recently used are evicted first;
    nothing else in there is touched.

    ``digest_of`` gives the SHA-256 that an object's name promises (64 hexadecimal digits), None for
    other objects, which are not cached. An object is kept once its length is known from a trusted
    manifest (`expect`). A cached copy is hashed on first use, and fetched again if damaged. Where
    the folder cannot be used, nothing is kept.
    """

    def __init__(
        self,
        store: Store,
        folder: str | os.PathLike[str],
        digest_of: Callable[[str], str | None],
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        super().__init__(store)
        self._kept = LocalStore(Path(folder) / CACHE_FOLDER)
        self._digest_of = digest_of
        self._max_bytes = max_bytes
        self._checked: set[str] = set()
        self._expected: dict[str, int] = {}

    def expect(self, name: str, nbytes: int) -> None:
        """The object ``name`` has ``nbytes`` by a trusted manifest: no more is read for the
        cache."""
        self._expected[name] = nbytes

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        digest = self._digest_of(name)
        if digest is not None and (self._has(name, digest) or self._keep(name, digest)):
            try:
                return self._kept.get(name, start, stop)
            except NotFound:  # it has just made room for another
                pass
        return super().get(name, start, stop)

    def head(self, name: str) -> ObjectInfo:
        digest = self._digest_of(name)
        if digest and self._has(name, digest):
            return self._kept.head(name)
        return super().head(name)

    def delete(self, name: str) -> None:
        super().delete(name)
        if self._digest_of(name) is not None:
            self._drop(name)

    def _has(self, name: str, digest: str) -> bool:
        """Whether a good copy is here."""
        path = self._kept.root / name
        try:
            if self._is_behind_link(path) or not path.is_file():
                self._checked.discard(name)
                return False
            if name not in self._checked:
                with path.open("rb") as file:
                    found = file_digest(file, "sha256").hexdigest()
                if found != digest:
                    self._drop(name)
                    return False
                self._checked.add(name)
            os.utime(path)
        except (OSError, StoreError):
            return False
        return True

    def _keep(self, name: str, digest: str) -> bool:
        """Fetches an object of which the length is known into the cache. False where it is not what
        its name says, or cannot be kept. Raises what the store raises."""
        nbytes = self._expected.pop(name, None)
        if nbytes is None or nbytes > self._max_bytes:
            return False
        if self._is_behind_link(self._kept.root / name):
            return False
        running, fetch = sha256(), super().get
        failed: StoreError | None = None

        def chunks() -> Iterator[bytes]:
            nonlocal failed
            for at in range(0, nbytes, _CHUNK_BYTES):
                try:
                    chunk = fetch(name, at, min(at + _CHUNK_BYTES, nbytes))
                except StoreError as error:
                    failed = error
                    raise
                running.update(chunk)
                yield chunk

        try:
            self._make_room(nbytes)
            self._kept.put(name, chunks())
        except (OSError, StoreError):  # the folder's trouble is no reason to stop
            if failed:
                raise
            return False
        if running.hexdigest() != digest:
            self._drop(name)
            return False
        self._checked.add(name)
        return True

    def _is_behind_link(self, path: Path) -> bool:
        """Whether a file, or a folder on the way to it, is a link, so that what is there may be
        somebody else's, or cannot be looked at."""
        below = len(self._kept.root.parts) - 1
        try:
            return any(
                each.is_symlink() for each in [path, *path.parents[: len(path.parts) - below - 1]]
            )
        except OSError:  # a name that is too long, say
            return True

    def _make_room(self, nbytes: int) -> None:
        kept: list[ObjectInfo] = []
        for folder, _, files in os.walk(self._kept.root):
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._kept.root).as_posix()
                if self._digest_of(name) is not None and not path.is_symlink():
                    found = path.stat()
                    kept.append(ObjectInfo(name, found.st_size, found.st_mtime))
        total = sum(info.nbytes for info in kept) + nbytes
        for info in sorted(kept, key=lambda i: i.modified):
            if total <= self._max_bytes:
                return
            self._drop(info.name)
            total -= info.nbytes

    def _drop(self, name: str) -> None:
        self._checked.discard(name)
        self._kept.delete(name)
