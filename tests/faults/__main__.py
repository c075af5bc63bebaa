"""The long version: python -m tests.faults --sequences 10000 --seed 1 [--jobs 2], or --only SEED to replay one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from .driver import Outcome, run

_CHUNK = 25
_SEEDS_APART = 10**9


def run_chunk(seeds: list[int], concurrent: bool) -> list[Outcome]:
    """The outcomes of some sequences, up to the first that breaks a promise. Only that one keeps its trace."""
    outcomes = []
    for seed in seeds:
        outcomes.append(run(seed, concurrent=concurrent))
        if outcomes[-1].violation:
            break
        outcomes[-1].trace.clear()
    return outcomes


def _fail(outcome: Outcome, concurrent: bool) -> int:
    print("\n".join(outcome.trace))
    print(f"\nVIOLATION in sequence {outcome.seed} after {outcome.steps} steps: {outcome.violation}")
    print(f"replay: python -m tests.faults --only {outcome.seed}{' --concurrent' if concurrent else ''}")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, metavar="SEED", help="replay one sequence and print its steps")
    parser.add_argument("--concurrent", action="store_true", help="with the library's threads: seeds do not repeat")
    parser.add_argument("--keep-going", action="store_true", help="print each violation's last line and go on")
    args = parser.parse_args()
    if args.only is not None:
        outcome = run(args.only, concurrent=args.concurrent)
        if outcome.violation:
            return _fail(outcome, args.concurrent)
        print("\n".join(outcome.trace))
        print(f"sequence {outcome.seed}: {outcome.steps} steps, nothing wrong")
        return 0

    started, done, steps, failed = time.monotonic(), 0, 0, 0
    injected, counts = Counter[str](), Counter[str]()
    seeds = [args.seed * _SEEDS_APART + k for k in range(args.sequences)]
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    if args.keep_going:
        chunks = [[seed] for seed in seeds]
    with ProcessPoolExecutor(args.jobs) as pool:
        for outcomes in pool.map(run_chunk, chunks, [args.concurrent] * len(chunks)):
            for outcome in outcomes:
                if outcome.violation and not args.keep_going:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return _fail(outcome, args.concurrent)
                if outcome.violation:
                    failed += 1
                    print(f"{outcome.seed}: {outcome.violation.splitlines()[0][:300]}", flush=True)
                done, steps = done + 1, steps + outcome.steps
                injected += outcome.injected
                counts += outcome.counts
                if done % 500 == 0:
                    print(f"{done} sequences, {steps} steps, {time.monotonic() - started:.0f} s", flush=True)
    seconds = time.monotonic() - started
    print(f"seed {args.seed}: {done} sequences, {steps} steps, {failed} violations, {seconds:.0f} s")
    print(f"faults injected: {sum(injected.values())} ({', '.join(f'{k} {n}' for k, n in injected.most_common())})")
    print(
        f"publishes {counts['publishes']}, refused as superseded {counts['conflicts']}, coded by a history "
        f"{counts['by_history']}; of ranks {counts['by_ranks']}, which were lost {counts['ranks_lost']} times, by "
        f"{counts['sharded']} trainers"
    )
    print(
        f"callers interrupted {counts['interrupted']}, races {counts['races']}, second threads refused "
        f"{counts['intrusions']}, forks {counts['forks']}, updates lost half-way {counts['lost_updates']}"
    )
    print(f"polls of group members {counts['polls']}, switches {counts['switches']}")
    print(f"syncs {counts['syncs']}, each with its live model compared; detours taken {counts['detours']}")
    print(
        f"newcomers that reached a version {counts['newcomer_reached']}, that met a gap named rightly "
        f"{counts['newcomer_gap']}; streams verified {counts['verified']}, audits {counts['audits']}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
