"""What the PULSELoCo benchmark says of learning: settings, data that differ, held-out prompts, torchft."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from benchmarks import trace
from benchmarks.loco import __main__ as command
from benchmarks.loco import ablation, convergence, heldout, methods, tasks, torchft_diloco
from benchmarks.loco.jobs import SYNC_EVERY, TRAINERS, JobResult
from pulse_rl.loco import DiLoCo
from tests.benchmarks.test_loco import Tiny, record

pytestmark = pytest.mark.slow  # the benchmark imports transformers: seconds

# Made-up words, enough for the prompts of words to differ.
VOCABULARY = [a + b + c for a in "bcdfglmnprst" for b in ("ana", "elo", "iru", "osa", "ute") for c in "bdgkmnprstvz"]


def test_help_names_every_method(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["loco", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(method in told for method in methods.METHODS)


def test_an_outcome_has_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "tiny", Tiny)
    dense, slow = (
        ablation.measure(ablation.Variant(DiLoCo, task="tiny", lr=1e-3, sync_every=h), 0, 4)
        for h in (SYNC_EVERY, 2 * SYNC_EVERY)
    )
    assert (len(dense.rewards), len(slow.rewards)) == (4, 2)
    assert all(before != after for before, after in pairwise(dense.rewards))
    assert dense.reward == pytest.approx(sum(dense.rewards) / 4)
    assert dense.payload == 2 * slow.payload
    assert dense.ahead == dense.reward
    ahead = ablation.measure(ablation.Variant(task="tiny", lr=1e-5), 0, 2)
    assert ahead.ahead != ahead.reward
    assert dense.title == "DiLoCo, tiny, lr 0.001"


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


def test_learnt_begins_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, tasks.PRETRAINED_SPLIT, Tiny)
    learnt = heldout.measure(methods.PULSE, 1e-3, 0, 2)
    before = Tiny(0, 0).evaluate()[0]
    assert learnt.rewards[0] == pytest.approx(before)
    assert len(set(learnt.rewards)) == len(learnt.losses) == 3
    assert str(learnt).split()[2:7] == ["0.001", "0", *(f"{reward:.4f}" for reward in learnt.rewards)]


def test_rows_of_torchft() -> None:
    job = convergence.job(methods.TORCHFT, 0, 3)
    rounds = [
        record(n, outer_seconds=t, interface_bytes=b) for n, t, b in ((1, 9.0, 800), (2, 0.2, 500), (3, 0.4, 200))
    ]
    result: JobResult = [rounds, [replace(r, outer_seconds=2 * r.outer_seconds) for r in rounds]]
    row = torchft_diloco.row(job, result)
    assert (row.interface, row.payload, row.outer, row.dense) == (500, 100, pytest.approx(0.6), 0.8)
    assert f"{methods.TORCHFT:18}    0   0.6000   0.3000" in torchft_diloco.text(job.task, [row], 3, 1e9)
    without = torchft_diloco.row(job, [[replace(r, interface_bytes=None) for r in rounds]])
    assert without.interface is None
    assert "loopback" in torchft_diloco.text(job.task, [without], 3, None)
    with pytest.raises(SystemExit, match=r"different weights after rounds \[1, 2, 3\]"):
        torchft_diloco.row(job, [rounds, [replace(r, root="01") for r in rounds]])


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed")
def test_torchft_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["torchft_diloco"])
    with pytest.raises(SystemExit, match="torchft is not installed"):
        torchft_diloco.main()
