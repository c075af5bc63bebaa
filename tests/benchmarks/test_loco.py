"""The PULSELoCo benchmark: its arithmetic on made-up rounds, and tiny runs among real processes and among threads."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from statistics import fmean

import pytest
import torch
import torch.distributed as dist

from benchmarks import trace
from benchmarks.loco import __main__ as command
from benchmarks.loco import learning, methods, tables, tasks, traffic, trainer
from benchmarks.loco.jobs import SYNC_EVERY, TRAINERS, WARM_UP, Job, JobResult, RoundRecord
from benchmarks.loco.learning import Outcome, Variant
from tests.support.loco_reference import pulse_loco
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.slow  # the benchmark imports transformers: seconds

PARAMETERS = 300

# Made-up words, enough for the prompts of words to differ.
VOCABULARY = [a + b + c for a in "bcdfglmnprst" for b in ("ana", "elo", "iru", "osa", "ute") for c in "bdgkmnprstvz"]


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


# -- among processes


def carry_out(process: Trainer) -> dict[str, list[RoundRecord]]:
    process.connect("start")
    tasks.TASKS["tiny"] = Tiny
    trainer.TASKS = tasks.TASKS
    return {
        method: trainer.run(
            Job("tiny", method, 1e-4, 3, 0, 4, dense=True),
            process.rank,
            "lo",
        )
        for method in methods.METHODS
    }


def test_a_tiny_job_of_every_method() -> None:
    found = together(carry_out, 3)
    for method in methods.METHODS:
        for rounds in zip(*(seen[method] for seen in found), strict=True):
            assert len({s.root for s in rounds}) == 1, "all trainers hold the same theta after a round"
            assert {s.parameters for s in rounds} == {PARAMETERS}
            assert all(s.outer_seconds > 0 and s.dense_seconds and s.interface_bytes for s in rounds)
        one = found[0][method]
        assert [s.number for s in one] == [1, 2, 3]
        assert [s.reward for s in one] == [3.5, 11.5, 19.5]
        assert all(before.root != after.root for before, after in pairwise(one) if method != methods.DDP)
    dense = 4 * PARAMETERS
    assert {s.payload_bytes for s in found[0][methods.DDP]} == {SYNC_EVERY * dense}
    assert {s.sent_bytes for s in found[0][methods.DDP]} == {SYNC_EVERY * dense * 4 // 3}
    assert {s.payload_bytes for s in found[0][methods.DILOCO]} == {dense}
    assert all(0 < seen.entries < PARAMETERS for seen in found[0][methods.PULSE])
    assert {s.payload_bytes for s in found[0][methods.DILOCO_INT8]} == {PARAMETERS + 4}
    assert {s.payload_bytes for s in found[0][methods.DILOCO_FP4]} == {PARAMETERS // 2 + 4}
    assert {s.entries for s in found[0]["SparseLoCo 3%"]} == {3 * PARAMETERS // 100}


def test_jobs_travel_as_json() -> None:
    for quick in (False, True):
        for job in traffic.jobs(quick):
            assert Job(**asdict(job)) == job
            assert job.method in methods.METHODS
            assert job.task in tasks.TASKS


def record(number: int = 6, **facts: object) -> RoundRecord:
    made = RoundRecord(
        number=number,
        parameters=1000,
        entries=20,
        payload_bytes=100,
        sent_bytes=400,
        interface_bytes=500,
        seconds={"gate": 0.1, "exchange": 0.2},
        outer_seconds=0.4,
        dense_seconds=0.8,
        reward=0.5,
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
    assert (row.payload, row.density, row.interface, row.outer) == (100, 0.02, 500, [])
    assert (row.less_payload, row.less_link) == (40, 15)
    text = traffic.traffic_text([row])
    line = next(line for line in text.splitlines() if line.startswith(methods.PULSE))
    assert line.split("|")[1:] == ["    40.0   320.0 ", "    15.0   120.0"]
    short = traffic.row(job, [rounds[:3] for rounds in result()])
    assert traffic.NOT_STEADY not in text
    assert traffic.NOT_STEADY in traffic.traffic_text([row, short])
    assert " - |" in traffic.traffic_text([traffic.row(job, result(interface_bytes=None))])


def test_cost_is_that_of_the_slowest_trainer() -> None:
    job = Job(tasks.PRETRAINED, methods.PULSE, 1e-6, 7, 0, 20, dense=True)
    measured = result()
    measured[2][5] = record(6, outer_seconds=1.6)
    row = traffic.row(job, measured)
    assert (row.outer, row.dense) == ([1.6, 0.4], [0.8, 0.8])
    assert row.phases["gate"] == pytest.approx(0.1)
    assert row.phases["verify"] == 0
    assert "1.25 (" in traffic.cost_text([row], traffic.LINK)
    # Of DiLoCo's rounds all but the first count: four long ones and two short ones.
    assert len(traffic.row(replace(job, method=methods.DILOCO), result()).outer) == 6


# -- tables


def outcome(method: str, seed: int, rewards: list[float], **facts: object) -> Outcome:
    made = Outcome(
        title=method,
        method=method,
        task=tasks.ARITHMETIC,
        lr=1e-4,
        trainers=TRAINERS,
        sync_every=SYNC_EVERY,
        seed=seed,
        density=0.1,
        summed=0.2,
        payload=5e5,
        link=9e5,
        between=0.0,
        ring=1000,
        payloads=[4e5, 6e5],
        links=[8e5, 1e6],
        rewards=rewards,
        losses=[1.0, 0.3],
        reward=fmean(rewards),
        loss=0.65,
        ahead=None,
        consensus=None,
    )
    return replace(made, **facts)


def curves(**off: float) -> list[Outcome]:
    return [outcome(m, s, [0.1, 0.5 + 0.01 * s + off.get(m, 0.0)]) for m in methods.METHODS for s in range(4)]


def test_the_table_of_what_is_learnt() -> None:
    text = tables.text(curves(**{methods.PULSE: 0.001, methods.PAPER: -0.1}))
    # The mean of both rounds halves the offsets, since fewer rounds than `LAST` all count.
    assert f"{methods.DILOCO:44}  0.3075 ± 0.0065" in text
    assert f"{methods.PAPER:44}  0.2575 ± 0.0065" in text
    line = next(line for line in text.splitlines() if line.startswith(methods.PULSE))
    assert line.endswith(" -"), "DiLoCo never had its reward"
    alone = tables.text([found for found in curves() if found.seed == 0])
    assert f"{methods.DILOCO:44}  0.3000 ± nan" in alone
    other = outcome(methods.DILOCO, 0, [0.1, 0.5], trainers=8)
    assert [len(of) for of in tables.by_task([*curves(), other, replace(other, rewards=[])])] == [len(curves()), 1]


def test_bytes_at_equal_reward() -> None:
    """The round in which a method gets there counts in part."""
    rewards, sizes = [0.1, 0.3, 0.2, 0.5], [10.0, 20.0, 30.0, 40.0]
    assert tables.bytes_until(rewards, sizes, 0.05) == 10
    assert tables.bytes_until(rewards, sizes, 0.2) == pytest.approx(20)
    assert tables.bytes_until(rewards, sizes, 0.35) == pytest.approx(80)
    assert tables.bytes_until(rewards, sizes, 0.51) is None
    worse, better = ({methods.PULSE: off} for off in (-0.2, 0.2))
    lines = [tables.equal_reward(curves(**off)) for off in (worse, better)]
    found = [next(line for line in of if line.startswith(methods.PULSE)) for of in lines]
    # Until DiLoCo's first round, after which all are alike, and until its last one.
    assert found[0].split()[2:] == ["0.40", "|", "0.80"] * 3 + ["-", "|", "-"]
    assert found[1].split()[-3:] == ["0.80", "|", "1.47"]
    after = [of[of.index(line) + 1].split() for of, line in zip(lines, found, strict=True)]
    assert after[0] == ["times", "less", *["1.0", "|", "1.0"] * 3, "-", "|", "-"]
    assert after[1][-3:] == ["1.2", "|", "1.2"]


def test_rounds_behind_are_those_since_the_reference_had_the_reward() -> None:
    rising = [0.1 * n for n in range(1, 9)]
    reference = outcome(methods.DILOCO, 0, rising)
    late = outcome(methods.PULSE, 0, [0.05, *(r - 0.15 for r in rising[1:])])
    assert tables.rounds_behind(late, reference) == pytest.approx(1.5)
    assert tables.rounds_behind(reference, late) is None


def test_help_names_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["loco", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(group in printed for group in learning.GROUPS)


# -- what is never trained on


def test_held_out_problems_are_never_drawn() -> None:
    without = set(tasks.held_out())
    assert len(without) == tasks.HELD_OUT
    drawn = tasks.draw(random.Random(0), 500, without)
    assert len(drawn) == 500
    assert not without & set(drawn)


def test_trainers_apart_see_different_first_summands() -> None:
    seen = []
    for rank in range(TRAINERS):
        without = tasks.of_others(rank) | set(tasks.held_out())
        drawn = tasks.draw(random.Random(rank), 400, without)
        assert not set(tasks.held_out()) & set(drawn)
        seen.append({a for a, _ in drawn})
    assert all(not one & other for one, other in combinations(seen, 2))
    assert set.union(*seen) == set(range(100))


def test_held_out_prompts_are_never_trained_on() -> None:
    held_out = {text for text, _ in tasks.held_out_prompts(VOCABULARY)}
    assert len(held_out) == tasks.HELD_OUT_PROMPTS
    training = tasks.SplitPrompts(VOCABULARY, 1, held_out=False)
    fit = trace.Prompts(VOCABULARY, trace.FIT_SEED)
    for prompts, count in ((training, 4000), (fit, trace.FIT_STEPS * trace.PROMPTS)):
        assert not held_out & {prompts.one()[0] for _ in range(count)}
    # Without the split some of them would be.
    whole = trace.Prompts(VOCABULARY, 1)
    assert held_out & {whole.one()[0] for _ in range(20_000)}


# -- among threads


def test_an_outcome_has_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "tiny", Tiny)
    dense, slow = (
        learning.measure(Variant(methods.DILOCO, task="tiny", lr=1e-3, sync_every=h), 0, 4, evaluate=True)
        for h in (SYNC_EVERY, 2 * SYNC_EVERY)
    )
    assert (len(dense.rewards), len(slow.rewards)) == (4, 2)
    assert all(before != after for before, after in pairwise(dense.rewards))
    assert dense.reward == pytest.approx(sum(dense.rewards) / 4)
    assert sum(dense.links) == 2 * sum(slow.links) == 4 * dense.link
    ddp = learning.measure(Variant(methods.DDP, task="tiny", lr=1e-3), 0, 4, evaluate=True)
    assert (len(ddp.rewards), ddp.link) == (4, SYNC_EVERY * ddp.ring)
    assert dense.ahead == dense.reward
    ahead = learning.measure(Variant(task="tiny", lr=1e-5), 0, 2, evaluate=True)
    assert ahead.ahead != ahead.reward
    assert dense.title == "DiLoCo, tiny, lr 0.001"


def counted(process: Trainer) -> tuple[Outcome, list[int]]:
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
                group["lr"] = 1e-4 * min(1.0, (step + 1) / WARM_UP)
            optimizer.step()
    dist.destroy_process_group()  # the threads are trainers of another world
    assert loop.last_round is not None
    found = [loop.last_round.entries, loop.last_round.sent_bytes, loop.last_round.summed]
    variant = Variant(task="tiny", lr=1e-4, trainers=process.size, settings={"gate_sums": False})
    return learning.measure(variant, 0, 2, evaluate=False), found


def test_threads_count_what_processes_count() -> None:
    found = together(counted, 4)
    outcome = found[0][0]
    assert outcome.density * PARAMETERS == pytest.approx(fmean(of[0] for _, of in found))
    assert outcome.link == fmean(of[1] for _, of in found)
    assert outcome.summed * PARAMETERS == pytest.approx(found[0][1][2])
    assert (outcome.reward, outcome.rewards) == (None, [])
    assert str(outcome).split()[-1] == "-"


def test_sites_count_what_leaves_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "tiny", Tiny)
    dense, one, two = (
        learning.measure(Variant(method, task="tiny", lr=1e-4, sites=2), 0, 2, evaluate=method != methods.ONE_LEVEL)
        for method in (methods.DILOCO, methods.ONE_LEVEL, methods.PULSE)
    )
    size, roots = 4 * PARAMETERS, 3 * 32
    assert (dense.link, dense.ring, dense.between) == (1.5 * size + roots, 1.5 * size, 1.5 * size)
    assert 0 < one.between < 2 * one.link
    assert 0 < two.between < 2 * two.link
    assert (one.reward, two.loss) == (None, 2.0)
