"""Joint activation: members switch together, and neither who vanishes nor who lies holds anybody for long."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pulse_rl import (
    ChainGap,
    InputError,
    InvalidName,
    LocalStore,
    Member,
    MemberConflict,
    MemoryStore,
    Publisher,
    Signer,
    Store,
    StoreUnavailable,
    Subscriber,
    Update,
    gc_stream,
    state_root,
)
from pulse_rl.store import Data, ObjectInfo, memory
from pulse_rl.stream.names import GroupNames, NoteName, StreamNames
from tests.support.groups import MEMBERS, Client, ClockedStore, Stop, run
from tests.support.states import Live, TinyTrainer
from tests.support.stores import FaultyStore, names, s3_store


class Clock:
    """The store's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(memory.time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def member(store: Store, name: str, **options: object) -> Member:
    subscriber = Subscriber(store, stream="s", threads=1, **options)
    return Member(subscriber, group="g", name=name, timeout_seconds=60)


class KeepsAll(MemoryStore):
    """Where members may write, but not delete."""

    def delete(self, name: str) -> None:
        raise StoreUnavailable("not allowed")


class Stream:
    """A stream of tiny states."""

    def __init__(self, store: Store, **options: object) -> None:
        self.trainer = TinyTrainer()
        self.publisher = Publisher(store, stream="s", threads=1, **options)

    def publish(self, count: int = 1) -> str:
        for _ in range(count):
            self.trainer.step()
            root = self.publisher.publish(self.trainer.state).root
        return root


def rounds(members: list[Member], count: int = 3) -> list[int | None]:
    """The members' versions after they have all polled so often."""
    for _ in range(count):
        for each in members:
            each.poll()
    return [each.version for each in members]


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
    paths: dict[Member, list[int]] = {quick: [], slow: []}
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


def test_whoever_has_staged_follows_one_that_has_switched_whatever_comes_between(clock: Clock) -> None:
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


def test_a_group_whose_version_is_deleted_while_all_are_away_goes_on_at_the_newest(clock: Clock) -> None:
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


def test_who_cannot_follow_to_a_version_that_only_others_have_is_not_waited_for(clock: Clock) -> None:
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
    assert gc_stream(store, "s", keep=1, grace_seconds=0).oldest == 9, "the notes are a hundred seconds old"


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


def test_a_version_that_no_trusted_key_signed_holds_the_others_for_the_timeout_only(clock: Clock) -> None:
    store, signer = MemoryStore(), Signer.generate()
    stream = Stream(store, signer=signer)
    stream.publish()
    careful, careless = member(store, "careful", trusted_keys=[signer.public_key]), member(store, "careless")
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


