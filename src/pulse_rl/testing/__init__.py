"""Tests for your own implementation of `Store`.

::

    from uuid import uuid4

    from my_store import MyStore
    from pulse_rl.testing import StoreConformance


    class TestMyStore(StoreConformance):
        def new_store(self):
            return MyStore(f"bucket/{uuid4()}")

        def peer_of(self, store):
            return MyStore(store.address)

In a file that pytest collects, this is the complete test. A fixture with ``autouse=True`` in the
class can store, for example, ``tmp_path`` on ``self`` for ``new_store``. pytest is not required:
with ``unittest.TestCase`` as a second base, the same class runs under unittest.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from enum import StrEnum
from hashlib import sha256
from itertools import pairwise
from threading import Barrier
from typing import Any, ClassVar

from ..errors import AlreadyExists, InputError, NotFound, StoreError, StoreUnavailable
from ..store import Store
from ..store.base import MAX_NAME

__all__ = ["StoreConformance"]

#: Names that no object may have: they could leave the store's folder, hide in it, or read otherwise
#: elsewhere.
BAD_NAMES = (
    *(
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "a/..",
        "/a",
        "a/",
        "a//b",
        ".a",
        "a/.b",
        "-a",
        "a b",
        "a\\b",
        "ü",
        "a\0b",
    ),
    *("a\n", "a:b", "a?b", "a%2e%2e", "~", "x" * (MAX_NAME + 1)),
)


class Guarantee(StrEnum):
    """The guarantee that a failed test reports as broken: from docs/protocol.md, section 2, or a
    call's description."""

    CREATE = (
        "`put_new` is atomic: of any number of creates of one name, exactly one succeeds, "
        "and the others fail"
    )
    WHOLE = "`put` shows an object whole or not at all"
    VISIBLE = "`get`, `head` and `list` see every object whose writing call has returned"
    ORDER = "`list` returns names in ascending order"
    CALLS = "each call does what its description in pulse_rl.Store says"


@contextmanager
def checks(guarantee: Guarantee) -> Iterator[None]:
    """Names the guarantee in every failure inside; decorates a test, or surrounds a part of one."""
    place = "" if guarantee is Guarantee.CALLS else " (docs/protocol.md, section 2)"
    try:
        yield
    except AssertionError as error:
        error.args = (f"broken: {guarantee}{place}. Seen: {error}",)
        raise
    except Exception as error:
        error.add_note(f"This was a test of: {guarantee}{place}.")
        raise


def holds(held: bool, seen: str) -> None:
    if not held:
        raise AssertionError(seen)


def equal(found: object, expected: object, what: str) -> None:
    holds(found == expected, f"{what}: {_short(found)}, expected {_short(expected)}")


def same_bytes(found: object, expected: bytes, what: str) -> None:
    holds(isinstance(found, bytes), f"{what}: a {type(found).__name__}, expected bytes")
    equal(found, expected, what)


def raises(
    expected: type[Exception], what: str, call: Callable[..., object], *arguments: object
) -> Exception:
    """The error of the call, which has to be one of ``expected``."""
    try:
        result = call(*arguments)
    except expected as error:
        return error
    except Exception as error:
        named = f"{type(error).__name__} ({str(error)[:200]})"
        raise AssertionError(f"{what}: raised {named}, expected {expected.__name__}") from error
    raise AssertionError(f"{what}: returned {_short(result)}, expected {expected.__name__}")


def _short(value: object) -> str:
    if isinstance(value, bytes) and len(value) > 100:
        return f"{len(value)} bytes with the SHA-256 {sha256(value).hexdigest()[:8]}…"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]} … {text[-40:]}"


