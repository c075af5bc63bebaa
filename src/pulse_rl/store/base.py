"""The store: six calls on named immutable objects, all that the library needs of a backend.

Required of a backend (docs/protocol.md, section 2): `put_new` is atomic, `put` shows an object
whole or not at all, and `get`, `head` and `list` see every object whose writing call has returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple, NoReturn, Protocol, runtime_checkable

from ..errors import AlreadyExists, FormatError, InputError, NotFound, StoreError, StoreUnavailable

Data = bytes | Iterable[bytes | memoryview]
"""Bytes, or chunks of them in order."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
NAME_HINT = "Use letters, digits, '.', '_' and '-'; start with a letter or a digit."
MAX_NAME = 512
MAX_LISTED = 1_000_000


PIECE_BYTES, CONNECTIONS = 4 << 20, 8
"""A long range of an object is read in pieces of at least so many bytes, over so many connections
at most: over a long way one connection is slow, and an object store gives each a rate of its
own."""


class ObjectInfo(NamedTuple):
    """An object's ``name``, its length ``nbytes`` in bytes, and its time of writing ``modified``,
    in Unix seconds by the store's clock."""

    name: str
    nbytes: int
    modified: float


@runtime_checkable
class Store(Protocol):
    """Object names are relative paths of letters, digits, '.', '_' and '-'; others raise
    InputError.

    Every call may raise StoreError, or StoreUnavailable, after which it is unknown whether a write
    took effect.
    """

    def put(self, name: str, data: Data) -> None:
        """Stores ``data`` as the object ``name``, replacing any object of that name. Raises
        StoreFull."""
        ...

    def put_new(self, name: str, data: bytes) -> None:
        """Stores ``data`` unless an object ``name`` exists, atomically among all clients. Raises
        AlreadyExists, also when an earlier attempt of the same call succeeded but its reply was
        lost."""
        ...

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [``start``, ``stop``) of the object ``name``, to its end without ``stop``. Raises
        NotFound, and StoreError for a range outside the object.
        """
        ...

    def head(self, name: str) -> ObjectInfo:
        """Length and time of writing of the object ``name``. Raises NotFound."""
        ...

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """The objects under ``folder`` ("": all) in name order, from the first name greater than
        ``start_after``."""
        ...

    def delete(self, name: str) -> None:
        """Removes the object ``name``; it is not an error if it does not exist."""
        ...


class ReadOnly:
    """The writing half of a store for readers. ``writers_hint``: where to write instead."""

    writers_hint: ClassVar[str]

    def put(self, name: str, data: Data) -> None:
        self._refuse(name)

    def put_new(self, name: str, data: bytes) -> None:
        self._refuse(name)

    def delete(self, name: str) -> None:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise StoreError(
            f"{check_name(name)} cannot be written: {self!r} is for readers", hint=self.writers_hint
        )


def is_name(name: str) -> bool:
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """``name`` itself; raises InputError for what could leave the store's folder or hide in it."""
    if not is_name(name):
        raise InputError(f"{name[:80]!r} is not a valid object name", hint=NAME_HINT)
    return name


def check_folder(name: str) -> str:
    """``name`` itself, which is a folder's, or "" for the whole store; raises InputError."""
    return name and check_name(name)


def check_range(name: str, nbytes: int, start: int, stop: int | None) -> tuple[int, int]:
    """The range with its end filled in; raises StoreError unless it lies inside an object of
    ``nbytes``."""
    stop = nbytes if stop is None else stop
    if not 0 <= start <= stop <= nbytes:
        raise StoreError(f"bytes {start} to {stop} are outside {name}, which has {nbytes}")
    return start, stop


def joined(data: Data) -> bytes:
    return data if isinstance(data, bytes) else b"".join(data)


def create_or_confirm(store: Store, name: str, data: bytes) -> bool:
    """Creates the object ``name`` in ``store``; True if it now holds ``data``, False if it holds
    another client's bytes.

    A client that retries after a lost reply finds its own object, so "already exists" is resolved
    by reading it back.
    """
    try:
        store.put_new(name, data)
    except AlreadyExists:
        return holds(store, name, data)
    return True


def holds(store: Store, name: str, data: bytes) -> bool:
    """Whether the object ``name`` is these bytes. Raises NotFound."""
    return store.head(name).nbytes == len(data) and store.get(name, 0, len(data)) == data


def whole(store: Store, name: str, nbytes: int) -> bytes:
    """The object ``name``, which was said to have ``nbytes``: no more is read. Raises NotFound, and
    FormatError where it is shorter."""
    try:
        return store.get(name, 0, nbytes)
    except (NotFound, StoreUnavailable):
        raise
    except StoreError as error:
        if store.head(name).nbytes >= nbytes:
            raise
        raise FormatError(f"{name} has fewer bytes than it had: {error}") from error
