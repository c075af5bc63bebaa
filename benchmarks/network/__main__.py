"""``python -m benchmarks.network``: see the package."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.network import regions, shape


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=regions.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument(
        "--clean", action="store_true", help="only delete the namespaces that a killed run left"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' logs there")
    parser.add_argument("--methods", nargs="+", choices=regions.METHODS, default=regions.METHODS)
    parser.add_argument("--rates", nargs="+", type=float, default=regions.RATES, metavar="BIT/S")
    parser.add_argument(
        "--congestion", default="cubic", help="TCP's congestion control (default: cubic)"
    )
    parser.add_argument("--save", action="store_true", help="write the log to benchmarks/results")
    arguments = parser.parse_args()
    shape.require_root()
    if arguments.clean:
        print(f"deleted: {', '.join(shape.clean()) or 'nothing'}")
        return 0
    # Either unwinds, so that the network is taken down; a shell that starts this in the background
    # has SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="pulse-network-"))
    try:
        found = regions.run_all(folder, arguments)
    except KeyboardInterrupt:
        print("interrupted; the network is gone", file=sys.stderr)
        return 130
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.save:
        command = f"python -m benchmarks.network --congestion {arguments.congestion}"
        results.save(f"network-{arguments.congestion}", command, found)
    return 0 if all(row["identical"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
