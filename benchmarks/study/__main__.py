"""Carries out the runs one after another and prints their tables."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.study import example, minilm, tables
from benchmarks.study.settings import RUNS, Settings


def carry_out(settings: Settings, seed: int) -> dict[str, Any]:
    started = time.perf_counter()

    def progress(step: int, reward: float, density: float) -> None:
        if step % 20 == 0 or step == settings.steps:
            seconds = time.perf_counter() - started
            print(
                f"{settings.name} step {step:3d} {reward:.3f} density {density:.3%} {seconds:.0f}s",
                flush=True,
            )

    module = minilm if settings.model == "minilm" else example
    result = module.run(settings, seed, progress)
    return {"settings": asdict(settings), **result, "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description="the sparsity study"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    results = []
    for settings in RUNS:
        if not args.only or settings.name in args.only:
            results.append(carry_out(settings, args.seed))
            if args.json:
                args.json.write_text(json.dumps(results))
    print(tables.all_tables(results))
    print(
        f"\n{len(results)} runs in {(time.perf_counter() - started) / 60:.1f} minutes, "
        f"{args.threads} thread(s)"
    )


if __name__ == "__main__":
    main()
