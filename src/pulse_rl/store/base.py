"""The store: six calls on named immutable objects, all that the library needs of a backend.

Required of a backend (docs/protocol.md, section 2): `put_new` is atomic, `put` shows an object
whole or not at all, and `get`, `head` and `list` see every object whose writing call has returned.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, NoReturn, Protocol, TypeVar, runtime_checkable

from ..errors import (
    AlreadyExists,
    FormatError,
    InputError,
    NotFound,
    PulseError,
    StoreError,
    StoreUnavailable,
    Untrusted,
)

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

DEFAULT_LATE_SECONDS = 600.0
_REQUEST_SECONDS = 1.0  # what is not late, for each call and each so many bytes a second
_MIN_RATE = 16 << 10
_CHECK = "Try the store with `pulse store-check`."
T = TypeVar("T")


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


class BoundedStore:
    """``store``, of which nothing is taken for granted but what it should be trusted with. A
    listing has at most 10^6 objects, in order and where they belong; a length is one. Within
    `limited`, reading calls may be late for a while: a second for each call and each 16 KiB is its
    due, what takes longer is lateness. A listing is one call, however many pages it has."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._left: float | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return repr(self.store)

    @contextmanager
    def limited(self, seconds: float = DEFAULT_LATE_SECONDS) -> Iterator[None]:
        """Within it, reading calls raise StoreUnavailable once they were late by so many
        ``seconds`` in all."""
        before, self._left = self._left, seconds
        try:
            yield
        finally:
            self._left = before

    def put(self, name: str, data: Data) -> None:
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.store.put_new(name, data)

    def delete(self, name: str) -> None:
        self.store.delete(name)

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

    def expect(self, name: str, nbytes: int) -> None:
        """Says that the object ``name`` has ``nbytes`` by a trusted manifest: of use to a cache
        only."""

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


# -- objects that cannot be read or trusted

UNREADABLE = (NotFound, FormatError, Untrusted)
"""Errors for which a reader passes over an object. With others, such as an unavailable store, it
cannot know."""

_TRIES = 3
_LOOKS_BETWEEN_LATER_TRIES = 64
_MAX_OBJECTS = 256
_MAX_BYTES = 32 << 20
_MAX_SECONDS = 600.0
_READS = 3


def read_again(get: Callable[[], bytes], parse: Callable[[bytes], T]) -> T:
    """What ``parse`` makes of an object, which is fetched up to three times before it is held to be
    damaged: networks corrupt bytes more often than disks do. The same bytes twice are what is
    stored. Raises what ``parse`` raises."""
    last: bytes | None = None
    for again in reversed(range(_READS)):
        data = get()
        try:
            return parse(data)
        except (FormatError, Untrusted):
            if data == last or not again:
                raise
        last = data
    raise AssertionError


class _Refusal(NamedTuple):
    """``info`` is the object as it was listed when it was refused, for the ``tries``-th time."""

    info: ObjectInfo
    tries: int


class UnreadableObjects:
    """What was refused among numbered objects. Each is tried at three looks and then passed over
    until it is written again, but for one look in 64. ``on_refused`` is told of each object the
    first time that it is refused.

    ``error`` is why the first number of the last look was refused, where that is known.
    """

    def __init__(self, on_refused: Callable[[int, PulseError], None] | None = None) -> None:
        self.error: PulseError | None = None
        self._on_refused = on_refused
        self._refused: dict[int, _Refusal] = {}  # the one that was tried longest ago first
        self._looks = 0

    def first(
        self,
        numbers: Sequence[int],
        listed: Mapping[int, ObjectInfo],
        read: Callable[[int], T],
        *,
        bounded: bool,
    ) -> T | None:
        """What ``read`` returns for the first of the ``numbers``, in the order of preference, for
        which it does not raise an `UNREADABLE`; None if there is none. ``listed`` are their
        objects.

        A ``bounded`` look ends after 256 objects or 32 MiB, and may miss what lies behind them; the
        next ones go on. Any other tries all that were never tried, up to the first that can be
        read. Raises StoreUnavailable where that takes more than ten minutes: the next look goes on.
        """
        self._looks += 1
        # What is gone, or was written again since, is not what was refused.
        self._refused = {n: was for n, was in self._refused.items() if listed.get(n) == was.info}
        if not numbers or numbers[0] not in self._refused:
            self.error = None
        budget = _Budget()
        rare = self._looks % _LOOKS_BETWEEN_LATER_TRIES == 0
        again = [number for number, was in self._refused.items() if was.tries < _TRIES or rare]

        def tried(number: int) -> T | None:
            budget.draw(listed[number].nbytes)
            try:
                found = read(number)
            except UNREADABLE as error:
                self._refuse(number, listed[number], error, is_first=number == numbers[0])
                return None
            self._refused.pop(number, None)
            return found

        found, place = None, len(numbers)
        for at, number in enumerate(numbers):
            if number not in self._refused:
                if bounded and budget.spent:
                    place = at
                    break
                if budget.late:
                    raise StoreUnavailable(
                        f"{len(numbers) - at} objects are left to be looked at after "
                        f"{_MAX_SECONDS:.0f} seconds",
                        hint="Somebody leaves junk in the store. Call again: the next look goes "
                        "on.",
                    )
                if (found := tried(number)) is not None:
                    place = at
                    break
        # What was refused before is tried again, whatever lies below it was found: it may have been
        # damaged on its way.
        places = {number: at for at, number in enumerate(numbers[:place])}
        for number in again:
            if budget.spent:
                break
            if (
                number in places
                and places[number] < place
                and (better := tried(number)) is not None
            ):
                found, place = better, places[number]
        return found

    def _refuse(self, number: int, info: ObjectInfo, error: PulseError, *, is_first: bool) -> None:
        last = self._refused.pop(number, None)
        self._refused[number] = _Refusal(info, last.tries + 1 if last else 1)
        if is_first:
            self.error = error
        if last is None and self._on_refused:
            self._on_refused(number, error)


class _Budget:
    """What one look may read."""

    def __init__(self) -> None:
        self._objects = _MAX_OBJECTS
        self._nbytes = _MAX_BYTES
        self._ends = time.monotonic() + _MAX_SECONDS

    @property
    def spent(self) -> bool:
        return self._objects <= 0 or self._nbytes <= 0

    @property
    def late(self) -> bool:
        return time.monotonic() > self._ends

    def draw(self, nbytes: int) -> None:
        self._objects -= 1
        self._nbytes -= nbytes
