"""The example, as its readers run it."""

from __future__ import annotations

import pytest

from examples import trl_grpo
from tests.engines.server import free_port


def test_a_follower_has_the_trainer_s_weights(capsys: pytest.CaptureFixture[str]) -> None:
    trl_grpo.main(["--steps", "2", "--port", str(free_port())])
    said = capsys.readouterr().out
    assert "version 2: " in said
    assert "after 2 steps a follower holds the trainer's weights in BF16, bit for bit" in said


@pytest.mark.slow
def test_async(capsys: pytest.CaptureFixture[str], async_grpo_on_cpu: None) -> None:
    trl_grpo.main(["--steps", "2", "--port", str(free_port()), "--async"])
    assert "after 2 steps a follower holds" in capsys.readouterr().out
