"""The mean of what all trainers' next inner steps start from: its bits, its refusals, and that it
changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl.errors import CorruptMessage, Diverged, InputError, TrainerLost
from tests.support import group_members
from tests.support.group_members import Member, members
from tests.support.loco_reference import Flat, Job, flat, group_of, pulse_loco, same
from tests.support.trainers import Trainer, together


def expected(theta: Flat, residuals: list[Flat], lookahead: float) -> Flat:
    total = torch.zeros_like(theta)
    for residual in residuals:
        total = total + residual
    return theta - torch.tensor(lookahead) * (total / len(residuals))


def test_of_one_trainer_it_is_where_its_steps_start() -> None:
    job = Job(0, lr=1e-3)
    with pulse_loco(job.model, job.optimizer, sync_every=2) as loop:
        job.step(0)
        job.step(0)
        assert loop.residual()["0.weight"].any()
        assert same(flat(loop.averaged_state()), job.weights())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("lookahead", [7.0, 0.3])
def test_it_is_the_rule_to_the_bit_and_changes_nothing(size: int, lookahead: float) -> None:
    found: dict[int, list[Flat]] = {}

    def work(member: Member) -> None:
        for _ in range(3):
            member.round()  # checked against the reference, to the bit, after each consensus too
            residual = member.reference.residual.clone()
            found.setdefault(member.rank, []).extend([residual, flat(member.loop.averaged_state())])

    everyone = members(size, work, lookahead=lookahead, forced=True)
    theta = everyone[0].reference.theta.detach()
    residuals = [found[rank][-2] for rank in range(size)]
    for rank in range(size):
        assert same(found[rank][-1], expected(theta, residuals, lookahead))
    assert not same(found[0][-1], theta)


def test_without_a_lookahead_it_is_theta_and_costs_a_root() -> None:
    def work(member: Member) -> None:
        member.round()
        exchange = group_of(member.loop)
        sent = exchange.sent_bytes
        assert same(flat(member.loop.averaged_state()), flat(member.loop.global_state()))
        assert exchange.sent_bytes - sent == 3 * 32

    members(4, work, lookahead=0.0, gate_sums=False)


def test_it_is_refused_where_it_would_be_something_else() -> None:
    job = Job(0)
    loop = pulse_loco(job.model, job.optimizer, sync_every=2)
    with pytest.raises(InputError, match="have not met"):
        loop.averaged_state()
    with loop:
        job.step(0)
        with pytest.raises(InputError, match="1 inner steps of the round"):
            loop.averaged_state()


def test_it_may_be_asked_for_when_a_round_is_told() -> None:
    seen: list[bool] = []
    job = Job(0, lr=1e-3)
    loop = pulse_loco(
        job.model,
        job.optimizer,
        sync_every=2,
        on_round=lambda _: seen.append(not same(common(), job.weights())),
    )

    def common() -> Flat:
        return flat(loop.averaged_state())

    with loop:
        job.step(0)
        job.step(0)
        assert same(job.weights(), common())
    assert seen == [True], "the model held theta meanwhile"


def test_trainers_that_do_not_agree_are_named() -> None:
    """One theta differs from the others', as no round leaves it."""

    def work(member: Member) -> None:
        member.round()
        member.loop.state.theta[7] += np.float32(member.rank == 1)
        with pytest.raises(Diverged, match=r"averaged state .* trainers \[1\]"):
            member.loop.averaged_state()

    members(3, work, forced=True)


@pytest.mark.parametrize("where", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("reader", [0, 2])
@pytest.mark.parametrize("size", [1, 3000])
def test_what_one_cannot_read_is_refused_by_all(
    where: str, reader: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged on the way to one trainer, which may have an empty share; the trainers can go on."""
    monkeypatch.setattr(group_members, "SIZE", size)

    def damaged(whole: Any) -> Any:
        def receive(*messages: Any, **bounds: Any) -> None:
            whole(*messages, **bounds)
            raise CorruptMessage("the message of trainer 1 was damaged in transit")

        return receive

    def work(member: Member) -> None:
        for _ in range(2):
            member.round()
            before = flat(member.loop.global_state()).clone()
            words = "damaged in transit" if member.rank == reader else f"trainer {reader} could not"
            with pytest.MonkeyPatch.context() as patch:
                if member.rank == reader:
                    patch.setattr(member.group, where, damaged(getattr(member.group, where)))
                with pytest.raises(CorruptMessage, match=words):
                    member.loop.averaged_state()
            assert same(flat(member.loop.global_state()), before)
            assert member.loop.averaged_state()

    members(3, work, forced=True)


@pytest.mark.parametrize("where", ["all_to_all", "all_gather"])
def test_messages_of_another_length_are_refused_by_all(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorter(messages: Any) -> Any:
        return messages[:-4] if isinstance(messages, bytes) else [*messages[:2], messages[2][:-4]]

    def work(member: Member) -> None:
        member.round()
        if member.rank == 1:
            whole = getattr(member.group, where)
            monkeypatch.setattr(member.group, where, lambda m, **k: whole(shorter(m), **k))
        with pytest.raises(CorruptMessage, match=r"trainer [12] (sent 3996 bytes|could not)"):
            member.loop.averaged_state()

    members(3, work, forced=True)


def real_trainers(trainer: Trainer) -> bytes:
    trainer.connect("all")
    job = Job(0, lr=1e-3)
    with pulse_loco(job.model, job.optimizer, sync_every=2) as loop:
        for _ in range(4):
            job.step(trainer.rank)
        residuals = [
            trainer.put("residual", loop.residual()) or trainer.get("residual", r)
            for r in range(trainer.size)
        ]
        found = flat(loop.averaged_state())
        assert same(found, expected(flat(loop.global_state()), list(map(flat, residuals)), 7.0))
        for _ in range(2):
            job.step(trainer.rank)
        return found.numpy().tobytes()


@pytest.mark.slow
def test_among_processes() -> None:
    assert len(set(together(real_trainers, 3))) == 1


def one_leaves(trainer: Trainer) -> str:
    trainer.connect("all")
    job = Job(0, lr=1e-3)
    loop = pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=3)
    with loop:
        for _ in range(2):
            job.step(trainer.rank)
        if trainer.rank == 1:
            loop.close()
            trainer.put("closed")
            return "closed"
        trainer.get("closed", 1)
        with pytest.raises(TrainerLost, match="trainer 1"):
            loop.averaged_state()
        with pytest.raises(InputError, match="have not met"):
            loop.averaged_state()
    return "lost"


@pytest.mark.slow
def test_a_trainer_that_has_left_is_named() -> None:
    assert together(one_leaves, 2) == ["lost", "closed"]
