"""What the logs of a real run say: reward over wall-clock, by method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.network.run import read_log
from benchmarks.network.spec import Spec

TRAINER = "trainer"


@dataclass(frozen=True)
class RlResult:
    """One run. ``rewards`` are (seconds, expected reward on held-out prompts); the rest are medians or means a step."""

    method: str
    steps: int
    steps_a_minute: float
    density: float | None
    version_bytes: float
    learn_seconds: float
    publish_seconds: float
    sync_seconds: dict[str, float]
    rewards: tuple[tuple[float, float], ...]


def rl_result(spec: Spec) -> RlResult:
    lines = read_log(spec.log(TRAINER))
    steps = [line for line in lines if line["event"] == "step"]
    evaluated = [(line["seconds"], line["reward"]) for line in lines if line["event"] == "evaluated"]
    if not steps or not evaluated:
        raise SystemExit(f"{spec.method}: no step was made, or none evaluated; see {spec.folder}")
    densities = [step["density"] for step in steps if step["density"] is not None]
    batches = {worker: [x for x in read_log(spec.log(worker)) if x["event"] == "batch"] for worker in spec.workers}
    return RlResult(
        method=spec.method,
        steps=len(steps),
        steps_a_minute=60 * len(steps) / evaluated[-1][0],
        density=fmean(densities) if densities else None,
        version_bytes=fmean(step["bytes"] for step in steps),
        learn_seconds=median(step["learn_seconds"] for step in steps),
        publish_seconds=median(step["publish_seconds"] for step in steps),
        sync_seconds={
            worker: median(x["sync_seconds"] for x in found if x["version"] != x["previous"])
            for worker, found in batches.items()
            if any(x["version"] != x["previous"] for x in found)
        },
        rewards=tuple(evaluated),
    )


def text(runs: Sequence[RlResult]) -> str:
    """One row a method; the reward at the start, at thirds of the time and at the end."""
    head = f"{'method':<8} {'steps':>5} {'/min':>6} {'bytes':>11} {'density':>8} | sync s by worker | reward over time"
    lines = [head, "-" * len(head)]
    for run in runs:
        syncs = " ".join(f"{seconds:.2f}" for seconds in run.sync_seconds.values())
        end = run.rewards[-1][0]
        shown = [max((r for r in run.rewards if r[0] <= end * part / 3), key=lambda r: r[0]) for part in range(4)]
        rewards = ", ".join(f"{reward:.4f} at {seconds:.0f} s" for seconds, reward in shown)
        density = f"{run.density:.2%}" if run.density is not None else "-"
        lines.append(
            f"{run.method:<8} {run.steps:>5} {run.steps_a_minute:>6.1f} {run.version_bytes:>11,.0f} {density:>8} | "
            f"{syncs} | {rewards}"
        )
    return "\n".join(lines)