def test_the_others_follow_a_member_that_starts_from_a_newer_base(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    members = [member(store, "a"), member(store, "b")]
    rounds(members)
    stream.publish(2)
    ahead = member(store, "ahead", base=dict(stream.trainer.state))
    assert ahead.poll() is None, "it has all of version 2"
    assert ahead.version == 2
    assert members[0].poll() is None, "the other one has not staged it"
    assert members[0].version == 0
    update = members[1].poll()
    assert update is not None
    assert update.version == 2
    assert rounds([*members, ahead]) == [2, 2, 2]
    root = stream.publish()
    update = None
    for each in [ahead, *members, ahead]:
        update = each.poll() or update
    assert update is not None
    assert (update.version, update.previous, update.root, ahead.version) == (3, 2, root, 3)


@pytest.mark.parametrize("acknowledges", [True, False])
def test_the_others_follow_a_member_that_has_synced_by_itself(clock: Clock, acknowledges: bool) -> None:
    store, live = MemoryStore(), Live()
    stream = Stream(store)
    stream.publish()
    subscriber = Subscriber(store, stream="s", threads=1)
    one = Member(subscriber, group="g", name="one")
    two = member(store, "two")

    def take(update: Update | None) -> None:
        if update is not None:
            live.apply(update)
            assert live.root == update.root
            if acknowledges:
                update.acknowledge()

    take(one.poll())
    two.poll()
    stream.publish(2)
    take(subscriber.sync())
    take(one.poll())
    assert one.version == 2
    assert two.poll() is not None
    take(one.poll())
    assert (one.version, two.version) == (2, 2)
    stream.publish()
    for _ in range(3):
        take(one.poll())
        two.poll()
    assert (one.version, two.version) == (3, 3)
    assert live.root == subscriber.root


def test_an_owner_that_syncs_by_itself_gets_what_its_member_had_staged(clock: Clock) -> None:
    store, live = MemoryStore(), Live()
    stream = Stream(store)
    stream.publish()
    subscriber = Subscriber(store, stream="s", threads=1)
    one, two = Member(subscriber, group="g", name="one"), member(store, "two")
    live.apply(one.poll())
    two.poll()
    stream.publish()
    assert one.poll() is None
    root = stream.publish()
    live.apply(subscriber.sync())
    assert live.root == root
    assert two.poll() is not None, "both had staged version 1"
    live.apply(one.poll())
    assert live.root == root, "and this one is past it"
    assert rounds([one, two]) == [2, 2]


def test_a_member_whose_subscriber_comes_to_an_older_version_stays_where_it_is(clock: Clock) -> None:
    store, live = MemoryStore(), Live()
    stream = Stream(store, anchor_ratio=0)
    stream.publish(3)
    subscriber = Subscriber(store, stream="s", threads=1)
    one = Member(subscriber, group="g", name="one")
    live.apply(one.poll())
    store.delete(names(store, "s/versions")[-1])
    subscriber.close()
    for _ in range(2):
        assert one.poll() is None
    assert (subscriber.version, one.version) == (1, 2)
    root = stream.publish()
    live.apply(one.poll())
    assert (one.version, live.root) == (3, root)


def test_an_update_that_was_staged_and_overtaken_is_part_of_the_next(clock: Clock) -> None:
    store, live = MemoryStore(), Live()
    stream = Stream(store)
    stream.publish()
    one, two = member(store, "one"), member(store, "two")
    for update in (one.poll(), two.poll()):
        live.apply(update)
    stream.publish()
    assert one.poll() is None
    root = stream.publish()
    ahead = member(store, "ahead", base=dict(stream.trainer.state))
    ahead.poll()
    assert one.poll() is None
    two.poll()
    update = one.poll()
    assert update is not None
    assert (update.version, update.previous, update.full) == (2, 0, False)
    live.apply(update)
    assert live.root == root


# Two processes of one name.


def test_of_two_processes_of_one_name_the_older_is_told(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    older = member(store, "a")
    assert rounds([older]) == [0]
    newer = member(store, "a")
    newer.poll()
    for _ in range(5):
        with pytest.raises(MemberConflict, match="newer process is the member 'a'"):
            older.poll()
        newer.poll()
    stream.publish()
    assert rounds([newer]) == [1]
    with pytest.raises(MemberConflict):
        older.poll()
    clock.now += 61  # the newer one has ended
    assert rounds([older]) == [1]


def test_a_member_that_is_restarted_at_once_goes_on_and_is_not_waited_for_twice(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    other = member(store, "other")
    for _ in range(5):
        restarted = member(store, "a")
        assert rounds([restarted, other])[0] == other.version
        root = stream.publish()
        other.poll()
        update = restarted.poll()
        assert update is not None
        assert update.root == root
    assert len([name for name in names(store, MEMBERS) if "/a-" in name]) <= 3


def test_a_process_that_was_replaced_is_not_waited_for_even_where_nobody_may_delete(clock: Clock) -> None:
    store = KeepsAll()
    stream, broken = Stream(store), FaultyStore(store)
    stream.publish()
    other = member(store, "other")
    rounds([other, member(store, "a")])
    stream.publish()
    assert other.poll() is None
    restarted = member(broken, "a")
    for _ in range(2):
        broken.fail_on("get", "versions")
        with pytest.raises(StoreUnavailable):
            restarted.poll()
    assert other.poll() is not None


def test_a_note_that_is_deleted_at_once_is_written_again(clock: Clock) -> None:
    class Deletes(MemoryStore):
        armed = True

        def head(self, name: str) -> ObjectInfo:
            if self.armed and "/members/" in name:
                self.armed = False
                self.delete(name)
            return super().head(name)

    store = Deletes()
    Stream(store).publish()
    assert member(store, "a").poll() is not None
    assert not store.armed


def test_who_stages_for_long_switches_to_nothing_that_the_others_have_left(clock: Clock) -> None:
    store = MemoryStore()
    stream, slow = Stream(store), FaultyStore(store)
    stream.publish()
    one, two = member(slow, "one"), member(store, "two")
    rounds([one, two])
    stream.publish()
    two.poll()
    seen: list[str] = []

    def goes_on(name: str, data: bytes) -> bytes:
        if name.endswith(".patch") and not seen:
            seen.append(name)
            clock.now += 100
            stream.publish()
            assert rounds([two]) == [2]
        return data

    slow.damage = goes_on
    assert one.poll() is None, "version 1 is not what the group has now"
    assert seen
    assert one.poll() is not None
    assert one.version == 2


def test_a_member_cannot_be_doubled_in_one_machine(clock: Clock) -> None:
    one = member(MemoryStore(), "one")
    with pytest.raises(InputError):
        copy.copy(one)
    child = os.fork()
    if child == 0:
        try:
            one.poll()
        except InputError as error:
            os._exit(0 if "this Member was made in another process" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


# Lies, and what lies about.


def note(name: str, step: str, claimed: int = 1) -> str:
    return f"{MEMBERS}/{name}-{claimed:015d}-{'f' * 16}-{step}"


LIES: dict[str, str] = {
    "a version far beyond": note("stranger", "999999999999-staged"),
    "a switch far beyond": note("stranger", "999999999999-switched"),
    "a version that does not exist": note("stranger", "000000000009-staged"),
    "an old version": note("stranger", "000000000000-staged"),
    "nothing": note("stranger", "empty"),
    "a member's name": note("a", "000000000001-switched", 10**15 - 1),
    "a member's name, claimed now": note("a", "empty", 1_000_005),
    "a member's name, claimed soon": note("b", "999999999999-staged", 1_050_000),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_delays_no_longer_than_it_is_repeated(clock: Clock, lie: str) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish(2)
    members = [member(store, "a"), member(store, "b")]
    rounds(members)
    for _ in range(3):
        store.put(LIES[lie], b"")
        stream.publish()
        for each in members:
            try:
                each.poll()
            except MemberConflict:
                assert "claimed" in lie
        clock.now += 20
    clock.now += 60
    stream.publish()
    assert rounds(members, 4) == [5, 5]


@pytest.mark.parametrize("seconds", [-1e9, 50, 1e9])
def test_a_note_of_another_time_delays_no_longer(seconds: float) -> None:
    """On a shared folder, whoever writes a file also dates it."""
    store = ClockedStore()
    stream = Stream(store)
    stream.publish()
    members = [member(store, "a"), member(store, "b")]
    rounds(members)
    lie = note("stranger", "000000000000-switched", int(store.now * 1000))
    store.put(lie, b"")
    store.date(lie, store.now + seconds)
    stream.publish()
    store.now += 55
    members[0].poll()
    assert members[1].poll() is None or abs(seconds) > 60
    store.now += 55.5
    assert rounds(members, 4) == [1, 1]
    rounds(members, 4)
    assert (lie in names(store, MEMBERS)) == (abs(seconds) < 600)


STRAYS = ("README", "a", "a-staged", "notes/a-x", f"-{1:015d}-{'f' * 16}-empty", f"a-{1:015d}-{'F' * 16}-empty")


def test_stray_objects_are_ignored_and_nothing_is_ever_read(clock: Clock) -> None:
    store = MemoryStore()
    watched = FaultyStore(store)
    for stray in STRAYS:
        if stray[0] != "-":
            store.put(f"{MEMBERS}/{stray}", b"x" * 100_000)
    store.put("s/groups/g/README", b"")
    store.put("s/groups/README", b"")
    stream = Stream(store)
    stream.publish()
    members = [member(watched, "a"), member(watched, "b")]
    rounds(members)
    store.put(note("dead", "000000000000-switched"), b"x" * 100_000)
    clock.now += 61
    stream.publish()
    watched.calls.clear()
    assert rounds(members) == [1, 1]
    assert not [name for call, name in watched.calls if call == "get" and "/groups/" in name]
    gc_stream(store, "s", keep=1)
    assert f"{MEMBERS}/README" in names(store, MEMBERS)


@pytest.mark.parametrize("name", ["a", "a-away", "a-000000000000001-ffffffffffffffff-empty", "9.-_" * 32])
def test_a_note_is_read_as_it_was_written(name: str) -> None:
    group = GroupNames(StreamNames("s"), "g")
    for written in (
        NoteName(name, 0, "0123456789abcdef", "away"),
        NoteName(name, 10**15 - 1, "f" * 16, "staged", 10**12 - 1),
        NoteName(name, 1, "0" * 16, "switched", 0),
    ):
        assert group.parse(group.note(written)) == written
        assert GroupNames(StreamNames("s"), "h").parse(group.note(written)) is None
    assert not [stray for stray in STRAYS if group.parse(f"{MEMBERS}/{stray}")]


def test_an_idle_poll_costs_the_same_at_any_age(clock: Clock) -> None:
    """After many versions, and thousands of members that are no more."""
    store = MemoryStore()
    watched = FaultyStore(store)
    stream = Stream(store)
    stream.publish()
    members = [member(watched, name) for name in ("a", "b", "c")]
    for k in range(1500):
        store.put(note(f"dead-{k}", "000000000000-switched", k), b"")
    clock.now += 1000

    def idle() -> int:
        watched.calls.clear()
        members[0].poll()
        return len(watched.calls)

    assert idle() <= 20 + 2 * 16
    rounds(members)
    assert idle() <= 4 + 16
    for _ in range(36):
        stream.publish()
        rounds(members)
    assert idle() == 4
    assert len(names(store, MEMBERS)) <= 9
    assert {call for call, _ in watched.calls} == {"put", "head", "list"}


def test_whoever_may_not_delete_takes_part(clock: Clock) -> None:
    store = KeepsAll()
    stream = Stream(store)
    stream.publish()
    members = [member(store, "a"), member(store, "b")]
    for version in range(1, 4):
        rounds(members)
        stream.publish()
        assert rounds(members) == [version, version]


# Any call may fail, and any moment be interrupted.


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "error",
    [Stop(), pytest.param(StoreUnavailable("the connection broke"), marks=pytest.mark.slow)],
    ids=["stop", "lost"],
)
def test_a_poll_that_ends_at_any_store_call_is_repeated(error: BaseException, after: bool) -> None:
    calls = 40
    for at in range(calls):
        store = ClockedStore()
        stream, client, live = Stream(store), Client(store), Live()
        one, two = member(client, "one"), member(store, "two")

        def poll(one: Member = one, live: Live = live) -> None:
            try:
                live.apply(one.poll())
            except (Stop, StoreUnavailable):
                return

        client.fail_at, client.error, client.after = at, error, after
        for _ in range(3):
            root = stream.publish()
            for _ in range(4):
                poll()
                two.poll()
        assert client.fail_at is None or client.calls < calls
        assert (one.version, two.version) == (2, 2)
        assert live.root == root


def test_an_update_that_was_interrupted_on_its_way_out_comes_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    stream = Stream(store)
    root = stream.publish()
    subscriber = Subscriber(store, stream="s", threads=1)
    one = Member(subscriber, group="g", name="one")
    sync: Callable[[int | None], Update | None] = subscriber.sync

    def interrupted(target: int | None = None) -> Update | None:
        monkeypatch.setattr(subscriber, "sync", sync)
        sync(target)
        raise Stop

    monkeypatch.setattr(subscriber, "sync", interrupted)
    with pytest.raises(Stop):
        one.poll()
    update = one.poll()
    assert update is not None
    assert (update.root, update.full) == (root, True)


def test_an_update_that_was_not_acknowledged_is_returned_again(clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    one, two = member(store, "one"), member(store, "two")
    for each in (one, two):
        update = each.poll()
        assert update is not None
        update.acknowledge()
    stream.publish()
    assert one.poll() is None
    update = two.poll()
    assert update is not None
    assert two.poll() is update
    update.acknowledge()
    assert two.poll() is None


@pytest.mark.parametrize("synced", [0, 2])
def test_an_update_whose_poll_failed_is_in_what_the_owner_syncs_by_itself(clock: Clock, synced: int) -> None:
    class Breaks(MemoryStore):
        armed = True

        def put(self, name: str, data: Data) -> None:
            super().put(name, data)
            if self.armed and name.endswith("-switched"):
                self.armed = False
                raise StoreUnavailable("the reply was lost")

    store, live = Breaks(), Live()
    stream = Stream(store)
    stream.publish()
    subscriber = Subscriber(store, stream="s", threads=1)
    one = Member(subscriber, group="g", name="one")
    with pytest.raises(StoreUnavailable):
        one.poll()
    assert one.version is None
    if synced:
        stream.publish(synced)
    live.apply(subscriber.sync())
    for _ in range(2):
        live.apply(one.poll())
        assert (live.root, one.version) == (subscriber.root, synced)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_random_sequences(part: int) -> None:
    for seed in range(part * 25, part * 25 + 25):
        run(seed)


def test_a_sequence_is_a_function_of_its_seed() -> None:
    assert run(7).trace == run(7).trace
    assert run(7).counts == run(7).counts


def test_a_group_in_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stream = Stream(store)
    stream.publish()
    members = [member(LocalStore(tmp_path), "a"), member(LocalStore(tmp_path), "b")]
    for version in range(3):
        assert rounds(members) == [version, version]
        stream.publish()
    assert len(list((tmp_path / MEMBERS).iterdir())) <= 6
    longest = Member(Subscriber(store, stream="s" * 128), group="g" * 128, name="n" * 128)
    assert longest.poll() is None


@pytest.mark.slow
def test_a_group_in_an_object_store(s3: str) -> None:
    """Where times are whole seconds."""
    store = s3_store(s3, "group")
    stream = Stream(store)
    stream.publish()
    one, two = member(store, "one"), member(s3_store(s3, "group"), "two")
    assert rounds([one, two]) == [0, 0]
    restarted = member(store, "one")
    assert rounds([restarted, two]) == [0, 0]
    with pytest.raises(MemberConflict):
        one.poll()
    stream.publish()
    assert rounds([restarted, two]) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_members_that_poll_at_the_same_time_go_the_same_way(kind: str, tmp_path: Path) -> None:
    shared = MemoryStore()
    stores: list[Store] = [LocalStore(tmp_path) if kind == "folder" else shared for _ in range(5)]
    stream, last = Stream(stores[0]), 30
    members = [member(store, f"m{k}") for k, store in enumerate(stores[1:])]
    paths: list[list[int]] = [[] for _ in members]
    for each in members:
        assert each.poll() is None

    def work(each: Member, path: list[int]) -> None:
        live, until = Live(), time.monotonic() + 60
        while each.version != last and time.monotonic() < until:
            update = each.poll()
            if update is not None:
                live.apply(update)
                assert live.root == update.root
                path.append(update.version)

    with ThreadPoolExecutor(len(members)) as pool:
        working = [pool.submit(work, each, path) for each, path in zip(members, paths, strict=True)]
        stream.publish(last + 1)
        for each in working:
            each.result()
    assert len(paths[0]) > 1
    assert paths[0][-1] == last
    assert paths == [paths[0]] * len(paths)


def test_names_and_timeouts_are_checked() -> None:
    subscriber = Subscriber(MemoryStore(), stream="s")
    with pytest.raises(InvalidName):
        Member(subscriber, group="../x", name="a")
    with pytest.raises(InvalidName):
        Member(subscriber, group="x", name="")
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError):
            Member(subscriber, group="x", name="a", timeout_seconds=seconds)
