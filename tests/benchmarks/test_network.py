"""The network's run without a network: its commands, and its replay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import measure
from benchmarks.network import methods, regions
from benchmarks.network.run import Spec
from benchmarks.network.shape import delete_commands
from pulse_rl import MemoryStore
from tests.support.plans import METHODS
from tests.support.states import weights


def test_only_our_own_namespaces_are_deleted() -> None:
    assert delete_commands(["pulse-net-hub", "other", "pulse-1"]) == [
        ["ip", "netns", "delete", "pulse-net-hub"]
    ]


@pytest.mark.parametrize("method", METHODS)
def test_workers_follow_by_every_method(
    method: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The paper's layout is one of the whole process, which goes on to other tests.
    monkeypatch.setattr(measure.pending, "code_blocks", measure.pending.code_blocks)
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


def test_the_arithmetic_of_a_run(tmp_path: Path) -> None:
    """Version 3 is passed over; the last line is torn."""
    spec = Spec("auto", 4.0, "", "", str(tmp_path))
    ready = {"event": "ready", "round_trip": 0.08, "upload_rate": 1e9, "params": 1000}
    published = [
        {
            "event": "published",
            "time": 10.0 * v,
            "seconds": 0.5,
            "version": v,
            "root": f"root {v}",
            "density": 0.01 * v,
        }
        for v in (1, 2, 3, 4)
    ]
    synced = [
        {
            "event": "synced",
            "time": 10.0 * v + wait,
            "seconds": 0.25,
            "version": v,
            "root": f"root {v}",
            "rx": 100 * v,
        }
        | {"fallbacks": v == 4}
        for v, wait in ((1, 1.0), (2, 2.0), (4, 3.0))
    ]
    for role, lines in (("trainer", [ready, *published]), ("worker", [ready, *synced])):
        spec.log(role).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    row = regions.summary(spec, 50e6)
    assert row["versions"] == 3
    assert row["bytes"] == 200
    assert row["idle_seconds"] == 0.25
    assert row["fallbacks"] == 1
    assert (row["newest_seconds"], row["newest_worst"], row["identical"]) == (2.5, 3.5, True)
    assert row["density"] == pytest.approx(0.025)
    assert 0 < regions.planned(row, row["density"])["planned_idle_seconds"] < 2
    spec.log("worker").write_text(json.dumps(ready) + "\n")
    with pytest.raises(SystemExit, match="moved to no version"):
        regions.summary(spec, 50e6)
