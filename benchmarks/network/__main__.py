"""``python -m benchmarks.network``: see the package."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.network import reward, shape, table
from benchmarks.network.results import ReplayResult, summary
from benchmarks.network.reward import RlResult
from benchmarks.network.run import run

# At 50 Mbit/s a full sync takes ten of these steps.
STEP_SECONDS = 0.7
PATCH_SECONDS, QUICK_SECONDS = 30.0, 10.0
# At 10 Mbit/s a full sync takes 38 s: two of them.
FULL_SECONDS, QUICK_FULL_SECONDS = 85.0, 45.0
RL_SECONDS = 75.0
# A worker in the midst of a full sync does not hear that it is to stop; a trainer evaluates its copies first.
STOP_SECONDS, RL_STOP_SECONDS = 5.0, 60.0

REPLAYS = (("auto", False), ("auto", True), ("zstd", True), ("full", True))
RL_RUNS = ("auto", "zstd", "full")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="shorter runs, and no reinforcement learning")
    parser.add_argument("--clean", action="store_true", help="only delete the namespaces that a killed run left")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' logs there")
    arguments = parser.parse_args()
    shape.require_root()
    if arguments.clean:
        print(f"deleted: {', '.join(shape.clean()) or 'nothing'}")
        return 0
    # Either unwinds, so that the network is taken down; a shell that starts this in the background has SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="pulse-network-"))
    try:
        traces = recorded()
        replays = replay_all(folder, traces, arguments.quick)
        trained = [] if arguments.quick else train_all(folder, traces)
    except KeyboardInterrupt:
        print("interrupted; the network is gone", file=sys.stderr)
        return 130
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return report(replays, trained, arguments.json)


def recorded() -> Path:
    """The folder of recorded runs."""
    from benchmarks import trace  # imports torch, which nothing else here needs

    return trace.ensure(runs=[trace.CHAIN_RUN])


def replay_all(folder: Path, traces: Path, quick: bool) -> list[ReplayResult]:
    found = []
    for method, shaped in REPLAYS:
        seconds = (
            (QUICK_FULL_SECONDS if quick else FULL_SECONDS)
            if method == "full"
            else (QUICK_SECONDS if quick else PATCH_SECONDS)
        )
        name = f"replay-{method}-{'shaped' if shaped else 'unshaped'}"
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        spec = run(
            "benchmarks.network.replay",
            method,
            shaped=shaped,
            step_seconds=STEP_SECONDS,
            seconds=seconds,
            stop_seconds=STOP_SECONDS,
            trace=traces,
            folder=folder / name,
        )
        found.append(summary(spec, shaped, seconds))
    return found


def train_all(folder: Path, traces: Path) -> list[RlResult]:
    found = []
    for method in RL_RUNS:
        print(f"rl-{method}: {RL_SECONDS:.0f} s", file=sys.stderr, flush=True)
        spec = run(
            "benchmarks.network.rl",
            method,
            shaped=True,
            step_seconds=0.0,  # it takes what it takes
            seconds=RL_SECONDS,
            stop_seconds=RL_STOP_SECONDS,
            trace=traces,
            folder=folder / f"rl-{method}",
        )
        found.append(reward.rl_result(spec))
    return found


def report(replays: Sequence[ReplayResult], trained: Sequence[RlResult], file: Path | None) -> int:
    """Prints the tables and the claims; the exit status says whether all of them hold."""
    checked = table.claims(replays)
    print(table.text(replays))
    print(f"on the {table.CLAIMED_RATE / 1e6:.0f} Mbit/s link:")
    for claim in checked:
        print(f"  {'yes' if claim.holds else 'NO '} {claim.text}")
    if trained:
        print(f"a real run over the same links, {RL_SECONDS:.0f} s each:\n{reward.text(trained)}")
    if file:
        facts = {
            "runs": [asdict(measured) for measured in replays],
            "rows": table.rows(replays),
            "claims": [asdict(claim) for claim in checked],
            "reinforcement_learning": [asdict(one) for one in trained],
        }
        file.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if all(claim.holds for claim in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
