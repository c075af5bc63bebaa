"""examples/ray_fleet.py under a real Ray: processes are killed, added and removed while it runs."""

from __future__ import annotations

import re
from pathlib import Path

import ray

import pulse_rl
from examples.ray_fleet import Fleet
from tests.support.programs import ran

WARM_UP = 60  # some answers are right then, so that the steps change weights


def test_workers_and_the_trainer_may_die_and_all_end_with_the_same_bits(
    cluster: None, tmp_path: Path
) -> None:
    fleet = Fleet(str(tmp_path), WARM_UP, cpus=0.5)
    first, second = fleet.join(), fleet.join()
    while {fleet.step().worker for _ in range(2)} != {first, second}:
        pass

    fleet.kill(first)
    while fleet.step().worker != first:  # Ray has started it again
        pass
    ray.kill(fleet.trainer, no_restart=False)
    before = fleet.step()
    third = fleet.join()
    while fleet.step().worker != third:
        pass
    fleet.leave(second)
    last = fleet.step()

    held = fleet.held()
    assert held.keys() == {"trainer", first, third}
    reports = list(pulse_rl.verify_stream(str(tmp_path), "policy"))
    assert all(report.ok for report in reports)
    assert set(held.values()) == {(last.version, reports[-1].root)}
    assert len({report.root for report in reports}) > last.version // 2  # it has trained
    assert 0 < before.version < last.version


def test_the_program_kills_and_adds_a_worker_and_proves_the_bits(tmp_path: Path) -> None:
    settings = ("--workers", 2, "--steps", 8, "--kill-at", 2, "--add-at", 3, "--remove-at", 6)
    program = ("-m", "examples.ray_fleet", "--store", tmp_path, "--warm-up", WARM_UP)
    said = ran(*program, *settings, seconds=600)
    assert re.findall(r"(\S+) (was killed|was added|has left)", said) == [
        ("worker-0", "was killed"),
        ("worker-2", "was added"),
        ("worker-0", "has left"),
    ]
    roots = dict(re.findall(r"(\S+) +version +8  root (\w{64})", said))
    assert roots.keys() == {"trainer", "worker-1", "worker-2"}
    assert len(set(roots.values())) == 1
    assert said.splitlines()[-1] == "the same bits everywhere"
