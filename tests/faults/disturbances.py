"""Steps in which somebody is disturbed: interrupted, raced, intruded upon, forked."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from pulse_rl import Publisher

from .callers import Calls, check_refused, fork, intrude, torn_writes
from .modes import STEADY
from .store import Client
from .worker import twins

if TYPE_CHECKING:
    from .world import World


class Disturbances:
    def interrupt(self: World, rng: Random) -> None:
        """Somebody is interrupted at any step, and calls again at once."""
        who = rng.choice(("publish", "sync", "sync"))
        if who == "publish":
            self._publish(rng, 0, [], interrupted=True)
        elif self.workers:
            worker = rng.choice(self.workers)
            worker.steps = self.interrupts.choose(rng, "sync", worker.client)
            worker.sync([], None)

    def race(self: World, rng: Random) -> None:
        """Another process is at work between two calls of a publish or a sync."""
        worker = rng.choice(self.workers) if self.workers and rng.random() < 0.4 else None
        client = worker.client if worker else self._publisher(rng, 0)[0]
        collected = rng.random() < 0.3

        def meanwhile() -> None:
            if collected:
                other = Client(self.net)
                self._tool(other, lambda: self._collect(other, rng.randint(1, 8), 3600.0), "gc")
                client.hit += 1  # what it was about to read may be gone
            else:
                self._publish(rng, 1, [])

        client.meanwhile(rng.randint(1, 10), meanwhile)
        if worker:
            worker.sync([], None)
        else:
            self._publish(rng, 0, [])
        self.counts["races"] += 1

    def tear(self: World, rng: Random) -> None:
        """Memory gives out while a patch is written to a state, and perhaps once more while that is
        undone."""
        if not self.workers:
            return
        worker = rng.choice(self.workers)
        self._publish(rng, 0, [])
        with torn_writes(rng.randint(1, 6), rng.choice((1, 2, 2))) as torn:
            worker.sync([], None)
        self.net.injected["torn_write"] += torn.count

    def intrude(self: World, rng: Random) -> None:
        """A second thread calls while the first one is at work."""
        if self.threads != STEADY:
            return
        client, publisher = self._publisher(rng, 0)
        if not self.workers or (rng.random() < 0.5 and isinstance(publisher, Publisher)):
            if not isinstance(client, Client) or not isinstance(publisher, Publisher):
                return  # of ranks, each has a publisher of its own
            state = self.trainers[1].step(rng)
            calls: Calls = [("publish", lambda: publisher.publish(state)), ("head", publisher.head)]
            wrong = intrude(client, rng, calls)
            self._publish(rng, 0, [])
        else:
            worker = rng.choice(self.workers)
            wrong = intrude(worker.client, rng, twins(worker))
            worker.sync([], None)
        check_refused(wrong)
        self.counts["intrusions"] += 1

    def fork(self: World, rng: Random) -> None:
        """A child uses what it inherited. Rare: a fork takes milliseconds."""
        if rng.random() > 0.3:
            return
        calls: Calls = []
        for pair in self.publishers:
            if pair is not None and isinstance(pair[1], Publisher):
                state = self.trainers[0].step(rng)
                calls += [
                    ("publish", lambda p=pair[1], s=state: p.publish(s)),
                    ("head", pair[1].head),
                ]  # type: ignore[misc]
        for worker in self.workers:
            calls += twins(worker)
        if calls:
            fork(calls)
            self.counts["forks"] += 1
