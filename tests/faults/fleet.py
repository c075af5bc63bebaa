"""A fleet under faults and lies: an origin, a relay into a near store, and workers of the whole
state or of a part of it, with caches or without, which read their stores through servers that lie
now and then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from pulse_rl import Publisher, PulseError, Relay, State, Subscriber
from pulse_rl.errors import ChainGap, EmptyStream, PublisherConflict
from pulse_rl.ops.compaction import fold_stream
from pulse_rl.ops.gc import gc_stream
from tests.support.lying_store import LIES, LyingStore
from tests.support.publishers import tuned

from .model import STREAM, Snapshot, check, snapshot
from .ranks import RankClients, RankTrainer
from .store import FAULTS, Client, CrashNow, Disk, Fault, Net
from .trainer import Trainer

_SELECTIONS = (None, None, "embed", ["layer*"])
_PUBLISHED, _NEAR = "origin", "near"
_LIES = 0.2


_Server = LyingStore[Client]


class Follower:
    """A worker with its stores; restarted where its process ended."""

    def __init__(self, fleet: Fleet, rng: Random) -> None:
        self._fleet = fleet
        self.select = rng.choice(_SELECTIONS)
        self._places = rng.choice(([_NEAR], [_NEAR, _PUBLISHED], [_NEAR, _PUBLISHED], [_PUBLISHED]))
        cached = self.select is None and rng.random() < 0.5
        self._cache = f"{fleet.folder.name}/{rng.getrandbits(32)}" if cached else None
        self.start()

    def start(self) -> None:
        self._servers = [self._fleet.server(place) for place in self._places]
        stores = list(self._servers)
        self.subscriber = Subscriber(
            stores, stream=STREAM, select=self.select, cache=self._cache, threads=1
        )
        self.subscriber.patience_seconds = 0
        self._last = -1

    def sync(self, rng: Random) -> None:
        origin = self._servers[-1] if self._places[-1] == _PUBLISHED else None
        with self._fleet.disturbed(rng, self._servers):
            try:
                update = self.subscriber.sync()
                if update is not None:
                    update.acknowledge()
                if origin and not _hit(origin) and not self._fleet.destroyed:
                    newest, version = (
                        max(self._fleet.published, default=None),
                        self.subscriber.version,
                    )
                    check(
                        version == newest,
                        f"{self} is at {version}, not at {newest}, which its origin has",
                    )
            except CrashNow:
                pass
            except PulseError as error:
                hit = _hit(origin) if origin else any(map(_hit, self._servers))
                excused = hit or self._fleet.destroyed or isinstance(error, EmptyStream)
                if isinstance(error, ChainGap) and self.select is not None and origin is None:
                    excused = excused or self._fleet.copy_lacks_digests()
                check(excused, f"{self} failed without a fault: {error!r}")
        if any(server.inner.dead for server in self._servers):
            self.start()
        self.inspect()

    def inspect(self) -> None:
        """What it shows is, to the bit, its part of a version that was published; and it never goes
        back."""
        version = self.subscriber.version
        if version is None:
            return
        check(version >= self._last, f"{self} went back from {self._last} to {version}")
        self._last = version
        shown = snapshot(self.subscriber.state)
        check(
            shown == self.part(self._fleet.published[version]),
            f"{self} shows a wrong version {version}",
        )

    def part(self, whole: Snapshot) -> Snapshot:
        if self.select is None:
            return whole
        patterns = [self.select] if isinstance(self.select, str) else self.select
        return {
            name: bits
            for name, bits in whole.items()
            if any(fnmatchcase(name, p) for p in patterns)
        }


class Fleet:
    """All chance comes from the ``rng`` that a step is given. ``destructive``: objects may be lost
    for good."""

    def __init__(self, rng: Random, *, destructive: bool) -> None:
        self.trace: list[str] = []
        self._destructive = destructive
        self.disks = {place: Disk(lambda name, data: None) for place in (_PUBLISHED, _NEAR)}
        self.nets = {place: Net(disk) for place, disk in self.disks.items()}
        self.counts: Counter[str] = Counter()
        self.folder = TemporaryDirectory(prefix="pulse-faults-")
        self.destroyed = False
        self.misled = False  # the source has shown the relay other objects than it has
        self.published: dict[int, Snapshot] = {}
        self._trainer = Trainer(rng)
        self._folds = rng.choice(((), (2, 4)))
        self._keep = rng.choice((None, 1, 3))
        self._sharded = rng.random() < 0.5
        self._publisher: Publisher | RankTrainer | None = None
        self._relay: tuple[list[_Server], Relay] | None = None
        self.followers = [Follower(self, rng) for _ in range(3)]

    @property
    def injected(self) -> Counter[str]:
        return sum((net.injected for net in self.nets.values()), Counter())

    def rules(self) -> dict[str, int]:
        steps = {"publish": 20, "burst": 6, "fold": 2, "gc": 3, "relay": 24, "follow": 40}
        return steps | ({"destroy": 8} if self._destructive else {})

    def settled(self, rng: Random) -> None:
        """Each step looks at what it has touched."""

    def close(self) -> None:
        for follower in self.followers:
            follower.subscriber.close()
        self.folder.cleanup()

    def server(self, place: str) -> _Server:
        return LyingStore(Client(self.nets[place]))

    @contextmanager
    def disturbed(self, rng: Random, servers: Sequence[_Server]) -> Iterator[None]:
        """Faults befall calls, and each of the servers may lie, for a while."""
        for server in servers:
            server.inner.expect(_faults(rng))
            lie = rng.choice(list(LIES)) if rng.random() < _LIES else "the truth"
            server.tell(*LIES.get(lie, ()))
            self.trace.append(f"  server {servers.index(server)} tells: {lie}")
            server.most_requests = 500 + 20 * len(self.disks[_PUBLISHED].names(STREAM))
        with patch("pulse_rl.store.base.MAX_LISTED", 2000):
            yield
        for server in servers:
            self.counts["lies"] += server.lies
            server.tell()
            server.inner.calm()

    def publish(self, rng: Random) -> None:
        """Without faults: those of publishers are another world's."""
        if self._publisher is None or rng.random() < 0.05:
            settings: dict[str, Any] = {
                "anchor_ratio": rng.choice((0.5, 1e9)),
                "shard_bytes": rng.choice((500, 1 << 30)),
                "history": rng.choice((False, True, True)),
            }
            if self._sharded and rng.random() < 0.8:
                self._publisher = RankTrainer(
                    RankClients(Net(self.disks[_PUBLISHED]), rng.choice((2, 3))), rng, **settings
                )
                self.counts["sharded"] += 1
            else:
                self._publisher = tuned(
                    self.disks[_PUBLISHED], stream=STREAM, threads=1, **settings
                )
        state: State = self._trainer.step(rng)
        done = self._publisher.publish(state, anchor=rng.random() < 0.1)
        self.published[done.version] = snapshot(state)

    def burst(self, rng: Random) -> None:
        for _ in range(rng.randint(3, 12)):
            self.publish(rng)

    def fold(self, rng: Random) -> None:
        if self.published:
            try:
                list(fold_stream(self.disks[_PUBLISHED], STREAM, (2, 8), threads=1))
            except ChainGap:
                check(self.destroyed, "a whole stream cannot be folded")

    def gc(self, rng: Random) -> None:
        try:
            gc_stream(
                self.disks[rng.choice((_PUBLISHED, _NEAR))],
                STREAM,
                keep=rng.randint(1, 6),
                grace_seconds=0,
            )
        except (ChainGap, EmptyStream) as error:
            check(
                self.destroyed or isinstance(error, EmptyStream),
                f"a whole stream cannot be collected: {error}",
            )

    def relay(self, rng: Random) -> None:
        if self._relay is None or rng.random() < 0.1:
            servers = [self.server(_PUBLISHED), self.server(_NEAR)]
            self._relay = servers, Relay(*servers, stream=STREAM, keep=self._keep, threads=1)
        servers, relay = self._relay
        with self.disturbed(rng, servers):
            try:
                if relay.sync() is not None:
                    self.counts["relayed"] += 1
            except CrashNow:
                self.counts["relays_stopped"] += 1
            except PulseError as error:
                conflict = isinstance(error, PublisherConflict) and not servers[1].lies
                check(not conflict, f"the relay takes its own copy for another's: {error}")
                check(
                    any(map(_hit, servers)) or self.destroyed,
                    f"the relay failed without a fault: {error!r}",
                )
                self.counts["relays_failed"] += 1
            self.misled |= servers[0].lies > 0 and servers[0].call in ("get", "head")
            # What the target says that it has stored is not there.
            self.destroyed |= servers[1].lies > 0 and servers[1].call in ("put", "put_new")
        if any(server.inner.dead for server in servers):
            self._relay = None
        self.look_at_the_copy()

    def look_at_the_copy(self) -> None:
        """Every version that the near store shows is whole there: a newcomer reaches it from
        nothing."""
        if self.destroyed:
            return
        for name in self.disks[_NEAR].names(f"{STREAM}/versions"):
            data = self.disks[_NEAR].peek(name)
            check(
                data == self.disks[_PUBLISHED].peek(name)
                or self.disks[_PUBLISHED].peek(name) is None,
                f"{name} differs",
            )
            version = int(name.rpartition("/")[2].partition(".")[0])
            reader = Subscriber(self.disks[_NEAR], stream=STREAM, threads=1)
            reader.sync(target=version)
            check(
                snapshot(reader.state) == self.published[version],
                f"version {version} of the copy is wrong",
            )
            self.counts["shown"] += 1

    def copy_lacks_digests(self) -> bool:
        """Whether the copy lacks digests since the relay was misled. Only workers that select read
        them, so that the relay shows a version without them, and tries again."""
        near, lacks = self.disks[_NEAR], False
        for name in near.names(f"{STREAM}/versions"):
            said = json.loads(near.peek(name) or b"{}")
            for kind in ("tensors", "leaves") if said["anchor"] else ("tensors",):
                lacks |= near.peek(f"{STREAM}/digests/{said['root']}.{kind}") is None
        return self.misled and lacks

    def follow(self, rng: Random) -> None:
        rng.choice(self.followers).sync(rng)

    def destroy(self, rng: Random) -> None:
        """An object of either store is lost or damaged; no manifest of the origin, whose number
        would be used again."""
        place = rng.choice((_PUBLISHED, _NEAR, _NEAR))
        kinds = ["payloads", "payloads", "digests", "links"] + (
            ["versions"] if place == _NEAR else []
        )
        disk = self.disks[place]
        names = disk.names(f"{STREAM}/{rng.choice(kinds)}")
        if not names:
            return
        name = rng.choice(names)
        data = disk.peek(name) or b""
        if data and rng.random() < 0.6:
            at = rng.randrange(len(data))
            disk.damage(
                name, data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            )
        else:
            disk.delete(name)
        self.destroyed = True
        self.counts["destroyed"] += 1

    def finish(self, rng: Random) -> None:
        """Faults stop; a version with an anchor comes, goes through the relay, and everybody is
        there."""
        for net in self.nets.values():
            net.flush()
        self._relay = None
        self._publisher = None
        self._trainer._tied = {}
        self.publish(rng)
        assert self._publisher is not None
        state = self._trainer.step(rng)
        done = self._publisher.publish(state, anchor=True)
        self.published[done.version] = snapshot(state)
        relay = Relay(self.disks[_PUBLISHED], self.disks[_NEAR], stream=STREAM, threads=1)
        relay.sync()
        check(
            relay.version == done.version, f"the relay is at {relay.version}, not at {done.version}"
        )
        for follower in self.followers:
            follower.subscriber.sync()
            follower.inspect()
            version = follower.subscriber.version
            check(
                version == done.version,
                f"a follower of {follower._places} is at {version}, not {done.version}",
            )


def _hit(server: _Server) -> bool:
    return server.lies > 0 or server.inner.hit > 0


def _faults(rng: Random) -> list[Fault]:
    if rng.random() < 0.5:
        return []
    kinds = rng.choices(list(FAULTS), k=rng.choice((1, 1, 2, 4)))
    return [Fault(kind, rng.randrange(rng.choice((3, 8, 20))), rng.random()) for kind in kinds]
