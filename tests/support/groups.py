"""Random sequences of what befalls a group: restarts, garbage collection, lost replies, damage, lies, interrupts.

Each is a function of its seed: ``python -m tests.support.groups --sequences 5000 --seed 1``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from pulse_rl import (
    Bits,
    MemoryStore,
    Publisher,
    PulseError,
    Store,
    StoreUnavailable,
    Subscriber,
    gc_stream,
)
from pulse_rl.store import Data, ObjectInfo
from pulse_rl.sync import group
from pulse_rl.sync.group import Member
from tests.support.states import Live

T = TypeVar("T")
TIMEOUT = 60.0
MOST_ROUNDS = 16
MEMBERS = "s/groups/g/members"


class Stop(BaseException):
    """An interrupt."""


class ClockedStore(MemoryStore):
    """Its clock stands still unless it is moved. Keeps the last listings for clients that see stale ones."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6
        self.before: dict[str, list[ObjectInfo]] = {}

    def _set(self, name: str, entry: tuple[bytes, float]) -> None:
        self.before = {folder: self.listed(folder) for folder in ("s/versions", "s/groups/g/members")}
        super()._set(name, (entry[0], self.now))

    def listed(self, folder: str) -> list[ObjectInfo]:
        return [
            ObjectInfo(n, len(self._objects[n][0]), self._objects[n][1])
            for n in self._names
            if n.startswith(f"{folder}/")
        ]

    def date(self, name: str, modified: float) -> None:
        """Gives an object another time, as who writes to a folder can."""
        self._objects[name] = (self._objects[name][0], modified)


class Client:
    """One worker's way to the store: call number ``fail_at`` from now on fails, before it has any effect or after."""

    def __init__(self, store: ClockedStore) -> None:
        self.store = store
        self.fail_at: int | None = None
        self.error: BaseException = Stop()
        self.after = False
        self.stale = False
        self.calls = 0

    def _do(self, act: Callable[[], T]) -> T:
        self.calls += 1
        if self.fail_at is None or self.fail_at > 0:
            self.fail_at = None if self.fail_at is None else self.fail_at - 1
            return act()
        self.fail_at = None
        if self.after:
            act()
        raise self.error

    def put(self, name: str, data: Data) -> None:
        self._do(lambda: self.store.put(name, data))

    def put_new(self, name: str, data: bytes) -> None:
        self._do(lambda: self.store.put_new(name, data))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._do(lambda: self.store.get(name, start, stop))

    def head(self, name: str) -> ObjectInfo:
        return self._do(lambda: self.store.head(name))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        if self.stale and folder in self.store.before:
            found = [info for info in self.store.before[folder] if info.name > (start_after or "")]
            return iter(self._do(lambda: found))
        return iter(self._do(lambda: list(self.store.list(folder, start_after))))

    def delete(self, name: str) -> None:
        self._do(lambda: self.store.delete(name))


class Worker:
    """A member and its live model, which starts from ``base``, a `Live` of a version."""

    def __init__(self, world: World, name: str, *, silent: bool, base: Live | None = None) -> None:
        self.world, self.name, self.silent = world, name, silent
        self.client = Client(world.store)
        self.live = base or Live()
        self.held = -1
        self.path: list[int] = []
        store: Store = self.client
        self.subscriber = Subscriber(
            store, stream="s", threads=1, base={n: b.array.copy() for n, b in base.tensors.items()} if base else None
        )
        self.member = Member(self.subscriber, group="g", name=name, timeout_seconds=TIMEOUT)

    def poll(self) -> None:
        self.apply(self.member.poll())
        version = self.member.version
        if version is not None and version not in self.path[-1:]:
            assert version > max(self.path, default=-1), f"{self.name} goes back from {self.path[-1:]} to {version}"
            self.path.append(version)
        if version is not None and version > self.held:
            assert self.live.root == self.world.roots[version], f"{self.name} has wrong bits of version {version}"
            self.held = version

    def apply(self, update: Any) -> None:
        if update is not None:
            assert update.version >= self.held, f"{self.name} is given {update.version} after {self.held}"
            self.live.apply(update)
            assert self.live.root == self.world.roots[update.version], f"{self.name}: {update} leads astray"
            if not self.silent:
                update.acknowledge()

    def ends(self) -> None:
        self.subscriber.close()


