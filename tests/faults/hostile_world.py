"""A signed stream beside a hostile co-writer: what its workers show is signed and never goes
back."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random

from pulse_rl import PulseError
from pulse_rl.errors import PublisherConflict

from .cowriter import KINDS, CoWriter
from .model import STREAM, Committed, Model, check, version_name
from .modes import STEADY
from .store import Client, CrashNow, Fault, Net
from .worker import Setup, Worker
from .world import SIGNER, STREAM_ID, World

_LATEST = 8  # publishes of an undisturbed publisher until everybody must follow
_MAX_SYNCS = 40


class SignedModel(Model):
    """What publishers with the key have committed, whoever may have taken it away since."""

    def __init__(self) -> None:
        super().__init__()
        self._signed: dict[tuple[int, str], Committed] = {}
        self._manifests: set[bytes] = set()
        self.claimed: set[int] = set()

    def created(self, name: str, data: bytes) -> None:
        if name.startswith(f"{STREAM}/epochs/"):
            self.claimed.add(int(name.rpartition("/")[2]))
        if name.startswith(f"{STREAM}/versions/"):
            said = self._parsed(data)
            version, root = said["version"], said["root"]
            check(name == version_name(version), f"{name} holds version {version}")
            check(root in self.states, f"version {version} was never handed over")
            self.versions[version] = Committed(
                data, root, said["aliases"], bool(said["anchor"]), said["publisher"]
            )
            self._signed[version, root] = self.versions[version]
            self._manifests.add(data)

    def committed(self, version: int, root: str) -> Committed | None:
        return self._signed.get((version, root))

    def was_committed(self, version: int, data: bytes) -> bool:
        return data in self._manifests


class TrustingWorker(Worker):
    """One that knows the publisher's key and the stream's ID. It may be held up, but not led
    astray."""

    why = ""

    def sync(
        self,
        faults: list[Fault],
        target: int | None,
        *,
        fresh: bool = False,
        reach: dict[int, str] | None = None,
    ) -> None:
        self.touched = True
        self.expect(faults)
        try:
            update = self.persistent(lambda: self.subscriber.sync(target))
        except CrashNow:
            return
        except PulseError as error:
            self.why = f"{error.kind}: {error}"
            self._counts[f"refused_{error.kind}"] += 1
            return
        finally:
            self.calm()
        self._counts["syncs"] += 1
        if update is not None or target is None:
            self.take(update)


class HostileWorld(World):
    """``kinds`` of hostile acts, a selection of those that are enabled. ``last`` is the version
    that was committed last, ``why`` a publish failed last."""

    last = -1
    why = ""

    def __init__(self, rng: Random, threads: str = STEADY, *args: object) -> None:
        super().__init__(rng, threads, *args)  # type: ignore[arg-type]
        self._cowriter = CoWriter(self.disk, self.model, SIGNER)
        self.kinds = rng.sample(list(KINDS), rng.randint(1, len(KINDS)))

    def rules(self) -> dict[str, int]:
        steps = {
            "publish": 24,
            "burst": 4,
            "restart_publisher": 4,
            "join": 6,
            "sync": 30,
            "sync_to": 2,
        }
        steps |= {"restart_worker": 4, "fold": 2, "gc": 3, "act": 40}
        return steps if self.threads != STEADY else steps | {"interrupt": 8}

    def act(self, rng: Random) -> None:
        kind = rng.choice(self.kinds)
        self.trace.append(f"  {kind}")
        self.net.injected[kind] += 1
        self._cowriter.watch(rng)
        KINDS[kind](self._cowriter, rng)

    def settled(self, rng: Random) -> None:
        for worker in self.workers:
            if worker.touched or rng.random() < 0.1:
                worker.inspect()
        if rng.random() < 0.2:
            newcomer = self._stranger()
            newcomer.sync([], None)
            newcomer.inspect()

    def finish(self, rng: Random) -> None:
        """The hostile one stops, and all that it wrote stays. The publisher goes on, and so does
        everybody once it has passed the versions that were taken away: nobody goes back to a number
        below their own."""
        self.net.flush()
        self.publishers = [None, None]
        self.ratio = 0.0
        for worker in self.workers:
            worker.loses_at = None
        before, highest = self.counts["committed"], self.model.head or 0
        for tries in range(highest + 2 * _LATEST):
            self._publish(rng, 0, [])
            done = self.counts["committed"] - before
            if tries == _LATEST - 1:
                check(
                    done >= _LATEST - 2,
                    f"of {_LATEST} undisturbed publishes {done} were committed: {self.why}",
                )
            if done >= _LATEST - 2 and self.last > highest:
                break
        head = self.last
        for worker in [*self.workers, self._stranger()]:
            for _ in range(_MAX_SYNCS):
                worker.sync([], None)
                worker.inspect()
                if worker.live.version == head:
                    break
            else:
                check(False, f"{worker} did not reach version {head}: {worker.why}")  # type: ignore[attr-defined]

    def gc(self, rng: Random) -> None:
        client = Client(self.net)
        self._tool(
            client,
            lambda: self._collect(client, rng.randint(1, 8), rng.choice((0.0, 3600.0))),
            "gc",
        )

    def _tool(self, client: Client, run: object, what: str) -> None:
        self.destroyed = True
        super()._tool(client, run, what)  # type: ignore[arg-type]

    def _new_model(self) -> Model:
        return SignedModel()

    def _signed(self, rng: Random) -> bool:
        return True

    def _stream_id(self, rng: Random) -> str | None:
        return STREAM_ID

    def _make_worker(
        self, net: Net, counts: Counter[str], cache: Path | None, setup: Setup
    ) -> Worker:
        return TrustingWorker(net, self.model, counts, cache, setup)

    def _publish(
        self, rng: Random, who: int, faults: list[Fault], *, interrupted: bool = False
    ) -> None:
        """May fail, with an error of the library. What is said to be committed was."""
        client, publisher = self._publisher(rng, who)
        state = self.trainers[who].step(rng)
        root = self.model.offer(state)
        client.expect(faults)
        self.counts["publishes"] += 1
        try:
            published = publisher.publish(state)
        except CrashNow:
            pass
        except PublisherConflict as error:
            self.why = repr(error)
            epoch = re.search(r"taken over .* with epoch ([0-9]+)", self.why)
            signed = epoch is None or int(epoch[1]) in self.model.claimed  # type: ignore[attr-defined]
            check(signed, f"a claim that nobody has signed stopped a publisher: {error}")
            self.counts["conflicts"] += 1
            self.publishers[who] = None
        except PulseError as error:
            self.why = repr(error)
            self.counts[f"publish_{error.kind}"] += 1
        else:
            self.counts["committed"] += 1
            self.last = published.version
            committed = self.model.committed(published.version, root)
            check(committed is not None, f"{published} is not what was committed")
        client.calm()
        if client.dead:
            self.publishers[who] = None
