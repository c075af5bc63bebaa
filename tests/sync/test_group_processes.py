"""Members that are ahead, restarted, replaced or doubled, and owners that sync by themselves."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest

from pulse_rl import GroupMember, MemoryStore, Subscriber, Update
from pulse_rl.errors import InputError, MemberConflict, StoreUnavailable
from pulse_rl.store import ObjectInfo
from tests.faults.groups import MEMBERS
from tests.support.lying_store import LyingStore
from tests.support.members import Clock, KeepsAll, Stream, member, rounds
from tests.support.states import Live
from tests.support.stores import FaultyStore, names


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
def test_the_others_follow_a_member_that_has_synced_by_itself(
    clock: Clock, acknowledges: bool
) -> None:
    store, live = MemoryStore(), Live()
    stream = Stream(store)
    stream.publish()
    subscriber = Subscriber(store, stream="s", threads=1)
    one = GroupMember(subscriber, group="g", name="one")
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
    one, two = GroupMember(subscriber, group="g", name="one"), member(store, "two")
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


def test_a_member_whose_subscriber_comes_to_an_older_version_stays_where_it_is(
    clock: Clock,
) -> None:
    store, live = MemoryStore(), Live()
    stream = Stream(store, anchor_ratio=0)
    stream.publish(3)
    subscriber = Subscriber(store, stream="s", threads=1)
    one = GroupMember(subscriber, group="g", name="one")
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


def test_a_member_that_is_restarted_at_once_goes_on_and_is_not_waited_for_twice(
    clock: Clock,
) -> None:
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


def test_a_process_that_was_replaced_is_not_waited_for_even_where_nobody_may_delete(
    clock: Clock,
) -> None:
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
    def delete(
        liar: LyingStore[MemoryStore], name: str, right: Callable[[], ObjectInfo]
    ) -> ObjectInfo:
        if "/members/" in name:
            liar.tell()
            liar.delete(name)
        return right()

    store = LyingStore(MemoryStore(), "head", delete)
    Stream(store).publish()
    assert member(store, "a").poll() is not None
    assert not store.call


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
            os._exit(0 if "this GroupMember was made in another process" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
