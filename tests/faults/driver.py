"""The driver of all stress tests: sequences by their seed, up to the first that breaks a promise.

A sequence of a world is a function of its seed: these run on all cores, and one that breaks a
promise is shrunk. A sequence of a program has real processes, signals and time: these run one after
another.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from random import Random
from traceback import format_exc
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from pulse_rl._util import serial
from pulse_rl.follow import patch_files
from pulse_rl.sharding import baseline
from pulse_rl.stream import stream
from pulse_rl.sync import commit, host_state, planner, publisher
from tests.support.interrupts import GatedOperation, Interrupter

from . import exits, kills
from .fleet import Fleet
from .hostile_world import HostileWorld
from .modes import CONCURRENT, INLINE, STEADY
from .store import CrashNow
from .world import World as StreamWorld

_STEPS = ((4, 14), (15, 40))
_HOSTILE = 0.2
_CHUNK = 25
_THREADED = (
    0.35  # of the sequences: a hand-over to a thread costs as much as the work on a small state
)


class World(Protocol):
    """Something to which things happen, by the methods that `rules` names with how often each
    comes: every one is a step, and gets the chance that it has. Raises where a promise is
    broken."""

    trace: list[str]
    counts: Counter[str]

    @property
    def injected(self) -> Counter[str]:
        """Faults by kind."""

    def rules(self) -> dict[str, int]: ...

    def settled(self, rng: Random) -> None:
        """What must hold after every step."""

    def finish(self, rng: Random) -> None:
        """Faults end; what must hold then."""

    def close(self) -> None: ...


def _stream(rng: Random, threads: str, interrupter: Interrupter) -> World:
    kind = HostileWorld if rng.random() < _HOSTILE else StreamWorld
    return kind(rng, threads, interrupter)


WORLDS: dict[str, Callable[[Random, str, Interrupter], World]] = {
    "streams": _stream,
    "fleet": lambda rng, *_: Fleet(rng, destructive=rng.random() < 0.5),
    "rounds": lambda rng, *_: import_module("tests.faults.rounds").Rounds(rng),  # which needs torch
}


PROGRAMS: dict[str, Callable[[int], Counter[str]]] = {
    "kills": kills.sequence,
    "exits": exits.sequence,
    "ranks": lambda seed: import_module("tests.faults.rank_runs").sequence(
        seed
    ),  # which needs torch
}


@dataclass
class Outcome:
    """What one sequence did, with the numbers of its ``steps``; ``violation`` is empty unless a
    promise was broken."""

    seed: int
    kind: str
    steps: list[int] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    trace: list[str] = field(default_factory=list)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Any exception is a violation: the library promises typed errors, and what meets another
        one is at fault."""
        try:
            yield
        except Exception as error:
            self.violation = f"{type(error).__name__}: {error}\n{format_exc(limit=-6)}"


def _post_at_once(self: serial.SerialThread, work: Callable[[], Any]) -> serial.Operation[Any]:
    """What is done behind the caller's work is done where it is asked for, and what ends it ends
    nothing else."""
    with suppress(CrashNow):
        self.run(work)
    done: serial.Operation[Any] = serial.Operation(lambda: None)
    done.cancel()
    return done


