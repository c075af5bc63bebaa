"""The PULSELoCo benchmark: its arithmetic on made-up rounds, and tiny runs among real processes and
among threads."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch

from benchmarks import trace
from benchmarks.loco import learning, links, methods, recorded, tables, tasks, trainer
from benchmarks.loco.jobs import SYNC_EVERY, TRAINERS, Job, RoundRecord
from benchmarks.loco.learning import Outcome, Variant
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.slow  # the benchmark imports transformers: seconds

PARAMETERS = 300

# Made-up words, enough for the prompts of words to differ.
VOCABULARY = [
    a + b + c
    for a in "bcdfglmnprst"
    for b in ("ana", "elo", "iru", "osa", "ute")
    for c in "bdgkmnprstvz"
]


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
    noise = torch.Generator().manual_seed(process.rank)
    steps = [{"w": 1e-4 * torch.randn(PARAMETERS, generator=noise)} for _ in range(4)]
    found = {}
    for method in methods.METHODS:
        with trainer.replayed(Job(method, 1e-4, fill=1), Tiny(0, 0).masters, steps, "lo") as take:
            found[method] = [take() for _ in range(4)]
    return found


def test_recorded_steps_by_every_method() -> None:
    found = together(carry_out, 3)
    for method in methods.METHODS:
        for rounds in zip(*(seen[method] for seen in found), strict=True):
            assert len({s.root for s in rounds}) == 1, (
                "all trainers hold the same theta after a round"
            )
            assert {s.parameters for s in rounds} == {PARAMETERS}
            assert all(0 < s.phases["exchange"] <= s.seconds and s.interface_bytes for s in rounds)
        one = found[0][method]
        assert all(
            before.root != after.root for before, after in pairwise(one) if method != methods.DDP
        )
    dense = 4 * PARAMETERS
    assert {s.payload_bytes for s in found[0][methods.DDP]} == {dense}
    assert {s.sent_bytes for s in found[0][methods.DDP]} == {dense * 4 // 3}
    assert {s.payload_bytes for s in found[0][methods.DILOCO]} == {dense}
    assert all(0 < seen.entries < PARAMETERS for seen in found[0][methods.PULSE])
    assert {s.payload_bytes for s in found[0][methods.DILOCO_INT8]} == {PARAMETERS + 4}
    assert {s.payload_bytes for s in found[0][methods.DILOCO_FP4]} == {PARAMETERS // 2 + 4}
    assert {s.entries for s in found[0]["SparseLoCo 3%"]} == {3 * PARAMETERS // 100}


def test_recorded_steps_are_what_training_took_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(tasks.TASKS, tasks.PRETRAINED, Tiny)
    monkeypatch.setattr(tasks, "WARM_START", tmp_path / "warm.pt")
    monkeypatch.setattr(tasks, "ensure", lambda _: None)
    recorded.ensure(1e-4)
    start, steps = recorded.read(1e-4, 0)
    assert torch.equal(start["w"], Tiny(0, 0).masters["w"])
    assert len(steps) == recorded.ROUNDS
    assert all(0 < step["w"].norm() < 1e-4 * SYNC_EVERY * PARAMETERS**0.5 for step in steps)
    assert 0 < recorded.inner_step_seconds(tasks.PRETRAINED) < 1


def record(**facts: object) -> RoundRecord:
    made = RoundRecord(
        parameters=1000,
        entries=20,
        payload_bytes=100,
        sent_bytes=400,
        interface_bytes=500,
        phases={"gate": 0.1, "exchange": 0.2},
        seconds=0.4,
        root="00",
    )
    return replace(made, **facts)


def test_a_row_has_the_round_of_the_slowest_and_the_exchange_of_the_last_one_there() -> None:
    rounds = [
        [record(), record(seconds=1.6, phases={"gate": 1.3, "exchange": 0.1})],
        [record(), record()],
    ]
    found = links.row(methods.PULSE, 1e-6, links.SWITCHED, rounds)
    assert (found.payload, found.density, found.interface) == (100, 0.02, 500)
    assert (found.seconds, found.exchange) == ([1.6, 0.4], [0.1, 0.2])
    assert links.row(methods.PULSE, 1e-6, None, [[record(interface_bytes=None)]]).interface is None
    of_steps = links.row(methods.DDP, 1e-6, links.SWITCHED, rounds)
    assert (of_steps.link, of_steps.seconds[1]) == (400 * SYNC_EVERY, 0.4 * SYNC_EVERY)


def test_the_table_of_links_is_relative_to_diloco_on_the_same_link() -> None:
    slow, fast = ([[record(sent_bytes=n * 400, seconds=n)]] for n in (8.0, 2.0))
    rows = [
        *(links.row(methods.DILOCO, 1e-6, link, slow) for link in links.CARRIED),
        links.row(methods.PULSE, 1e-6, links.CARRIED[1], fast),
    ]
    text = links.text(rows)
    assert text.splitlines()[-1].split()[-4:] == ["2.00", "0.20", "4.0", "4.0"]


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
    return [
        outcome(m, s, [0.1, 0.5 + 0.01 * s + off.get(m, 0.0)])
        for m in methods.METHODS
        for s in range(4)
    ]


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
    assert [len(of) for of in tables.by_task([*curves(), other, replace(other, rewards=[])])] == [
        len(curves()),
        1,
    ]


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
    for prompts, count in ((training, 2000), (fit, trace.FIT_STEPS * trace.PROMPTS)):
        assert not held_out & {prompts.one()[0] for _ in range(count)}
    # Without the split some of them would be.
    whole = trace.Prompts(VOCABULARY, 1)
    assert held_out & {whole.one()[0] for _ in range(10_000)}


# -- among threads


def test_an_outcome_has_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "tiny", Tiny)
    dense, slow = (
        learning.measure(
            Variant(methods.DILOCO, task="tiny", lr=1e-3, sync_every=h), 0, 4, evaluate=True
        )
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
