"""What was measured beside what `pulse_rl.plan` predicts for it, and the claims that the run has to bear out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.network.results import ReplayResult, WorkerResult
from benchmarks.network.run import GIGABIT
from benchmarks.network.spec import THREADS
from pulse_rl.plan import Scenario, make_plan
from pulse_rl.plan.model import MethodPlan

CLAIMED_RATE = 50e6
KEPT, TENTH, PLANNED = 0.9, 0.1, 0.15


@dataclass(frozen=True)
class Claim:
    """A sentence with its number, and whether the run bears it out."""

    text: str
    holds: bool


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


def claims(runs: Sequence[ReplayResult]) -> list[Claim]:
    """Of the 50 Mbit/s link: patches keep 90% of the unshaped utilisation, full leaves less than 10%, plans hold."""
    found = {(run.method, run.shaped): run for run in runs}
    density = density_of(runs)

    def at(method: str, shaped: bool) -> tuple[ReplayResult, WorkerResult]:
        run = found[method, shaped]
        index = next(i for i, worker in enumerate(found["full", True].workers) if worker.rate == CLAIMED_RATE)
        return run, run.workers[index]

    unshaped = at("auto", False)[1].utilisation
    ours, full = at("auto", True)[1].utilisation, at("full", True)[1].utilisation
    checked = [
        Claim(f"patches keep {ours / unshaped:.1%} of the unshaped utilisation", ours >= KEPT * unshaped),
        Claim(f"full syncs leave a utilisation of {full:.1%}", full < TENTH),
    ]
    for method in ("auto", "zstd", "full"):
        run, worker = at(method, True)
        plan = predicted(run, worker, density)
        assert plan is not None
        off = error(worker.utilisation, plan.worker_utilisation)
        checked.append(Claim(f"the plan for {method} is off by {off:+.1%}", abs(off) <= PLANNED))
    broken = [worker for run in runs for worker in run.workers if worker.identical is False]
    checked.append(Claim(f"{len(broken)} workers ended with other bits than the trainer's", not broken))
    return checked


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
