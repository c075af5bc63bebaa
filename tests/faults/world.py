"""A stream, its publishers and workers, and everything that can happen to them; checked against the
model."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from pulse_rl import Publisher, PulseError, Signer, verify_stream
from pulse_rl.errors import EmptyStream, PublisherConflict
from pulse_rl.ops.gc import gc_stream
from tests.support.interrupts import Boom, Interrupter
from tests.support.publishers import tuned

from .callers import Interrupts
from .disturbances import Disturbances
from .model import GAP, MUST, STREAM, Model, check, version_name
from .modes import INLINE, STEADY
from .ranks import RankClients, RankTrainer
from .store import FAULTS, Client, CrashNow, Disk, Fault, Net
from .trainer import Trainer
from .upkeep import Upkeep
from .worker import Inline, Setup, Worker

_MAX_WORKERS = 4
SIGNER = Signer(bytes(range(32)))
STREAM_ID = "0123456789abcdef" * 2


class World(Disturbances, Upkeep):
    """Every method named in `RULES` is one step. All chance comes from the ``rng`` that a step is
    given."""

    def __init__(
        self, rng: Random, threads: str = STEADY, interrupter: Interrupter | None = None
    ) -> None:
        self.model = self._new_model()
        self.disk = self.model.disk = Disk(self.model.created)
        self.net = Net(self.disk)
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.trainers = [Trainer(rng), Trainer(rng)]
        self.publishers: list[tuple[Client, Publisher] | tuple[RankClients, RankTrainer] | None] = [
            None,
            None,
        ]
        self.sharded = rng.random() < 0.4
        self.unsettled = [False, False]
        self.workers: list[Worker] = []
        self.destroyed = False
        self.silently = False  # an object was damaged in a way that its size does not show
        self.ratio = rng.choice((0.5, 1.0, 3.0, 1000.0, 1000.0))
        self.history = rng.choice((False, True, True))
        self.shard_bytes = rng.choice((1 << 30, 500))
        self.threads = threads
        self.model.signed = self._signed(rng)
        self.signer = SIGNER if self.model.signed else None
        self.setup = Setup(
            (SIGNER.public_key,) if self.signer else None, self._stream_id(rng), threads == INLINE
        )
        self.interrupts = Interrupts(interrupter or Interrupter())
        self._folder: Path | None = None
        self._looked_at = -1

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def injected(self) -> Counter[str]:
        self.counts["by_history"] = self.model.by_history
        return self.net.injected

    def rules(self) -> dict[str, int]:
        """The steps of this world and how often they come."""
        return RULES if self.threads == INLINE else RULES | THREADED

    # Steps.

    def publish(self, rng: Random) -> None:
        who = int(rng.random() < 0.2)
        self._publish(rng, who, self._faults(rng))

    def burst(self, rng: Random) -> None:
        for _ in range(rng.randint(3, 9)):
            self._publish(rng, 0, self._faults(rng) if rng.random() < 0.1 else [])

    def restart_publisher(self, rng: Random) -> None:
        who = rng.randrange(2)
        self.publishers[who], self.unsettled[who] = None, False

    def join(self, rng: Random) -> None:
        if len(self.workers) >= _MAX_WORKERS:
            self.workers.pop(rng.randrange(len(self.workers))).close()
        self.workers.append(self._worker(rng))
        self._sync(rng, self.workers[-1])

    def sync(self, rng: Random) -> None:
        if self.workers:
            self._sync(rng, rng.choice(self.workers))

    def sync_to(self, rng: Random) -> None:
        """To an older version than the head, as a controller of several workers may ask for."""
        if self.workers and self.model.head is not None:
            self._sync(rng, rng.choice(self.workers), target=rng.randint(0, self.model.head))

    def restart_worker(self, rng: Random) -> None:
        if self.workers:
            rng.choice(self.workers).restart(rng.choice(("cold", "base")), rng)

    # What holds at all times, and in the end.

    def settled(self, rng: Random) -> None:
        """After a step: no worker that it touched shows a wrong state, nor one that it did not
        touch, and a version that can be reached is reached. Of those that cannot have changed some
        are looked at."""
        for worker in self.workers:
            if worker.touched or rng.random() < 0.1:
                worker.inspect()
        changed, self._looked_at = self.disk.changes != self._looked_at, self.disk.changes
        if changed:
            for version, committed in self.model.versions.items():
                data = self.disk.peek(version_name(version))
                check(
                    self.destroyed or data in (None, committed.data),
                    f"the manifest of version {version} changed",
                )
        if self.model.versions and rng.random() < (0.5 if changed else 0.1):
            self._newcomer(rng.choice(list(self.model.versions)), self.model.reach(self.disk))

    def finish(self, rng: Random) -> None:
        """Faults stop: everything that can be reached is; every worker reaches the head."""
        self.net.flush()
        for worker in self.workers:
            worker.loses_at = None
        if not self.model.versions:
            self._publish(rng, 0, [])
        self._walk(rng)
        if not self.destroyed:
            reports = list(
                verify_stream(self.disk, STREAM, trusted_keys=self.setup.trusted_keys, threads=1)
            )
            bad = [(r.version, r.problems) for r in reports if not r.ok]
            check(not bad, f"verify finds fault with a whole stream: {bad}")
            self.counts["verified"] += 1
            for worker in self.workers:
                worker.sync([], None)
                check(
                    worker.live.version == self.model.head,
                    f"{worker} is not at the head {self.model.head}",
                )
        self.ratio = 0.0
        self.publishers = [None, None]
        for _ in range(2):
            self._publish(rng, 0, [])
        head = self.model.head
        assert head is not None
        for worker in self.workers:
            if worker.is_of_another_stream(head):
                worker.restart("cold", None)
        for worker in self.workers:
            worker.sync([], None)
            check(worker.live.version == head, f"{worker} is not at the head {head}")
            worker.inspect()
        self._newcomer(max(self.model.versions), self.model.reach(self.disk), must=True)

    # Parts of steps.

    def _new_model(self) -> Model:
        return Model()

    def _signed(self, rng: Random) -> bool:
        return rng.random() < 0.2

    def _stream_id(self, rng: Random) -> str | None:
        return STREAM_ID if rng.random() < 0.2 else None

    def _worker(self, rng: Random) -> Worker:
        cache = None
        if rng.random() < 0.15:  # of its own, or shared by the workers of a node
            cache = self._cache_folder() / rng.choice(("node", str(rng.getrandbits(32))))
        worker = self._make_worker(self.net, self.counts, cache, self.setup)
        worker.holds = rng.random() < 0.15
        return worker

    def _make_worker(
        self, net: Net, counts: Counter[str], cache: Path | None, setup: Setup
    ) -> Worker:
        return Worker(net, self.model, counts, cache, setup)

    def _cache_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="pulse-faults-"))
        return self._folder

    def _collect(self, client: Client, keep: int, grace: float) -> None:
        keys, stream_id = self.setup.trusted_keys, self.setup.stream_id
        gc_stream(
            client, STREAM, keep=keep, grace_seconds=grace, trusted_keys=keys, stream_id=stream_id
        )

    def _newcomer(self, version: int, reach: dict[int, str], must: bool = False) -> None:
        check(
            not must or reach[version] == MUST,
            f"version {version} cannot be reached after a publish with an anchor",
        )
        self._stranger().sync([], version, fresh=True, reach=reach)
        self.counts[f"newcomer_{'gap' if reach[version] == GAP else 'reached'}"] += 1

    def _stranger(self) -> Worker:
        """A worker of its own that nothing befalls: no late call arrives meanwhile."""
        return self._make_worker(
            Net(self.disk), self.counts, None, replace(self.setup, inline=True)
        )

    def _walk(self, rng: Random) -> None:
        """Newcomers go to some of the versions, and to some that cannot be reached; and one worker
        goes through all that it can reach, where `verify_stream` does not."""
        reach = self.model.reach(self.disk)
        gaps = [version for version in reach if reach[version] != MUST]
        others = [version for version in reach if reach[version] == MUST]
        for version in rng.sample(gaps, min(3, len(gaps))) + rng.sample(
            others, min(4, len(others))
        ):
            self._newcomer(version, reach)
        if not self.destroyed:
            return
        walker = self._stranger()
        for version in others:
            walker.sync([], version)
            check(walker.live.version == version, f"{walker} did not reach version {version}")
        walker.inspect()

    def _faults(self, rng: Random) -> list[Fault]:
        if rng.random() < 0.4:
            return []
        kinds = rng.choices(
            list(FAULTS), weights=(3, 3, 2, 1, 3, 3, 3, 3, 2), k=rng.choice((1, 1, 2, 4))
        )
        return [Fault(kind, rng.randrange(rng.choice((3, 8, 20))), rng.random()) for kind in kinds]

    def _sync(self, rng: Random, worker: Worker, target: int | None = None) -> None:
        faults = self._faults(rng)
        if rng.random() < 0.1:
            worker.interrupt_at = rng.randrange(12)
        if rng.random() < 0.1:
            worker.loses_at = rng.randrange(8)
        worker.sync(faults, target)
        if worker.client.dead:
            worker.restart(rng.choice(("cold", "base")), rng)

    def _publisher(
        self, rng: Random, who: int
    ) -> tuple[Client, Publisher] | tuple[RankClients, RankTrainer]:
        """The one that runs, or a new one: of one process, or of two or three ranks."""
        pair = self.publishers[who]
        if pair is None:
            settings: dict[str, Any] = {
                "anchor_ratio": self.ratio,
                "signer": self.signer,
                "stream_id": self.setup.stream_id,
                "shard_bytes": self.shard_bytes,
            }
            if self.sharded and rng.random() < 0.8:
                clients = RankClients(self.net, rng.choice((1, 2, 2, 3)))
                self.counts["sharded"] += 1
                pair = self.publishers[who] = (
                    clients,
                    RankTrainer(clients, rng, history=self.history, **settings),
                )
                return pair
            client = Client(self.net)
            publisher = tuned(client, stream=STREAM, history=self.history, threads=1, **settings)
            if self.setup.inline:
                publisher._serial = Inline()
            pair = self.publishers[who] = (client, publisher)
        return pair

    def _publish(
        self, rng: Random, who: int, faults: list[Fault], *, interrupted: bool = False
    ) -> None:
        client, publisher = self._publisher(rng, who)
        state = self.trainers[who].step(rng)
        root = self.model.offer(state)
        client.expect(faults)
        steps = None
        if interrupted and isinstance(client, Client):
            steps = self.interrupts.choose(rng, "publish", client)
        elif interrupted and isinstance(client, RankClients):
            rng.choice(client.each).meanwhile(rng.randint(1, 12), _interrupt)
        self.counts["publishes"] += 1
        self.counts["by_ranks"] += isinstance(client, RankClients)
        kinds = {fault.kind for fault in faults}
        damaged = bool(kinds & {"flip", "truncate"})
        self.model.strict = not damaged and "stale" not in kinds
        # One that reads its own commit damaged takes it for another's.
        before, most = set(self.model.versions), 1 + self.unsettled[who] + damaged
        try:
            try:
                published = (
                    steps.run(lambda: publisher.publish(state))
                    if steps
                    else publisher.publish(state)
                )
            except Boom:
                client.hit += isinstance(client, RankClients)  # the ranks have parted
                self.counts["interrupted"] += 1
                most += 1
                published = publisher.publish(state)
            if interrupted and isinstance(client, RankClients):
                client.calm()
        except CrashNow:
            pass
        except PublisherConflict:
            self.counts["conflicts"] += 1
            self.publishers[who], self.unsettled[who] = None, False
            client.calm()
            if not faults:
                self._publish(rng, who, [])
            return
        except PulseError as error:
            check(client.hit > 0, f"publisher {who} failed without a fault: {error!r}")
        else:
            self.unsettled[who] = False
            check(published.root == root, f"publish returned root {published.root} for {root}")
            committed = self.model.committed(published.version, root)
            check(committed is not None, f"{published} is not what was committed")
            assert committed is not None
            own = {
                v
                for v, other in self.model.versions.items()
                if other.publisher == committed.publisher
            } - before
            check(len(own) <= most, f"one publish committed the versions {own}")
            client.calm()
            if not client.dead:
                return
        self.trace.append(f"  publisher {who} failed")
        self.counts["ranks_lost"] += isinstance(client, RankClients) and client.dead
        client.calm()
        self.unsettled[who] = not client.dead
        if client.dead:
            self.publishers[who] = None

    def _tool(self, client: Client, run: Callable[[], object], what: str) -> None:
        """A command that an operator runs; it may fail where something is wrong, with an error of
        the library."""
        self.trace.append(f"  {what}")
        try:
            run()
        except (CrashNow, EmptyStream):
            return
        except PulseError as error:
            check(client.hit > 0 or self.destroyed, f"{what} failed without a fault: {error!r}")


def _interrupt() -> None:
    raise Boom


#: Steps and how often they come.
RULES: dict[str, int] = {
    "publish": 30,
    "burst": 8,
    "restart_publisher": 4,
    "join": 6,
    "sync": 26,
    "sync_to": 4,
    "restart_worker": 5,
    "race": 6,
    "tear": 3,
    "fold": 5,
    "gc": 5,
    "destroy": 5,
    "lie": 6,
    "audit": 3,
}

#: Steps of worlds whose objects have threads of their own.
THREADED: dict[str, int] = {"interrupt": 24, "intrude": 4, "fork": 3}
