"""The shaped-network run without a network: its commands, its replay, and the arithmetic on its logs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.network import methods, replay, reward, shape, table
from benchmarks.network.results import ReplayResult, WorkerResult, summary
from benchmarks.network.run import WORKER_RATES, nodes, read_log
from benchmarks.network.shape import Node, build_commands, delete_commands, link_command
from benchmarks.network.spec import Spec
from pulse_rl import MemoryStore
from pulse_rl.plan import METHODS, Scenario, make_plan
from tests.support.states import weights

STEP = 0.5


def test_commands_build_a_bridge_and_shape_both_ends() -> None:
    commands = [" ".join(command) for command in build_commands([Node("a", 1), Node("b", 2, 50e6)])]
    assert commands[0] == "ip netns add pulse-net-hub"
    shaped = [command for command in commands if "tbf" in command]
    assert [command.split("root")[0] for command in shaped] == [
        "tc -n pulse-net-hub qdisc add dev port2 ",
        "tc -n pulse-net-b qdisc add dev eth0 ",
    ]
    assert all("rate 50000000bit burst 16000b limit 312500b" in command for command in shaped)
    assert "ip -n pulse-net-a addr add 10.77.0.1/24 dev eth0" in commands
    assert Node("a", 1).inside(["ls"]) == ["ip", "netns", "exec", "pulse-net-a", "ls"]


def test_a_node_is_cut_off_at_the_bridge() -> None:
    assert [" ".join(link_command(Node("b", 2), up=up)) for up in (False, True)] == [
        "ip -n pulse-net-hub link set dev port2 down",
        "ip -n pulse-net-hub link set dev port2 up",
    ]


def test_only_our_own_namespaces_are_deleted() -> None:
    assert delete_commands(["pulse-net-hub", "other", "pulse-1"]) == [["ip", "netns", "delete", "pulse-net-hub"]]


def test_every_name_fits_and_is_ours() -> None:
    for shaped in (True, False):
        found = nodes(shaped)
        assert len({node.address for node in found}) == len(found) == 2 + len(WORKER_RATES)
        assert all(node.namespace.startswith(shape.PREFIX) for node in found)
        assert [node.rate for node in found[2:]] == (list(WORKER_RATES) if shaped else [None] * 4)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="needs root"):
        shape.require_root()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The commands that would have run; the one that adds pulse-net-b fails."""
    commands: list[str] = []

    def run(command: list[str]) -> None:
        commands.append(" ".join(command))
        if "pulse-net-b" in command:
            raise SystemExit("no such device")

    left = {"ip netns list": "pulse-net-old (id: 3)\nother\n", "ip netns pids pulse-net-old": ""}
    monkeypatch.setattr(shape, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(shape, "_run", run)
    monkeypatch.setattr(shape, "_output", lambda command: left[" ".join(command)])
    monkeypatch.setattr(shape.subprocess, "run", lambda command, **_: commands.append(" ".join(command)))
    return commands


def test_a_network_that_fails_half_way_is_taken_down(ran: list[str]) -> None:
    with pytest.raises(SystemExit, match="no such device"), shape.network([Node("a", 1), Node("b", 2)]):
        pass
    assert ran[0] == "ip netns delete pulse-net-old"  # what a killed run left goes first
    assert ran[1] == "ip netns add pulse-net-hub"
    assert ran[-3:] == [f"ip netns delete pulse-net-{name}" for name in ("hub", "a", "b")]


def test_a_network_in_use_is_left_alone(ran: list[str]) -> None:
    with shape.network([Node("a", 1)]):
        before = list(ran)
        with pytest.raises(SystemExit, match="using the shaped network"):
            shape.clean()
        with pytest.raises(SystemExit, match="using the shaped network"), shape.network([Node("c", 1)]):
            pass
        assert ran == before
    assert shape.clean() == ["pulse-net-old"]


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
    spec = Spec("context", STEP, "", (), str(tmp_path), "")
    seen = [flat.tolist() for _ in islice(replay.step(spec, methods.Weights(flat, {"w": (5,)})), 7)]
    assert seen[2] == [0, 101, 102, 103, 0]
    assert seen[5] == [0] * 5
    assert seen[6] == seen[0] == [0, 101, 0, 0, 0]


def write_logs(folder: Path, sync_seconds: float) -> Spec:
    """A trainer that publishes each second, and workers of steps of `STEP` seconds that sync in a constant time."""
    spec = Spec("context", STEP, "", tuple(node.name for node in nodes(True)[2:]), "", str(folder))
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


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"a": 1}\n{"a": 2')
    assert read_log(tmp_path / "log") == [{"a": 1}]


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


def test_claims_hold_for_what_was_planned_and_fail_otherwise() -> None:
    runs = [ideal("context", False), ideal("context", True), ideal("zstd", True), ideal("full", True)]
    assert all(claim.holds for claim in table.claims(runs))
    assert "DIFFER" not in table.text(runs)

    def with_worker(run: ReplayResult, **changes: object) -> ReplayResult:
        workers = list(run.workers)
        workers[WORKER_RATES.index(table.CLAIMED_RATE)] = replace(workers[1], **changes)  # type: ignore[arg-type]
        return replace(run, workers=tuple(workers))

    slow = [claim.holds for claim in table.claims([runs[0], with_worker(runs[1], utilisation=0.7), *runs[2:]])]
    assert slow == [False, True, False, True, True, True]
    fast = [claim.holds for claim in table.claims([*runs[:3], with_worker(runs[3], utilisation=0.2)])]
    assert fast == [True, False, True, True, False, True]
    wrong = [claim.holds for claim in table.claims([with_worker(runs[0], identical=False), *runs[1:]])]
    assert wrong == [True, True, True, True, True, False]
    assert "DIFFER" in table.text([with_worker(runs[0], identical=False)])


def test_reward_over_time(tmp_path: Path) -> None:
    spec = Spec("zstd", 0.0, "", ("worker10",), "", str(tmp_path))
    step = {"event": "step", "density": 0.02, "bytes": 100, "learn_seconds": 0.5, "publish_seconds": 0.1}
    evaluated = [{"event": "evaluated", "seconds": float(s), "reward": s / 100} for s in (0, 10, 20, 30)]
    spec.log("trainer").write_text("".join(json.dumps(line) + "\n" for line in [step, step, step, *evaluated]))
    batches = [{"event": "batch", "previous": v - 1, "version": v, "sync_seconds": 0.3} for v in (1, 2)]
    spec.log("worker10").write_text("".join(json.dumps(line) + "\n" for line in batches))
    run = reward.rl_result(spec)
    assert (run.steps, run.steps_a_minute, run.sync_seconds) == (3, pytest.approx(6), {"worker10": 0.3})
    assert "0.3000 at 30 s" in reward.text([run])
