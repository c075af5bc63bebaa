"""Where the inner steps start, and what the model holds meanwhile; the rounds themselves:
test_trainers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pulse_rl.errors import InputError, StateMismatch
from pulse_rl.loco import PulseLoCo, Round
from tests.support.loco_reference import Flat, Job, Reference, flat, pulse_loco, same


def made(seed: int = 0, **settings: Any) -> tuple[Job, PulseLoCo]:
    job = Job(seed, lr=1e-3)
    return job, pulse_loco(
        job.model, job.optimizer, **({"sync_every": 2, "lookahead": 7.0} | settings)
    )


def round_of(job: Job) -> None:
    for _ in range(2):
        job.step(0)


def start(loop: PulseLoCo) -> Flat:
    return flat(loop.global_state()) - torch.tensor(7.0) * flat(loop.residual())


def test_the_model_holds_theta_while_it_is_looked_at() -> None:
    seen: list[bool] = []

    def look(_: Round) -> None:
        seen.append(same(job.weights(), flat(loop.global_state())))

    job, loop = made(on_round=look)
    with loop:
        round_of(job)
        assert seen == [True]
        assert loop.residual()["0.weight"].any()
        assert same(job.weights(), start(loop))
        assert not same(job.weights(), flat(loop.global_state()))
        with loop.global_weights():
            assert same(job.weights(), flat(loop.global_state()))
        assert same(job.weights(), start(loop))
        job.step(0)
        with pytest.raises(InputError, match="1 inner steps"), loop.global_weights():
            pass
        loop.rewind()
        assert same(job.weights(), start(loop))


def test_a_look_within_a_look_leaves_theta_in_the_model() -> None:
    """An evaluation that on_round calls looks at theta, too; what is published after it is still
    theta."""
    seen: list[bool] = []

    def look(_: Round) -> None:
        with loop.global_weights():
            seen.append(same(job.weights(), flat(loop.global_state())))
        seen.append(same(job.weights(), flat(loop.global_state())))
        loop.rewind()
        seen.append(same(job.weights(), flat(loop.global_state())))

    job, loop = made(on_round=look)
    with loop:
        for _ in range(2):
            round_of(job)
            assert same(job.weights(), start(loop))
    assert seen == [True] * 6


def test_who_leaves_tells_the_others_even_if_the_model_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, loop = made()

    def fails(_: object) -> None:
        raise RuntimeError("an error of the device")

    loop.__enter__()
    round_of(job)
    monkeypatch.setattr(loop.parameters, "write", fails)
    with pytest.raises(RuntimeError, match="device"):
        loop.close()
    assert not loop.meeting.joined


def test_outside_the_loop_the_model_holds_theta() -> None:
    """After it was left, after a checkpoint was loaded, and not in mid-round."""
    job, loop = made()
    with loop:
        round_of(job)
    assert loop.residual()["0.weight"].any()
    assert same(job.weights(), flat(loop.global_state()))
    with loop.global_weights():
        pass
    assert same(job.weights(), flat(loop.global_state()))
    other, resumed = made(5)
    resumed.load_state_dict(loop.state_dict())
    assert same(other.weights(), flat(loop.global_state()))
    for into in ((job, loop), (other, resumed)):
        with into[1]:
            assert same(into[0].weights(), start(loop))
            into[0].step(0)
            local = into[0].weights()
        assert same(into[0].weights(), local)


def test_the_default_is_auto() -> None:
    job = Job()
    assert pulse_loco(job.model, job.optimizer, sync_every=2).lookahead == pytest.approx(7.0)


def test_auto_is_what_an_entry_moves_theta_by_in_the_end() -> None:
    assert made(lookahead="auto", outer_lr=0.7, outer_momentum=0.9)[1].lookahead == pytest.approx(
        7.0
    )
    assert made(lookahead="auto", outer_lr=0.5, outer_momentum=0.0)[1].lookahead == 0.5


@pytest.mark.parametrize("ahead", [0.0, 7.0])
def test_what_is_learnt_counts_once_whatever_is_sent(ahead: float) -> None:
    """The rule has a virtual iterate, theta - lr / (1 - mu) (e + mu^2 m), that moves by what
    trainers learn alone (notes/design/0029): e is the mean of the residuals. In the reference,
    which the library equals bit for bit."""
    size, learnt = 600, torch.Generator().manual_seed(0)
    theta = torch.randn(size, generator=learnt) / 50
    trainers = [Reference(theta, lookahead=ahead) for _ in range(3)]

    def virtual() -> Flat:
        residual = torch.stack([t.residual.double() for t in trainers]).mean(0)
        return trainers[0].theta.data.double() - 7.0 * (
            residual + 0.81 * trainers[0].momentum().double()
        )

    expected = None
    for number in range(12):
        steps = [1e-4 * torch.randn(size, generator=learnt) for _ in trainers]
        sent = [t.select(t.start() - step)[1] for t, step in zip(trainers, steps, strict=True)]
        assert 0 < sum(int(one.count_nonzero()) for one in sent) < 3 * size
        for t in trainers:
            t.outer_step(sent)
        if expected is not None:
            expected = expected - 7.0 * torch.stack(steps).double().mean(0)
            torch.testing.assert_close(virtual(), expected, rtol=0, atol=1e-6)
        expected = virtual() if number == 0 else expected
    moved = (virtual() - trainers[0].theta.data.double()).abs().mean()
    assert moved > 1e-4, "much is held back or under way"


def followed(job: Job, loop: PulseLoCo, reference: Reference, *, from_theta: bool = False) -> None:
    """A round, which equals the reference's; ``from_theta``: its steps start there."""
    sent: list[Flat] = []
    if from_theta:
        reference.lookahead = torch.tensor(0.0)
    hook = job.optimizer.register_step_post_hook(lambda *_: sent.append(job.weights()))
    job.optimizer._optimizer_step_post_hooks.move_to_end(
        hook.id, last=False
    )  # before the loop's own
    with loop.global_weights() if from_theta else nullcontext():
        round_of(job)
        assert same(job.weights(), flat(loop.global_state())) == from_theta
    hook.remove()
    _, values = reference.select(sent[-1])
    reference.lookahead = torch.tensor(7.0)
    reference.outer_step([values])
    reference.check(loop)


