"""Trainers that die or stand still in any part of a round: an error in time, and the others go on
with nothing lost."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import pytest
import torch

from pulse_rl.errors import InputError, TrainerLost
from pulse_rl.loco import PulseLoCo
from tests.support.loco_reference import (
    Job,
    Reference,
    flat,
    group_of,
    last_round,
    pulse_loco,
    same,
)
from tests.support.trainers import (
    Group,
    Trainer,
    cut_off_in_broadcast,
    force_scattered,
    lose,
    side_by_side,
    together,
)

pytestmark = pytest.mark.slow

# Where the victim is lost: on entering a phase, or before the n-th collective of the round
# (lengths, messages, whether all were read, roots).
PLACES = ["gate", 1, 2, 3, "update", 4]
# The same of a scattered round: lengths, parts, lengths of the sums, sums, whether all were read,
# roots.
PLACES_SCATTERED = ["gate", 1, 2, 3, 4, 5, "update", 6]
WAYS = ["gathered", "scattered"]


class CheckedTrainer:
    """One trainer beside the dense reference. It puts what it is about to send where the others
    find it."""

    def __init__(
        self, trainer: Trainer, way: str, *, seed: int = 0, timeout_seconds: float = 20
    ) -> None:
        force_scattered(way == "scattered")
        self.trainer, self.job, self.way = trainer, Job(seed, lr=1e-3), way
        self.s = self.sent = torch.empty(0)
        self.job.optimizer.register_step_post_hook(lambda *_: self._put_sent())
        self.loop = pulse_loco(
            self.job.model,
            self.job.optimizer,
            sync_every=2,
            timeout_seconds=timeout_seconds,
        )

    def __enter__(self) -> Self:
        self.loop.__enter__()
        self.reference = Reference(flat(self.loop.global_state()))
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.close()

    def step(self) -> None:
        self.job.step(self.trainer.rank)

    def _put_sent(self) -> None:
        if self.loop.inner_step == 1:
            self.s, self.sent = copy.deepcopy(self.reference).select(self.job.weights())
            self.trainer.put(f"sent-{self.loop.round}", self.sent)

    def after(self, number: int, ranks: tuple[int, ...]) -> Reference:
        """The reference after a round in which the messages of these ranks counted."""
        found = copy.deepcopy(self.reference)
        found.residual = self.s - self.sent
        found.outer_step([self.trainer.get(f"sent-{number}", rank) for rank in ranks])
        return found

    def rejoin(self, *, forget: bool = False) -> None:
        """``forget``: not all trainers know the same last sums; shares are cut anew."""
        self.loop.rejoin()
        if forget:
            self.reference.summed.zero_()

    def round(self, ranks: tuple[int, ...]) -> str:
        """A round in which all goes well. Returns theta's root."""
        number = self.loop.round
        self.step()
        self.step()
        self.reference = self.after(number, ranks)
        self.reference.check(self.loop)
        assert last_round(self.loop).number == number + 1
        assert last_round(self.loop).trainers == len(ranks)
        return last_round(self.loop).root


