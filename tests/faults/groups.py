"""A group under faults: restarts, garbage collection, lost replies, damage, lies, interrupts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Condition
from typing import Any, TypeVar

import numpy as np

from pulse_rl import Bits, MemoryStore, Publisher, PulseError, Store, Subscriber, gc_stream
from pulse_rl.errors import StoreUnavailable
from pulse_rl.store import Data, ObjectInfo
from pulse_rl.sync.group import GroupMember
from tests.support.states import Live

T = TypeVar("T")
TIMEOUT = 60.0
MOST_ROUNDS = 16
MEMBERS = "s/groups/g/members"


class Stop(BaseException):
    """An interrupt."""


class ClockedStore(MemoryStore):
    """Its clock stands still unless it is moved. Keeps the last listings for clients that see stale
    ones."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6
        self.before: dict[str, list[ObjectInfo]] = {}

    def _set(self, name: str, entry: tuple[bytes, float]) -> None:
        self.before = {
            folder: self.listed(folder) for folder in ("s/versions", "s/groups/g/members")
        }
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


class Turns:
    """Runs acts at the same time. Of their calls of the store one at a time goes on, chance says
    whose."""

    def __init__(self, rng: Random, acts: Mapping[str, Callable[[], None]]) -> None:
        self.rng, self.acts = rng, acts
        self.moved = Condition()
        self.waiting: dict[str, int] = {}
        self.ended: set[str] = set()
        self.turn: str | None = None

    def run(self) -> None:
        with ThreadPoolExecutor(len(self.acts)) as pool:
            acting = [pool.submit(self._act, name) for name in self.acts]
            with self.moved:
                while left := self.acts.keys() - self.ended:
                    if self.turn is None and left <= self.waiting.keys():
                        self.turn = self.rng.choice(sorted(left))
                        self.moved.notify_all()
                    self.moved.wait()
        for each in acting:
            each.result()

    def _act(self, name: str) -> None:
        try:
            self.acts[name]()
        finally:
            with self.moved:
                self.ended.add(name)
                self.moved.notify_all()

    def wait(self, name: str) -> None:
        with self.moved:
            self.waiting[name] = self.waiting.get(name, 0) + 1
            self.moved.notify_all()
            self.moved.wait_for(lambda: self.turn == name)
            self.turn = None
            self.waiting[name] -= 1
            if not self.waiting[name]:
                del self.waiting[name]
            self.moved.notify_all()


class Client:
    """One worker's way to the store: call number ``fail_at`` from now on fails, before it has any
    effect or after."""

    def __init__(self, store: ClockedStore, name: str = "") -> None:
        self.store, self.name = store, name
        self.turns: Turns | None = None
        self.fail_at: int | None = None
        self.error: BaseException = Stop()
        self.after = False
        self.stale = False
        self.calls = 0

    def _do(self, act: Callable[[], T]) -> T:
        if self.turns:
            self.turns.wait(self.name)
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
        found = self._do(lambda: list(self.store.list(folder, start_after)))
        if self.turns:
            # As in a folder, whose names are read first, and then the times of those that are still
            # there.
            now = self._do(lambda: {info.name: info for info in self.store.listed(folder)})
            found = [now[info.name] for info in found if info.name in now]
        return iter(found)

    def delete(self, name: str) -> None:
        self._do(lambda: self.store.delete(name))


class Worker:
    """A member and its live model, which starts from ``base``, a `Live` of a version."""

    def __init__(self, world: World, name: str, *, base: Live | None = None) -> None:
        self.world, self.name = world, name
        self.client = Client(world.store, name)
        self.live = base or Live()
        self.held = -1
        self.path: list[int] = []
        store: Store = self.client
        self.subscriber = Subscriber(
            store,
            stream="s",
            threads=1,
            base={n: b.array.copy() for n, b in base.tensors.items()} if base else None,
        )
        self.member = GroupMember(self.subscriber, group="g", name=name, timeout_seconds=TIMEOUT)

    def poll(self) -> None:
        self.apply(self.member.poll())
        version = self.member.version
        if version is not None and version not in self.path[-1:]:
            assert version > max(self.path, default=-1), (
                f"{self.name} goes back from {self.path[-1:]} to {version}"
            )
            self.path.append(version)
        if version is not None and version > self.held:
            self.world.require_root(
                version, self.live.root, f"{self.name} has wrong bits of version {version}"
            )
            self.held = version

    def apply(self, update: Any) -> None:
        if update is not None:
            assert update.version >= self.held, (
                f"{self.name} is given {update.version} after {self.held}"
            )
            self.live.apply(update)
            self.world.require_root(
                update.version, self.live.root, f"{self.name}: {update} leads astray"
            )
            update.acknowledge()

    def ends(self) -> None:
        self.subscriber.close()