class StoreConformance(ABC):
    """Tests of one kind of store. A subclass says how to create one; each test creates its own and
    leaves objects in it.

    Failures are AssertionErrors that begin with the broken `Guarantee`; what else a call raises
    unexpectedly is passed on with the guarantee as a note. ``large_bytes``, ``many_objects`` and
    ``clock_seconds`` may be lowered or raised to suit the store; no other difference is allowed.
    """

    #: Size of a large object: more than one part of a multipart upload.
    large_bytes: ClassVar[int] = 12 << 20
    #: Objects in a long list: more than one page of it.
    many_objects: ClassVar[int] = 1003
    #: An object that is written again this many seconds later has a later time of writing.
    clock_seconds: ClassVar[float] = 2.0

    @abstractmethod
    def new_store(self) -> Store:
        """An empty store that nothing else uses."""

    def peer_of(self, store: Store) -> Store:
        """Another client of the objects of ``store``. Override it if a client has private state,
        such as a cache or a connection: otherwise each client reads only what it wrote.
        """
        return store

    @checks(Guarantee.CALLS)
    def test_it_has_the_calls_of_a_store(self) -> None:
        holds(
            isinstance(self.new_store(), Store),
            "a store without all of the calls of pulse_rl.Store",
        )

    # -- put_new

    @checks(Guarantee.CREATE)
    def test_a_second_create_is_refused(self) -> None:
        store = self.new_store()
        clients = (store, self.peer_of(store))
        store.put_new("a/b", b"first")
        for client in clients:
            for data in (b"second", b"first"):
                raises(AlreadyExists, "a second put_new of a name", client.put_new, "a/b", data)
                equal(
                    [c.get("a/b") for c in clients],
                    [b"first"] * 2,
                    "the object after a put_new that was refused",
                )
        store.delete("a/b")
        store.put_new("a/b", b"third")
        equal(store.get("a/b"), b"third", "an object that was deleted and created again")

    @checks(Guarantee.CREATE)
    def test_what_was_put_cannot_be_created(self) -> None:
        store = self.new_store()
        store.put("a/b", b"put")
        raises(AlreadyExists, "put_new of a name that was put", store.put_new, "a/b", b"created")
        equal(store.get("a/b"), b"put", "the object after a put_new that was refused")

    @checks(Guarantee.CREATE)
    def test_of_racing_creates_one_wins(self) -> None:
        store, racers = self.new_store(), 6
        peer, barrier = self.peer_of(store), Barrier(racers)

        def create(client: Store, name: str, data: bytes) -> tuple[bool, bytes]:
            """Whether it won, and what stands there as soon as it knows."""
            barrier.wait(30)
            try:
                client.put_new(name, data)
            except AlreadyExists:
                return False, client.get(name)
            return True, data

        with ThreadPoolExecutor(racers) as pool:
            for name in (f"a/{k}" for k in range(5)):
                tries = [
                    pool.submit(create, peer if racer % 2 else store, name, bytes([racer]) * 1000)
                    for racer in range(racers)
                ]
                ends = [t.result() for t in tries]
                equal(sum(won for won, _ in ends), 1, f"winners of {racers} racing creates")
                (winner,) = (data for won, data in ends if won)
                equal(
                    [data == winner for _, data in ends],
                    [True] * racers,
                    "racers that then find the winner's bytes",
                )
                equal(store.get(name), winner, "the object after the race")

    # -- put

    @checks(Guarantee.VISIBLE)
    def test_what_was_put_is_there(self) -> None:
        store = self.new_store()
        for client in (store, self.peer_of(store)):
            for k, data in enumerate([b"", b"x", _random_bytes(100_000)]):
                name = f"a/{k}"
                store.put(name, data)
                same_bytes(client.get(name), data, f"get of {len(data)} bytes that were put")
                equal(client.head(name)[:2], (name, len(data)), "name and nbytes of head")
                holds(
                    client.head(name) in list(client.list("a")), "head's answer is not among list's"
                )

    @checks(Guarantee.VISIBLE)
    def test_put_replaces(self) -> None:
        store = self.new_store()
        for client in (store, self.peer_of(store)):
            for data in (b"first, longer", b"second"):
                store.put("a/b", data)
                equal(client.get("a/b"), data, "get of what was put last")
                equal(client.head("a/b").nbytes, len(data), "nbytes of what was put last")
                equal(
                    [(i.name, i.nbytes) for i in client.list("a")], [("a/b", len(data))], "the list"
                )

    @checks(Guarantee.VISIBLE)
    def test_a_payload_is_there_under_its_digest(self) -> None:
        """The names that a cache may know."""
        store, data = self.new_store(), _random_bytes(5000)
        name = f"stream/payloads/{sha256(data).hexdigest()}.patch"
        raises(NotFound, "get of a payload before it is put", store.get, name)
        for _ in range(2):
            store.put(name, data)
            for client in (store, self.peer_of(store)):
                same_bytes(client.get(name), data, "get of a payload")
                equal(client.get(name, 7, 4000), data[7:4000], "a range of a payload")
                equal(client.head(name).nbytes, len(data), "nbytes of a payload")
        store.delete(name)
        raises(NotFound, "get of a payload after it was deleted", store.get, name)

    @checks(Guarantee.CALLS)
    def test_put_takes_chunks(self) -> None:
        store = self.new_store()
        cases: list[list[Any]] = [[], [b""], [b"a", b"", b"bc"], [memoryview(b"xyz")[1:], b"!"]]
        for chunks in cases:
            expected = b"".join(bytes(chunk) for chunk in chunks)
            store.put("a/list", chunks)
            store.put("a/iterator", iter(chunks))
            equal(store.get("a/list"), expected, "what was put as a list of chunks")
            equal(store.get("a/iterator"), expected, "what was put as an iterator of chunks")

    @checks(Guarantee.WHOLE)
    def test_a_large_object(self) -> None:
        """Chunks of odd sizes."""
        store, data = self.new_store(), _random_bytes(self.large_bytes)
        n = len(data)
        cuts = [0, 1, n // 3, n // 3 + 17, n - n // 9, n]
        store.put("a/large", (memoryview(data)[a:b] for a, b in pairwise(cuts)))
        equal(store.head("a/large").nbytes, n, "nbytes of a large object")
        same_bytes(store.get("a/large"), data, "get of a large object")
        equal(
            store.get("a/large", n // 2, n // 2 + 99),
            data[n // 2 : n // 2 + 99],
            "a range of a large object",
        )

    @checks(Guarantee.WHOLE)
    def test_a_put_in_progress_shows_nothing(self) -> None:
        store = self.new_store()
        peer = self.peer_of(store)
        chunks = [_random_bytes(self.large_bytes // 3 + k) for k in range(3)]
        store.put("a/old", b"old")
        for name, old in (("a/new", None), ("a/old", b"old")):
            seen = _seen_during_put(store, peer, name, chunks)
            wrong = [len(data or b"") for data in seen if data not in (old, b"".join(chunks))]
            equal(
                wrong,
                [],
                "lengths of what a reader got in the midst of a put, neither the old nor the new "
                "object",
            )
            same_bytes(peer.get(name), b"".join(chunks), "get after the put")

    @checks(Guarantee.WHOLE)
    def test_a_put_that_breaks_changes_nothing(self) -> None:
        store = self.new_store()
        store.put("a/old", b"old")

        def breaks(nbytes: int) -> Iterator[bytes]:
            for _ in range(0, nbytes, 1 << 20):
                yield bytes(1 << 20)
            raise ValueError("the source of the chunks broke")

        for nbytes in (0, 1 << 20, self.large_bytes):
            for name in ("a/new", "a/old"):
                raises(
                    Exception, "put whose chunks end in an error", store.put, name, breaks(nbytes)
                )
            equal(_names(store, "a"), ["a/old"], "the names after puts that failed")
            equal(store.get("a/old"), b"old", "the object after a put that failed")

    # -- get, head

    @checks(Guarantee.CALLS)
    def test_ranges(self) -> None:
        store = self.new_store()
        store.put("a/b", b"0123456789")
        for start, stop in (
            (0, 10),
            (3, 7),
            (9, None),
            (10, None),
            (4, 4),
            (0, 0),
            (10, 10),
            (0, 2),
        ):
            equal(
                store.get("a/b", start, stop),
                b"0123456789"[start:stop],
                f"get of bytes {start} to {stop} of 10",
            )
        equal(store.get("a/b", stop=2), b"01", "get with nothing but a stop")

    @checks(Guarantee.CALLS)
    def test_ranges_outside_the_object_are_errors(self) -> None:
        """A short answer in place of an error would pass for a damaged object."""
        store = self.new_store()
        store.put("a/b", b"0123456789")
        for start, stop in ((0, 11), (11, 11), (11, None), (5, 3), (-1, 3), (0, -1), (10, 12)):
            what = f"get of bytes {start} to {stop} of 10"
            error = raises(StoreError, what, store.get, "a/b", start, stop)
            holds(
                not isinstance(error, NotFound | StoreUnavailable),
                f"{what}: raised {type(error).__name__}",
            )

    @checks(Guarantee.CALLS)
    def test_what_is_absent_is_not_found(self) -> None:
        store = self.new_store()
        store.put("a/b", b"x")
        for name in ("a/c", "a", "b", "a/b2"):
            raises(NotFound, "get of an absent object", store.get, name)
            raises(NotFound, "get of a range of an absent object", store.get, name, 0, 1)
            raises(NotFound, "head of an absent object", store.head, name)
        equal(_names(store, "nothing"), [], "the list of an empty folder")

    @checks(Guarantee.CALLS)
    def test_the_time_of_writing(self) -> None:
        """In Unix seconds; garbage collection keeps what was written again, so a second put must
        show."""
        store = self.new_store()
        store.put("a/b", b"x")
        first = store.head("a/b").modified
        holds(1e9 < first < 1e11, f"modified is {first}, expected Unix seconds")
        stop, last = time.monotonic() + self.clock_seconds, first
        while last <= first and time.monotonic() < stop:
            time.sleep(0.02)
            store.put("a/b", b"x")
            last = store.head("a/b").modified
        holds(last > first, f"modified is still {last} after {self.clock_seconds} seconds of puts")

    # -- list

    def test_lists_are_in_order(self) -> None:
        store = self.new_store()
        inside = ["a/0010", "a/0002", "a/0001", "a/b/c", "a/b.x", "a/b-x", "a/B", "a/z"]
        for name in inside:
            store.put(name, name.encode())
        listed = [info.name for info in store.list("a")]
        with checks(Guarantee.CALLS):
            equal(sorted(listed), sorted(inside), "the names of the list")
        with checks(Guarantee.ORDER):
            equal(listed, sorted(inside), "the list")

    @checks(Guarantee.CALLS)
    def test_lists_are_of_one_folder(self) -> None:
        store = self.new_store()
        for name in ("a/b/c", "a/b.x", "a/bb/c", "a.b", "a2/x", "ab", "b/a/x", "A/x"):
            store.put(name, name.encode())
        equal(_names(store, "a"), ["a/b.x", "a/b/c", "a/bb/c"], "the list of the folder a")
        equal(_names(store, "a/b"), ["a/b/c"], "the list of the folder a/b")
        everything = ["A/x", "a.b", "a/b.x", "a/b/c", "a/bb/c", "a2/x", "ab", "b/a/x"]
        equal(_names(store, ""), everything, "the list of the whole store")
        equal(_names(store, "", "a0"), everything[5:], "the list of the whole store after a0")

    @checks(Guarantee.CALLS)
    def test_lists_go_on_after_a_name(self) -> None:
        store = self.new_store()
        everything = [f"a/{k:03}" for k in range(0, 40, 2)]
        for name in everything:
            store.put(name, b"")
        for after in ("a/000", "a/021", "a/038", "A/9", "b/0"):
            equal(
                _names(store, "a", after),
                [n for n in everything if n > after],
                f"the list after {after}",
            )

    def test_a_list_of_more_than_a_page(self) -> None:
        store = self.new_store()
        expected = [f"a/{k:06}" for k in range(self.many_objects)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: store.put(name, b""), reversed(expected)))
        for client in (store, self.peer_of(store)):
            listed = [info.name for info in client.list("a")]
            with checks(Guarantee.VISIBLE):
                equal(len(listed), len(expected), "the length of the list")
                equal(sorted(listed), expected, "the names of the list")
            with checks(Guarantee.ORDER):
                equal(listed, expected, "the list")
            with checks(Guarantee.CALLS):
                equal(
                    _names(client, "a", expected[1]), expected[2:], f"the list after {expected[1]}"
                )

    @checks(Guarantee.VISIBLE)
    def test_a_delete_during_a_list_hides_no_other_name(self) -> None:
        store = self.new_store()
        names = [f"a/{k}" for k in range(9)]
        for name in names:
            store.put(name, b"x")
        listed = store.list("a")
        first = next(listed).name
        for name in (first, names[4]):
            store.delete(name)
        found = {first, *(info.name for info in listed)}
        equal(sorted(found - {names[4]}), sorted({*names} - {names[4]}), "the list")

    # -- delete

    @checks(Guarantee.CALLS)
    def test_a_delete_removes_one_object(self) -> None:
        store = self.new_store()
        for name in ("a/x-30", "a/x-300", "a/x-3", "a/x-30.json", "b/c/d"):
            store.put(name, b"x")
        store.delete("a/x-30")
        equal(
            _names(store, "a"),
            ["a/x-3", "a/x-30.json", "a/x-300"],
            "the names after a delete of a/x-30",
        )
        raises(NotFound, "get of what was deleted", self.peer_of(store).get, "a/x-30")
        store.delete("b/c")
        equal(_names(store, "b"), ["b/c/d"], "the names after a delete of the folder b/c")

    @checks(Guarantee.CALLS)
    def test_a_delete_of_what_is_absent_is_no_error(self) -> None:
        store = self.new_store()
        store.put("a/b", b"x")
        for name in ("a/b", "a/b", "a/c", "nothing"):
            store.delete(name)

    # -- names

    @checks(Guarantee.CALLS)
    def test_bad_names_are_refused(self) -> None:
        store = self.new_store()
        store.put("kept/x", b"x")
        calls: dict[str, Callable[[str], object]] = {
            "put": lambda name: store.put(name, b"y"),
            "put_new": lambda name: store.put_new(name, b"y"),
            "get": store.get,
            "get of a range": lambda name: store.get(name, 0, 1),
            "head": store.head,
            "list": lambda name: list(store.list(name)),
            "delete": store.delete,
        }
        for name in BAD_NAMES:
            for call, act in calls.items():
                if (call, name) == ("list", ""):  # the whole store
                    continue
                raises(InputError, f"{call} with the name {name[:20]!r}", act, name)
        equal(_names(store, "kept"), ["kept/x"], "the names after calls that were refused")

    @checks(Guarantee.CALLS)
    def test_the_longest_name(self) -> None:
        store = self.new_store()
        name = "/".join(["x" * 127] * 4).ljust(MAX_NAME, "y")
        store.put_new(name, b"x")
        equal(store.get(name), b"x", f"get of an object with a name of {MAX_NAME} characters")


def _names(store: Store, folder: str, start_after: str | None = None) -> list[str]:
    """Sorted, so that only what is about the order fails for it."""
    return sorted(info.name for info in store.list(folder, start_after))


def _random_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)


def _seen_during_put(
    store: Store, peer: Store, name: str, chunks: list[bytes]
) -> list[bytes | None]:
    """What ``peer`` reads after each of the chunks was taken: the object's bytes, or None for no
    object.

    A reader that has to wait for the put is waited for once, for a second.
    """
    looks: list[Future[bytes | None]] = []

    def look() -> bytes | None:
        try:
            return peer.get(name)
        except NotFound:
            return None

    def watched() -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk
            if all(earlier.done() for earlier in looks):
                looks.append(pool.submit(look))
                wait(looks, timeout=1)

    with ThreadPoolExecutor(1) as pool:
        store.put(name, watched())
    return [done.result() for done in looks]
