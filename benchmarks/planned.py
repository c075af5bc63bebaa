"""What a sync of well-known models is by the planner, beside what was run: the rows of
docs/evidence.md.

    python -m benchmarks.planned [--save]

A planned row takes its density from a public measurement at the nearest size and learning rate.
Seconds are those of a sync over a link of the named rate with 8 cores at either end. A measured row
is a real patch of a recorded or synthetic step on this machine; its plan stands beside it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results, trace
from pulse_rl import MemoryStore, Publisher, State
from pulse_rl.study.plan import Scenario, make_plan

PULSE = "PULSE, arXiv 2602.03839, section 3"
SPARSERL = "SparseRL-Sync, arXiv 2605.07330"
VERL = "verl, sparse updates of a 235B model: 0.02 to 0.05%"
RATES = (200e6, 1e9, 10e9)


@dataclass(frozen=True)
class Model:
    """``params`` as published, BF16. ``density`` of a step as ``source`` has it, at ``lr`` where it
    is known."""

    name: str
    params: float
    density: float
    at: str
    source: str


MODELS = (
    Model("Qwen3-0.6B", 0.596e9, 0.0074, "Qwen2.5-0.5B, lr 3e-6", PULSE),
    Model("Qwen3-1.7B", 1.72e9, 0.0027, "Qwen2.5-1.5B, lr 1e-6", PULSE),
    Model("Qwen3-1.7B", 1.72e9, 0.0057, "Qwen2.5-1.5B, lr 3e-6", PULSE),
    Model("Qwen3-1.7B", 1.72e9, 0.0094, "Qwen2.5-1.5B, lr 5e-6", PULSE),
    Model("Qwen3-8B", 8.19e9, 0.0086, "Qwen2.5-7B, lr 3e-6", PULSE),
    Model("Qwen3-30B-A3B", 30.5e9, 0.0061, "106B", SPARSERL),
    Model("Llama-3.3-70B", 70.6e9, 0.0061, "106B", SPARSERL),
    Model("Kimi-K2", 1.03e12, 0.0061, "106B", SPARSERL),
    Model("Kimi-K2", 1.03e12, 0.0005, "235B", VERL),
)


def planned(model: Model) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model.name, "kind": "planned", "params": round(model.params)}
    row |= {"density": model.density, "at": model.at, "source": model.source}
    for rate in RATES:
        plan = make_plan(Scenario(round(model.params), model.density, 50.0, rate))
        full, ours = plan["full"], plan["auto"]
        row |= {
            "full_bytes": full.sync_bytes,
            "bytes": ours.sync_bytes,
            "zstd_bytes": plan["zstd"].sync_bytes,
        }
        row |= {
            f"seconds_{rate / 1e6:.0f}": ours.sync_seconds,
            f"full_seconds_{rate / 1e6:.0f}": full.sync_seconds,
        }
    return row


def measured(name: str, folder: Path, at: str) -> dict[str, Any]:
    """A patch between two recorded states."""
    old, new = (State.of(folder / f"{at}.{which}.safetensors") for which in ("old", "new"))
    with Publisher(MemoryStore(), stream="planned") as publisher:
        publisher.publish(old)
        done = publisher.publish(new)
    assert done.changed is not None
    plan = make_plan(Scenario(done.elements, done.density, 50.0, 1e9))["auto"]
    row = {
        "model": name,
        "kind": "measured",
        "params": done.elements,
        "density": done.density,
        "at": at,
    }
    return row | {
        "full_bytes": done.dense_bytes,
        "bytes": done.patch_bytes,
        "planned_bytes": plan.sync_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/planned.jsonl"
    )
    arguments = parser.parse_args()
    runs = trace.ensure(runs=["lr1e-6", "lr3e-6"])
    rows = [
        measured(f"MiniLM, {run}", runs / run, f"step{step:05d}")
        for run in ("lr1e-6", "lr3e-6")
        for step in (40, 120)
    ]
    rows += [planned(model) for model in MODELS]
    for tenths in range(10, 51):  # 10 Mbit/s to 100 Gbit/s
        rate = 1e6 * 10 ** (tenths / 10)
        plan = make_plan(Scenario(7_000_000_000, 0.0086, 50.0, rate))
        rows.append(
            {"kind": "link", "rate": rate, **{name: plan[name].sync_seconds for name in plan}}
        )
    for row in rows:
        if row["kind"] == "link":
            continue
        print(
            f"{row['model']:16} {row['kind']:9}{row['params'] / 1e9:9.3f}B {row['density']:7.2%}"
            f"{row['full_bytes'] / 1e6:12,.1f} MB{row['bytes'] / 1e6:10,.2f} "
            f"MB{row['full_bytes'] / row['bytes']:7.0f}x"
            + "".join(f"{row.get(f'seconds_{rate / 1e6:.0f}', 0):9.1f}" for rate in RATES)
        )
    if arguments.save:
        results.save("planned", "python -m benchmarks.planned", rows)


if __name__ == "__main__":
    main()
