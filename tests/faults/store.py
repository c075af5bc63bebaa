"""A faulty store: clients that lose calls and replies, see stale listings and damaged bytes, and
crash in between.

All clients share one `Net` around one `Disk`; every fault is asked for beforehand and counted, so
that a sequence of calls repeats exactly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from pulse_rl import MemoryStore
from pulse_rl.errors import AlreadyExists, StoreUnavailable
from pulse_rl.store import Data, ObjectInfo

STALE_CHANGES = 4  # how many changes a stale listing may be behind

#: The calls that each kind of fault can befall. ``late``: the call fails and takes effect some
#: calls later, that is, calls are reordered. ``crash`` ends the client's process, ``interrupt``
#: only the call.
FAULTS: dict[str, tuple[str, ...]] = {
    "drop": ("put", "put_new", "get", "head", "list", "delete"),
    "lost_reply": ("put", "put_new", "delete"),
    "late": ("put", "put_new"),
    "twice": ("put", "put_new"),
    "stale": ("list",),
    "truncate": ("get",),
    "flip": ("get",),
    "crash": ("put", "put_new", "get", "head", "list", "delete"),
    "interrupt": ("put", "put_new", "get", "head", "list", "delete"),
}


_OFTEN = 0.7


class CrashNow(BaseException):
    """The process ends here, or its user interrupts it."""


@dataclass(slots=True)
class Fault:
    """One fault to come: at the first call that it can befall from number ``at`` on. ``where`` in
    [0, 1) places it in the bytes or in time."""

    kind: str
    at: int
    where: float


class Disk(MemoryStore):
    """What is stored, with a logical clock (a second a change) and the last changes, for stale
    listings.

    ``on_create`` is told of every object that `put_new` creates; ``changes`` counts what changed in
    any way.
    """

    def __init__(self, on_create: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._on_create = on_create
        self.misread = False  # a client was given a damaged manifest that is whole here
        self._changes: deque[tuple[str, tuple[bytes, float] | None]] = deque(maxlen=STALE_CHANGES)
        self._now = 0.0
        self.changes = 0
        self.damaged: set[str] = set()
        self.straggling = False  # a call that was sent long ago arrives

    def put(self, name: str, data: Data) -> None:
        old = self._objects.get(name)
        super().put(name, data)
        assert "/versions/" not in name, f"{name} was written with an overwriting put"
        self._changed(name, old)

    def put_new(self, name: str, data: bytes) -> None:
        super().put_new(name, data)
        self._changed(name, None)
        self._on_create(name, data)

    def delete(self, name: str) -> None:
        old = self._objects.get(name)
        super().delete(name)
        if old is not None:
            self._changed(name, old)

    def damage(self, name: str, data: bytes) -> None:
        """Replaces an object's bytes behind everybody's back."""
        self.changes += 1
        self._objects[name] = (data, self._objects[name][1])
        self.damaged.add(name)

    def plant(self, name: str, data: bytes) -> None:
        """Writes an object in whatever way, as one may who does not keep to the protocol."""
        old = self._objects.get(name)
        super().put(name, data)
        self._changed(name, old)

    def stale_list(self, folder: str, start_after: str | None, behind: int) -> list[ObjectInfo]:
        """The listing as it was ``behind`` changes ago."""
        past = {info.name: info for info in self.list(folder)}
        for name, old in list(self._changes)[::-1][:behind]:
            if name.startswith(f"{folder}/"):
                past.pop(name, None)
                if old is not None:
                    past[name] = ObjectInfo(name, len(old[0]), old[1])
        return sorted(
            info for info in past.values() if start_after is None or info.name > start_after
        )

    def names(self, folder: str) -> list[str]:
        first = bisect_right(self._names, f"{folder}/")
        return self._names[first : bisect_left(self._names, f"{folder}0", first)]

    def peek(self, name: str) -> bytes | None:
        entry = self._objects.get(name)
        return entry[0] if entry else None

    def _changed(self, name: str, old: tuple[bytes, float] | None) -> None:
        self._changes.append((name, old))
        self._now += 1
        self.changes += 1
        self.damaged.discard(name)
        if name in self._objects:
            self._objects[name] = (self._objects[name][0], self._now)


class Net:
    """Between the clients and the disk: calls that are under way, and the count of faults by
    kind."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.injected: Counter[str] = Counter()
        self._under_way: list[tuple[int, Callable[[], None]]] = []

    def send_late(self, calls: int, act: Callable[[], None]) -> None:
        self._under_way.append((calls, act))

    def tick(self) -> None:
        due = [act for left, act in self._under_way if left <= 1]
        self._under_way = [(left - 1, act) for left, act in self._under_way if left > 1]
        self.disk.straggling = True
        for act in due:
            _quietly(act)
        self.disk.straggling = False

    def flush(self) -> None:
        """Everything that is under way arrives."""
        while self._under_way:
            self.tick()


