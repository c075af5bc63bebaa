"""Whoever lies in a group's folder holds nobody for long; a poll may end anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pulse_rl import GroupMember, LocalStore, MemoryStore, Store, Subscriber, Update, gc_stream
from pulse_rl.errors import InputError, MemberConflict, StoreUnavailable
from pulse_rl.store import Data, ObjectInfo
from tests.faults.groups import MEMBERS, Client, ClockedStore, Stop
from tests.support.members import Clock, KeepsAll, Stream, member, note, rounds
from tests.support.states import Live
from tests.support.stores import FaultyStore, names, s3_store

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


STRAYS = (
    "README",
    "a",
    "a-staged",
    "notes/a-x",
    f"-{1:015d}-{'f' * 16}-empty",
    f"a-{1:015d}-{'F' * 16}-empty",
)


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


@pytest.mark.parametrize(
    "name", ["a", "a-away", "a-000000000000001-ffffffffffffffff-empty", "9.-_" * 32]
)
def test_members_of_any_name_meet(name: str, clock: Clock) -> None:
    store = MemoryStore()
    stream = Stream(store)
    stream.publish()
    members = [member(store, name), member(store, "b")]
    for version in range(3):
        assert rounds(members) == [version, version]
        stream.publish()


@pytest.mark.slow
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


@pytest.mark.slow
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

        def poll(one: GroupMember = one, live: Live = live) -> None:
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
    one = GroupMember(subscriber, group="g", name="one")
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
    one, two = member(store, "one", GroupMember), member(store, "two", GroupMember)
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
def test_an_update_whose_poll_failed_is_in_what_the_owner_syncs_by_itself(
    clock: Clock, synced: int
) -> None:
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
    one = GroupMember(subscriber, group="g", name="one")
    with pytest.raises(StoreUnavailable):
        one.poll()
    assert one.version is None
    if synced:
        stream.publish(synced)
    live.apply(subscriber.sync())
    for _ in range(2):
        live.apply(one.poll())
        assert (live.root, one.version) == (subscriber.root, synced)


def test_a_listing_that_misses_a_member_makes_nobody_switch_alone() -> None:
    """A note that is replaced while the folder is read may be in it under neither name."""

    class Misses(MemoryStore):
        missed = "none"

        def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
            return (
                info
                for info in super().list(folder, start_after)
                if f"/{self.missed}-" not in info.name
            )

    store = Misses()
    members = [member(store, "a"), member(store, "b")]
    assert rounds(members) == [None, None]
    Stream(store).publish()
    store.missed = "b"
    assert rounds(members[:1]) == [None]
    store.missed = "none"
    assert rounds(members) == [0, 0]


def test_a_group_in_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stream = Stream(store)
    stream.publish()
    members = [member(LocalStore(tmp_path), "a"), member(LocalStore(tmp_path), "b")]
    for version in range(3):
        assert rounds(members) == [version, version]
        stream.publish()
    assert len(list((tmp_path / MEMBERS).iterdir())) <= 6
    longest = GroupMember(Subscriber(store, stream="s" * 128), group="g" * 128, name="n" * 128)
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

    def work(each: GroupMember, path: list[int]) -> None:
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
    with pytest.raises(InputError):
        GroupMember(subscriber, group="../x", name="a")
    with pytest.raises(InputError):
        GroupMember(subscriber, group="x", name="")
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError):
            GroupMember(subscriber, group="x", name="a", timeout_seconds=seconds)
