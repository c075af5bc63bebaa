"""`make demo` and `make demo-loco`, small: what is killed resumes, and the proofs at the end can
fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.grpo import __main__ as grpo
from examples.grpo.run import RunFailed, RunFolder
from examples.grpo.settings import Settings as GrpoSettings
from examples.loco.__main__ import compare_weights
from examples.loco.settings import Settings
from pulse_rl.cli import main
from tests.support.programs import ran

SMALL = "--steps 6 --sft-steps 30 --prompts 4 --checkpoint-every 2"
SMALL_LOCO = "--trainers 2 --workers 1 --rounds 3 --sync-every 2 --prompts 2"


def test_killed_trainer_and_worker_resume_with_identical_weights(tmp_path: Path) -> None:
    options = f"{SMALL} --kill trainer@3 --kill worker-1@4".split()
    said = ran("-m", "examples.grpo", "--run", tmp_path, *options)
    result = json.loads((tmp_path / "trainer.jsonl").read_text().splitlines()[-1])
    assert (result["event"], result["step"]) == ("result", 6)
    assert said.count(f"{result['root']}  bit-identical") == 4
    assert said.count("SIGKILL, as asked") == 2
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0

    report = tmp_path / f"store/reports/worker-0/{result['version']:012d}.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"root": "0" * 64}))
    folder = RunFolder(tmp_path)
    with pytest.raises(RunFailed, match="differ"):
        grpo.compare_weights(GrpoSettings.load(folder.settings), folder, result)


def journal(folder: RunFolder, trainer: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in folder.journal(trainer).read_text().splitlines()]


def test_a_killed_trainer_resumes_and_all_models_are_identical_at_the_end(tmp_path: Path) -> None:
    options = f"{SMALL_LOCO} --sft-steps 10 --patience 60 --kill trainer-1@1".split()
    said = ran("-m", "examples.loco", "--run", tmp_path, *options)
    assert "all 2 trainers hold the same global weights" in said

    folder = RunFolder(tmp_path)
    settings = Settings.load(folder.settings)
    journals = [journal(folder, name) for name in settings.trainer_names]
    for lines in journals:
        rounds = [e["round"] for e in lines if e["event"] == "round"]
        assert rounds in (
            [1, 2, 3],
            [2, 3],
        )  # without 1 if a slow trainer was ended before it could report it
        assert [(e["round"], e["restarts"]) for e in lines if e["event"] == "met"] == [
            (0, 0),
            (1, 1),
        ]
    results = {
        name: lines[-1] for name, lines in zip(settings.trainer_names, journals, strict=True)
    }
    one, other = results.values()
    assert one["weights"] == other["weights"] != one["root"]

    compare_weights(settings, folder, results)
    with pytest.raises(RunFailed, match="differ"):
        compare_weights(settings, folder, {**results, "trainer-1": other | {"weights": "0" * 64}})
    report = tmp_path / f"store/reports/worker-0/{settings.rounds:012d}.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"root": "0" * 64}))
    with pytest.raises(RunFailed, match="differ"):
        compare_weights(settings, folder, results)
