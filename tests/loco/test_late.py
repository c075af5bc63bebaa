"""Trainers that are late for a round over a store, or come in a crowd: nothing is lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy

import pytest

from pulse_rl import MemoryStore, Store
from pulse_rl.errors import NonFinite, TrainerLost
from tests.support.loco_reference import flat, last_round, same
from tests.support.stores import FaultyStore

from .test_over_store import SECONDS, Killed, Member, alone, check, closes


def wait_for_post(store: Store, trainer: str, number: int) -> None:
    began = time.monotonic()
    while not any(f"/{trainer}." in i.name for i in store.list(f"loco/posts/{number:012d}")):
        assert time.monotonic() - began < SECONDS
        time.sleep(0.01)


def test_who_is_late_is_left_out_and_loses_nothing(store: MemoryStore) -> None:
    """c takes its first steps while a does three rounds. What it has trained is in its message of
    the fourth, at whose end it is in step again."""
    a, c = alone(store), Member(store, "c", least=2, grace=0.0)
    with a.loop, c.loop, ThreadPoolExecutor(1) as pool:
        c.job.step(ord("c"))
        for _ in range(3):
            a.round()

        def late() -> None:
            c.job.step(ord("c"))
            c.log.append((0, c.loop.round, c.now))

        other = pool.submit(late)
        wait_for_post(store, "c", 3)
        a.round()
        other.result(SECONDS)
        reasons = last_round(c.loop).excluded_reason.split("; ")
        assert [reason.split(":")[0] for reason in reasons] == ["round 1", "round 2", "round 3"]
        both = pool.submit(c.round)
        wait_for_post(store, "c", 4)
        a.round()
        both.result(SECONDS)
        for member in (a, c):
            member.final = member.held()
    assert closes(store) == [["a"]] * 3 + [["a", "c"]] * 2
    check([a, c], store)


@pytest.mark.parametrize("lost", [True, False])
def test_who_was_late_is_killed_and_comes_back(lost: bool, store: MemoryStore) -> None:
    """Its steps are in its residual, and its message never arrived, or nobody has closed the round:
    what it has trained is in its next message."""
    line = FaultyStore(store)
    a, c = alone(store), Member(line, "c", least=2, grace=0.0)
    c.patience(timeout_seconds=0.0)
    with a.loop:
        with suppress(Killed), c.loop:
            a.round()
            if lost:
                line.fail_on("put", "posts")
            c.job.step(ord("c"))
            with suppress(Exception):
                c.job.step(ord("c"))
            assert line.fired == lost
            saved, job = c.loop.state_dict(), deepcopy(c.job.state_dict())
            held = flat(c.loop.residual()).clone()
            raise Killed
        assert held.any()
        back = alone(store, "c")
        back.load(job, saved)
        with back.loop:
            assert (back.loop.round, back.loop.inner_step) == (1, 0)
            assert same(flat(back.loop.residual()), held)
            back.round()
            assert closes(store) == [["a"], ["c"]]
            # A message of its former process may have counted in place of this one.
            assert flat(back.loop.residual()).square().sum() < held.square().sum()


def test_what_is_late_and_not_finite_stops_its_trainer_alone(store: MemoryStore) -> None:
    a, c = alone(store), alone(store, "c")
    with a.loop, c.loop:
        a.round()
        c.job.step(ord("c"))
        next(c.job.model.parameters()).data.fill_(float("nan"))
        with pytest.raises(NonFinite):
            c.job.step(ord("c"))
        c.loop.rewind()
        c.job.optimizer.state.clear()
        c.round()
        assert closes(store) == [["a"], ["c"]]
        a.loop.rejoin()
        assert same(flat(a.loop.global_state()), flat(c.loop.global_state()))


def test_a_crowd_is_let_in_by_and_by(store: MemoryStore) -> None:
    """All read the messages of a first round: it names sixteen, and the next one four times as
    many."""
    names = [f"t{number:02d}" for number in range(18)]
    waiting = []
    for name in names[:-1]:
        member = Member(store, name, least=99)
        member.patience(timeout_seconds=0.0)
        with suppress(TrainerLost), member.loop:
            member.round()
        waiting.append(member)
    counted = FaultyStore(store)
    last = alone(counted, names[-1])
    last.loop.threads = 1
    with last.loop:
        last.round()
        assert closes(store) == [names[:16], names[-1:]]
        posts = [
            name for call, name in counted.calls if call == "get" and name.startswith("loco/posts/")
        ]
        assert len(posts) == 16, "it reads those that it names"
        for _ in range(2):
            for member in waiting:
                with suppress(TrainerLost), member.loop:
                    if not member.loop.inner_step:
                        member.round()
            last.round()
    assert closes(store)[2:] == [[*names[:15], names[-1]], names]
