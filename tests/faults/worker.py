"""A worker of the world: a subscriber, and a live model that sees nothing but its updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from pulse_rl import PulseError, Subscriber, Update
from pulse_rl._util.serial import SerialThread
from pulse_rl.errors import ChainGap, FormatError, StreamRecreated, Untrusted
from pulse_rl.events import Event, FallbackUsed
from tests.support.interrupts import Boom, Steps

from .model import GAP, MUST, STREAM, Live, Model, check, snapshot
from .store import Client, CrashNow, Fault, Net

R = TypeVar("R")
_STARTS = count()


@dataclass(frozen=True, slots=True)
class Setup:
    """How the subscribers of a world are made. ``inline``: their operations run on the calling
    thread."""

    trusted_keys: tuple[str, ...] | None = None
    stream_id: str | None = None
    inline: bool = False


class Inline(SerialThread):
    """Stands for the thread of an object that nobody interrupts: a hand-over costs more than a look
    at a small state."""

    def __init__(self) -> None:
        pass

    def run(self, work: Callable[[], R], *, whole: bool = False) -> R:
        return work()


class Worker:
    def __init__(
        self, net: Net, model: Model, counts: Counter[str], cache: Path | None, setup: Setup
    ) -> None:
        self._net = net
        self._model = model
        self._counts = counts
        self._cache = cache
        self._setup = setup
        self.holds = False
        self.interrupt_at: int | None = None
        self.steps: Steps | None = None
        self.loses_at: int | None = None
        self.touched = True
        self.live = Live()
        self.restart("cold", None)

    def __str__(self) -> str:
        return (
            f"the worker at {self.subscriber.version} (live {self.live.version}, "
            f"{self.subscriber.status})"
        )

    def close(self) -> None:
        self.client.dead = True

    def restart(self, how: str, rng: Random | None) -> None:
        """A new process: with its live weights gone ("cold"), or loaded again from a checkpoint of
        them ("base")."""
        self.client = Client(self._net, lasting=True)
        self.interrupt_at = self.steps = self.loses_at = None
        self._least: int | None = None
        self._held: tuple[Update, list[bytes]] | None = None
        self.touched = True
        base = None
        if how == "base" and self.live.version is not None and not self.live.torn:
            base = self.live.tensors
        else:
            self.live = Live()
        if rng and self._cache and self._cache.exists():
            for _ in range(rng.choice((0, 1, 1, 3))):
                self._damage_cache(rng, self._cache)
        self._base = base is not None
        self.subscriber = Subscriber(
            self.client,
            stream=STREAM,
            base=base,
            cache=self._cache,
            # In a mapped file, of a process by itself: the model does not know what a state that is
            # found saves.
            state=self._cache and self._cache.with_name(f"{self._cache.name}-{next(_STARTS)}"),
            trusted_keys=self._setup.trusted_keys,
            stream_id=self._setup.stream_id,
            threads=1,
            on_event=self._listen,
        )
        if self._setup.inline:
            self.subscriber._serial = Inline()

    def sync(
        self,
        faults: list[Fault],
        target: int | None,
        *,
        fresh: bool = False,
        reach: dict[int, str] | None = None,
    ) -> None:
        """One sync, and what must come of it."""
        self.touched = True
        before = self.subscriber.version if self.subscriber.status == "ready" else None
        if reach is None:
            reach = self._model.reach(self._net.disk, before)
        readable = self._model.readable(self._net.disk)
        listed = readable or self._model.listed(self._net.disk)
        goal = (
            target
            if target is not None
            else max([*listed, *([] if before is None else [before])], default=None)
        )
        kinds = {fault.kind for fault in faults}
        self.expect(faults)
        try:
            update = self.persistent(lambda: self.subscriber.sync(target))
        except CrashNow:
            return
        except PulseError as error:
            if kinds == {"drop"} and goal is not None and reach.get(goal) == MUST:
                check(
                    not isinstance(error, ChainGap),
                    f"{self}: lost connections are taken for a gap: {error}",
                )
            if self.client.hit == 0:
                assert goal is not None
                where = f"{self} to {goal}"
                unreadable = isinstance(error, FormatError | Untrusted) and not readable
                replaced = isinstance(error, StreamRecreated) and self.is_of_another_stream(goal)
                expected = isinstance(error, ChainGap) or unreadable or replaced
                check(expected, f"{where}: {error!r}")
                if replaced:
                    return
                # It may have read a manifest above that was whole then.
                hopes = target is None and any(
                    version > goal for version in self._model.listed(self._net.disk)
                )
                check(
                    hopes or reach.get(goal, GAP) != MUST, f"{where}, which can be reached: {error}"
                )
                if fresh and reach[goal] == GAP:
                    names = self._model.broken(self._net.disk)
                    check(
                        str(goal) in str(error), f"the error does not name version {goal}: {error}"
                    )
                    check(
                        any(name in str(error) for name in names),
                        f"the error names nothing broken: {error}",
                    )
                self._counts["gaps"] += 1
            return
        finally:
            self.calm()
        self._counts["syncs"] += 1
        if fresh:
            assert goal is not None
            check(reach[goal] != GAP, f"version {goal} was reached where there is no path")
        if update is not None or target is None:
            self.take(update)
        if update is None and self.client.hit == 0 and goal is not None and target is None:
            seen = self.subscriber.version is not None and self.subscriber.version >= goal
            check(seen or not readable, f"{self} was told that there is nothing newer than {goal}")

    def inspect(self) -> None:
        """What it shows is a version, to the last bit."""
        self.touched = False
        if self.subscriber.status != "ready":
            self._least = None  # it starts anew
            return
        version = self.subscriber.version
        check(
            self._least is None or version >= self._least,
            f"{self} went back from version {self._least}",
        )
        self._least = version
        assert version is not None
        committed = self._model.committed(version, self.subscriber.root)
        check(
            committed is not None,
            f"{self} shows a version that was never committed, or a wrong root",
        )
        check(
            snapshot(self.subscriber.state) == self._model.states[self.subscriber.root],
            f"{self} shows wrong bits",
        )
        shown = self.subscriber.manifest.to_bytes()
        check(
            self._model.was_committed(version, shown),
            f"{self} shows a manifest that was not committed: {shown!r}",
        )

    def take(self, update: Update | None) -> None:
        """The live model scatters the update, and must then be the version; or it is interrupted,
        or forgets to say so, and gets it again."""
        if update is not None:
            committed = self._model.committed(update.version, update.root)
            check(committed is not None, f"{self} was handed {update}, which was never committed")
            assert committed is not None
            check(
                self._follows(update),
                f"{self} was handed {update}, which does not start where the live model is",
            )
            if self._loses(update):
                return
            self._hold(update)
            self.live.apply(update)
            update.acknowledge()
            aliases = committed.aliases
            check(
                update.aliases == aliases,
                f"{self} was told of the aliases {update.aliases}, not {aliases}",
            )
        elif self._base and self.subscriber.version is None:
            return  # nothing is there yet, or any more, by which its own weights could be known
        elif self._base and self.subscriber.version is not None:
            self.live.version, self.live.root = self.subscriber.version, self.subscriber.root
        self._base = False
        if self.live.version is not None:
            check(
                self.live.snapshot() == self._model.states[self.live.root],
                f"the live model of {self} is wrong",
            )
        check(
            not self.live.torn,
            f"{self} was told that there is nothing new, with half an update missing",
        )
        self.is_level()
        self._counts["checked"] += 1

    def is_of_another_stream(self, version: int) -> bool:
        """Whether a publisher that could read none of the versions has begun another stream with
        ``version``."""
        known = self.subscriber.stream_id
        return known is not None and self._model.stream_id(version) != known

    def is_level(self) -> None:
        """Nothing that the host state has is missing in the live model."""
        check(
            self.live.version == self.subscriber.version, f"{self}: the live model was left behind"
        )

    def expect(self, faults: list[Fault]) -> None:
        self.client.expect(faults)

    def calm(self) -> None:
        """Nothing befalls it any more."""
        self.client.calm()
        self.interrupt_at = self.steps = None

    def persistent(self, act: Callable[[], R]) -> R:
        """``act()``, again at once where the caller is interrupted."""
        try:
            return self.steps.run(act) if self.steps else act()
        except Boom:
            self._counts["interrupted"] += 1
            return act()

    def _hold(self, update: Update) -> None:
        """Keeps an update for long, if it is one that does: its values must not change
        meanwhile."""
        if self._held:
            kept, copies = self._held
            now = [tensor.values.tobytes() for tensor in kept.tensors]
            check(now == copies, f"the values of {kept} have changed while {self} held it")
        self._held = (
            (update, [tensor.values.tobytes() for tensor in update.tensors]) if self.holds else None
        )

    def _follows(self, update: Update) -> bool:
        """Whether the update starts where the live model is, or at another version with the same
        bits, as one that starts from a base may."""
        known = self.live.version
        return (
            update.previous is None
            or update.previous == known
            or self._model.committed(update.previous, self.live.root) is not None
        )

    def _loses(self, update: Update) -> bool:
        """Whether the worker is interrupted while it scatters ``update``: some tensors have it,
        others not."""
        if self.loses_at is None or not update.tensors:
            return False
        for _ in update:
            break
        self.live.apply(update, self.loses_at % (len(update.tensors) + 1))
        self.loses_at = None
        self._counts["lost_updates"] += 1
        return True

    def _damage_cache(self, rng: Random, cache: Path) -> None:
        files = sorted(path for path in cache.rglob("*") if path.is_file())
        if files:
            data = bytearray((path := rng.choice(files)).read_bytes())
            if data:
                data[rng.randrange(len(data))] ^= 1
                path.write_bytes(data)
                self._net.injected["cache_flip"] += 1

    def _listen(self, event: Event) -> None:
        if isinstance(event, FallbackUsed):
            self._counts["detours"] += 1
        if self.interrupt_at is not None:
            self.interrupt_at -= 1
            if self.interrupt_at < 0:
                self.interrupt_at = None
                self.client.hit += 1
                self._net.injected["interrupt_in_listener"] += 1
                raise CrashNow(f"at {event}")


def twins(worker: Worker) -> list[tuple[str, Callable[[], Any]]]:
    """What a second thread, or a forked process, may try with a worker's subscriber."""
    subscriber = worker.subscriber
    return [
        ("sync", subscriber.sync),
        ("root", lambda: subscriber.root),
        ("full_update", subscriber.full_update),
    ]
