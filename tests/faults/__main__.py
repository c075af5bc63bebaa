"""The long version: ``python -m tests.faults streams --sequences 10000 --seed 1``, ``--only SEED`` to replay one.

``streams``, ``fleet`` and ``groups`` are worlds of random sequences. The others are programs in real time: ``kills``
kills processes at every call to a store, ``interrupts`` interrupts calls at random moments, ``hostile`` writes what it
likes into a stream's folder, ``exits`` ends programs with everything under way, ``ranks`` kills, interrupts and
misleads the ranks of a sharded trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module

from . import exits, hostile, interrupts, kills
from .driver import WORLDS, described, run, search, shrunk

_SEEDS_APART = 10**9
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "kills": kills.main,
    "interrupts": interrupts.main,
    "hostile": hostile.main,
    "exits": exits.main,
    "ranks": lambda argv: import_module("tests.faults.rank_runs").main(argv),  # which needs torch
}


def main(argv: list[str]) -> int:
    if argv and argv[0] in PROGRAMS:
        return PROGRAMS[argv[0]](argv[1:])
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("world", choices=[*WORLDS, *PROGRAMS])
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, metavar="SEED", help="replay one sequence and print its steps")
    parser.add_argument("--steps", help="of --only: these steps alone, such as 0,3,4")
    parser.add_argument("--concurrent", action="store_true", help="with the library's threads: seeds do not repeat")
    args = parser.parse_args(argv)
    if args.only is not None:
        only = None if args.steps is None else [int(number) for number in args.steps.split(",") if number]
        outcome = run(args.only, args.world, concurrent=args.concurrent, only=only)
        if outcome.violation:
            print(described(outcome if args.steps or args.concurrent else shrunk(outcome)))
            return 1
        print("\n".join(outcome.trace))
        print(f"sequence {outcome.seed}: {len(outcome.steps)} steps, nothing wrong")
        return 0

    started, done, steps = time.monotonic(), 0, 0
    injected, counts = Counter[str](), Counter[str]()
    seeds = [args.seed * _SEEDS_APART + k for k in range(args.sequences)]
    for outcome in search(args.world, seeds, jobs=args.jobs, concurrent=args.concurrent):
        if outcome.violation:
            print(described(outcome))
            return 1
        done, steps = done + 1, steps + len(outcome.steps)
        injected += outcome.injected
        counts += outcome.counts
        if done % 500 == 0:
            print(f"{done} sequences, {steps} steps, {time.monotonic() - started:.0f} s", flush=True)
    seconds = time.monotonic() - started
    print(f"{args.world}, seed {args.seed}: {done} sequences, {steps} steps, no violation, {seconds:.0f} s")
    for title, numbers in (("faults injected", injected), ("what happened", counts)):
        listed = ", ".join(f"{kind} {number}" for kind, number in numbers.most_common())
        print(f"{title}: {sum(numbers.values())} ({listed})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
