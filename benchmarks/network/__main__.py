"""``python -m benchmarks.network``: see the package."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import results
from benchmarks.network import shape, table, wan
from benchmarks.network.run import run

# At 50 Mbit/s a full sync takes ten of these steps.
STEP_SECONDS = 0.7
PATCH_SECONDS, QUICK_SECONDS = 30.0, 10.0
# At 10 Mbit/s a full sync takes 38 s: two of them.
FULL_SECONDS, QUICK_FULL_SECONDS = 85.0, 45.0

REPLAYS = (("auto", False), ("auto", True), ("zstd", True), ("full", True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--clean", action="store_true", help="only delete the namespaces that a killed run left")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' logs there")
    parser.add_argument("--wan", action="store_true", help="two regions and a long way that loses packets, instead")
    parser.add_argument("--methods", nargs="+", choices=wan.METHODS, default=wan.METHODS, help="of --wan")
    parser.add_argument("--rates", nargs="+", type=float, default=wan.RATES, metavar="BIT/S", help="of --wan")
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control, of --wan (default: cubic)")
    parser.add_argument("--save", action="store_true", help="write the log of --wan to benchmarks/results")
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
        if arguments.wan:
            found = wan.run_all(folder, arguments)
            if arguments.save:
                command = f"python -m benchmarks.network --wan --congestion {arguments.congestion}"
                results.save(f"wan-{arguments.congestion}", command, found)
            return 0 if all(row["identical"] for row in found) else 1
        replays = replay_all(folder, arguments.quick)
    except KeyboardInterrupt:
        print("interrupted; the network is gone", file=sys.stderr)
        return 130
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(table.text(replays))
    if arguments.json:
        facts = {"runs": [asdict(measured) for measured in replays], "rows": table.rows(replays)}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if any(worker.identical is False for replay in replays for worker in replay.workers) else 0


def replay_all(folder: Path, quick: bool) -> list[table.ReplayResult]:
    from benchmarks import trace  # imports torch, which nothing else here needs

    traces, found = trace.ensure(runs=[trace.CHAIN_RUN]), []
    for method, shaped in REPLAYS:
        whole, short = (FULL_SECONDS, QUICK_FULL_SECONDS) if method == "full" else (PATCH_SECONDS, QUICK_SECONDS)
        seconds = short if quick else whole
        name = f"replay-{method}-{'shaped' if shaped else 'unshaped'}"
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        spec = run(
            method, shaped=shaped, step_seconds=STEP_SECONDS, seconds=seconds, trace=traces, folder=folder / name
        )
        found.append(table.summary(spec, shaped, seconds))
    return found


if __name__ == "__main__":
    sys.exit(main())
