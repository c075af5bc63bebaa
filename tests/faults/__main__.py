"""The long version: ``python -m tests.faults streams --sequences 10000 --seed 1``, ``--only SEED``
to replay one.

``streams``, ``fleet`` and ``rounds`` are worlds of random steps. The others are
programs in real time. A sequence of ``kills`` kills one role at each of its calls to a store; of
``exits`` ends a program with everything under way; of ``ranks`` kills, interrupts and misleads the
ranks of a sharded trainer.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter

from .driver import PROGRAMS, WORLDS, described, run, search, shrunk

_SEEDS_APART = 10**9
_SAID_EVERY_SECONDS = 30.0
SEQUENCES = {"kills": 3, "exits": 500, "ranks": 20}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("kind", choices=[*WORLDS, *PROGRAMS])
    parser.add_argument("--sequences", type=int, help="10,000 of a world")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="none begins later")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--only", type=int, metavar="SEED", help="replay one sequence and print its steps"
    )
    parser.add_argument("--steps", help="of --only: these steps alone, such as 0,3,4")
    parser.add_argument(
        "--concurrent", action="store_true", help="with the library's threads: seeds do not repeat"
    )
    args = parser.parse_args(argv)
    # Half of a tiny state's elements may change, and hints say so.
    logging.getLogger("pulse_rl").addFilter(lambda each: not each.getMessage().startswith("stream"))
    if args.only is not None:
        only = (
            None
            if args.steps is None
            else [int(number) for number in args.steps.split(",") if number]
        )
        outcome = run(args.only, args.kind, concurrent=args.concurrent, only=only)
        if outcome.violation:
            print(
                described(
                    shrunk(outcome)
                    if outcome.steps and not (args.steps or args.concurrent)
                    else outcome
                )
            )
            return 1
        print("\n".join(outcome.trace))
        print(
            f"sequence {outcome.seed}: {len(outcome.steps)} steps, {dict(outcome.counts)}, "
            "nothing wrong"
        )
        return 0

    started = said = time.monotonic()
    done, steps, injected, counts = 0, 0, Counter[str](), Counter[str]()
    first = args.seed * _SEEDS_APART
    seeds = list(range(first, first + (args.sequences or SEQUENCES.get(args.kind, 10_000))))
    for outcome in search(args.kind, seeds, jobs=args.jobs, concurrent=args.concurrent):
        if outcome.violation:
            print(described(outcome))
            return 1
        done, steps = done + 1, steps + len(outcome.steps)
        injected += outcome.injected
        counts += outcome.counts
        now = time.monotonic()
        if now - said > _SAID_EVERY_SECONDS:
            print(f"{done} sequences, {steps} steps, {now - started:.0f} s", flush=True)
            said = now
        if now - started > 60 * args.minutes:
            break
    seconds = time.monotonic() - started
    print(
        f"{args.kind}, seed {args.seed}: {done} sequences, {steps} steps, no violation, "
        f"{seconds:.0f} s"
    )
    for title, numbers in (("faults injected", injected), ("what happened", counts)):
        listed = ", ".join(f"{kind} {number}" for kind, number in numbers.most_common())
        if numbers:
            print(f"{title}: {sum(numbers.values())} ({listed})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
