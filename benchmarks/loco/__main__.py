"""``python -m benchmarks.loco``: see the package. Hours on two cores."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.loco import learning, links, tables

PARTS = ("links", *learning.GROUPS)
DEFAULT = ("links", "methods", "heldout", "H", "trainers", "scaling")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=DEFAULT, help="only these parts"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer rounds, seeds and rates: to see that all of it works",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all numbers to this file"
    )
    parser.add_argument("--rounds", type=int, help="of a run of a group; each has its own default")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="of groups (default 0 1 2)"
    )
    arguments = parser.parse_args()
    # SIGTERM unwinds like Ctrl-C, so that trainers and network are taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    facts: dict[str, Any] = {}
    try:
        if "links" in arguments.only:
            rows = list(links.run(arguments.quick))
            print("\n" + links.text(rows))
            facts["links"] = [asdict(row) for row in rows]
        groups = [group for part, group in learning.GROUPS.items() if part in arguments.only]
        if groups:
            seeds, rounds = (
                (arguments.seeds[:1], 2) if arguments.quick else (arguments.seeds, arguments.rounds)
            )
            found = list(learning.run(groups, seeds, rounds, quick=arguments.quick))
            print("\n" + "\n\n".join(map(tables.text, tables.by_task(found))))
            facts["groups"] = [asdict(outcome) for outcome in found]
    except KeyboardInterrupt:
        print("interrupted; trainers and network are gone", file=sys.stderr)
        return 130
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes")
    if arguments.json:
        arguments.json.write_text(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
