"""The store: six calls on named immutable objects, all that the library needs of a backend.

Requirements (docs/protocol.md, section 2): `put_new` is atomic. `put` shows an object whole or not
at all. `get`, `head` and `list` see every object whose writing call has returned.
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

#: Bytes, or chunks of them in order.
Data = bytes | Iterable[bytes | memoryview]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
NAME_HINT = "Use letters, digits, '.', '_' and '-'; start with a letter or a digit."
MAX_NAME = 512
# A stranger who can write could list names without end; no stream has as many objects.
MAX_LISTED = 1_000_000


#: A long range of an object is read in pieces of at least this many bytes, over at most this many
#: connections. At 80 ms and a loss of 0.1% one connection carries 6 Mbit/s in the long run, and
#: eight of them 42. One connection read 51 MB in 68 s, eight in 11 s.
PIECE_BYTES, CONNECTIONS = 4 << 20, 8

DEFAULT_LATE_SECONDS = 600.0
_REQUEST_SECONDS = 1.0  # a read is not late: for each call, and for each _MIN_RATE bytes
_MIN_RATE = 16 << 10
_CHECK = "Try the store with `pulse store-check`."
T = TypeVar("T")


class ObjectInfo(NamedTuple):
    """Describe an object of a store.

    Args:
        name: The object's name.
        nbytes: Its length in bytes.
        modified: Its time of writing in Unix seconds, by the store's clock.
    """

    name: str
    nbytes: int
    modified: float


@runtime_checkable
class Store(Protocol):
    """Store named objects: the interface of every backend.

    Names are relative paths of letters, digits, '.', '_' and '-'; others raise InputError. Every
    call may raise StoreError. After StoreUnavailable it is unknown whether a write took effect.
    """

    def put(self, name: str, data: Data) -> None:
        """Store an object whole or not at all, replacing any object of that name.

        Args:
            name: The object's name.
            data: Its bytes, or chunks of them in order.
        Raises:
            StoreFull: The store has no space left.
        """

    def put_new(self, name: str, data: bytes) -> None:
        """Create an object unless its name exists, atomically among all clients.

        Args:
            name: The object's name.
            data: Its bytes.
        Raises:
            AlreadyExists: The name exists. This may be the object of an earlier attempt of the same
                call, whose reply was lost.
            StoreFull: The store has no space left.
        """

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of an object.

        Args:
            name: The object's name.
            start: The first byte. Default: 0.
            stop: The byte after the last one. Default: the object's length.
        Returns: ``stop - start`` bytes.
        Raises:
            NotFound: There is no such object.
            StoreError: The range is outside of the object.
        """

    def head(self, name: str) -> ObjectInfo:
        """Return the length and the time of writing of an object.

        Args:
            name: The object's name.
        Raises:
            NotFound: There is no such object.
        """

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """List the objects under a folder in name order.

        Args:
            folder: The folder, without a slash at its end; "" for the whole store.
            start_after: Begin at the first name greater than this. Default: at the first object.
        Returns: An iterator of `ObjectInfo`.
        """

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is no error.

        Args:
            name: The object's name.
        """


class ReadOnly:
    """Refuses the writing calls of a store for readers.

    ``writers_hint`` is the hint of the error: where to write instead.
    """

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
    """Whether ``name`` is a valid object name."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return ``name``; raise InputError for a name that could leave the store's folder or hide in
    it."""
    if not is_name(name):
        raise InputError(f"{name[:80]!r} is not a valid object name", hint=NAME_HINT)
    return name


def check_folder(name: str) -> str:
    """Return ``name``, a folder's name or "" for the whole store; raise InputError otherwise."""
    return name and check_name(name)


def check_range(name: str, nbytes: int, start: int, stop: int | None) -> tuple[int, int]:
    """The range with its end filled in.

    Raises StoreError unless it lies inside an object of ``nbytes`` bytes.
    """
    stop = nbytes if stop is None else stop
    if not 0 <= start <= stop <= nbytes:
        raise StoreError(f"bytes {start} to {stop} are outside {name}, which has {nbytes}")
    return start, stop


def joined(data: Data) -> bytes:
    """All of ``data`` as one bytes object."""
    return data if isinstance(data, bytes) else b"".join(data)


def create_or_confirm(store: Store, name: str, data: bytes) -> bool:
    """Create the object ``name`` unless it exists.

    A client that retries after a lost reply finds its own object. So after "already exists" the
    object is read back.

    Returns: Whether the object now holds ``data``; False if another client created it.
    """
    try:
        store.put_new(name, data)
    except AlreadyExists:
        return holds(store, name, data)
    return True


def holds(store: Store, name: str, data: bytes) -> bool:
    """Whether the object ``name`` has exactly the bytes ``data``. Raises NotFound."""
    return store.head(name).nbytes == len(data) and store.get(name, 0, len(data)) == data


