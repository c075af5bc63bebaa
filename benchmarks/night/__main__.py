"""A night of incidents around an S3-compatible store, and what a person had to do about them.

    python -m benchmarks.night [--seed 1] [--incidents 200] [--minutes M] [--scale 0.2] [--keep DIR]
    [--kinds "store down" …] [--json FILE] [--vllm .venv-vllm/bin/python]

A trainer, three workers (``pulse follow`` of the store; ``pulse follow`` of what ``pulse serve``
shows, with the store behind it; a program with ``Subscriber.updates`` and ``apply_``), ``pulse
relay``, and ``pulse fold`` every 20 s are processes. A supervisor starts again what has ended, as
systemd does with Restart=always. Incidents are drawn at random, one after another. An incident is
recovered from when every worker holds bits that were published after its cause ended. Where that
takes longer than a minute the incident is late; where it does not come in ``--patience`` seconds,
the harness does what a person would, and counts an intervention: it asks the trainer for an anchor,
then starts all processes again, then gives all readers empty disks.

With ``--vllm`` a live vLLM is a fourth worker, on a small Qwen2. It is never killed or stopped: it
takes minutes to start.

An oracle compares what workers hold with what the trainer had, by SHA-256 of the raw bytes and
without the library. The S3-compatible server is a stand-in (moto) behind a proxy that does the
harm. Clocks are moved by a preloaded library (``clock.c``) where there is a compiler, and disks are
filled where they may be mounted (root).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .incidents import ALL, DAEMONS, READERS, Chance, drawn
from .world import World

_LATE_SECONDS = 60.0
_TAIL = 2500


class Night:
    """Runs the incidents in a world, and notes each as one row."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world = args, world
        self.rng = random.Random(args.seed)
        self.rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        if not self._await(0.0, 600.0 if self.args.vllm else 90.0):
            raise SystemExit(f"the fleet does not start:\n{self._tails()}")
        began = time.monotonic()
        for number, kind in enumerate(drawn(self.rng, self.args.incidents, self.args.kinds)):
            if self.args.minutes and time.monotonic() > began + 60 * self.args.minutes:
                break
            row = self._incident(number, kind)
            self.rows.append(row)
            with self.args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
            late = "" if row["seconds"] <= _LATE_SECONDS else "  LATE"
            helped = "".join(f"  by {step}" for step in row["interventions"])
            deaths = ", ".join(f"{name} {status}" for name, status in row["deaths"])
            print(
                f"{number:4} {kind:26} {row['seconds']:6.1f} s  {row['detail'][:110]}"
                f"{f' [{deaths}]' * bool(deaths)}{late}{helped}",
                flush=True,
            )
            time.sleep(self.rng.uniform(0.0, 2.0))
        return self.rows

    def _incident(self, number: int, kind: str) -> dict[str, Any]:
        world, proxy = self.world, self.world.proxy
        before = proxy.requests, proxy.taken, proxy.given, len(world.deaths), len(world.wrong)
        # Each incident draws from a seed of its own, so that it does not hang on how long others
        # took.
        chance = Chance(random.Random(f"{self.args.seed}-{number}"), self.args.scale)
        detail = ALL[kind][0](world, chance)
        ended = time.monotonic()
        steps: list[str] = []
        tails = ""
        recovered = self._await(ended, _LATE_SECONDS)
        if not recovered:
            tails = f"late: {', '.join(world.late(ended))}\n{self._tails()}"
            recovered = self._await(ended, max(self.args.patience, _LATE_SECONDS))
        helps: list[tuple[str, Callable[[], None]]] = [
            ("an anchor", self._ask_for_an_anchor),
            ("a restart of all", self._restart_all),
            ("empty disks", self._empty_disks),
        ]
        while not recovered and helps:
            step, work = helps.pop(0)
            steps.append(step)
            work()
            recovered = self._await(ended, time.monotonic() - ended + 45.0)
        seconds = time.monotonic() - ended
        if not recovered:
            raise SystemExit(f"nothing helps after {kind}: {detail}\n{self._tails()}")
        wrong = world.wrong[before[4] :]
        return {
            "seed": self.args.seed,
            "number": number,
            "kind": kind,
            "detail": detail,
            "seconds": round(seconds, 2),
            "interventions": steps,
            "wrong": wrong,
            "deaths": world.deaths[before[3] :],
            "requests": proxy.requests - before[0],
            "to_store": proxy.taken - before[1],
            "from_store": proxy.given - before[2],
            **({"tails": tails or self._tails()} if tails or wrong else {}),
        }

    def _await(self, ended: float, until: float) -> bool:
        """Whether all workers hold what was published later than ``ended``, at ``ended + until`` at
        the latest."""
        deadline = (ended or time.monotonic()) + until
        while self.world.late(ended):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _ask_for_an_anchor(self) -> None:
        (self.world.folder / "anchor").touch()

    def _restart_all(self) -> None:
        for name in DAEMONS:
            self.world.signal(name, signal.SIGKILL)

    def _empty_disks(self) -> None:
        self._ask_for_an_anchor()
        for name in READERS:
            self.world.forget(name)

    def _tails(self) -> str:
        logs = sorted((self.world.folder / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-_TAIL:]}" for log in logs)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line of Markdown for each kind, and one for all."""
    by_kind = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    lines = [
        "| incident | number | recovery, median | worst | late | interventions | wrong bits | "
        "restarts | MB to the store, from it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, found in [*sorted(by_kind.items()), ("**all**", rows)]:
        seconds = [row["seconds"] for row in found]
        cells = [
            kind,
            len(found),
            f"{statistics.median(seconds):.1f} s",
            f"{max(seconds):.1f} s",
            sum(each > _LATE_SECONDS for each in seconds),
            sum(len(row["interventions"]) for row in found),
            sum(len(row["wrong"]) for row in found),
            sum(len(row["deaths"]) for row in found),
            f"{sum(r['to_store'] for r in found) / 1e6:.0f}, "
            f"{sum(r['from_store'] for r in found) / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main(given: list[str] | None = None) -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.night", description=lines[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--incidents", type=int, default=200)
    parser.add_argument("--minutes", type=float, help="begin no incident after this time")
    parser.add_argument("--scale", type=float, default=1.0, help="of all that lasts 1 to 60 s")
    parser.add_argument("--kinds", nargs="+", choices=list(ALL), help="these, by turns")
    parser.add_argument("--keep-versions", type=int, default=40)
    parser.add_argument("--patience", type=float, default=120.0, help="until a person helps")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and stores here")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM: a worker")
    default = Path(__file__).parents[1] / "results" / "night.jsonl"
    parser.add_argument("--json", type=Path, default=default, help="append each incident here")
    args = parser.parse_args(given)
    # A night in the background ends by SIGTERM, with its table; shells ignore SIGINT there.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pulse-night-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        caches = random.Random(args.seed).random() < 0.5
        began = time.monotonic()
        disks = not args.kinds or "full disk" in args.kinds
        with World(folder, args.seed, args.keep_versions, caches, disks, args.vllm) as world:
            night = Night(args, world)
            try:
                rows = night.run()
            except KeyboardInterrupt:
                rows = night.rows
            misnumbered, versions = world.misnumbered(), len(world.published)
            disks, clocks = bool(world.mounts), world.preload is not None
    print(
        f"\nseed {args.seed}, scale {args.scale:g}, {len(rows)} incidents in "
        f"{(time.monotonic() - began) / 60:.0f} minutes, {versions} versions; caches "
        f"{'on' if caches else 'off'}, disks {'filled' if disks else 'not filled'}, clocks "
        f"{'moved' if clocks else 'not moved'}"
    )
    print("\n".join(table(rows)) if rows else "no incident")
    for line in misnumbered:
        print(line)
    failed = any(r["interventions"] or r["wrong"] or r["seconds"] > _LATE_SECONDS for r in rows)
    return 1 if failed or misnumbered else 0


if __name__ == "__main__":
    raise SystemExit(main())