def test_an_error_of_the_listener_changes_nothing() -> None:
    def fail(_: Round) -> None:
        if len(fails):
            raise fails.pop()

    fails = [KeyboardInterrupt()]
    job, loop = made(on_round=fail)
    reference = Reference(flat(loop.global_state()), lookahead=7.0)
    with loop:
        with pytest.raises(KeyboardInterrupt):
            followed(job, loop, reference)
        loop.on_round = None
        assert same(job.weights(), start(loop))
        round_of(job)
        assert loop.round == 2


def test_steps_that_start_at_theta_are_counted_from_there() -> None:
    job, loop = made()
    reference = Reference(flat(loop.global_state()), lookahead=7.0)
    with loop:
        followed(job, loop, reference)
        followed(job, loop, reference, from_theta=True)
        followed(job, loop, reference)


def test_a_round_that_was_begun_with_another_lookahead_is_ended_with_it() -> None:
    job, loop = made()
    reference = Reference(flat(loop.global_state()), lookahead=7.0)
    with loop:
        followed(job, loop, reference)
        job.step(0)
        saved = copy.deepcopy((job.state_dict(), loop.state_dict()))
        job.step(0)
        theta = flat(loop.global_state())
    for ahead in (0.0, 3.0):
        other, resumed = made(5, lookahead=ahead)
        other.load_state_dict(copy.deepcopy(saved[0]))
        resumed.load_state_dict(saved[1])
        with resumed:
            other.step(0)
            assert same(flat(resumed.global_state()), theta)
    with pytest.raises(StateMismatch, match="lookahead"):
        loop.load_state_dict({**saved[1], "started_with": "7"})
