"""Stores that read another one: with a cache folder, so that a restart does not download everything
again; at a bounded rate; within the bounds of docs/protocol.md, section 2. And which of them can be
waited for."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from ..errors import NotFound, StoreError, StoreUnavailable
from .base import MAX_LISTED, MAX_NAME, Data, ObjectInfo, Store
from .local import LocalStore

CACHE_FOLDER = "pulse-cache"
DEFAULT_MAX_BYTES = 64 << 30
_CHUNK_BYTES = 16 << 20
_REQUEST_SECONDS = 1.0  # what is not late, for each call and each so many bytes a second
_MIN_RATE = 16 << 10
DEFAULT_LATE_SECONDS = 600.0
_CHECK = "Try the store with `pulse store-check`."
T = TypeVar("T")


class Wrapper:
    """A store that passes on what it does not change to ``store``."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __repr__(self) -> str:
        return repr(self.store)

    def put(self, name: str, data: Data) -> None:
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.store.put_new(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.store.get(name, start, stop)

    def head(self, name: str) -> ObjectInfo:
        return self.store.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self.store.list(folder, start_after)

    def delete(self, name: str) -> None:
        self.store.delete(name)


class CachedStore(Wrapper):
    """``store`` with a cache of the objects that are named by their content, up to ``max_bytes``,
    in the folder ``pulse-cache`` below ``folder``. The least recently used are evicted first;
    nothing else in there is touched.

    ``digest_of`` gives the SHA-256 that an object's name promises (64 hexadecimal digits), None for
    other objects, which are not cached. An object is kept once somebody who knows its length has
    said so (`expect`). A cached copy is hashed on first use, and fetched again if damaged. Where
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
        """The object ``name`` has ``nbytes`` by the word of whoever is trusted, which the store's
        is not: no more is read for the cache."""
        self._expected[name] = nbytes

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        digest = self._digest_of(name)
        if digest is not None and (self._has(name, digest) or self._keep(name, digest)):
            try:
                return self._kept.get(name, start, stop)
            except NotFound:  # it has just made room for another
                pass
        return self.store.get(name, start, stop)

    def head(self, name: str) -> ObjectInfo:
        digest = self._digest_of(name)
        if digest and self._has(name, digest):
            return self._kept.head(name)
        return self.store.head(name)

    def delete(self, name: str) -> None:
        self.store.delete(name)
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
                if self._hash(name) != digest:
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
        if (
            nbytes is None
            or nbytes > self._max_bytes
            or self._is_behind_link(self._kept.root / name)
        ):
            return False
        running = sha256()
        failed: StoreError | None = None

        def chunks() -> Iterator[bytes]:
            nonlocal failed
            for at in range(0, nbytes, _CHUNK_BYTES):
                try:
                    chunk = self.store.get(name, at, min(at + _CHUNK_BYTES, nbytes))
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

    def _hash(self, name: str) -> str:
        running, size = sha256(), self._kept.head(name).nbytes
        for at in range(0, size, _CHUNK_BYTES):
            running.update(self._kept.get(name, at, min(at + _CHUNK_BYTES, size)))
        return running.hexdigest()

    def _drop(self, name: str) -> None:
        self._checked.discard(name)
        self._kept.delete(name)


def expect(store: Store, name: str, nbytes: int) -> None:
    """Says to a cache in front of ``store``, if there is one, how long an object is."""
    if isinstance(store, CachedStore):
        store.expect(name, nbytes)


class BoundedStore(Wrapper):
    """``store``, of which nothing is taken for granted but what it should be trusted with. A
    listing has at most 10^6 objects, in order and where they belong; a length is one. Within
    `limited`, reading calls may be late for a while: a second for each call and each 16 KiB is its
    due, what takes longer is lateness. A listing is one call, however many pages it has."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._left: float | None = None
        self._lock = threading.Lock()

    @contextmanager
    def limited(self, seconds: float = DEFAULT_LATE_SECONDS) -> Iterator[None]:
        """Within it, reading calls raise StoreUnavailable once they were late by so many
        ``seconds`` in all."""
        before, self._left = self._left, seconds
        try:
            yield
        finally:
            self._left = before

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._timed(name, lambda: self.store.get(name, start, stop))

    def head(self, name: str) -> ObjectInfo:
        return _checked(name, self._timed(name, lambda: self.store.head(name)))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        found, due, count = iter(self.store.list(folder, start_after)), _REQUEST_SECONDS, 0
        last = start_after or ""
        while True:
            began = time.monotonic()
            info = next(found, None)
            due -= time.monotonic() - began
            if due < 0:
                self._draw(folder, -due)
                due = 0.0
            if info is None:
                return
            count += 1
            if count > MAX_LISTED:
                raise StoreError(
                    f"the store lists more than {MAX_LISTED} objects in {folder}", hint=_CHECK
                )
            if info.name <= last or not info.name.startswith(f"{folder}/" if folder else ""):
                raise StoreError(
                    f"{info.name[:80]!r} has no place in the store's list of {folder}", hint=_CHECK
                )
            last = info.name
            if len(last) <= MAX_NAME:
                yield _checked(last, info)

    def _timed(self, name: str, read: Callable[[], T]) -> T:
        self._draw(name, 0.0)
        began = time.monotonic()
        found = read()
        due = _REQUEST_SECONDS + (len(found) / _MIN_RATE if isinstance(found, bytes) else 0.0)
        self._draw(name, max(0.0, time.monotonic() - began - due), raises=False)
        return found

    def _draw(self, name: str, seconds: float, *, raises: bool = True) -> None:
        with self._lock:
            if self._left is None:
                return
            self._left -= seconds
            if raises and self._left < 0:
                raise StoreUnavailable(
                    f"{name}: the store answers too slowly", hint="The next call tries it again."
                )


def _checked(name: str, info: ObjectInfo) -> ObjectInfo:
    if info.name != name or info.nbytes < 0 or not math.isfinite(info.modified):
        raise StoreError(f"the store says nonsense of {name}: {info!r:.200}", hint=_CHECK)
    return info


def bounded_in(store: Store) -> BoundedStore | None:
    """The bounded store that ``store`` is, or reads."""
    while isinstance(store, Wrapper) and not isinstance(store, BoundedStore):
        store = store.store
    return store if isinstance(store, BoundedStore) else None
