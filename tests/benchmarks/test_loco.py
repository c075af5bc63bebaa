"""The PULSELoCo benchmark: its arithmetic on made-up rounds, and a tiny job of every method among real processes."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.loco import convergence, cost, methods, plot, scaling, sites, tasks, traffic, trainer
from benchmarks.loco.jobs import NOT_STEADY, SYNC_EVERY, TRAINERS, Job, JobResult, RoundRecord
from tests.support.loco_reference import pulse_loco
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.slow  # the benchmark imports transformers: seconds

PARAMETERS = 300


class Tiny:
    """A task whose gradients are noise, and which is evaluated by the norm of its weights."""

    def __init__(self, seed: int, rank: int) -> None:
        start = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(7)) * 0.02
        self.masters = {"w": torch.nn.Parameter(start)}
        self._generator = torch.Generator().manual_seed(100 * seed + rank)
        self.casts = 0

    def gradient(self, step: int) -> float:
        self.masters["w"].grad = torch.randn(PARAMETERS, generator=self._generator)
        return float(step)

    def cast(self) -> None:
        self.casts += 1

    def evaluate(self) -> tuple[float, float]:
        return float(self.masters["w"].detach().norm()), 2.0


def carry_out(process: Trainer) -> dict[str, list[RoundRecord]]:
    process.connect("start")
    tasks.TASKS["tiny"] = Tiny
    trainer.TASKS = tasks.TASKS
    return {
        method: trainer.run(
            Job("tiny", method, 1e-4, 3, 0, 4, 0.1 if method == methods.TOP_K else None, evaluate=True, dense=True),
            process.rank,
            "lo",
        )
        for method in methods.METHODS
    }


def test_a_tiny_job_of_every_method() -> None:
    found = together(carry_out, 3)
    for method in methods.METHODS:
        for rounds in zip(*(seen[method] for seen in found), strict=True):
            assert len({s.held_out_reward for s in rounds}) == 1, "all trainers hold the same weights after a round"
            assert {s.parameters for s in rounds} == {PARAMETERS}
            assert all(s.outer_seconds > 0 and s.dense_seconds and s.interface_bytes for s in rounds)
        one = found[0][method]
        assert [s.number for s in one] == [1, 2, 3]
        assert [s.reward for s in one] == [3.5, 11.5, 19.5]
        assert all(before.held_out_reward != after.held_out_reward for before, after in pairwise(one))
    dense = 4 * PARAMETERS
    assert {s.payload_bytes for s in found[0][methods.DDP]} == {SYNC_EVERY * dense}
    assert {s.sent_bytes for s in found[0][methods.DDP]} == {SYNC_EVERY * dense * 4 // 3}
    assert {s.payload_bytes for s in found[0][methods.DILOCO]} == {dense}
    for seen in found[0][methods.PULSE]:
        assert 0 < seen.entries < PARAMETERS
        assert seen.u32_bytes == 8 * seen.entries
        assert seen.gap16_bytes == 6 * seen.entries
    assert {s.entries for s in found[0][methods.TOP_K]} == {PARAMETERS // 10}


def test_plain_layouts() -> None:
    blocks = [np.array([0, 0xFFFF, 0x20000], np.uint32), np.array([], np.uint32), np.array([0xFFFF], np.uint32)]
    assert methods.u32_bytes(blocks) == 8 * 4
    # Gaps of 0, 0xFFFE, 0x10000 and 0xFFFF: the last two do not fit into one number with an escape left.
    assert methods.gap16_bytes(blocks) == 6 * 4 + 2 * 2


def record(number: int = 6, **facts: object) -> RoundRecord:
    made = RoundRecord(
        number=number,
        parameters=1000,
        entries=20,
        payload_bytes=100,
        sent_bytes=400,
        interface_bytes=500,
        u32_bytes=160,
        gap16_bytes=120,
        seconds={"gate": 0.1, "exchange": 0.2},
        outer_seconds=0.4,
        dense_seconds=0.8,
        reward=0.5,
        held_out_reward=0.6,
        held_out_loss=0.3,
        root="00",
    )
    return replace(made, **facts)


def result(**facts: object) -> JobResult:
    """Five rounds that do not count yet, and two that do."""
    early = [record(number, payload_bytes=1, outer_seconds=9.0) for number in range(1, 6)]
    return [[*early, record(6, **facts), record(7, **facts)] for _ in range(TRAINERS)]


def test_traffic_ratios() -> None:
    job = Job(tasks.ARITHMETIC, methods.PULSE, 1e-5, 7, 0, 20)
    row = traffic.row(job, result())
    assert (row.payload, row.density, row.bytes_per_entry) == (100, 0.02, 5)
    assert (row.dense_payload, row.dense_link) == (4000, 6000)
    diloco, ddp, _ = traffic.TARGETS
    assert diloco.measured(row) == {"payload": 40, "link": 15}
    assert ddp.measured(row) == {"payload": 320, "link": 120}
    text = traffic.text([row])
    assert (
        f"{methods.PULSE}, arithmetic, lr 1e-05, at least 17 times less than DiLoCo? payload 40.0, yes; link 15.0, NO"
        in text
    )
    assert "u32 160 bytes (25.0 times less)" in text
    short = traffic.row(job, [rounds[:3] for rounds in result()])
    assert NOT_STEADY not in text
    assert NOT_STEADY in traffic.text([row, short])
    without = traffic.row(job, result(interface_bytes=None))
    assert without.interface is None
    assert " - |" in traffic.text([without])


def test_cost_is_that_of_the_slowest_trainer() -> None:
    job = Job(tasks.PRETRAINED, methods.PULSE, 1e-6, 7, 0, 20, dense=True)
    measured = result()
    measured[2][5] = record(6, outer_seconds=1.6)
    row = cost.row(job, measured)
    assert row.outer == [1.6, 0.4]
    assert row.ratios == pytest.approx([2.0, 0.5])
    assert row.phases["gate"] == pytest.approx(0.1)
    assert row.phases["verify"] == 0
    assert "less than a dense all-reduce? NO, 1.25 of it" in cost.text([row], cost.LINK)
    diloco = cost.row(replace(job, method=methods.DILOCO), result(outer_seconds=0.8))
    text = cost.text([cost.row(job, result()), diloco], None)
    # Of DiLoCo's rounds all but the first count: four long ones and two short ones.
    assert "less than a dense all-reduce? yes, 0.50 of it; 0.04 of DiLoCo's outer round" in text


def curves(**off: float) -> list[convergence.Curve]:
    return [
        convergence.Curve(m, s, [0.1, 0.5 + 0.01 * s + off.get(m, 0.0)], [1.0, 0.3], [4e5, 6e5], [8e5, 1e6], 0.1)
        for m in methods.METHODS
        for s in convergence.SEEDS
    ]


def test_convergence_verdict() -> None:
    made = curves(**{methods.PULSE: 0.001, methods.TOP_K: -0.1})
    # The mean of both rounds halves the offsets, since fewer rounds than `LAST` all count.
    lines = {line.split(" within")[0]: line for line in convergence.verdicts(made)}
    assert "reward yes (off by +0.0005" in lines[methods.PULSE]
    assert "reward NO (off by -0.0500" in lines[methods.TOP_K]
    assert f"{methods.DILOCO:18}  0.3075 ± 0.0065" in convergence.text(made)
    alone = convergence.text([curve for curve in made if curve.seed == 0])
    assert f"{methods.DILOCO:18}  0.3000 ± nan" in alone
    assert "within" not in alone


def test_a_curve_is_the_mean_of_the_trainers() -> None:
    of_round = [record(1, held_out_reward=r, payload_bytes=b) for r, b in ((0.1, 10), (0.2, 20), (0.3, 30), (0.6, 40))]
    curve = convergence.curve(convergence.job(methods.PULSE, 1, 1), [[s] for s in of_round])
    assert curve.rewards == pytest.approx([0.3])
    assert curve.payload_bytes == 25
    assert (curve.links, curve.until(0).payload_bytes) == ([400], 0)


def test_bytes_at_equal_reward() -> None:
    """The round in which a method gets there counts in part."""
    rewards, sizes = [0.1, 0.3, 0.2, 0.5], [10.0, 20.0, 30.0, 40.0]
    assert convergence.bytes_until(rewards, sizes, 0.05) == 10
    assert convergence.bytes_until(rewards, sizes, 0.2) == pytest.approx(20)
    assert convergence.bytes_until(rewards, sizes, 0.35) == pytest.approx(80)
    assert convergence.bytes_until(rewards, sizes, 0.51) is None
    worse, better = ({methods.PULSE: off} for off in (-0.2, 0.2))
    lines = [convergence.equal_reward(curves(**off)) for off in (worse, better)]
    found = [next(line for line in of if line.startswith(methods.PULSE)) for of in lines]
    # Until DiLoCo's first round, after which all are alike, and until its last one.
    assert found[0].split()[2:] == ["0.40", "|", "0.80"] * 3 + ["-", "|", "-"]
    assert found[1].split()[-3:] == ["0.80", "|", "1.47"]
    after = [of[of.index(line) + 1].split() for of, line in zip(lines, found, strict=True)]
    assert after[0] == ["times", "less", *["1.0", "|", "1.0"] * 3, "-", "|", "-"]
    assert after[1][-3:] == ["1.2", "|", "1.2"]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    plot.draw(curves(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_problems_are_never_drawn() -> None:
    without = set(tasks.held_out())
    assert len(without) == tasks.HELD_OUT
    drawn = tasks.draw(random.Random(0), 500, without)
    assert len(drawn) == 500
    assert not without & set(drawn)


def test_jobs_travel_as_json() -> None:
    for quick in (False, True):
        for job in traffic.jobs(quick):
            assert Job(**asdict(job)) == job
            assert job.method in methods.METHODS
            assert job.task in tasks.TASKS


def test_rounds_behind_are_those_since_the_reference_had_the_reward() -> None:
    rising = [0.1 * n for n in range(1, 9)]
    reference = convergence.Curve(methods.DILOCO, 0, rising, rising, rising, rising, 1.0)
    late = convergence.Curve(methods.PULSE, 0, [0.05, *(r - 0.15 for r in rising[1:])], rising, rising, rising, 1.0)
    assert convergence.rounds_behind(late, reference) == pytest.approx(1.5)
    assert convergence.rounds_behind(reference, late) is None


def scaled(process: Trainer) -> tuple[scaling.Row, list[int]]:
    """Of trainers as threads of each process, and what the processes themselves count."""
    process.connect("start")
    tasks.TASKS["tiny"] = Tiny
    job = Tiny(0, process.rank)
    optimizer = torch.optim.AdamW(job.masters.values(), lr=1e-4, weight_decay=0.0)
    with pulse_loco(job.masters, optimizer, sync_every=SYNC_EVERY) as loop:
        for step in range(2 * SYNC_EVERY):
            job.gradient(step)
            torch.nn.utils.clip_grad_norm_(job.masters.values(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 * min(1.0, (step + 1) / traffic.WARM_UP)
            optimizer.step()
    dist.destroy_process_group()  # the threads are trainers of another world
    assert loop.last_round is not None
    found = [loop.last_round.entries, loop.last_round.sent_bytes, loop.last_round.summed]
    return scaling.measure("tiny", 1e-4, process.size, gate_sums=False, rounds=2), found


def test_threads_count_what_processes_count() -> None:
    found = together(scaled, 4)
    row = found[0][0]
    assert row.entries == fmean(counted[0] for _, counted in found)
    assert row.link == fmean(counted[1] for _, counted in found)
    assert row.summed == found[0][1][2]
    assert row.scattered == (row.link < row.gathered)
    assert row.entries <= row.union <= 4 * row.entries
    more = replace(row, trainers=8, link=1.2 * row.link)
    growth = 1.2 * (1 - 1 / 4) / (1 - 1 / 8)
    assert scaling.beyond(row, more, 8) == pytest.approx(8 * row.parameters / more.link * (1 - 1 / 8))
    assert scaling.beyond(row, more, 32) == pytest.approx(scaling.beyond(row, more, 8) / growth**2)
    assert "from 8 trainers on: 8: " in scaling.text([row, more])
    assert "from 8 trainers on" not in scaling.text([replace(row, gated=True), more])


def test_rows_of_sites_count_what_leaves_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "tiny", Tiny)
    found = {
        method: sites.measure("tiny", 1e-4, method, 2, members=2, evaluate=method != "one level")
        for method in sites.METHODS
    }
    dense = 4 * PARAMETERS
    roots = 3 * 32
    assert (found["DiLoCo"].link, found["DiLoCo"].between) == (1.5 * dense + roots, 1.5 * dense)
    one, two = found["one level"], found["two levels"]
    assert 0 < one.between < 2 * one.link
    assert 0 < two.between < 2 * two.link
    assert (one.reward, two.loss) == (None, 2.0)
    lines = sites.text(list(found.values())).splitlines()
    assert len(lines) == 8
    assert f"{two.between:,.0f}" in lines[-1]
