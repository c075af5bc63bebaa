"""Closing rounds: each trainer sends its whole residual once, and the averaged state is the mean of
what all trainers' next inner steps start from."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_rl.errors import CorruptMessage, InputError, TrainerLost
from tests.support.group_members import Member, members
from tests.support.loco_reference import Flat, Job, flat, group_of, last_round, pulse_loco, same
from tests.support.trainers import Trainer, together


def test_of_one_trainer_it_is_where_its_steps_start() -> None:
    """Also where it is asked for while a round is reported; nothing is held back after it."""
    seen: list[bool] = []
    job = Job(0, lr=1e-3)
    loop = pulse_loco(
        job.model, job.optimizer, sync_every=2, on_round=lambda done: seen.append(done.number == 1)
    )
    with loop:
        job.step(0)
        job.step(0)
        assert loop.residual()["0.weight"].any()
        start = job.weights()
        assert same(flat(loop.averaged_state()), start)
        assert not flat(loop.residual()).any()
        assert same(job.weights(), start)
        loop.on_round = lambda _: seen.append(same(flat(loop.averaged_state()), job.weights()))
        job.step(0)
        job.step(0)
    assert seen == [True, True], "no closing round is reported"
    assert loop.round == 4


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize(
    "settings", [{}, {"lookahead": 0.3}, {"compression": "e8m2"}, {"compression": "e8m0"}], ids=str
)
def test_it_is_the_rule_to_the_bit(size: int, settings: dict[str, Any]) -> None:
    sent: dict[tuple[int, int], Flat] = {}

    def work(member: Member) -> None:
        for number in range(2):
            for _ in range(2):
                member.round()
            at, before = (number, member.rank), member.reference.theta.detach().clone()
            sent[at] = member.reference.close()
            found = flat(member.loop.averaged_state())
            assert last_round(member.loop).entries == int(sent[at].count_nonzero())
            member.reference.closing_step([sent[number, rank] for rank in range(size)])
            member.reference.check(member.loop)
            assert same(found, member.reference.theta.data)
            assert not same(found, before)

    members(size, work, **settings)


def test_without_a_lookahead_it_is_the_global_weights() -> None:
    def work(member: Member) -> None:
        member.round()
        sent = group_of(member.loop).sent_bytes
        assert same(flat(member.loop.averaged_state()), flat(member.loop.global_state()))
        assert group_of(member.loop).sent_bytes == sent

    members(3, work, lookahead=0.0)


def test_it_is_refused_where_it_would_be_something_else() -> None:
    job = Job(0)
    loop = pulse_loco(job.model, job.optimizer, sync_every=2)
    with pytest.raises(InputError, match="have not met"):
        loop.averaged_state()
    with loop:
        job.step(0)
        with pytest.raises(InputError, match="1 inner steps of the round"):
            loop.averaged_state()


@pytest.mark.parametrize("reader", [0, 2])
def test_what_one_cannot_read_is_refused_by_all(reader: int) -> None:
    """Damaged on its way to one trainer; nothing has changed, and the trainers can go on."""

    def work(member: Member) -> None:
        member.round()
        before, reference = flat(member.loop.residual()).clone(), member.reference
        with pytest.MonkeyPatch.context() as patch:
            if member.rank == reader:
                whole = member.group.all_gather

                def receive(*messages: Any, **bounds: Any) -> None:
                    whole(*messages, **bounds)
                    raise CorruptMessage("damaged in transit")

                patch.setattr(member.group, "all_gather", receive)
            with pytest.raises(CorruptMessage, match=rf"trainers \[{reader}\] could not read"):
                member.loop.averaged_state()
        assert same(flat(member.loop.residual()), before)
        reference.check(member.loop)
        member.round()

    members(3, work)


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
        trainer.connect("alone", (0,))
        held = flat(loop.residual()).clone()
        loop.rejoin()  # the closing round is due
        assert held.any()
        assert not flat(loop.residual()).any()
        assert (loop.round, loop.inner_step) == (2, 0)
    return "lost"


@pytest.mark.slow
def test_a_trainer_that_has_left_is_named() -> None:
    assert together(one_leaves, 2) == ["lost", "closed"]