@contextmanager
def repeatable(rng: Random) -> Iterator[None]:
    """No clock, no chance and no threads but the sequence's own, so that it repeats call by call;
    sometimes the listed links are planned on from close by, too. Nothing waits for a disk: power
    cuts are not among the faults."""
    ticks = itertools.count(1)
    clock = SimpleNamespace(time=lambda: 1e9 + next(ticks) / 8, perf_counter=lambda: 0.0)
    with ExitStack() as stack:
        for module, name, value in (
            (commit, "time", clock),
            (publisher, "time", clock),
            (commit, "secrets", SimpleNamespace(token_hex=lambda n: rng.randbytes(n).hex())),
            (serial, "Operation", GatedOperation),
            (serial.SerialThread, "post", _post_at_once),
            (GatedOperation, "begin_late", staticmethod(lambda: rng.random() < 0.5)),
            (os, "fsync", lambda _: None),
            (host_state, "_PREFETCH", 1),
            (patch_files, "_FILES_AT_ONCE", 1),
            (stream, "_AT_ONCE", 1),
            (baseline, "_LINKS_AT_ONCE", 1),
            (planner, "_FAR", rng.choice((3, planner._FAR))),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def run(
    seed: int,
    kind: str = "streams",
    *,
    concurrent: bool = False,
    only: Collection[int] | None = None,
) -> Outcome:
    """One sequence of the ``kind``, or ``only`` some of its steps in a world: each has chance of
    its own, which is the same whatever is left out. ``concurrent`` keeps the library's threads: a
    seed does not repeat exactly then."""
    outcome = Outcome(seed, kind)
    if kind in WORLDS:
        _go_through(outcome, concurrent, only)
    else:
        with outcome.judged():
            outcome.counts = PROGRAMS[kind](seed)
    return outcome


def _go_through(outcome: Outcome, concurrent: bool, only: Collection[int] | None) -> None:
    seed, rng = outcome.seed, Random(outcome.seed)
    with ExitStack() as stack:
        interrupter = stack.enter_context(Interrupter())
        threads = STEADY if rng.random() < _THREADED else INLINE
        if not concurrent:
            stack.enter_context(repeatable(Random(seed ^ 0x5EED)))
        world = WORLDS[outcome.kind](rng, CONCURRENT if concurrent else threads, interrupter)
        stack.callback(world.close)
        rules = world.rules()
        with outcome.judged():
            for number in range(rng.randint(*rng.choice(_STEPS))):
                if only is not None and number not in only:
                    continue
                chance = Random(f"{seed}/{number}")
                rule = chance.choices(list(rules), weights=list(rules.values()))[0]
                world.trace.append(f"{number}: {rule}")
                outcome.steps.append(number)
                getattr(world, rule)(chance)
                world.settled(chance)
            world.trace.append("finish")
            world.finish(Random(f"{seed}/finish"))
        outcome.injected, outcome.counts, outcome.trace = world.injected, world.counts, world.trace


def shrunk(found: Outcome, tries: int = 300) -> Outcome:
    """A shorter sequence that breaks a promise, by leaving out ever smaller pieces of the one that
    was ``found``."""
    size = max(len(found.steps) // 2, 1)
    while size and tries > 0:
        at = len(found.steps)
        while at > 0 and tries > 0:
            at, tries = at - size, tries - 1
            rest = found.steps[: max(at, 0)] + found.steps[at + size :]
            shorter = run(found.seed, found.kind, only=rest)
            if shorter.violation and len(shorter.steps) < len(found.steps):
                found = shorter
                at = min(at, len(found.steps))
        size //= 2
    return found


def run_chunk(kind: str, seeds: list[int], concurrent: bool) -> list[Outcome]:
    """The outcomes of some sequences, up to the first that breaks a promise. Only that one keeps
    its trace."""
    outcomes = []
    for seed in seeds:
        outcomes.append(run(seed, kind, concurrent=concurrent))
        if outcomes[-1].violation:
            break
        outcomes[-1].trace.clear()
    return outcomes


def search(
    kind: str, seeds: list[int], *, jobs: int | None = None, concurrent: bool = False
) -> Iterator[Outcome]:
    """The outcomes of many sequences, those of worlds by processes of their own, up to the first
    that breaks a promise; that one is shrunk."""
    if kind in PROGRAMS:
        for seed in seeds:
            yield (outcome := run(seed, kind))
            if outcome.violation:
                return
        return
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("forkserver")) as pool:
        try:
            for outcomes in pool.map(
                run_chunk, [kind] * len(chunks), chunks, [concurrent] * len(chunks)
            ):
                for outcome in outcomes:
                    if outcome.violation:
                        yield outcome if concurrent else shrunk(outcome)
                        return
                    yield outcome
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def described(outcome: Outcome) -> str:
    """What a sequence that breaks a promise did, and how to see it again."""
    steps = f" --steps {','.join(map(str, outcome.steps))}" if outcome.steps else ""
    return "\n".join(
        [
            *outcome.trace,
            f"\nVIOLATION in sequence {outcome.seed} of {outcome.kind}: {outcome.violation}",
            f"replay: python -m tests.faults {outcome.kind} --only {outcome.seed}{steps}",
        ]
    )