@dataclass
class World:
    """``calm``: nothing but publishing and polling, so that all members must switch to the same versions, together."""

    seed: int
    calm: bool
    trace: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.numpy = np.random.default_rng(self.seed)
        self.store = ClockedStore()
        self.roots: dict[int, str] = {}
        self.state = {"a": self.numpy.integers(0, 1 << 16, (8, 8), np.uint16), "b": np.zeros(4, np.uint16)}
        self.publisher = Publisher(self.store, stream="s", threads=1, anchor_ratio=self.rng.choice((0.5, 50)))
        self.names = [f"worker-{k}" for k in range(self.rng.randint(1, 4))]
        self.workers = {name: self.started(name) for name in self.names}
        self.twins: list[Worker] = []

    def started(self, name: str, base: Live | None = None) -> Worker:
        return Worker(self, name, silent=self.rng.random() < 0.3, base=base)

    # -- what may happen

    def publish(self) -> None:
        for _ in range(self.rng.choice((1, 1, 3))):
            self.state["a"].reshape(-1)[self.numpy.integers(0, 64, 3)] ^= 1
            done = self.publisher.publish({n: Bits(a, "BF16") for n, a in self.state.items()})
            self.roots[done.version] = done.root

    def poll(self) -> None:
        self.polled(self.rng.choice([*self.workers.values(), *self.twins]))

    def poll_all(self) -> None:
        for worker in self.rng.sample(list(self.workers.values()), len(self.workers)):
            self.polled(worker)

    def polled(self, worker: Worker) -> None:
        try:
            worker.poll()
        except (PulseError, Stop) as error:
            if self.calm:
                raise
            kind = type(error).__name__
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def restart(self) -> None:
        """At once, or with what it had as a checkpoint, or beside the old process."""
        name = self.rng.choice(self.names)
        old = self.workers[name]
        twin = self.rng.random() < 0.3
        base = None
        if self.rng.random() < 0.3 and old.held >= 0 and not twin:
            base = Live()
            base.tensors = {n: Bits(b.array.copy(), b.dtype) for n, b in old.live.tensors.items()}
        self.workers[name] = self.started(name, base)
        if twin:
            self.twins.append(old)
        else:
            old.ends()

    def restart_all(self) -> None:
        for name in self.names:
            self.workers[name].ends()
            self.workers[name] = self.started(name)

    def ahead(self) -> None:
        """The owner syncs by itself, and scatters what it gets."""
        worker = self.rng.choice(list(self.workers.values()))
        try:
            update = worker.subscriber.sync()
        except (PulseError, Stop):
            return
        worker.apply(update)
        worker.held = update.version if update is not None else worker.held

    def newest_as_base(self) -> None:
        """A worker starts from a checkpoint of the newest version."""
        if not self.roots:
            return
        base = Live()
        base.tensors = {n: Bits(a.copy(), "BF16") for n, a in self.state.items()}
        name = self.rng.choice(self.names)
        self.workers[name].ends()
        self.workers[name] = self.started(name, base)

    def fails(self) -> None:
        client = self.rng.choice(list(self.workers.values())).client
        client.fail_at, client.after = self.rng.randrange(12), self.rng.random() < 0.5
        client.error = self.rng.choice((Stop(), StoreUnavailable("the connection broke")))

    def stale(self) -> None:
        client = self.rng.choice(list(self.workers.values())).client
        client.stale = not client.stale

    def time(self) -> None:
        self.store.now += self.rng.choice((1, 10, 30, 70, 1000))

    def gc(self) -> None:
        try:
            gc_stream(self.store, "s", keep=self.rng.randint(1, 3), grace_seconds=0)
        except PulseError:
            return

    def damage(self) -> None:
        found = [i.name for i in self.store.listed("s/payloads")]
        if found:
            name = self.rng.choice(found)
            if self.rng.random() < 0.5:
                self.store.delete(name)
            else:
                self.store.put(name, b"junk")

    def close(self) -> None:
        """Unless the owner has taken an update past its member, which then would not know what the model holds."""
        worker = self.rng.choice(list(self.workers.values()))
        if worker.held in (-1, worker.member.version):
            worker.subscriber.close()

    def lie(self) -> None:
        rng, store = self.rng, self.store
        notes = [i.name for i in store.listed(MEMBERS)]
        kind = rng.randrange(5)
        if kind == 0 and notes:
            store.delete(rng.choice(notes))
        elif kind == 1 and notes:
            store.date(rng.choice(notes), store.now + rng.choice((-1e5, -50, 50, 200, 1e9)))
        elif kind == 2:
            name = rng.choice(("README", "x/y", "worker-0", f"worker-0-{'9' * 15}", "w--away", "w-5-staged"))
            store.put(f"{MEMBERS}/{name}", b"x" * 1000)
        else:
            name = rng.choice((*self.names, "stranger"))
            claimed = rng.choice((0, 1, int(store.now * 1000) + 1, int(store.now * 1000) + 10_000, 10**15 - 1))
            versions = [0, 1, max(self.roots, default=0), max(self.roots, default=0) + 1, 10**12 - 1]
            step = rng.choice(("away", "empty", *(f"{v:012d}-{s}" for v in versions for s in ("staged", "switched"))))
            store.put(f"{MEMBERS}/{name}-{claimed:015d}-{rng.randbytes(8).hex()}-{step}", b"")

    # -- what must hold

    def restorable(self) -> bool:
        try:
            update = Subscriber(self.store, stream="s", threads=1).sync()
        except PulseError:
            return False
        return update is not None and update.version == max(self.roots)

    def finish(self) -> int:
        """Faults end; unless the newest version can be restored, or at random, another is published, with an anchor.
        Returns how many rounds of polls it takes until all members hold the newest."""
        for worker in self.twins:
            worker.ends()
        self.twins.clear()
        for worker in self.workers.values():
            worker.client.fail_at, worker.client.stale = None, False
        if self.rng.random() < 0.5 or not self.restorable():
            self.publisher = Publisher(self.store, stream="s", threads=1, anchor_ratio=0)
            self.publish()
        newest = max(self.roots)
        rounds = 0
        while rounds < MOST_ROUNDS and any(worker.held != newest for worker in self.workers.values()):
            self.store.now += 15
            self.poll_all()
            rounds += 1
        held = {worker.name: worker.held for worker in self.workers.values()}
        assert set(held.values()) == {newest}, (
            f"{held} in place of {newest}, {[i.name for i in self.store.list(MEMBERS)]}"
        )
        for worker in self.workers.values():
            assert worker.live.root == self.roots[newest]
        return rounds


