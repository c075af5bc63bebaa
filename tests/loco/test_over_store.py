"""Rounds over a store: the same theta on all, whoever is late, gone, back or new, as a plain
simulation has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl import MemoryStore, PulseLoCo, Store
from pulse_rl.errors import (
    InputError,
    NonFinite,
    PulseError,
    StateMismatch,
    StoreUnavailable,
    TrainerLost,
)
from pulse_rl.loco import StoreExchange
from pulse_rl.loco.messages import CompressionName
from pulse_rl.store import Data
from tests.support.loco_reference import Job, Reference, flat, last_round, same
from tests.support.posts import digest_of
from tests.support.states import present
from tests.support.stores import FaultyStore

#: For what comes; nothing waits for it to pass.
SECONDS = 120.0


class Member:
    """A trainer of the run in ``store``, whose every round can be simulated afterwards."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        least: int = 3,
        grace: float = SECONDS,
        compression: CompressionName = "fp32",
        **settings: Any,
    ) -> None:
        self.compression = compression
        self.name, self.job = name, Job(lr=1e-3)
        self.now, self.log = torch.empty(0), list[tuple[int, int, torch.Tensor]]()
        self.job.optimizer.register_step_post_hook(
            lambda *_: setattr(self, "now", self.job.weights())
        )
        over = StoreExchange(
            store,
            trainer=name,
            min_trainers=1,
            grace_seconds=0.0,
            timeout_seconds=SECONDS,
            **settings,
        )
        self.loop = PulseLoCo(
            self.job.model,
            self.job.optimizer,
            sync_every=2,
            exchange=over,
            compression=compression,
        )
        # The run's settings are the same in all tests; who waits for more than they ask is patient.
        self.patience(min_trainers=least, grace_seconds=grace)
        self.first = flat(self.loop.global_state()).clone()

    def patience(self, **settings: Any) -> None:
        meeting: Any = self.loop.meeting
        meeting.exchange = replace(meeting.exchange, **settings)

    def load(self, job: Any, saved: Any) -> None:
        self.job.load_state_dict(job)
        self.loop.load_state_dict(saved)

    def round(self) -> str:
        before = self.loop.round
        for _ in range(2):
            self.job.step(ord(self.name[0]))
        self.log.append((before, self.loop.round, self.now))
        return last_round(self.loop).root

    def held(self) -> tuple[torch.Tensor, ...]:
        """Theta, residual and the next start."""
        return (
            flat(self.loop.global_state()).clone(),
            flat(self.loop.residual()).clone(),
            self.job.weights(),
        )


def closes(store: Store) -> list[list[str]]:
    """Who was in each round."""
    found = [json.loads(store.get(info.name)) for info in store.list("loco/closed")]
    assert [each["round"] for each in found] == list(range(len(found)))
    return [[trainer for trainer, _, _ in each["posts"]] for each in found]


def simulate(members: list[Member], store: Store) -> dict[str, Reference]:
    """By the document: who is in is summed by name; who is not keeps all that it has."""
    rounds = closes(store)
    references = {m.name: Reference(m.first, compression=m.compression) for m in members}
    logs = {member.name: list(member.log) for member in members}
    for number, names in enumerate(rounds):
        sent = {}
        for name, log in logs.items():
            if not log or number < log[0][0]:
                continue
            began, ended, now = log[0]
            reference = references[name]
            s, out = reference.select(now if number == began else reference.start().float())
            assert (name in names) == (number == ended - 1)
            if name in names:
                sent[name] = out
                log.pop(0)
            else:
                reference.residual = s
        for reference in references.values():
            reference.outer_step([sent[name] for name in names])
    return references


def check(members: list[Member], store: Store) -> None:
    """All hold what the simulation has, bit for bit."""
    references = simulate(members, store)
    for member in members:
        reference = references[member.name]
        for mine, expected in zip(
            member.final, (reference.theta.data, reference.residual, reference.start()), strict=True
        ):
            assert same(mine, expected)


def at_once(*programs: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(programs)) as pool:
        return [each.result(SECONDS) for each in [pool.submit(program) for program in programs]]


@pytest.mark.parametrize("compression", ["fp32", "e8m2"])
def test_all_hold_the_same_theta_after_each_round(compression: CompressionName) -> None:
    store = MemoryStore()
    members = [Member(store, name, compression=compression) for name in "abc"]

    def train(member: Member) -> list[str]:
        with member.loop:
            roots = [member.round() for _ in range(4)]
            member.final = member.held()
        return roots

    first, *others = at_once(*(lambda m=m: train(m) for m in members))
    assert [first] * 2 == others
    assert len(set(first)) == 4
    assert closes(store) == [["a", "b", "c"]] * 4
    check(members, store)
    for member in members:
        done = present(member.loop.last_round)
        assert (done.number, done.trainers, done.scattered) == (4, 3, False)
        assert 0 < done.payload_bytes <= done.sent_bytes


