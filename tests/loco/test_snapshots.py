"""Snapshots of a run over a store: who is new or far behind takes one up, whatever became of it."""

from __future__ import annotations

import json

import pytest

from pulse_rl import MemoryStore
from pulse_rl.errors import StoreError
from tests.support.loco_reference import flat, same
from tests.support.stores import FaultyStore

from .test_over_store import alone, closes


def test_who_is_new_or_far_behind_takes_up_the_run(store: MemoryStore) -> None:
    """By a snapshot and the messages since: older ones are gone."""
    member, behind = alone(store), alone(store, "b")
    with behind.loop:
        behind.round()
        saved = behind.loop.state_dict()
    with member.loop:
        while len(closes(store)) < 30:
            member.round()
        newest = member.held()
    kept = {int(info.name.split("/")[2]) for info in store.list("loco/posts")}
    assert 0 < min(kept) < max(kept) == member.loop.round - 1
    # The run's first snapshot and the two newest ones, and their pieces.
    assert len(list(store.list("loco/snapshots"))) == 2
    assert len(list(store.list("loco/pieces"))) == 3 * 2
    for name in ("b", "c"):
        late = alone(store, name)
        if name == "b":
            late.loop.load_state_dict(saved)
        with late.loop:
            assert late.loop.round == len(closes(store))
            assert same(flat(late.loop.global_state()), newest[0])
            late.round()
            newest = late.held()
    with member.loop:
        assert same(flat(member.loop.global_state()), newest[0])


def test_a_member_that_may_not_delete_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    class Kept(MemoryStore):
        def delete(self, name: str) -> None:
            raise StoreError("not allowed to delete")

    member = alone(Kept())
    with member.loop:
        for _ in range(12):
            member.round()
        assert member.loop.round == 12
    assert caplog.text.count("old objects of the run are left: not allowed to delete") == 1


@pytest.mark.parametrize("how", ["damaged", "cut", "gone", "deleted meanwhile"])
def test_a_snapshot_that_cannot_be_read_is_passed_over(how: str, store: MemoryStore) -> None:
    """The one before it serves, and the messages since that."""
    member = alone(store)
    with member.loop:
        while len(closes(store)) < 30:
            member.round()
    newest = list(store.list("loco/snapshots"))[-1].name
    piece = f"loco/pieces/{json.loads(store.get(newest))['momentum']['pieces'][0]}"
    if how == "damaged":
        store.put(piece, bytes(len(store.get(piece))))
    elif how == "cut":
        store.put(piece, store.get(piece)[:-4])
    else:
        store.delete(piece)
    if how == "deleted meanwhile":
        store.delete(newest)
    late = alone(store, "c")
    with late.loop:
        assert late.loop.round == 30
        assert same(flat(late.loop.global_state()), flat(member.loop.global_state()))


@pytest.mark.parametrize("name", ["b", "c"])
def test_who_reads_a_snapshot_too_slowly_takes_the_next_one(name: str, store: MemoryStore) -> None:
    """While it reads the newest one, new or far behind, two more are stored, and that one is
    deleted."""
    behind, member = alone(store, "b"), alone(store)
    with behind.loop:
        behind.round()
        saved = behind.loop.state_dict()

    class Slow(FaultyStore):
        is_waited_for = False

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            if name.startswith("loco/pieces/") and not self.is_waited_for:
                self.is_waited_for = True
                there = {info.name for info in store.list("loco/snapshots")}
                while there & {info.name for info in store.list("loco/snapshots")}:
                    member.round()
            return super().get(name, start, stop)

    with member.loop:
        while len(closes(store)) < 30:
            member.round()
        late = alone(Slow(store), name)
        if name == "b":
            late.loop.load_state_dict(saved)
        with late.loop:
            assert late.loop.round == member.loop.round
            assert same(flat(late.loop.global_state()), flat(member.loop.global_state()))


def test_who_is_new_reads_no_more_the_longer_the_run() -> None:
    requests = []
    for rounds in (20, 40):
        store = MemoryStore()
        member = alone(store)
        with member.loop:
            while member.loop.round < rounds:
                member.round()
        newest = int(list(store.list("loco/snapshots"))[-1].name[-17:-5])
        counted = FaultyStore(store)
        with alone(counted, "c").loop:
            requests.append(len(counted.calls) - 3 * (rounds - newest))
    assert requests[0] == requests[1]