RULES = {
    "publish": 6, "poll": 12, "poll_all": 6, "restart": 3, "restart_all": 1, "ahead": 1, "newest_as_base": 1,
    "fails": 4, "stale": 2, "time": 3, "gc": 2, "damage": 1, "close": 1, "lie": 4,
}  # fmt: skip
CALM = ("publish", "poll", "poll", "poll_all")


def run(seed: int) -> World:
    """One sequence of 20 to 50 steps; raises AssertionError with its trace where a promise was broken."""
    rng = Random(seed)
    words = SimpleNamespace(token_hex=lambda n: rng.randbytes(n).hex())
    with patch.object(group, "secrets", words):
        world = World(seed, calm=seed % 4 == 0)
        try:
            if world.calm:
                _calm(world, rng)
            else:
                for _ in range(rng.randint(20, 50)):
                    rule = rng.choices(list(RULES), weights=list(RULES.values()))[0]
                    world.trace.append(rule)
                    getattr(world, rule)()
            world.counts["rounds"] = world.finish()
        except (PulseError, Stop, AssertionError) as error:
            raise AssertionError(f"seed {seed}: {error}\n{' '.join(world.trace)}") from error
        finally:
            for worker in [*world.workers.values(), *world.twins]:
                worker.ends()
            world.publisher.close()
    return world


def _calm(world: World, rng: Random) -> None:
    world.poll_all()
    for _ in range(rng.randint(20, 50)):
        getattr(world, rng.choice(CALM))()
        for worker in world.workers.values():
            others = [other for other in world.workers.values() if other is not worker]
            for other in others:
                assert other.subscriber.version is None or worker.held <= other.subscriber.version, "switched alone"
                short, long = sorted((worker.path, other.path), key=len)
                assert short == long[: len(short)], f"members went {short} and {long}"
                assert len(long) - len(short) <= 1, f"members went {short} and {long}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts: dict[str, int] = {}
    rounds = 0
    for seed in range(arguments.seed, arguments.seed + arguments.sequences):
        world = run(seed)
        rounds = max(rounds, world.counts.pop("rounds"))
        for kind, count in world.counts.items():
            counts[kind] = counts.get(kind, 0) + count
    print(f"{arguments.sequences} sequences, at most {rounds} rounds at the end, {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
