"""Plants one fault at a time and runs sequences of `tests.faults` until one fails: python -m tests.mutants."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, ModuleType
from typing import NamedTuple

_SEEDS = 20_261_121
_NOTHING = "nothing"
_HANGS_SECONDS = 20.0
_MOST_SECONDS = 1800.0


class Verdict(NamedTuple):
    """``caught`` by sequence number ``sequences`` (from 1 on), and what it said; else that many found nothing."""

    name: str
    caught: bool
    sequences: int
    said: str
    seconds: float


class _Planted(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module of the package, with other source."""

    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(f"pulse_rl.{module}", path)
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def plant(name: str) -> None:
    """Makes this process import the package with the fault ``name``. What was imported before is forgotten."""
    from .catalogue import MUTANTS

    mutant = next(m for m in MUTANTS if m.name == name)
    source = mutant.planted()
    for imported in [module for module in sys.modules if module == "pulse_rl" or module.startswith("pulse_rl.")]:
        if "_native" not in imported:
            del sys.modules[imported]
    sys.meta_path.insert(0, _Planted(mutant.module, str(mutant.path), source))


def _hunt(name: str, sequences: int) -> None:
    """In a process of its own: prints the number of the sequence that failed, and how; each one that has begun, too."""
    if name != _NOTHING:
        plant(name)
    from tests.faults.driver import run

    for number in range(1, sequences + 1):
        print(json.dumps([number, ""]), flush=True)
        faulthandler.dump_traceback_later(_HANGS_SECONDS, exit=True)
        outcome = run(_SEEDS + number)
        if outcome.violation:
            print(json.dumps([number, outcome.violation.splitlines()[0]]), flush=True)
            os._exit(0)
    os._exit(0)


def judge(name: str, sequences: int) -> Verdict:
    """Hunts for the mutant in a process of its own. One that hangs is caught, too."""
    started = time.monotonic()
    command = [sys.executable, "-m", "tests.mutants", "--hunt", name, "--sequences", str(sequences)]
    hunter = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = hunter.communicate(timeout=_MOST_SECONDS)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
        number, said = lines[-1] if lines else (0, "")
        if hunter.returncode:
            hung = "Timeout (" in err
            said = said or ("hung" if hung else f"ended with {hunter.returncode}: {err.strip().splitlines()[-1:]}")
    except subprocess.TimeoutExpired:
        os.killpg(hunter.pid, signal.SIGKILL)
        out, _ = hunter.communicate()
        number, said = len(out.splitlines()), "hung"
    return Verdict(name, bool(said), number, said, time.monotonic() - started)


def main() -> int:
    from .catalogue import MUTANTS

    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sequences", type=int, default=600, help="at most so many for each fault")
    parser.add_argument("--only", metavar="WORDS", help="the faults whose names have these words in them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--hunt", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hunt:
        _hunt(args.hunt, args.sequences)
    for mutant in MUTANTS:
        mutant.planted()
    chosen = [mutant for mutant in MUTANTS if not args.only or args.only in mutant.name]
    survivors, surprises = [], []
    sound = judge(_NOTHING, args.sequences)
    if sound.caught:
        print(f"without a fault, sequence {sound.sequences} fails: {sound.said}")
        return 1
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, verdict in zip(chosen, pool.map(lambda m: judge(m.name, args.sequences), chosen), strict=True):
            if verdict.sequences == 0:
                raise RuntimeError(f"{mutant.name}: {verdict.said}")  # it could not even begin
            outcome = f"caught by sequence {verdict.sequences}" if verdict.caught else "SURVIVED"
            print(f"{mutant.name}: {outcome} ({verdict.seconds:.0f} s) {verdict.said[:150]}", flush=True)
            if not verdict.caught:
                survivors.append(mutant)
            if verdict.caught == bool(mutant.survives):
                surprises.append(mutant.name)
    print(f"{len(chosen)} faults planted, {len(chosen) - len(survivors)} caught, {len(survivors)} survived")
    for mutant in survivors:
        print(f"  {mutant.name}: {mutant.survives or 'nobody knows why'}")
    if surprises:
        print(f"not as the catalogue says: {', '.join(surprises)}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
