"""Checkpoints and interrupts: training goes on to the same bits, from a boundary, from mid-round,
and after Ctrl-C."""

from __future__ import annotations

import _thread
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pulse_rl.errors import NonFinite, StateMismatch
from pulse_rl.loco import PulseLoCo, gate, messages, outer, parameters
from tests.support.loco_reference import Job, all_same, last_round, outer_state, pulse_loco


def run(job: Job, loop: PulseLoCo, steps: int) -> None:
    with loop:
        for _ in range(steps):
            job.step(0)


def whole(job: Job, loop: PulseLoCo) -> list[torch.Tensor]:
    moments = [s["exp_avg_sq"].float().reshape(-1) for s in job.optimizer.state.values()]
    return [job.weights(), torch.cat(moments), *outer_state(loop)]


@pytest.mark.parametrize("lookahead", [0.0, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stop", [3, 4, 5, 6])
def test_resume_is_exact_at_a_boundary_and_in_mid_round(
    stop: int, dtype: torch.dtype, lookahead: float
) -> None:
    def make(seed: int) -> tuple[Job, PulseLoCo]:
        job = Job(seed, dtype=dtype, lr=1e-2)
        return job, pulse_loco(
            job.model, job.optimizer, sync_every=3, compression="bf16", lookahead=lookahead
        )

    job, loop = make(0)
    run(job, loop, 11)
    first, half = make(0)
    run(first, half, stop)
    saved = copy.deepcopy((first.state_dict(), half.state_dict()))
    run(first, half, 2)  # the saved state is a copy
    again, resumed = make(7)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert (resumed.round, resumed.inner_step) == divmod(stop, 3)
    run(again, resumed, 11 - stop)
    assert all_same(whole(job, loop), whole(again, resumed))
    assert last_round(loop).root == last_round(resumed).root


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("residual"),
        lambda s: s.pop("round"),
        lambda s: s["global"].pop("0.bias"),
        lambda s: s["global"].update(more=torch.ones(1)),
        lambda s: s["momentum"].update({"0.bias": torch.ones(3)}),
        lambda s: s["momentum"].update({"0.bias": torch.ones(40).double()}),
        lambda s: s["global"].update({"0.bias": torch.full((40,), float("nan"))}),
        lambda s: s["residual"].update({"0.bias": torch.full((40,), float("inf"))}),
        lambda s: s["residual"].update({"0.bias": [0.0] * 40}),
        lambda s: s.update({"global": None}),
        lambda s: s.update(round=-1),
        lambda s: s.update(round="1"),
        lambda s: s.update(inner_step=1.5),
        lambda s: s.update(messages=[1]),
        lambda s: s.update(messages=None),
    ],
)
def test_another_state_is_refused_and_nothing_has_changed(
    spoil: Callable[[dict[str, Any]], Any],
) -> None:
    job = Job()
    loop = pulse_loco(job.model, job.optimizer, sync_every=2)
    run(job, loop, 3)
    before, state = whole(job, loop), loop.state_dict()
    spoil(state)
    with pytest.raises((StateMismatch, NonFinite)):
        loop.load_state_dict(state)
    assert all_same(before, whole(job, loop))
    assert (loop.round, loop.inner_step) == (1, 1)


# -- interrupts


@pytest.mark.parametrize(
    "name",
    ["open_entries", "encode_entries", "decode_entries", "sparse_outer_step", "state_digest"],
)
def test_an_interrupt_leaves_the_state_of_one_round_or_the_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a kernel of a round, while threads work on other blocks."""
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", 1 << 8)
    states: dict[int, list[torch.Tensor]] = {}
    job = Job()
    loop = pulse_loco(job.model, job.optimizer, sync_every=1, threads=2)
    with loop:
        for number in range(3):
            states[number] = outer_state(loop)
            job.step(0)
    job = Job()
    loop = pulse_loco(job.model, job.optimizer, sync_every=1, threads=2)
    calls = 0
    module = next(m for m in (messages, gate, outer) if hasattr(m, name))
    kernel = getattr(module, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            _thread.interrupt_main()
        return kernel(*args, **kwargs)

    with loop:
        job.step(0)
        monkeypatch.setattr(module, name, interrupted)
        calls = 4 if name == "state_digest" else 0
        try:
            job.step(0)
        except KeyboardInterrupt:
            pass
        else:
            assert name == "decode_entries", "alone, nothing is decoded"
        found = outer_state(loop)
        assert all_same(found, states[loop.round])
