"""The shaped-network run without a network: its commands, its replay, and the arithmetic on its logs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.network import methods, replay, table
from benchmarks.network.run import WORKER_RATES, Spec, nodes
from benchmarks.network.shape import delete_commands
from benchmarks.network.table import ReplayResult, WorkerResult, summary
from pulse_rl import MemoryStore
from pulse_rl.plan import Scenario, make_plan
from tests.support.plans import METHODS
from tests.support.states import weights

STEP = 0.5


def test_only_our_own_namespaces_are_deleted() -> None:
    assert delete_commands(["pulse-net-hub", "other", "pulse-1"]) == [["ip", "netns", "delete", "pulse-net-hub"]]


@pytest.mark.parametrize("method", METHODS)
def test_workers_follow_by_every_method(method: str, rng: np.random.Generator) -> None:
    start, store = weights(rng, 500).array, MemoryStore()
    ours = methods.Weights(start.copy(), {"a": (20, 20), "b": (100,)})
    theirs = methods.Weights(start.copy(), {"a": (20, 20), "b": (100,)})
    trainer = methods.trainer(method, store, ours)
    assert trainer.publish().version == 0
    worker = methods.worker(method, store, theirs)
    for version in (1, 2):
        ours.flat[version::50] ^= 1
        done = trainer.publish()
        assert (done.version, done.density) == (version, None if method == "full" else 0.02)
        worker.sync()
        assert (worker.version, worker.root()) == (version, done.root)
        worker.sync()  # nothing new
        assert worker.version == version
    assert np.array_equal(theirs.flat, ours.flat)


def test_the_replay_goes_forth_and_back(tmp_path: Path) -> None:
    chain = tmp_path / replay.RUN / "chain"
    chain.mkdir(parents=True)
    arrays = {}
    for step in (1, 2, 3):
        arrays[f"index{step:05d}"] = np.array([step], np.uint32)
        arrays[f"bits{step:05d}"] = np.array([100 + step], np.uint16)
    np.savez(chain / "deltas.npz", **arrays)
    flat = np.zeros(5, np.uint16)
    spec = Spec("auto", STEP, "", (), str(tmp_path), "")
    seen = [flat.tolist() for _ in islice(replay.step(spec, flat), 7)]
    assert seen[2] == [0, 101, 102, 103, 0]
    assert seen[5] == [0] * 5
    assert seen[6] == seen[0] == [0, 101, 0, 0, 0]


def write_logs(folder: Path, sync_seconds: float) -> Spec:
    """A trainer that publishes each second, and workers of steps of `STEP` seconds that sync in a constant time."""
    spec = Spec("auto", STEP, "", tuple(node.name for node in nodes(True)[2:]), "", str(folder))
    lines = [{"event": "ready", "params": 1000, "tx_bytes": 0, "time": 0.0}]
    for version in range(1, 7):
        facts = {"version": version, "density": 0.01, "bytes": 10, "seconds": 0.1, "root": f"root {version}"}
        lines.append({"event": "published", "time": float(version), "tx_bytes": 100 * version, **facts})
    spec.log("trainer").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for worker in spec.workers:
        now, previous = 0.0, 0
        lines = [{"event": "ready", "round_trip": 0.001}]
        for number in range(5):
            version, done = int(now), now + sync_seconds + STEP
            facts = {"previous": previous, "version": version, "sync_seconds": sync_seconds}
            lines.append(
                {
                    "event": "step",
                    "since": now,
                    "time": done,
                    "rx_since": 7 * number,
                    "rx_bytes": 7 * number + 7,
                    **facts,
                }
            )
            now, previous = done, version
        lines.append({"event": "end", "version": previous, "root": f"root {previous}"})
        spec.log(worker).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    return spec


def test_the_arithmetic_of_a_run(tmp_path: Path) -> None:
    run = summary(write_logs(tmp_path, sync_seconds=0.5), shaped=True, seconds=5)
    assert (run.params, run.density, run.version_bytes, run.trainer_sent_bytes) == (1000, pytest.approx(0.01), 10, 600)
    assert run.versions_a_minute == pytest.approx(60)
    for worker, rate in zip(run.workers, WORKER_RATES, strict=True):
        # Each cycle lasts a second; the first, which found nothing new, does not count.
        assert (worker.rate, worker.steps, worker.identical) == (rate, 4, True)
        assert worker.utilisation == pytest.approx(0.5)
        assert worker.steps_a_minute == pytest.approx(60)
        assert worker.bytes_a_sync == 7
        assert worker.lag == 1


def test_a_worker_that_never_got_a_version_is_said(tmp_path: Path) -> None:
    spec = write_logs(tmp_path, sync_seconds=0.5)
    spec.log("worker10").write_text('{"event": "ready", "round_trip": 0.1}\n')
    with pytest.raises(SystemExit, match="worker10 made no step"):
        summary(spec, shaped=True, seconds=5)


def ideal(method: str, shaped: bool) -> ReplayResult:
    """A run whose workers measure what the planner predicts."""
    workers = []
    for rate in WORKER_RATES:
        scenario = Scenario(22_600_000, 0.003, 0.7, rate, upload_bandwidth=1e9, cores=1)
        plan = make_plan(scenario).methods[method]
        workers.append(
            WorkerResult(rate if shaped else None, 40, plan.worker_utilisation, 0.1, 1.0, 60.0, 1, 0.0, identical=True)
        )
    density = None if method == "full" else 0.003
    return ReplayResult(method, shaped, 0.7, 30.0, 22_600_000, density, 1.0, 0.1, 85.0, 1, tuple(workers))


def test_the_plan_stands_beside_what_is_measured() -> None:
    runs = [ideal("auto", False), ideal("auto", True), ideal("zstd", True), ideal("full", True)]
    rows = table.rows(runs)
    assert all(row["planned_utilisation_error"] == pytest.approx(0) for row in rows if row["shaped"])
    assert all("planned_utilisation" not in row for row in rows if not row["shaped"])
    assert "DIFFER" not in table.text(runs)
    wrong = replace(runs[0], workers=(replace(runs[0].workers[0], identical=False), *runs[0].workers[1:]))
    assert "DIFFER" in table.text([wrong, *runs[1:]])
