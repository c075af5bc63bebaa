"""The smallest programs, run as a newcomer would run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pulse_rl
from tests.support.programs import CHECKOUT
from tests.support.trainers import printed


@pytest.mark.slow
def test_a_worker_follows_a_trainer(tmp_path: Path) -> None:
    (lines,) = printed(CHECKOUT / "examples/minimal.py", str(tmp_path))
    assert [int(v) for v in re.findall(r"published version (\d+)", "\n".join(lines))] == [0, 1, 2]
    reports = list(pulse_rl.verify_stream(str(tmp_path), "policy"))
    assert all(report.ok for report in reports)
    assert lines[-1] == f"bit-identical, root {reports[-1].root}"


@pytest.mark.slow
def test_two_trainers_stay_in_step() -> None:
    (lines,) = printed(CHECKOUT / "examples/minimal_loco.py")
    rounds = re.findall(
        r"round (\d+): ([\d,]+) bytes a trainer, not ([\d,]+); root", "\n".join(lines)
    )
    assert [int(number) for number, _, _ in rounds] == [1, 2, 3]
    assert all(
        int(sent.replace(",", "")) < int(dense.replace(",", "")) for _, sent, dense in rounds
    )


@pytest.mark.slow
def test_the_asynchronous_loop_learns() -> None:
    (lines,) = printed(CHECKOUT / "examples/async_grpo.py", "60")
    text = "\n".join(lines)
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+),", text)]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0]
    assert "2 workers are bit-identical" in text


def test_both_fit_a_page() -> None:
    for program in ("minimal.py", "minimal_loco.py"):
        assert len((CHECKOUT / "examples" / program).read_text().splitlines()) <= 75