def alone(store: Store, name: str = "a", **settings: Any) -> Member:
    return Member(store, name, least=1, grace=0.0, **settings)


class Killed(Exception):
    pass


def test_steps_that_may_have_counted_are_not_sent_again(store: MemoryStore) -> None:
    """A checkpoint of mid-round; then its process puts the round's message, and dies: what is saved
    is part of that."""
    first = alone(store)
    with suppress(Killed), first.loop:
        first.job.step(ord("a"))
        saved, job = first.loop.state_dict(), deepcopy(first.job.state_dict())
        first.job.step(ord("a"))
        raise Killed
    assert closes(store) == [["a"]]
    back = alone(store)
    back.load(job, saved)
    with back.loop:
        assert back.loop.round == 1
        assert not flat(back.loop.residual()).any()
        assert back.loop.inner_step == 0, "no empty message follows"


def test_steps_that_may_have_counted_are_not_followed_by_an_empty_message() -> None:
    """While a is away, in mid-round, a process of its name runs so far ahead that the messages of
    a's round are gone."""
    store = MemoryStore()
    first, fast = alone(store), alone(store)
    with suppress(Killed), first.loop:
        first.job.step(ord("a"))
        saved, job = first.loop.state_dict(), deepcopy(first.job.state_dict())
        raise Killed
    with fast.loop:
        while (
            fast.loop.round < 20
            or f"{fast.loop.round:012d}" not in list(store.list("loco/snapshots"))[-1].name
        ):
            fast.round()
    assert not any(store.list("loco/posts/000000000000"))
    done = len(closes(store))
    back = alone(store)
    back.load(job, saved)
    with back.loop:
        assert len(closes(store)) == back.loop.round == done
        assert back.loop.inner_step == 0
        assert not flat(back.loop.residual()).any()
        back.round()
        assert len(closes(store)) == back.loop.round == done + 1


@pytest.mark.parametrize("counted", [True, False])
def test_a_trainer_that_is_killed_and_comes_back_is_counted_once(counted: bool) -> None:
    """It dies as it puts its message, which the others count, or never saw. What has counted is not
    sent again."""
    store = FaultyStore(MemoryStore())
    first, other = alone(store), alone(store, "b")
    with first.loop:
        first.round()
    with first.loop, other.loop:
        saved, job = first.loop.state_dict(), first.job.state_dict()
        assert saved["trainer"] == "a"
        before = flat(saved["residual"]).clone()
        assert before.any()
        store.fail_on("put", "posts", after=counted)
        with pytest.raises(StoreUnavailable):
            first.round()
        other.round()
    assert ("a" in closes(store)[-1]) == counted
    back = alone(store)
    back.load(job, saved)
    with back.loop:
        assert same(flat(back.loop.global_state()), flat(other.loop.global_state()))
        assert same(flat(back.loop.residual()), torch.zeros_like(before) if counted else before)
        back.round()
        assert closes(store)[-1] == ["a"]


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(
    ("call", "folder"), [("put", "posts"), ("put_new", "closed"), ("get", "closed")]
)
def test_a_round_whose_store_fails_goes_on(call: str, folder: str, after: bool) -> None:
    """Every reply may be lost: `rejoin` ends the round that was due, with the bits of a run without
    failure."""
    store = FaultyStore(MemoryStore())
    members = [alone(store), alone(MemoryStore())]
    for member in members:
        with member.loop:
            member.round()
            if member is members[0]:
                store.fail_on(call, folder, after=after)
                with pytest.raises(StoreUnavailable):
                    member.round()
                assert store.fired
                member.loop.rejoin()
            else:
                member.round()
            member.round()
            member.final = member.held()
    assert [each.loop.round for each in members] == [3, 3]
    for one, other in zip(*(member.final for member in members), strict=True):
        assert same(one, other)


def test_without_a_quorum_nothing_is_lost(store: MemoryStore) -> None:
    member, other = (Member(store, name, least=2, grace=0.0) for name in "ab")
    member.patience(timeout_seconds=0.0)
    loop, job = member.loop, member.job
    loop.sync_every = 1
    with loop:
        with pytest.raises(TrainerLost, match="1 of 2 trainers"):
            job.step(0)
        other.loop.sync_every = 1
        with other.loop:
            other.job.step(1)
        assert closes(store) == [["a", "b"]]
        loop.rejoin()
        assert loop.round == 1
        assert same(flat(loop.global_state()), flat(other.loop.global_state()))


def test_what_others_write_is_passed_over(store: MemoryStore) -> None:
    """Names that are none, a message of another theta, one that is cut off, and one larger than
    any."""
    member = alone(store)
    with member.loop:
        member.round()
        (kept,) = store.list("loco/posts/000000000000")
        old = store.get(kept.name)
        big = b"PLSP" + bytes(20 * member.loop.parameters.count + 20_000)
        for data in (old, old[:50], b"", big):
            store.put(f"loco/posts/000000000001/x{len(data)}.{digest_of(data)}", data)
        store.put("loco/posts/000000000001/README", b"junk")
        store.put("loco/closed/README", b"junk")
        member.round()
    assert [
        post[0] for post in json.loads(store.get("loco/closed/000000000001.json"))["posts"]
    ] == ["a"]


