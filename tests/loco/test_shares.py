"""Rounds over a store whose shares have owners: the same theta on all, and what owners withhold is theirs, as a plain
simulation has it; owners that are late or killed, and parts that are damaged."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_rl import MemoryStore, Store
from pulse_rl.errors import StoreUnavailable
from pulse_rl.loco import round_posts, run_store
from pulse_rl.loco.wire import WireName
from pulse_rl.store import Data
from tests.support.loco_reference import flat, same
from tests.support.stores import FaultyStore

from .test_over_store import Member, at_once, check, closes, sums_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of few parameters; and no snapshot, which would delete what is looked at."""
    monkeypatch.setattr(round_posts, "MIN_SHARE", 1)
    monkeypatch.setattr(run_store.RunStore, "keep_snapshot", lambda *_: None)


def gated(store: Store, name: str, **settings: Any) -> Member:
    return Member(store, name, gate_sums=True, **{"quorum": 2} | settings)


def together(*members: Member, rounds: int = 1) -> None:
    def train(member: Member) -> None:
        for _ in range(rounds):
            member.round()

    at_once(*(lambda m=m: train(m) for m in members))


def makers(store: Store, number: int) -> list[str]:
    return [each["trainer"] for each in sums_of(store, number)]


def end(store: Store, *members: Member) -> None:
    for member in members:
        member.final = member.held()
    check(list(members), store)


@pytest.mark.parametrize(("wire", "sweep"), [("FP32", None), ("int4", None), ("int2", 2)])
def test_owners_sum_their_shares(wire: WireName, sweep: int | None) -> None:
    store = MemoryStore()
    a, b, c = (gated(store, name, wire=wire, sweep=sweep, quorum=3) for name in "abc")
    with a.loop, b.loop, c.loop:
        together(a, b, c, rounds=4)
        assert closes(store) == [["a", "b", "c"]] * 4
        assert "".join(sum((makers(store, number) for number in range(4)), [])) == "bcacababc"
        assert a.loop.last_round is not None
        assert a.loop.last_round.scattered
        end(store, a, b, c)


def test_a_late_owner_is_not_waited_for() -> None:
    """It dies as it puts its sums: the other makes them, and withholds what they lack."""
    store = MemoryStore()
    a_line, b_line = FaultyStore(store), FaultyStore(store)
    a, b = gated(a_line, "a"), gated(b_line, "b", grace=0.0)
    with a.loop, b.loop:
        together(a, b)
        b_line.fail_on("list", "posts")  # once its message is there
        a_line.fail_on("put_new", "sums")
        for member in (b, a):
            with pytest.raises(StoreUnavailable):
                member.round()
        for member in (b, a):
            member.loop.rejoin()
            assert makers(store, 1) == ["b", "b"]
            member.log.append((1, member.loop.round, member.now))
        end(store, a, b)


def test_an_owner_that_lost_a_reply_knows_its_sums() -> None:
    store = MemoryStore()
    line = FaultyStore(store)
    a, b = gated(line, "a"), gated(store, "b")
    with a.loop, b.loop:
        together(a, b)
        line.fail_on("put_new", "sums", after=True)
        with pytest.raises(StoreUnavailable):
            together(a, b)
        assert makers(store, 1) == ["b", "a"]
        a.loop.rejoin()
        a.log.append((1, a.loop.round, a.now))
        end(store, a, b)


def test_an_owner_that_was_killed_finds_what_it_withheld() -> None:
    """From a checkpoint: its own message may not count twice, but what it held back of sums it makes again."""
    store = MemoryStore()
    line = FaultyStore(store)
    a, b = gated(line, "a"), gated(store, "b")
    with a.loop, b.loop:
        together(a, b)
        saved, job = a.loop.state_dict(), a.job.state_dict()
        line.fail_on("put_new", "sums", after=True)
        with pytest.raises(StoreUnavailable):
            together(a, b)
        b.final = b.held()
    back = gated(store, "a")
    back.job.load_state_dict(job)
    back.loop.load_state_dict(saved)
    with back.loop, a.loop:  # a process that lives on knows the same
        assert same(flat(back.loop.global_state()), b.final[0])
        a.log.append((1, a.loop.round, a.now))
        a.final = a.held()
        check([a, b], store)
        withheld = flat(back.loop.residual())
        assert withheld.any()
        assert not withheld[: len(withheld) // 2].any()  # the share of b


class Damaging(FaultyStore):
    """The last byte of each message changes on the way into the store, but for the first."""

    posts = 0

    def put(self, name: str, data: Data) -> None:
        if "posts" in name:
            assert isinstance(data, bytes)
            self.posts += 1
            if self.posts > 1:
                data = data[:-1] + bytes([data[-1] ^ 1])
        super().put(name, data)


def test_a_part_that_is_damaged_is_left_out_and_loses_nothing() -> None:
    store = MemoryStore()
    a, b = gated(store, "a"), gated(Damaging(store), "b")
    with a.loop, b.loop:
        together(a, b, rounds=5)
        left_out = [[dict(each["left_out"]) for each in sums_of(store, number)] for number in range(5)]
        # Where b owns the last share itself it has what it sent.
        assert left_out[1] == left_out[3] == [{}, {"b": "part 1 is damaged in the store"}]
        assert left_out[2] == left_out[4] == [{}, {}]
        end(store, a, b)
