"""What the logs of a replay say."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.network.run import Lines, nodes, read_log
from benchmarks.network.shape import Node
from benchmarks.network.spec import Spec


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
