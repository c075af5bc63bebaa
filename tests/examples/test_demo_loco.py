"""The example of trainers in step, small: a killed trainer resumes, and the proof at the end can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pulse_rl
from examples.grpo.rollouts import Origin, Rollouts
from examples.loco.__main__ import RunFailed, compare_roots
from examples.loco.inbox import Inbox, put, waiting
from examples.loco.settings import RunFolder, Settings

CHECKOUT = Path(__file__).parents[2]
SMALL = ["--trainers", "2", "--workers", "1", "--rounds", "3", "--sync-every", "2", "--prompts", "2"]
SMALL += ["--sft-steps", "10", "--patience", "60"]


def journal(folder: RunFolder, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in folder.journal_of(rank).read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_trainer_resumes_and_all_models_are_identical_at_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.loco", "--run", str(tmp_path), *SMALL, "--kill", "trainer-1@1"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 2 trainers hold the same theta" in done.stdout

    folder = RunFolder(tmp_path)
    journals = [journal(folder, rank) for rank in range(2)]
    for lines in journals:
        rounds = [e["round"] for e in lines if e["event"] == "round"]
        assert rounds in ([1, 2, 3], [2, 3])  # without 1 if a slow trainer was ended before it could report it
        assert [(e["round"], e["restarts"]) for e in lines if e["event"] == "met"] == [(0, 0), (1, 1)]
    results = dict(enumerate(lines[-1] for lines in journals))
    assert results[0]["theta"] == results[1]["theta"] != results[0]["root"]

    settings = Settings.load(folder.settings)
    compare_roots(settings, folder, results)
    with pytest.raises(RunFailed, match="differ"):
        compare_roots(settings, folder, {**results, 1: results[1] | {"theta": "0" * 64}})
    report = tmp_path / f"store/reports/worker-0/{settings.rounds:012d}.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"root": "0" * 64}))
    with pytest.raises(RunFailed, match="differ"):
        compare_roots(settings, folder, results)


def test_an_inbox_keeps_what_was_taken_until_the_round_is_over_and_drops_what_is_refused() -> None:
    store = pulse_rl.MemoryStore()
    good = Rollouts(Origin("worker-0", "policy", 5, "aa", 1.0, 1.0), torch.zeros(2, 3), torch.zeros(2), torch.ones(2))
    put(store, 1, 0, good)
    put(store, 1, 1, replace(good, origin=replace(good.origin, worker="worker-1")))
    put(store, 1, 2, replace(good, origin=replace(good.origin, root="bb")))
    put(store, 1, 3, replace(good, origin=replace(good.origin, version=4)))
    put(store, 1, 4, replace(good, origin=replace(good.origin, version=2)))
    put(store, 0, 0, good)

    def take(inbox: Inbox) -> Rollouts | None:
        return inbox.take(roots={4: "99", 5: "aa"}, newest=6, max_lag=1)

    inbox = Inbox(store, rank=1)
    taken = [take(inbox), take(inbox), take(inbox)]
    assert [batch and batch.origin.worker for batch in taken] == ["worker-0", "worker-1", None]
    assert inbox.refused == {"unknown version": 1, "wrong root": 2}
    assert (waiting(store, 1, "worker-0"), waiting(store, 1, "worker-1")) == (1, 1)
    assert take(Inbox(store, rank=1)) is not None  # a trainer that was killed finds the round's batches again
    inbox.finish_round()
    assert (waiting(store, 1, "worker-0"), waiting(store, 1, "worker-1"), waiting(store, 0, "worker-0")) == (0, 0, 1)
