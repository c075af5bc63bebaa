"""Trainers that are late for a round over a store, leave late, or come in a crowd: nothing is lost,
nobody waits."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from pulse_rl import MemoryStore
from pulse_rl.errors import TrainerLost
from tests.support.loco_reference import Reference, flat, last_round, same
from tests.support.stores import FaultyStore

from .test_over_store import SECONDS, Killed, Member, alone, closes, local_steps, sent_behind


def test_who_is_late_is_left_out_loses_nothing_and_does_not_wait() -> None:
    """c takes its first steps while a does three rounds. What it has learnt is put for the next
    round while it goes on, until that has counted in time."""
    stored = MemoryStore()
    a, c = alone(stored), Member(stored, "c", quorum=2, grace=0.0)
    of_a, of_c = Reference(a.first), Reference(c.first)

    def has_posted(number: int) -> bool:
        return any("/c." in info.name for info in stored.list(f"loco/posts/{number:012d}"))

    def round_of_a(number: int) -> torch.Tensor:
        """With c's message in the store."""
        began = time.monotonic()
        while not has_posted(number):
            assert time.monotonic() - began < SECONDS
            time.sleep(0.01)
        a.round()
        return of_a.select(a.now)[1]

    def steps_of_c() -> torch.Tensor:
        for _ in range(2):
            c.job.step(ord("c"))
        return c.now

    def end(*sent: torch.Tensor) -> None:
        of_a.outer_step(list(sent))
        of_c.outer_step(list(sent))

    def is_late() -> torch.Tensor:
        """It puts what it has, and goes on."""
        assert c.loop.inner_step == 0
        of_c.residual, sent = of_c.select(of_c.start())
        of_c.includes_sent = True
        assert same(flat(c.loop.residual()), of_c.residual), (
            "with what it sends, until that has counted"
        )
        return sent

    with a.loop, c.loop, ThreadPoolExecutor(1) as pool:
        c.job.step(ord("c"))
        three = [a.round() and a.now for _ in range(3)]
        c.job.step(ord("c"))
        assert "round 1: " in last_round(c.loop).excluded_reason
        of_c.residual, of_c.includes_sent = of_c.select(c.now)[0], True
        for now in three:
            end(of_a.select(now)[1])
        sent = is_late()
        # Its message is in round 4; before its next steps end, round 5 is closed without it.
        in_time = round_of_a(3)
        of_a.outer_step([in_time, sent])
        a.round()
        without = of_a.select(a.now)[1]
        of_a.outer_step([without])
        learnt = of_c.start() - steps_of_c()
        of_c.residual = (of_c.residual - sent) + learnt
        of_c.outer_step([in_time, sent])
        of_c.outer_step([without])
        assert c.loop.round == 5
        sent = is_late()
        # In round 6 it is in time, and has nothing to send before the end of its next steps.
        in_time = round_of_a(5)
        learnt = of_c.start() - steps_of_c()
        of_c.residual = (of_c.residual - sent) + learnt
        end(in_time, sent)
        assert (c.loop.round, c.loop.inner_step, has_posted(6)) == (6, 0, False)
        other = pool.submit(round_of_a, 6)
        sent = of_c.select(steps_of_c())[1]
        end(other.result(SECONDS), sent)
        for member, reference in ((a, of_a), (c, of_c)):
            assert all(
                map(
                    same,
                    member.held(),
                    (reference.theta.data, reference.residual, reference.start()),
                )
            )
    assert closes(stored) == [["a"]] * 3 + [["a", "c"], ["a"], ["a", "c"], ["a", "c"]]


def test_who_was_late_comes_back_and_leaves_without_waiting(store: MemoryStore) -> None:
    a, c = alone(store), Member(store, "c", quorum=2, grace=0.0)
    with a.loop:
        with c.loop:
            a.round()
            for _ in range(2):
                c.job.step(ord("c"))
            saved, job = c.loop.state_dict(), deepcopy(c.job.state_dict())
        assert isinstance(saved["message"], str)
        back = Member(store, "c", quorum=2, grace=0.0)
        back.load(job, saved)
        with back.loop:
            pass  # nobody else is there: who waits here gets TrainerLost in the end


def test_steps_behind_a_message_that_never_arrived_stay_what_they_were(store: MemoryStore) -> None:
    """Of a trainer that was late, and is killed."""
    line = FaultyStore(store)
    a, c = alone(store), Member(line, "c", quorum=2, grace=0.0)
    with a.loop:
        with suppress(Killed), c.loop:
            a.round()
            line.fail_on("put", "posts")
            for _ in range(2):
                c.job.step(ord("c"))
            sent_behind(c)
            c.job.step(ord("c"))
            saved, job, steps = c.loop.state_dict(), deepcopy(c.job.state_dict()), local_steps(c)
            raise Killed
        assert line.fired
        back = Member(store, "c", quorum=2, grace=0.0)
        back.load(job, saved)
        with back.loop:
            assert same(local_steps(back), steps)


def test_a_crowd_is_let_in_by_and_by(store: MemoryStore) -> None:
    """All read the messages of a first round: it names sixteen, and the next one all who are
    there."""
    names = [f"t{number:02d}" for number in range(18)]
    waiting = []
    for name in names[:-1]:
        member = Member(store, name, quorum=99)
        member.loop.meeting.exchange = replace(member.loop.meeting.exchange, deadline_seconds=0.0)  # type: ignore[attr-defined]
        with suppress(TrainerLost), member.loop:
            member.round()
        waiting.append(member)
    counted = FaultyStore(store)
    last = alone(counted, names[-1])
    last.loop.threads = 1
    with last.loop:
        last.round()
        assert closes(store) == [names[:16]]
        posts = [
            name for call, name in counted.calls if call == "get" and name.startswith("loco/posts/")
        ]
        assert len(posts) == 16, "it reads those that it names"
        held = flat(last.loop.residual()).clone()
        assert held.any()
        for member in waiting:
            with suppress(TrainerLost), member.loop:
                if not member.loop.inner_step:
                    member.round()
        last.round()
    assert closes(store)[1:] == [names]


@pytest.mark.parametrize("overlap", [0, 1])
def test_who_is_late_when_it_leaves_does_not_wait(overlap: int, store: MemoryStore) -> None:
    """Its message is there all the same, and counts if the others go on; it comes back and
    knows."""
    a, c = alone(store), Member(store, "c", quorum=2, grace=0.0, overlap=overlap)
    with a.loop:
        with c.loop:
            a.round()
            for _ in range(2):
                c.job.step(ord("c"))
        saved, job = c.loop.state_dict(), c.job.state_dict()
        assert isinstance(saved["message"], str)
        residual = flat(c.loop.residual()).clone()
        a.round()
        assert closes(store) == [["a"], ["a", "c"]]
        back = alone(store, "c")
        back.load(job, saved)
        with back.loop:
            assert same(flat(back.loop.global_state()), flat(a.loop.global_state()))
            assert flat(back.loop.residual()).square().sum() < residual.square().sum()
        assert "message" not in back.loop.state_dict()