def test_what_is_not_finite_is_its_trainers_own_affair(store: MemoryStore) -> None:
    member, bad = alone(store), alone(store, "b")
    with member.loop, bad.loop:
        with torch.no_grad():
            next(bad.job.model.parameters()).fill_(float("nan"))
        with pytest.raises(NonFinite):
            bad.round()
        member.round()
        bad.loop.rewind()
        bad.job.optimizer.state.clear()  # NaN, too
        bad.round()
        assert closes(store) == [["a"], ["b"]]


def refusals() -> dict[str, tuple[Callable[[Store], Any], type[PulseError], str]]:
    def run(store: Store, model: nn.Module, **settings: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return PulseLoCo(
            model,
            optimizer,
            exchange=StoreExchange(store, min_trainers=1),
            **({"sync_every": 2} | settings),
        )

    def buffers(store: Store) -> None:
        model = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8))
        with run(MemoryStore(), model, sync_every=1) as loop:
            model(torch.randn(4, 24)).sum().backward()
            loop.parameters.optimizers._all[0].step()

    return {
        "settings": (
            lambda s: run(s, Job().model, sync_every=3).__enter__(),
            InputError,
            "settings",
        ),
        "model": (lambda s: run(s, nn.Linear(2, 2)).__enter__(), StateMismatch, "those of the run"),
        "buffers": (buffers, StateMismatch, "1.running_mean'.* changed"),
        "neither": (
            lambda s: PulseLoCo(*_parts(), sync_every=1, exchange=object()),  # type: ignore[arg-type]
            InputError,
            "store",
        ),
        "name": (lambda s: StoreExchange(s, trainer="a/b"), InputError, "trainer"),
        "min_trainers": (lambda s: StoreExchange(s, min_trainers=0), InputError, "min_trainers"),
        "group": (lambda s: run(s, Job().model).rejoin(object()), InputError, "not in a group"),
    }


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    job = Job()
    return job.model, job.optimizer


@pytest.mark.parametrize("case", refusals())
def test_refusals(case: str, store: MemoryStore) -> None:
    act, error, match = refusals()[case]
    with alone(store).loop:
        pass
    with pytest.raises(error, match=match):
        act(store)


class CountingStore(FaultyStore):
    """With the bytes that are written."""

    sent = 0

    def put(self, name: str, data: Data) -> None:
        self.sent += len(bytes(data)) if isinstance(data, bytes) else sum(map(len, data))
        super().put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.sent += len(data)
        super().put_new(name, data)


@pytest.mark.slow
def test_what_leaves_a_trainer_does_not_grow_with_their_number() -> None:
    """Counted at the store, snapshots included, which all make by turns; and the requests of a
    round are bounded."""
    rounds, means = 6, list[float]()
    for trainers in (4, 16):
        store = MemoryStore()

        def train(name: str, store: Store = store, trainers: int = trainers) -> tuple[int, int]:
            line, random = CountingStore(store), torch.Generator().manual_seed(ord(name))
            weight = nn.Parameter(torch.randn(20_000, generator=torch.Generator().manual_seed(0)))
            optimizer = torch.optim.SGD([weight], lr=1e-3)
            over = StoreExchange(
                line,
                trainer=name,
                min_trainers=trainers,
                grace_seconds=SECONDS,
                timeout_seconds=SECONDS,
            )
            settings: dict[str, Any] = {"exchange": over, "compression": "fp32"}
            with PulseLoCo({"w": weight}, optimizer, sync_every=1, **settings) as loop:
                loop.threads = 1
                line.sent, line.calls = 0, []
                reported = 0
                for _ in range(rounds):
                    weight.grad = torch.randn(20_000, generator=random)
                    optimizer.step()
                    assert last_round(loop).trainers == trainers
                    reported += last_round(loop).sent_bytes
                assert reported == line.sent
            pieces = sum(call == "put" and "pieces" in of for call, of in line.calls)
            looks = sum(call == "list" and "posts/" in of for call, of in line.calls)
            deleted = sum(call == "delete" for call, _ in line.calls)
            others = [
                of
                for call, of in line.calls
                if "snapshots" not in of and "pieces" not in of and "/" in of[5:]
            ]
            assert len(others) <= rounds * (trainers + 8) + 3 * looks + deleted
            return line.sent, pieces

        found = at_once(*(lambda name=name: train(name) for name in "abcdefghijklmnop"[:trainers]))
        means.append(sum(sent for sent, _ in found) / trainers / rounds)
        assert sum(pieces > 0 for _, pieces in found) > 1
    assert means[1] <= 1.1 * means[0]
