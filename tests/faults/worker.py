"""A worker of the world: a subscriber, and a live model that sees nothing but its updates."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from pulse_rl import ChainGap, FormatError, PulseError, Subscriber, Update
from pulse_rl.events import Event, PathFailed
from pulse_rl.state.digest import state_digest

from .model import GAP, MUST, STREAM, Live, Model, check, snapshot
from .store import Client, CrashNow, Fault, Net


class Worker:
    def __init__(self, net: Net, model: Model, counts: Counter[str], cache: Path | None) -> None:
        self._net = net
        self._model = model
        self._counts = counts
        self._cache = cache
        self.interrupt_at: int | None = None
        self.live = Live()
        self.restart("cold", None)

    def __str__(self) -> str:
        return f"the worker at {self.subscriber.version} (live {self.live.version}, {self.subscriber.status})"

    def close(self) -> None:
        self.client.dead = True

    def restart(self, how: str, rng: Random | None) -> None:
        """A new process: with its live weights gone ("cold"), or loaded again from a checkpoint of them ("base")."""
        self.client = Client(self._net)
        self.interrupt_at = None
        base = None
        if how == "base" and self.live.version is not None:
            base = self.live.tensors
        else:
            self.live = Live()
        if rng and self._cache and self._cache.exists() and rng.random() < 0.5:
            files = sorted(path for path in self._cache.rglob("*") if path.is_file())
            if files:
                data = bytearray((path := rng.choice(files)).read_bytes())
                if data:
                    data[rng.randrange(len(data))] ^= 1
                    path.write_bytes(data)
                    self._net.injected["cache_flip"] += 1
        self._base = base is not None
        self.subscriber = Subscriber(
            self.client, stream=STREAM, base=base, cache=self._cache, threads=1, on_event=self._listen
        )

    def sync(
        self, faults: list[Fault], target: int | None, *, fresh: bool = False, reach: dict[int, str] | None = None
    ) -> None:
        """One sync, and what must come of it."""
        before = self.subscriber.version if self.subscriber.status == "ready" else None
        if reach is None:
            reach = self._model.reach(self._net.disk, before)
        readable = self._model.readable(self._net.disk)
        listed = readable or self._model.listed(self._net.disk)
        goal = target if target is not None else max([*listed, *([] if before is None else [before])], default=None)
        self.client.expect(faults)
        try:
            update = self.subscriber.sync(target)
        except CrashNow:
            return
        except PulseError as error:
            if self.client.hit == 0:
                assert goal is not None
                where = f"{self} to {goal}"
                unreadable = isinstance(error, FormatError) and not readable
                check(isinstance(error, ChainGap) or unreadable, f"{where}: {error!r}")
                check(reach.get(goal, GAP) != MUST, f"{where}, which can be reached: {error}")
                if fresh and reach[goal] == GAP:
                    names = self._model.broken(self._net.disk)
                    check(str(goal) in str(error), f"the error does not name version {goal}: {error}")
                    check(any(name in str(error) for name in names), f"the error names nothing broken: {error}")
                self._counts["gaps"] += 1
            return
        finally:
            self.client.calm()
            self.interrupt_at = None
        self._counts["syncs"] += 1
        if fresh:
            assert goal is not None
            check(reach[goal] != GAP, f"version {goal} was reached where there is no path")
        if update is not None or target is None:
            self._take(update)
        if update is None and self.client.hit == 0 and goal is not None and target is None:
            seen = self.subscriber.version is not None and self.subscriber.version >= goal
            check(seen or not readable, f"{self} was told that there is nothing newer than {goal}")

    def inspect(self) -> None:
        """What it shows is a version, to the last bit."""
        if self.subscriber.status != "ready":
            return
        version = self.subscriber.version
        assert version is not None
        committed = self._model.versions.get(version)
        check(committed is not None, f"{self} shows a version that was never committed")
        assert committed is not None
        check(self.subscriber.root == committed.root, f"{self} shows a wrong root")
        check(state_digest(self.subscriber.state, threads=1).root == committed.root, f"{self} shows a wrong state")
        check(snapshot(self.subscriber.state) == self._model.bits(version), f"{self} shows wrong bits")

    def _take(self, update: Update | None) -> None:
        """The live model scatters the update, and must then be the version."""
        if update is not None:
            known = update.previous is None or self._model.bits(update.previous) == self.live.snapshot()
            check(known, f"{self} was handed {update}, which does not start where the live model is")
            self.live.apply(update)
            check(update.version == self.subscriber.version, f"{self} was handed {update}")
            if not self._net.manifests_flipped:
                aliases = self._model.versions[update.version].aliases
                check(update.aliases == aliases, f"{self} was told of the aliases {update.aliases}, not {aliases}")
        elif self._base and self.subscriber.version is not None:
            self.live.version = self.subscriber.version
        self._base = False
        if self.live.version is not None:
            check(self.live.snapshot() == self._model.bits(self.live.version), f"the live model of {self} is wrong")
        check(self.live.version == self.subscriber.version, f"{self}: the live model was left behind")
        self._counts["checked"] += 1

    def _listen(self, event: Event) -> None:
        if isinstance(event, PathFailed):
            self._counts["detours"] += 1
        if self.interrupt_at is not None:
            self.interrupt_at -= 1
            if self.interrupt_at < 0:
                self.interrupt_at = None
                self.client.hit += 1
                self._net.injected["interrupt_in_listener"] += 1
                raise CrashNow(f"at {event}")
