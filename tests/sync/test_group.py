"""Joint activation: members switch together, and who vanishes holds nobody for long."""

from __future__ import annotations

import pytest

from pulse_rl import GroupMember, MemoryStore, Publisher, Signer, gc_stream, state_root
from pulse_rl.errors import ChainGap, StoreUnavailable
from tests.faults.groups import MEMBERS
from tests.support.members import Clock, Stream, member, note, rounds
from tests.support.states import TinyTrainer
from tests.support.stores import FaultyStore, names


def test_nobody_switches_before_all_have_staged(clock: Clock) -> None:
    store, trainer = MemoryStore(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    first, second = member(store, "first"), member(store, "second")
    assert first.poll() is None
    assert second.poll() is None
    for version in range(3):
        trainer.step()
        publisher.publish(trainer.state)
        assert first.poll() is None, "the second has not staged"
        assert first.poll() is None
        update = second.poll()
        assert update is not None
        assert (update.version, update.root) == (version, state_root(trainer.state))
        update = first.poll()
        assert update is not None
        assert (update.version, first.version, second.version) == (version, version, version)
        assert first.poll() is None


def test_a_version_that_comes_later_waits_for_the_next_time(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    one, two = member(store, "one"), member(store, "two")
    assert two.poll() is not None, "alone in the group"
    assert one.poll() is not None
    stream.publish(2)
    assert one.poll() is None
    stream.publish()
    agreed = [two.poll(), one.poll()]
    assert [u.version for u in agreed if u] == [2, 2]
    assert one.poll() is None
    agreed = [two.poll(), one.poll()]
    assert [u.version for u in agreed if u] == [3, 3]


def test_nobody_skips_a_version_that_another_has_switched_to(clock: Clock) -> None:
    """However often one polls, and however fast versions come."""
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    quick, slow = member(store, "quick"), member(store, "slow")
    rounds([quick, slow])
    paths: dict[GroupMember, list[int]] = {quick: [], slow: []}
    for turn in range(12):
        stream.publish()
        for each in (quick, quick, slow) if turn % 2 else (slow, quick, quick):
            update = each.poll()
            paths[each] += [update.version] if update else []
    short, long = sorted(paths.values(), key=len)
    assert len(short) >= 5
    assert short == long[: len(short)]


def test_a_member_that_vanishes_holds_the_others_for_the_timeout_only(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    stays, vanishes = member(store, "stays"), member(store, "vanishes")
    stays.poll()
    vanishes.poll()
    stream.publish()
    clock.now += 59
    assert stays.poll() is None
    clock.now += 2
    update = stays.poll()
    assert update is not None
    assert update.version == 1
    root = stream.publish()
    update = stays.poll()
    assert update is not None
    assert update.version == 2
    back = vanishes.poll()
    assert back is not None
    assert (back.version, back.root, back.previous) == (2, root, 0)


def test_whoever_has_staged_follows_one_that_has_switched_whatever_comes_between(
    clock: Clock,
) -> None:
    """It does not wait for a third one that comes back just then and cannot stage."""
    store = MemoryStore()
    stream, broken = Stream(store), FaultyStore(store)
    stream.publish()
    one, two, back = member(store, "one"), member(store, "two"), member(broken, "back")
    rounds([one, two, back])
    stream.publish()
    clock.now += 40
    assert (one.poll(), two.poll()) == (None, None)
    clock.now += 30
    assert two.poll() is not None
    broken.fail_on("get", "payloads")
    with pytest.raises(StoreUnavailable):
        back.poll()
    assert one.poll() is not None
    assert (one.version, two.version, back.version) == (1, 1, 0)


def test_members_wait_for_each_other_after_the_stores_clock_has_gone_back(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    one, two = member(store, "one"), member(store, "two")
    rounds([one, two])
    clock.now -= 800
    rounds([one, two])
    stream.publish()
    assert (one.poll(), two.poll() is None, one.poll() is None) == (None, False, False)


def test_a_newcomer_joins_at_the_groups_version(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    old, other = member(store, "old"), member(store, "other")
    rounds([old, other])
    stream.publish()
    new = member(store, "new")
    update = new.poll()
    assert update is not None
    assert update.version == 0, "the group has not agreed on version 1 yet"
    assert rounds([old, new, other]) == [1, 1, 1]


def test_a_member_that_cannot_stage_is_not_waited_for(clock: Clock) -> None:
    store = MemoryStore()
    stream, broken = Stream(store), FaultyStore(store)
    stream.publish()
    good, bad = member(store, "good"), member(broken, "bad")
    rounds([good, bad])
    stream.publish()
    assert good.poll() is None
    for seconds in (0, 40, 40):
        clock.now += seconds
        assert good.poll() is None
        broken.fail_on("get", "payloads")
        with pytest.raises(StoreUnavailable):
            bad.poll()
    broken.fail_on("get", "payloads")
    with pytest.raises(StoreUnavailable):
        bad.poll()  # and says that it is not to be waited for
    update = good.poll()
    assert update is not None
    update = bad.poll()
    assert update is not None
    assert (good.version, bad.version, update.full) == (1, 1, False)


def test_a_process_that_crashes_again_and_again_holds_nobody(clock: Clock) -> None:
    store = MemoryStore()
    stream, broken = Stream(store), FaultyStore(store)
    stream.publish()
    good, bad = member(store, "good"), member(store, "bad")
    rounds([good, bad])
    stream.publish()
    versions = []
    for _ in range(6):
        clock.now += 20
        broken.fail_on("get", "payloads")
        with pytest.raises(StoreUnavailable):
            member(broken, "bad").poll()
        versions += [u.version for u in [good.poll()] if u]
    assert versions == [1]


# What the group stands on is gone.


def test_a_group_whose_version_is_deleted_while_all_are_away_goes_on_at_the_newest(
    clock: Clock,
) -> None:
    store = MemoryStore()
    stream = Stream(store, anchor_ratio=0)
    stream.publish(2)
    assert rounds([member(store, "a"), member(store, "b")]) == [1, 1]
    stream.publish(3)
    for name in names(store, "s/versions")[:-1]:
        store.delete(name)
    clock.now += 5
    restarted = [member(store, "a"), member(store, "c")]
    assert rounds(restarted) == [None, None], "the note of b still counts"
    clock.now += 60
    assert rounds(restarted) == [4, 4]
    clock.now += 1000
    assert rounds([member(store, "d"), member(store, "a")]) == [4, 4]


def test_members_of_different_ages_meet_after_a_gc(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store, anchor_ratio=0)
    stream.publish()
    paused, old = member(store, "paused"), member(store, "old")
    assert rounds([paused, old]) == [0, 0]
    stream.publish(3)
    clock.now += 100
    assert rounds([old]) == [3]
    clock.now += 100
    stream.publish(4)
    gc_stream(store, "s", keep=1, grace_seconds=0)
    assert names(store, "s/versions") == ["s/versions/000000000007.json"]
    young = member(store, "young")
    assert rounds([paused, young, old]) == [7, 7, 7]


@pytest.mark.parametrize("staged_by", [0, 1, 2])
def test_a_version_that_is_damaged_is_left_for_a_later_one(clock: Clock, staged_by: int) -> None:
    """Before any, some or all of the members have staged it."""
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    members = [member(store, "a"), member(store, "b")]
    rounds(members)
    before = set(names(store, "s/payloads"))
    stream.publish()
    for each in members[:staged_by]:
        each.poll()
    for name in set(names(store, "s/payloads")) - before:
        store.put(name, b"junk")
    for _ in range(3):
        for each in [member(store, "c"), *members]:
            try:
                each.poll()
            except ChainGap:
                assert staged_by < 2 or each not in members
    clock.now += 61  # c is gone
    stream.publisher = Publisher(store, stream="s", threads=1, anchor_ratio=0)
    stream.publish()
    assert rounds(members) == [2, 2]


def test_who_cannot_follow_to_a_version_that_only_others_have_is_not_waited_for(
    clock: Clock,
) -> None:
    """As after a stream was restored from a copy of some days ago."""
    store = MemoryStore()
    stream = Stream(store, anchor_ratio=0)
    stream.publish(3)
    old = member(store, "old")
    rounds([old])
    for name in names(store, "s/versions")[1:]:
        store.delete(name)
    new = member(store, "new")
    for _ in range(8):
        clock.now += 20
        for each in (old, new):
            each.poll()
    assert (old.version, new.version) == (2, None)
    assert next(name for name in names(store, MEMBERS) if "/new-" in name).endswith("-away")
    clock.now += 100
    assert rounds([new]) == [0]


def test_gc_keeps_the_version_at_which_a_live_group_is(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store, anchor_ratio=0)
    stream.publish(3)
    old = member(store, "old")
    assert rounds([old]) == [2]
    clock.now += 30
    stream.publish(5)
    for name in ("before", "the-last"):  # whatever order they are listed in
        store.put(note(name, "000000000000-switched"), b"")
    gc_stream(store, "s", keep=1, grace_seconds=0)
    for name in ("before", "the-last"):
        store.delete(note(name, "000000000000-switched"))
    assert names(store, "s/versions")[0] == "s/versions/000000000002.json"
    young = member(store, "young")
    update = young.poll()
    assert update is not None
    assert update.version == 2, "the group's, from which it goes on together"
    assert rounds([old, young]) == [7, 7]
    clock.now += 100
    stream.publish(2)
    assert gc_stream(store, "s", keep=1, grace_seconds=0).oldest == 9, (
        "the notes are a hundred seconds old"
    )


def test_gc_is_not_held_up_by_a_group_whose_version_is_damaged(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store, anchor_ratio=0)
    stream.publish(2)
    payloads = set(names(store, "s/payloads"))
    rounds([member(store, "a")])
    stream.publish(3)
    for name in payloads:
        store.delete(name)
    assert gc_stream(store, "s", keep=1, grace_seconds=0).oldest == 4


def test_a_version_that_no_trusted_key_signed_holds_the_others_for_the_timeout_only(
    clock: Clock,
) -> None:
    store, signer = MemoryStore(), Signer.generate()
    stream = Stream(store, signer=signer)
    stream.publish()
    careful, careless = (
        member(store, "careful", trusted_keys=[signer.public_key]),
        member(store, "careless"),
    )
    assert rounds([careful, careless]) == [0, 0]
    stream.publisher = Publisher(store, stream="s", threads=1, anchor_ratio=0)
    stream.publish()
    for _ in range(6):
        clock.now += 20
        careless.poll()
        with pytest.raises(ChainGap):
            careful.poll()
    careless.poll()
    assert (careful.version, careless.version) == (0, 1)
    stream.publisher = Publisher(store, stream="s", threads=1, anchor_ratio=0, signer=signer)
    stream.publish()
    assert rounds([careful, careless]) == [2, 2]


# Ahead of the group.