def _quietly(act: Callable[[], None]) -> None:
    """Carries out a call that nobody waits for any more."""
    try:
        act()
    except AlreadyExists:
        return


class Client:
    """One process's view of the store. Once ``dead``, it makes no call any more. On a ``lasting``
    bad line a manifest that has arrived damaged does so, often, until `calm`."""

    def __init__(self, net: Net, *, lasting: bool = False) -> None:
        self.net = net
        self._lasting = lasting
        self._worn: dict[str, bytes] = {}
        self.dead = False
        self.hit = 0
        self.faults: list[Fault] = []
        self._calls = 0
        self._meanwhile: tuple[int, Callable[[], None]] | None = None

    def expect(self, faults: list[Fault]) -> None:
        """The faults that befall the calls from now on."""
        self.faults, self._calls, self.hit = faults, 0, 0

    def calm(self) -> None:
        self.faults, self._meanwhile, self._worn = [], None, {}

    def meanwhile(self, call: int, act: Callable[[], None]) -> None:
        """Calls ``act``, once, when the call number ``call`` from now on is under way."""
        self._meanwhile = (call, act)

    def put(self, name: str, data: Data) -> None:
        whole = data if isinstance(data, bytes) else b"".join(data)
        self._write("put", name, lambda: self.net.disk.put(name, whole))

    def put_new(self, name: str, data: bytes) -> None:
        self._write("put_new", name, lambda: self.net.disk.put_new(name, data))

    def delete(self, name: str) -> None:
        self._write("delete", name, lambda: self.net.disk.delete(name))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        fault = self._before("get", name)
        if name in self._worn:
            return self._worn[name]
        data = self.net.disk.get(name, start, stop)
        if fault is None or not data:
            return data
        at = int(fault.where * len(data))
        self.net.disk.misread |= "/versions/" in name
        if fault.kind == "truncate":
            return data[:at]
        assert fault.kind == "flip"
        bit = 1 << int(fault.where * 8 * len(data)) % 8
        flipped = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        if self._lasting and "/versions/" in name and fault.where < _OFTEN:
            self._worn[name] = flipped
        return flipped

    def head(self, name: str) -> ObjectInfo:
        self._before("head", name)
        return self.net.disk.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        fault = self._before("list", folder)
        if fault is None:
            return iter(tuple(self.net.disk.list(folder, start_after)))
        return iter(
            self.net.disk.stale_list(folder, start_after, 1 + int(fault.where * STALE_CHANGES))
        )

    def _write(self, call: str, name: str, act: Callable[[], None]) -> None:
        fault = self._before(call, name)
        if fault is None:
            act()
        elif fault.kind == "twice":  # a client that sends again, since the first reply is late
            _quietly(act) if call == "put_new" else act()
            act()
        elif fault.kind in ("crash", "interrupt"):
            _quietly(act)
            self._end(fault, f"after {call} {name}")
        else:
            if fault.kind == "late":
                self.net.send_late(1 + int(fault.where * 8), act)
            else:
                _quietly(act)
            raise StoreUnavailable(f"{call} {name}: the reply was lost")

    def _before(self, call: str, name: str) -> Fault | None:
        """Counts the call; raises if it fails before it has any effect, else returns what happens
        to it."""
        if self.dead:
            raise CrashNow("dead already")
        self.net.tick()
        self._calls += 1
        if self._meanwhile:
            left, act = self._meanwhile
            self._meanwhile = (left - 1, act) if left > 1 else None
            if left == 1:
                act()
        for fault in self.faults:
            if fault.at < self._calls and call in FAULTS[fault.kind]:
                break
        else:
            return None
        self.faults.remove(fault)
        self.hit += 1
        self.net.injected[fault.kind] += 1
        if fault.kind == "drop":
            raise StoreUnavailable(f"{call} {name}: no connection")
        if fault.kind in ("crash", "interrupt") and (
            fault.where < 0.5 or call in ("get", "head", "list")
        ):
            self._end(fault, f"before {call} {name}")
        return fault

    def _end(self, fault: Fault, where: str) -> NoReturn:
        self.dead = fault.kind == "crash"
        raise CrashNow(where)
