"""A store with a local cache folder, so that a restart does not download everything again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from hashlib import sha256

from ..errors import NotFound, StoreFull
from .base import Data, ObjectInfo, Store
from .local import LocalStore

_CHUNK_BYTES = 16 << 20
DEFAULT_MAX_BYTES = 64 << 30


class CachedStore:
    """``store`` with a cache in ``folder`` of the objects that are named by their content, up to ``max_bytes``; the
    least recently used are evicted first.

    ``digest_of`` gives the SHA-256 that an object's name promises (64 hexadecimal digits), None for other objects,
    which are not cached. A cached copy is hashed on first use, and fetched again if damaged.
    """

    def __init__(
        self,
        store: Store,
        folder: str | os.PathLike[str],
        digest_of: Callable[[str], str | None],
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self.store = store
        self._kept = LocalStore(folder)
        self._digest_of = digest_of
        self._max_bytes = max_bytes
        self._checked: set[str] = set()

    def put(self, name: str, data: Data) -> None:
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.store.put_new(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        digest = self._digest_of(name)
        if digest is None:
            return self.store.get(name, start, stop)
        if not self._has(name, digest):
            try:
                self._keep(name, digest)
            except StoreFull:
                return self.store.get(name, start, stop)
        try:
            return self._kept.get(name, start, stop)
        except NotFound:  # it was not what its name says, or has just made room for another
            return self.store.get(name, start, stop)

    def head(self, name: str) -> ObjectInfo:
        digest = self._digest_of(name)
        if digest and self._has(name, digest):
            return self._kept.head(name)
        return self.store.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self.store.list(folder, start_after)

    def delete(self, name: str) -> None:
        self.store.delete(name)
        self._drop(name)

    def _has(self, name: str, digest: str) -> bool:
        """Whether a good copy is here."""
        path = self._kept.root / name
        if name not in self._checked:
            if not path.is_file():
                return False
            if self._hash(name) != digest:
                self._drop(name)
                return False
            self._checked.add(name)
        if not path.is_file():
            self._checked.discard(name)
            return False
        os.utime(path)
        return True

    def _keep(self, name: str, digest: str) -> None:
        size = self.store.head(name).nbytes
        if size > self._max_bytes:
            return
        running = sha256()

        def chunks() -> Iterator[bytes]:
            for at in range(0, size, _CHUNK_BYTES):
                chunk = self.store.get(name, at, min(at + _CHUNK_BYTES, size))
                running.update(chunk)
                yield chunk

        self._make_room(size)
        self._kept.put(name, chunks())
        if running.hexdigest() == digest:
            self._checked.add(name)
        else:
            self._drop(name)

    def _make_room(self, nbytes: int) -> None:
        if not self._kept.root.is_dir():
            return
        kept = [
            info
            for folder in self._kept.root.iterdir()
            if not folder.name.startswith(".")
            for info in self._kept.list(folder.name)
        ]
        total = sum(info.nbytes for info in kept) + nbytes
        for info in sorted(kept, key=lambda i: i.modified):
            if total <= self._max_bytes:
                return
            self._drop(info.name)
            total -= info.nbytes

    def _hash(self, name: str) -> str:
        running, size = sha256(), self._kept.head(name).nbytes
        for at in range(0, size, _CHUNK_BYTES):
            running.update(self._kept.get(name, at, min(at + _CHUNK_BYTES, size)))
        return running.hexdigest()

    def _drop(self, name: str) -> None:
        self._checked.discard(name)
        self._kept.delete(name)
