"""Who is who over a store: the run that a trainer joins, and the trainer that it is."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest

from pulse_rl import MemoryStore, PulseLoCo, Signer, Store
from pulse_rl.errors import InputError, StateMismatch, TrainerLost
from pulse_rl.loco import GroupExchange, StoreExchange, group, store_rounds
from tests.support.loco_reference import Job, flat, last_round, same

from .test_over_store import SECONDS, Member, alone, at_once, closes


def trained(store: Store, seed: int = 0, **settings: Any) -> tuple[Job, PulseLoCo]:
    job = Job(seed, lr=1e-3)
    over = StoreExchange(store, **({"min_trainers": 1, "grace_seconds": 0.0} | settings))
    return job, PulseLoCo(job.model, job.optimizer, sync_every=1, exchange=over)


def begun(store: Store, rounds: int = 3, **settings: Any) -> PulseLoCo:
    """A run that has ended."""
    job, loop = trained(store, **settings)
    with loop:
        for _ in range(rounds):
            job.step(0)
    return loop


def test_a_straggler_ends_with_the_others_weights(store: MemoryStore) -> None:
    """They have left: it has what they did, and knows at its next round that nobody is there."""
    a, c = alone(store), Member(store, "c", least=2, grace=SECONDS)
    with c.loop:
        with a.loop:
            a.round()
            a.round()
        c.round()
        assert c.loop.round == 2
        assert same(flat(c.loop.global_state()), flat(a.loop.global_state()))
        with pytest.raises(TrainerLost, match="a left before it"):
            c.round()


def test_a_run_is_known_by_its_name_and_its_id(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = begun(store, run="toy")
    assert len(first.run) == 32
    for run in ("toy", first.run, None):
        job, loop = trained(store, run=run)
        with loop:
            job.step(0)
            assert loop.run == first.run
    assert f"joined run toy ({first.run}) at round 3, begun 20" in caplog.text
    for run, place in (("other", store), ("0" * 32, store), ("0" * 32, MemoryStore())):
        with pytest.raises(StateMismatch, match=run):
            trained(place, run=run)[1].__enter__()


@pytest.mark.parametrize("keys", [False, True])
def test_a_used_store_is_refused_to_other_weights_unless_asked_for(
    keys: bool, store: MemoryStore
) -> None:
    """Where members have keys a name does not do: it may be that of an old run, copied there."""
    signer = Signer.generate()
    members = {"signer": signer, "trusted_keys": [signer.public_key]} if keys else {}
    first = begun(store, run="toy", **members)
    asked = [first.run] if keys else [first.run, "toy"]
    for run in {None, "toy", first.run} - set(asked):
        job, loop = trained(store, 5, run=run, **members)
        before = job.weights()
        with pytest.raises(StateMismatch, match="other weights than this trainer's"):
            loop.__enter__()
        assert same(job.weights(), before)
    for run in asked:
        _, loop = trained(store, 5, run=run, **members)
        with loop:
            assert same(flat(loop.global_state()), flat(first.global_state()))


def test_trainers_of_other_weights_may_begin_together(store: MemoryStore) -> None:
    begun(store, rounds=1)
    _, loop = trained(store, 5)
    with loop:
        assert loop.round == 1


def test_a_checkpoint_is_one_of_its_trainer_and_its_run(store: MemoryStore) -> None:
    saved = begun(store, trainer="a").state_dict()
    _, other = trained(store, trainer="b")
    with pytest.raises(StateMismatch, match="of trainer 'a', not of 'b'"):
        other.load_state_dict(saved)
    elsewhere = MemoryStore()
    begun(elsewhere, rounds=4)
    _, loop = trained(elsewhere, trainer="a")
    loop.load_state_dict(saved)
    with pytest.raises(StateMismatch, match=f"its saved state's is {saved['run']}"):
        loop.__enter__()


def test_two_trainers_of_one_name_are_refused(store: MemoryStore) -> None:
    """Once both have been in a round: until then one may be a process that came back."""
    together = Barrier(3)
    members = [Member(store, name, least=2, grace=0.0) for name in "axx"]

    def train(member: Member) -> list[str]:
        reasons = []
        with suppress(TrainerLost), member.loop:
            member.patience(timeout_seconds=20.0)
            together.wait(SECONDS)
            for _ in range(4):
                try:
                    member.round()
                except InputError as error:
                    return [*reasons, str(error)]
                reasons.append(last_round(member.loop).excluded_reason)
        return reasons

    _, *twins = at_once(*(lambda m=m: train(m) for m in members))
    assert any("another trainer with the name 'x'" in reason for of in twins for reason in of)


def test_who_waits_knows_at_once_that_all_others_have_left(store: MemoryStore) -> None:
    a, b = (Member(store, name, least=2, grace=SECONDS) for name in "ab")

    def leave() -> None:
        with b.loop:
            b.round()

    def stay() -> float:
        with a.loop:
            a.round()
            began = time.monotonic()
            with pytest.raises(TrainerLost, match=r"round 2: b left before it; 1 of 2 trainers"):
                a.round()
            ended = time.monotonic()
            with b.loop:
                other = at_once(a.loop.rejoin, b.round)
            assert other
        return ended - began

    found, _ = at_once(stay, leave)
    assert found < SECONDS / 2
    assert closes(store) == [["a", "b"]] * 2


def test_who_has_left_is_not_waited_for(store: MemoryStore) -> None:
    a, b = (Member(store, name, least=2, grace=1e9) for name in "ab")
    with a.loop:
        with b.loop:
            at_once(a.round, b.round)
        a.patience(min_trainers=1)
        a.round()
    assert closes(store) == [["a", "b"], ["a"]]


@pytest.mark.parametrize("where", ["store", "group"])
def test_a_long_wait_is_logged(
    where: str,
    store: MemoryStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "store":
        monkeypatch.setattr(store_rounds, "_LOG_AFTER", 0.0)
        a = Member(store, "a", least=2)
        a.patience(timeout_seconds=0.0)
        with suppress(TrainerLost), a.loop:
            at_once(a.round, lambda: alone(MemoryStore()))
        a.patience(timeout_seconds=0.2)
        with suppress(TrainerLost):
            a.loop.rejoin()
        assert "round 1: waiting for more trainers" in caplog.text
        return
    monkeypatch.setattr(group, "_LOG_AFTER_SECONDS", 0.0)
    with group.logged_wait("waiting for somebody"):
        began = time.monotonic()
        while not caplog.text and time.monotonic() - began < SECONDS:
            time.sleep(0.01)
    assert "waiting for somebody since 0 s" in caplog.text


def settings_that_differ() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        "sync_every": ({"sync_every": 3}, {}),
        "compression": ({"compression": "bf16"}, {}),
        "lookahead": ({"lookahead": 0.0}, {}),
        "min_trainers": ({}, {"min_trainers": 4}),
        "grace_seconds": ({}, {"grace_seconds": 4.0}),
    }


@pytest.mark.parametrize("key", settings_that_differ())
def test_a_setting_that_differs_is_named(key: str, store: MemoryStore) -> None:
    of_loop, of_exchange = settings_that_differ()[key]
    begun(store)
    job = Job()
    over = StoreExchange(store, **({"min_trainers": 1, "grace_seconds": 0.0} | of_exchange))
    loop = PulseLoCo(job.model, job.optimizer, exchange=over, **({"sync_every": 1} | of_loop))
    with pytest.raises(InputError, match=rf"other settings: {key} is .* there, .* here"):
        loop.__enter__()


def test_a_round_is_printed_on_one_line(store: MemoryStore) -> None:
    done = replace(last_round(begun(store)), trainers=4, sent_bytes=1000, parameters=100_000)
    assert str(replace(done, entries=2100, number=7)) == (
        "round 7: 4 trainers, 2.1% of 100000 parameters, sent 1 kB, 600 times less than DiLoCo"
    )
    assert "left out of round 3: late" in str(replace(done, excluded_reason="round 3: late"))


def test_an_exchange_is_a_group_a_store_or_an_address(tmp_path: Any) -> None:
    loops: list[Callable[[], PulseLoCo]] = [
        lambda e=e: PulseLoCo(job.model, job.optimizer, sync_every=1, exchange=e)
        for e in (None, GroupExchange(), StoreExchange(tmp_path / "a"), str(tmp_path / "b"))
    ]
    for number, made in enumerate(loops):
        job = Job()
        assert (made().trainer.name != "") == (number > 1)


def test_a_saved_state_is_the_trainers_own(store: MemoryStore) -> None:
    """Without a name of its own a trainer takes the saved one."""
    saved = copy.deepcopy(begun(store, trainer="a").state_dict())
    _, loop = trained(store)
    loop.load_state_dict(saved)
    with loop:
        assert loop.state_dict()["trainer"] == "a"
