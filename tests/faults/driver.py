"""Sequences of random steps, each a function of its seed."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from traceback import format_exc
from types import SimpleNamespace
from unittest.mock import patch

from pulse_rl._util import serial
from pulse_rl.integrations.fsdp import head
from pulse_rl.patch import part
from pulse_rl.sync import catch_up, commit, folds, publisher, route, slices
from tests.support.histories import named_in_small_patches
from tests.support.interrupts import GatedOperation, Interrupter

from .hostile_world import HostileWorld
from .modes import CONCURRENT, INLINE, STEADY
from .store import CrashNow
from .world import World

_STEPS = ((4, 14), (15, 40))
_HOSTILE = 0.2
_THREADED = 0.35  # of the sequences: a hand-over to a thread costs as much as the work on a small state


@dataclass
class Outcome:
    """What one sequence did; ``violation`` is empty unless a promise was broken."""

    seed: int
    steps: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    trace: list[str] = field(default_factory=list)


class _AtOnce:
    """Stands for a thread: runs where it is started, and what ends it ends nothing else."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...] = (), **_: object) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        try:
            self._target(*self._args)
        except CrashNow:
            return

    def join(self) -> None:
        return


@contextmanager
def repeatable(rng: Random) -> Iterator[None]:
    """No clock, no chance and no threads but the sequence's own, so that it repeats call by call; sometimes the listed
    links are planned on from close by, too. Nothing waits for a disk: power cuts are not among the faults."""
    ticks = itertools.count(1)
    clock = SimpleNamespace(time=lambda: 1e9 + next(ticks) / 8, perf_counter=lambda: 0.0)
    with ExitStack() as stack:
        for module, name, value in (
            (commit, "time", clock),
            (publisher, "time", clock),
            (head, "time", clock),
            (commit, "secrets", SimpleNamespace(token_hex=lambda n: rng.randbytes(n).hex())),
            (serial, "Operation", GatedOperation),
            (GatedOperation, "begin_late", staticmethod(lambda: rng.random() < 0.5)),
            (os, "fsync", lambda _: None),
            (folds, "threading", SimpleNamespace(Thread=_AtOnce)),
            (catch_up, "_PREFETCH", 1),
            (part, "_FILES_AT_ONCE", 1),
            (slices, "_FILES_AT_ONCE", 1),
            (slices, "_LINKS_AT_ONCE", 1),
            (route, "_FAR", rng.choice((3, route._FAR))),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


@named_in_small_patches()
def run(seed: int, *, concurrent: bool = False) -> Outcome:
    """One sequence of 4 to 40 steps. ``concurrent`` keeps the library's threads: then a seed does not repeat exactly.

    Any exception is a violation: the library promises typed errors, and a world that meets another one is at fault.
    """
    rng, outcome = Random(seed), Outcome(seed)
    with ExitStack() as stack:
        interrupter = stack.enter_context(Interrupter())
        threads = STEADY if rng.random() < _THREADED else INLINE
        if not concurrent:
            stack.enter_context(repeatable(Random(seed ^ 0x5EED)))
        kind = HostileWorld if rng.random() < _HOSTILE else World
        world = kind(rng, CONCURRENT if concurrent else threads, interrupter)
        stack.callback(world.close)
        rules = world.rules()
        try:
            for _ in range(rng.randint(*rng.choice(_STEPS))):
                rule = rng.choices(list(rules), weights=list(rules.values()))[0]
                world.trace.append(f"{outcome.steps}: {rule}")
                getattr(world, rule)(rng)
                world.settled(rng)
                outcome.steps += 1
            world.finish(rng)
        except Exception as error:
            outcome.violation = f"{type(error).__name__}: {error}\n{format_exc(limit=-6)}"
        outcome.injected, outcome.counts, outcome.trace = world.net.injected, world.counts, world.trace
        outcome.counts["by_history"] = world.model.by_history
    return outcome