class World:
    """``calm``: nothing but publishing and polling, so that all members must switch to the same
    versions, together."""

    def __init__(self, rng: Random, *, calm: bool) -> None:
        self.calm = calm
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.numpy = np.random.default_rng(rng.getrandbits(32))
        self.store = ClockedStore()
        self.roots: dict[int, str] = {}
        self.unchecked: list[tuple[int, str, str]] = []
        self.state = {
            "a": self.numpy.integers(0, 1 << 16, (8, 8), np.uint16),
            "b": np.zeros(4, np.uint16),
        }
        self.client = Client(self.store, "publisher")
        self.publisher = Publisher(
            self.client, stream="s", threads=1, anchor_ratio=rng.choice((0.5, 50))
        )
        self.names = [f"worker-{k}" for k in range(rng.randint(1, 4))]
        self.workers = {name: self.started(rng, name) for name in self.names}
        self.twins: list[Worker] = []
        if calm:
            self.poll_all(rng)

    def close(self) -> None:
        for worker in [*self.workers.values(), *self.twins]:
            worker.ends()
        self.publisher.close()

    def rules(self) -> dict[str, int]:
        if self.calm:
            return {"publish": 1, "poll": 2, "poll_all": 1, "at_once": 2}
        return {
            "publish": 6, "poll": 12, "poll_all": 6, "restart": 3, "restart_all": 1, "ahead": 1,
            "newest_as_base": 1,
            "at_once": 4, "fails": 4, "stale": 2, "time": 3, "gc": 2, "damage": 1, "let_go": 1,
            "lie": 4,
        }  # fmt: skip

    def settled(self, rng: Random) -> None:
        """In a calm group all members switch to the same versions, together."""
        for worker in self.workers.values() if self.calm else ():
            for other in self.workers.values():
                held = other.subscriber.version
                assert other is worker or held is None or worker.held <= held, "switched alone"
                short, long = sorted((worker.path, other.path), key=len)
                assert short == long[: len(short)], f"members went {short} and {long}"
                assert len(long) - len(short) <= 1, f"members went {short} and {long}"

    def require_root(self, version: int, root: str, otherwise: str) -> None:
        """At once, or when the publisher that makes the version at the same time has said what it
        holds."""
        if version in self.roots:
            assert root == self.roots[version], otherwise
        else:
            self.unchecked.append((version, root, otherwise))

    def started(self, rng: Random, name: str, base: Live | None = None) -> Worker:
        return Worker(self, name, base=base)

    # -- what may happen

    def publish(self, rng: Random) -> None:
        for _ in range(rng.choice((1, 1, 3))):
            self.state["a"].reshape(-1)[self.numpy.integers(0, 64, 3)] ^= 1
            done = self.publisher.publish({n: Bits(a, "BF16") for n, a in self.state.items()})
            self.roots[done.version] = done.root

    def poll(self, rng: Random) -> None:
        self.polled(rng.choice([*self.workers.values(), *self.twins]))

    def poll_all(self, rng: Random) -> None:
        for worker in rng.sample(list(self.workers.values()), len(self.workers)):
            self.polled(worker)

    def at_once(self, rng: Random) -> None:
        """All poll a few times and some versions are published, at the same time."""

        def of(worker: Worker, count: int) -> Callable[[], None]:
            return lambda: [self.polled(worker) for _ in range(count)] and None

        acts = {name: of(worker, rng.randint(1, 3)) for name, worker in self.workers.items()}
        clients = [worker.client for worker in self.workers.values()]
        if rng.random() < 0.5:
            publishes = Random(rng.random())
            acts["publisher"] = lambda: self.publish(publishes)
            clients.append(self.client)
        turns = Turns(rng, acts)
        for client in clients:
            client.turns = turns
        turns.run()
        for client in clients:
            client.turns = None
        for version, root, otherwise in self.unchecked:
            assert root == self.roots[version], otherwise
        self.unchecked.clear()

    def polled(self, worker: Worker) -> None:
        try:
            worker.poll()
        except (PulseError, Stop) as error:
            if self.calm:
                raise
            self.counts[type(error).__name__] += 1

    def restart(self, rng: Random) -> None:
        """At once, or with what it had as a checkpoint, or beside the old process."""
        name = rng.choice(self.names)
        old = self.workers[name]
        twin = rng.random() < 0.3
        base = None
        if rng.random() < 0.3 and old.held >= 0 and not twin:
            base = Live()
            base.tensors = {n: Bits(b.array.copy(), b.dtype) for n, b in old.live.tensors.items()}
        self.workers[name] = self.started(rng, name, base)
        if twin:
            self.twins.append(old)
        else:
            old.ends()

    def restart_all(self, rng: Random) -> None:
        for name in self.names:
            self.workers[name].ends()
            self.workers[name] = self.started(rng, name)

    def ahead(self, rng: Random) -> None:
        """The owner syncs by itself, and scatters what it gets."""
        worker = rng.choice(list(self.workers.values()))
        try:
            update = worker.subscriber.sync()
        except (PulseError, Stop):
            return
        worker.apply(update)
        worker.held = update.version if update is not None else worker.held

    def newest_as_base(self, rng: Random) -> None:
        """A worker starts from a checkpoint of the newest version."""
        if not self.roots:
            return
        base = Live()
        base.tensors = {n: Bits(a.copy(), "BF16") for n, a in self.state.items()}
        name = rng.choice(self.names)
        self.workers[name].ends()
        self.workers[name] = self.started(rng, name, base)

    def fails(self, rng: Random) -> None:
        client = rng.choice(list(self.workers.values())).client
        client.fail_at, client.after = rng.randrange(12), rng.random() < 0.5
        client.error = rng.choice((Stop(), StoreUnavailable("the connection broke")))

    def stale(self, rng: Random) -> None:
        client = rng.choice(list(self.workers.values())).client
        client.stale = not client.stale

    def time(self, rng: Random) -> None:
        self.store.now += rng.choice((1, 10, 30, 70, 1000))

    def gc(self, rng: Random) -> None:
        try:
            gc_stream(self.store, "s", keep=rng.randint(1, 3), grace_seconds=0)
        except PulseError:
            return

    def damage(self, rng: Random) -> None:
        found = [i.name for i in self.store.listed("s/payloads")]
        if found:
            name = rng.choice(found)
            if rng.random() < 0.5:
                self.store.delete(name)
            else:
                self.store.put(name, b"junk")

    def let_go(self, rng: Random) -> None:
        """Unless the owner has taken an update past its member, which then would not know what the
        model holds."""
        worker = rng.choice(list(self.workers.values()))
        if worker.held in (-1, worker.member.version):
            worker.subscriber.close()

    def lie(self, rng: Random) -> None:
        store = self.store
        notes = [i.name for i in store.listed(MEMBERS)]
        kind = rng.randrange(5)
        if kind == 0 and notes:
            store.delete(rng.choice(notes))
        elif kind == 1 and notes:
            store.date(rng.choice(notes), store.now + rng.choice((-1e5, -50, 50, 200, 1e9)))
        elif kind == 2:
            name = rng.choice(
                ("README", "x/y", "worker-0", f"worker-0-{'9' * 15}", "w--away", "w-5-staged")
            )
            store.put(f"{MEMBERS}/{name}", b"x" * 1000)
        else:
            name = rng.choice((*self.names, "stranger"))
            claimed = rng.choice(
                (0, 1, int(store.now * 1000) + 1, int(store.now * 1000) + 10_000, 10**15 - 1)
            )
            versions = [
                0,
                1,
                max(self.roots, default=0),
                max(self.roots, default=0) + 1,
                10**12 - 1,
            ]
            step = rng.choice(
                (
                    "away",
                    "empty",
                    *(f"{v:012d}-{s}" for v in versions for s in ("staged", "switched")),
                )
            )
            store.put(f"{MEMBERS}/{name}-{claimed:015d}-{rng.randbytes(8).hex()}-{step}", b"")

    # -- what must hold

    def restorable(self) -> bool:
        try:
            update = Subscriber(self.store, stream="s", threads=1).sync()
        except PulseError:
            return False
        return update is not None and update.version == max(self.roots)

    def finish(self, rng: Random) -> None:
        """Faults end; unless the newest version can be restored, or at random, another is
        published, with an anchor. All members hold the newest after a few rounds of polls."""
        for worker in self.twins:
            worker.ends()
        self.twins.clear()
        for worker in self.workers.values():
            worker.client.fail_at, worker.client.stale = None, False
        if rng.random() < 0.5 or not self.restorable():
            self.publisher = Publisher(self.client, stream="s", threads=1, anchor_ratio=0)
            self.publish(rng)
        newest = max(self.roots)
        rounds = 0
        while rounds < MOST_ROUNDS and any(
            worker.held != newest for worker in self.workers.values()
        ):
            self.store.now += 15
            self.poll_all(rng)
            rounds += 1
        held = {worker.name: worker.held for worker in self.workers.values()}
        assert set(held.values()) == {newest}, (
            f"{held} in place of {newest}, {[i.name for i in self.store.list(MEMBERS)]}"
        )
        for worker in self.workers.values():
            assert worker.live.root == self.roots[newest]