def lose_at(loop: PulseLoCo, place: object, how: signal.Signals) -> None:
    """Once; a process that was stopped may go on."""
    exchange = group_of(loop)
    phase, calls = loop._phase, 0
    all_gather, all_to_all = exchange._all_gather_array, exchange._all_to_all_arrays

    @contextmanager
    def entering(name: str) -> Iterator[None]:
        nonlocal place
        if name == place:
            place = None
            lose(how)
        with phase(name):
            yield

    def losing(collective: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == place:
                lose(how)
            return collective(*args)

        return calling

    loop._phase = entering  # type: ignore[method-assign]
    exchange._all_gather_array = losing(all_gather)  # type: ignore[method-assign]
    exchange._all_to_all_arrays = losing(all_to_all)  # type: ignore[method-assign]


def survive(
    trainer: Trainer,
    place: object,
    how: signal.Signals,
    victim: int,
    timeout_seconds: float,
    way: str,
) -> str:
    """A round in which ``victim`` is lost; the others go on. Returns theta's root two rounds
    later."""
    last = 4 if way == "gathered" else 6
    finished = place in ("update", last)  # by then the others have all that they need
    everyone = (0, 1, 2)
    survivors = tuple(rank for rank in everyone if rank != victim)
    trainer.connect("first")
    with CheckedTrainer(trainer, way, timeout_seconds=timeout_seconds) as checked:
        loop = checked.loop
        checked.round(everyone)
        if trainer.rank == victim:
            lose_at(loop, place, how)
        checked.step()
        started = time.monotonic()
        with pytest.raises(TrainerLost) as caught:
            checked.step()
        assert time.monotonic() - started < (
            2 * timeout_seconds if how == signal.SIGSTOP else timeout_seconds
        )
        assert "rejoin" in caught.value.hint
        with pytest.raises(InputError, match="not met"):  # no second try before they have
            loop._run_round()
        trainer.connect("second", survivors)
        checked.rejoin()
        assert (loop.round, loop.inner_step) == (2, 0)
        # Nothing is lost, nothing is sent twice: theta has taken what was sent, the residual is
        # what is left of s.
        checked.reference = checked.after(1, everyone if finished else survivors)
        checked.reference.check(loop)
        checked.round(survivors)
        return checked.round(survivors)


@pytest.mark.parametrize(
    ("how", "way"),
    [*((signal.SIGKILL, way) for way in WAYS), *((signal.SIGSTOP, way) for way in WAYS[:2])],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_others_go_on(how: signal.Signals, way: str) -> None:
    """In every part of a round; side by side, as most of the time is waiting."""
    timeout_seconds = 20 if how == signal.SIGKILL else 4
    groups = {}
    for i, place in enumerate(PLACES if way == "gathered" else PLACES_SCATTERED):
        victim = i % 3
        groups[place] = Group(survive, 3, place, how, victim, timeout_seconds, way, lost=(victim,))
    for place, roots in side_by_side(groups).items():
        assert len(set(roots)) == 2, f"the survivors differ: {place}"
        assert None in roots


def miss_the_end(loop: PulseLoCo) -> None:
    """The next round ends on all others; this trainer loses them when it has sent everything."""
    exchange = group_of(loop)
    all_gather = exchange.all_gather_fixed

    def cut_off(message: bytes) -> list[bytes]:
        found = all_gather(message)
        if len(message) > 1:  # not yet the word that all was read
            return found
        raise TrainerLost("the line went dead")

    exchange.all_gather_fixed = cut_off  # type: ignore[method-assign]


def come_back(trainer: Trainer, way: str) -> list[str]:
    """Who missed the end of a round, slept through one, comes from a checkpoint, is new, or left in
    mid-round: all join, and what each has not sent is sent later, once. Returns theta's roots."""
    me, roots = trainer.rank, []
    checked = CheckedTrainer(trainer, way, seed=me, timeout_seconds=4)
    loop = checked.loop
    if me != 3:
        trainer.connect("a", (0, 1, 2))
        checked.__enter__()
        checked.round((0, 1, 2))

        # Trainer 2 misses the end of round 1, in which its message was counted.
        if me == 2:
            miss_the_end(loop)
        checked.step()
        with pytest.raises(TrainerLost):
            checked.step()
        assert loop.round == (1 if me == 2 else 2)
        checked.reference = checked.after(1, (0, 1, 2))
        trainer.connect("b", (0, 1, 2))
        checked.rejoin(forget=True)
        checked.reference.check(loop)
        roots.append(checked.round((0, 1, 2)))

        # Trainer 1 sleeps through round 3. The others make a group of two.
        if me == 1:
            trainer.put("pid", os.getpid())
            lose_at(loop, "gate", signal.SIGSTOP)
        checked.step()
        with pytest.raises(TrainerLost):
            checked.step()
        assert loop.round == 3
        if me != 1:
            trainer.connect("c", (0, 2))
            checked.rejoin()
            checked.reference = checked.after(3, (0, 2))
            checked.reference.check(loop)
        if me == 0:
            os.kill(trainer.get("pid", 1), signal.SIGCONT)

    # It wakes up, and a new trainer comes.
    everyone = (0, 1, 2, 3)
    trainer.connect("d")
    if me == 3:
        checked.__enter__()
        assert not checked.reference.residual.any()
        momentum = flat(loop.state_dict()["momentum"])
        checked.reference.outer.state[checked.reference.theta] = {"momentum_buffer": momentum}
    else:
        checked.rejoin(forget=True)
    if me == 1:
        checked.reference = checked.after(3, (0, 2))
        checked.reference.summed.zero_()
        checked.reference.residual = checked.s  # its message reached nobody
    assert loop.round == 4
    checked.reference.check(loop)
    early = loop.state_dict()
    roots.append(checked.round(everyone))

    # Trainer 3 comes back from a checkpoint of a round that the others have left: what it kept then
    # may have been sent.
    trainer.connect("e")
    if me == 3:
        assert checked.reference.residual.any()
        loop.load_state_dict(early | {"residual": {k: v + 1 for k, v in early["residual"].items()}})
        checked.reference.residual.zero_()
    checked.rejoin(forget=True)
    assert loop.round == 5
    checked.reference.check(loop)
    roots.append(checked.round(everyone))

    # Trainer 1 leaves in mid-round and comes back two rounds later.
    if me == 1:
        checked.step()
        trainer.barrier("two rounds on", everyone)
        left = (checked.reference.start() - checked.job.weights()) + flat(loop.residual())
        checked.reference = checked.after(6, (0, 2, 3))
        checked.reference = checked.after(7, (0, 2, 3))
        checked.reference.residual = left
    else:
        trainer.connect("f", (0, 2, 3))
        checked.rejoin()
        checked.round((0, 2, 3))
        checked.round((0, 2, 3))
        trainer.barrier("two rounds on", everyone)
    trainer.connect("g")
    checked.rejoin(forget=True)
    assert loop.round == 8
    checked.reference.check(loop)
    roots.append(checked.round(everyone))
    checked.__exit__()
    return roots


def test_whoever_comes_back_sends_what_it_has_not_sent() -> None:
    """In every way; side by side, as most of the time is waiting."""
    for way, (*old, new) in side_by_side({way: Group(come_back, 4, way) for way in WAYS}).items():
        assert old[0] == old[1] == old[2], way
        assert old[0][1:] == new, way


def interrupt(message: bytes) -> list[bytes]:
    raise KeyboardInterrupt


def meetings(trainer: Trainer) -> None:
    """Trainers that do not come, or are lost in the middle of the rendezvous."""
    # Trainer 1 does not come.
    trainer.connect("a")
    job = Job(trainer.rank)
    loop = pulse_loco(job.model, job.optimizer, sync_every=1, timeout_seconds=3)
    before = flat(loop.global_state())
    if trainer.rank != 1:
        started = time.monotonic()
        with pytest.raises(TrainerLost):
            loop.__enter__()
        assert time.monotonic() - started < 10
        assert not job.optimizer._optimizer_step_post_hooks
        assert same(flat(loop.global_state()), before)
    trainer.barrier("nobody met", (0, 1, 2))

    # All but trainer 2 go on for some rounds. It loses them in the middle of the state that it
    # fetches.
    if trainer.rank != 2:
        trainer.connect("b", (0, 1))
        loop.__enter__()
        for _ in range(3):
            job.step(trainer.rank)
    trainer.barrier("three rounds on", (0, 1, 2))
    trainer.connect("c")
    with cut_off_in_broadcast(2, torn=trainer.rank == 2), pytest.raises(TrainerLost):
        loop.rejoin() if trainer.rank != 2 else loop.__enter__()
    if trainer.rank == 2:
        assert same(flat(loop.global_state()), before)
        assert not flat(loop.state_dict()["momentum"]).any()
        assert same(job.weights(), before)
        assert loop.round == 0
    with pytest.raises(InputError, match="not met") if trainer.rank != 2 else nullcontext():
        job.step(trainer.rank)
    trainer.connect("d")
    if trainer.rank == 2:
        loop.__enter__()
    else:
        loop.rejoin()  # and the round that was due runs, when trainer 2 takes part
    if trainer.rank == 2:
        assert loop.round == 3
        job.step(trainer.rank)
    assert loop.round == 4

    # Ctrl-C on trainer 1 between two collectives. Nobody died, so torch.distributed need not be
    # initialized anew.
    exchange = group_of(loop)
    if trainer.rank == 1:
        exchange.all_gather_fixed = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt if trainer.rank == 1 else TrainerLost):
        job.step(trainer.rank)
    assert loop.round == 4
    trainer.barrier("interrupted", (0, 1, 2))
    loop.rejoin()
    assert loop.round == 5
    trainer.put("theta", flat(loop.global_state()))
    assert same(trainer.get("theta", 0), flat(loop.global_state()))
    loop.close()


def test_a_meeting_that_fails_changes_nothing() -> None:
    together(meetings, 3)