def whole(store: Store, name: str, nbytes: int) -> bytes:
    """Read the object ``name``, of which at most ``nbytes`` are read.

    Raises NotFound, and FormatError if the object is shorter.
    """
    try:
        return store.get(name, 0, nbytes)
    except (NotFound, StoreUnavailable):
        raise
    except StoreError as error:
        # A range error means that the object is shorter; any other error is the store's.
        if store.head(name).nbytes >= nbytes:
            raise
        raise FormatError(f"{name} has fewer bytes than it had: {error}") from error


class BoundedStore:
    """Bounds what a store can do to a reader: its listings, its lengths and its delays.

    A listing has at most 10^6 objects, in order and in their folder. No length is negative. Within
    `limited`, reads may be late for a limited time in all. Each call may take a second, and a
    second for each 16 KiB; more is lateness. A listing counts as one call, however many pages it
    has.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._left: float | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return repr(self.store)

    @contextmanager
    def limited(self, seconds: float = DEFAULT_LATE_SECONDS) -> Iterator[None]:
        """Within this block reads raise StoreUnavailable after ``seconds`` of lateness in all."""
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
            # Only the time inside the store counts, not that of the caller between two objects.
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
        """Announce the length of an object from a trusted manifest. Only a cache uses it."""

    def _timed(self, name: str, read: Callable[[], T]) -> T:
        # Raises before the read if earlier reads have used up the time. A read that ends late still
        # returns its bytes: they are worth more than an error.
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
    """Return ``info``; raise StoreError if it cannot describe the object ``name``."""
    if info.name != name or info.nbytes < 0 or not math.isfinite(info.modified):
        raise StoreError(f"the store says nonsense of {name}: {info!r:.200}", hint=_CHECK)
    return info


# -- objects that cannot be read or trusted

#: Errors after which a reader skips an object. After any other error, such as StoreUnavailable, it
#: cannot know whether the object is good.
UNREADABLE = (NotFound, FormatError, Untrusted)

_TRIES = 3
_LOOKS_BETWEEN_LATER_TRIES = 64
_MAX_OBJECTS = 256
_MAX_BYTES = 32 << 20
_MAX_SECONDS = 600.0
_READS = 3


def read_again(get: Callable[[], bytes], parse: Callable[[bytes], T]) -> T:
    """Fetch an object and parse it, with up to three fetches before it counts as damaged.

    Networks corrupt bytes more often than disks do. If two fetches return the same bytes, these are
    stored, and there is no third. Raises what ``parse`` raises.
    """
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
    """The object as it was listed when it was refused for the ``tries``-th time."""

    info: ObjectInfo
    tries: int


class UnreadableObjects:
    """Remembers which numbered objects were refused, so that a poll does not read them again.

    Each refused object is tried at three polls, then at one poll in 64, until it is written again.
    A poll that finds nothing tries the preferred one each time: its reader has no version yet.
    ``on_refused`` is called once for each refused object. ``error`` is the reason why the first
    number of the last poll was refused, if known.
    """

    def __init__(self, on_refused: Callable[[int, PulseError], None] | None = None) -> None:
        self.error: PulseError | None = None
        self._on_refused = on_refused
        self._refused: dict[int, _Refusal] = {}  # least recently tried first
        self._looks = 0

    def first(
        self,
        numbers: Sequence[int],
        listed: Mapping[int, ObjectInfo],
        read: Callable[[int], T],
        *,
        bounded: bool,
    ) -> T | None:
        """The result of ``read`` for the first of ``numbers`` that can be read, else None.

        An object cannot be read if ``read`` raises one of `UNREADABLE`. ``numbers`` are in order of
        preference, and ``listed`` has their objects. A ``bounded`` poll ends after 256 objects or
        32 MiB and may miss what lies behind them; the next polls go on. Any other poll tries all
        objects that were never tried, up to the first that can be read. Raises StoreUnavailable if
        that takes more than ten minutes; the next call continues.
        """
        self._looks += 1
        # 1. Forget refusals of objects that are gone or were written again since.
        self._refused = {n: was for n, was in self._refused.items() if listed.get(n) == was.info}
        if not numbers or numbers[0] not in self._refused:
            self.error = None
        budget = _Budget()
        rare = self._looks % _LOOKS_BETWEEN_LATER_TRIES == 0
        again = [number for number, was in self._refused.items() if was.tries < _TRIES or rare]
        first_again = [n for n in numbers[:1] if n in self._refused and n not in again]

        def tried(number: int) -> T | None:
            budget.draw(listed[number].nbytes)
            try:
                found = read(number)
            except UNREADABLE as error:
                self._refuse(number, listed[number], error, is_first=number == numbers[0])
                return None
            self._refused.pop(number, None)
            return found

        # 2. Objects that were never tried, up to the first that can be read. Junk in the store must
        # neither hide a good version for ever nor make one poll read all of it.
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
        # 3. Refused objects that are preferred to the one just found: the network may have damaged
        # them.
        places = {number: at for at, number in enumerate(numbers[:place])}
        for number in again if found is not None else [*again, *first_again]:
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
    """The limits of one poll: objects, bytes and seconds."""

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
