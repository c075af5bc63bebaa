"""What the logs of a replay say, beside what `pulse_rl.plan` predicts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.network.run import GIGABIT, THREADS, Lines, Spec, nodes, read_log
from benchmarks.network.shape import Node
from pulse_rl.plan import Scenario, make_plan
from pulse_rl.plan.model import MethodPlan


@dataclass(frozen=True)
class WorkerResult:
    """What one worker measured, over whole steps from the first new version on. Bytes are those of the interface.

    ``utilisation`` is the share of the time in which it generated, the rest went into syncing. ``lag`` is how many
    versions newer than its own the stream was when a step ended, at most.
    """

    rate: float | None
    steps: int
    utilisation: float
    sync_seconds: float
    bytes_a_sync: float
    steps_a_minute: float
    lag: int
    round_trip: float
    identical: bool | None


@dataclass(frozen=True)
class ReplayResult:
    """One run of a method. Trainer's figures are means over its versions."""

    method: str
    shaped: bool
    step_seconds: float
    seconds: float
    params: int
    density: float | None
    version_bytes: float
    publish_seconds: float
    versions_a_minute: float
    trainer_sent_bytes: int
    workers: tuple[WorkerResult, ...]


def summary(spec: Spec, shaped: bool, seconds: float) -> ReplayResult:
    """What the logs of a replay say."""
    _, trainer, *workers = nodes(shaped)
    lines = read_log(spec.log(trainer.name))
    ready = next(line for line in lines if line["event"] == "ready")
    versions = [line for line in lines if line["event"] == "published"]
    if len(versions) < 2:
        raise SystemExit(f"{spec.method}: the trainer published {len(versions)} versions; run for longer")
    densities = [v["density"] for v in versions if v["density"] is not None]
    cycle = (versions[-1]["time"] - versions[0]["time"]) / (len(versions) - 1)
    return ReplayResult(
        method=spec.method,
        shaped=shaped,
        step_seconds=spec.step_seconds,
        seconds=seconds,
        params=ready["params"],
        density=fmean(densities) if densities else None,
        version_bytes=fmean(v["bytes"] for v in versions),
        publish_seconds=median(v["seconds"] for v in versions),
        versions_a_minute=60 / cycle,
        trainer_sent_bytes=versions[-1]["tx_bytes"] - ready["tx_bytes"],
        workers=tuple(worker_summary(spec, worker, versions) for worker in workers),
    )


def worker_summary(spec: Spec, worker: Node, versions: Lines) -> WorkerResult:
    """From the first sync that brought a new version on: whole steps, each with the sync before it."""
    lines = read_log(spec.log(worker.name))
    ready = next(line for line in lines if line["event"] == "ready")
    end = next((line for line in lines if line["event"] == "end"), None)
    steps = [line for line in lines if line["event"] == "step"]
    while steps and steps[0]["version"] == steps[0]["previous"]:
        steps = steps[1:]
    if not steps:
        raise SystemExit(f"{spec.method}: {worker.name} made no step with a new version; run for longer")
    lasted = steps[-1]["time"] - steps[0]["since"]
    syncs = [step["sync_seconds"] for step in steps if step["version"] != step["previous"]]
    lags = [sum(v["version"] > step["version"] and v["time"] <= step["time"] for v in versions) for step in steps]
    roots = {v["version"]: v["root"] for v in versions}
    return WorkerResult(
        rate=worker.rate,
        steps=len(steps),
        utilisation=len(steps) * spec.step_seconds / lasted,
        sync_seconds=median(syncs),
        bytes_a_sync=(steps[-1]["rx_bytes"] - steps[0]["rx_since"]) / len(syncs),
        steps_a_minute=60 * len(steps) / lasted,
        lag=max(lags),
        round_trip=ready["round_trip"],
        identical=None if end is None else roots.get(end["version"]) == end["root"],
    )


def predicted(run: ReplayResult, worker: WorkerResult, density: float) -> MethodPlan | None:
    """The plan for one worker of a shaped run, from what is known without it: link, step, density, and the round trip
    to an idle store. None where the link has no rate."""
    if worker.rate is None:
        return None
    scenario = Scenario(
        params=run.params,
        density=density,
        step_seconds=run.step_seconds,
        bandwidth=worker.rate,
        upload_bandwidth=GIGABIT,
        cores=THREADS,
        round_trip_seconds=worker.round_trip,
    )
    return make_plan(scenario).methods[run.method]


def worker_sync(plan: MethodPlan) -> float:
    """The worker's own part of a sync, in seconds."""
    return sum(plan.phases[name] for name in ("download", "verify", "apply"))


def error(measured: float, plan: float) -> float:
    """How far the plan is from the measurement, as a share of it."""
    return plan / measured - 1


def density_of(runs: Sequence[ReplayResult]) -> float:
    """The trace's density, from a run that published patches."""
    return next(run.density for run in runs if run.density is not None)


def rows(runs: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """One object a worker and run, with the plan beside it."""
    density, found = density_of(runs), []
    for run in runs:
        for worker in run.workers:
            plan = predicted(run, worker, density)
            row: dict[str, Any] = {"method": run.method, "shaped": run.shaped, **asdict(worker)}
            if plan:
                row["planned_utilisation"] = plan.worker_utilisation
                row["planned_utilisation_error"] = error(worker.utilisation, plan.worker_utilisation)
                row["papers_utilisation"] = plan.utilisation
                row["planned_sync_seconds"] = worker_sync(plan)
                row["planned_bytes"] = plan.sync_bytes
            found.append(row)
    return found


def text(runs: Sequence[ReplayResult]) -> str:
    """The table as lines."""
    head = (
        f"{'method':<8} {'link':>10} | {'bytes/sync':>11} {'planned':>11} | {'sync s':>7} {'planned':>7} | "
        f"{'utilis.':>7} {'planned':>7} {'error':>6} {'paper':>6} | {'steps/min':>9} {'lag':>3} bits"
    )
    lines = [head, "-" * len(head)]
    for row in rows(runs):
        link = f"{row['rate'] / 1e6:.0f} Mbit/s" if row["rate"] else "unshaped"
        bits = {None: "-", True: "ok", False: "DIFFER"}[row["identical"]]
        planned = [""] * 5
        if "planned_bytes" in row:
            planned = [
                f"{row['planned_bytes']:,}",
                f"{row['planned_sync_seconds']:.3f}",
                f"{row['planned_utilisation']:.1%}",
                f"{row['planned_utilisation_error']:+.1%}",
                f"{row['papers_utilisation']:.1%}",
            ]
        lines.append(
            f"{row['method']:<8} {link:>10} | {row['bytes_a_sync']:>11,.0f} {planned[0]:>11} | "
            f"{row['sync_seconds']:>7.3f} {planned[1]:>7} | {row['utilisation']:>7.1%} {planned[2]:>7} {planned[3]:>6} "
            f"{planned[4]:>6} | {row['steps_a_minute']:>9.1f} {row['lag']:>3} {bits}"
        )
    for run in runs:
        lines.append(
            f"trainer, {run.method}{'' if run.shaped else ' unshaped'}: {run.versions_a_minute:.1f} versions a minute, "
            f"{run.publish_seconds * 1e3:.0f} ms to publish one, {run.version_bytes:,.0f} bytes each, "
            f"{run.trainer_sent_bytes:,} bytes sent"
        )
    return "\n".join(lines)
