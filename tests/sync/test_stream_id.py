"""A stream has an ID: another run of its name is not taken for it, one recreated is said to be
so."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_rl import (
    MemoryStore,
    Publisher,
    Signer,
    Subscriber,
    fold_stream,
    gc_stream,
    state_root,
    verify_stream,
)
from pulse_rl.errors import (
    ChainGap,
    InputError,
    PublisherConflict,
    StoreUnavailable,
    StreamRecreated,
)
from pulse_rl.events import BaselineRestored, Event, FallbackUsed, Synced
from tests.support.publishers import anchor_stream, tuned
from tests.support.states import (
    Live,
    Rng,
    Tensors,
    history,
    present,
    publish_each,
    reach,
    roots,
    taken,
)
from tests.support.stores import FaultyStore, names


def published(states: list[Tensors], signer: Signer | None = None, store: Any = None) -> Any:
    store = store or MemoryStore()
    with Publisher(store, stream="policy", signer=signer) as publisher:
        publish_each(publisher, states)
    return store


def trusting(store: Any, signer: Signer, seen: list[Event]) -> Subscriber:
    keys = [signer.public_key]
    return Subscriber(store, stream="policy", trusted_keys=keys, on_event=seen.append)


def wipe(store: MemoryStore, folder: str = "policy") -> None:
    for name in names(store, folder):
        store.delete(name)


def replay(
    source: MemoryStore,
    into: MemoryStore,
    folders: tuple[str, ...] = ("versions", "payloads", "links"),
) -> None:
    """What a co-writer can do who has kept the objects of another run."""
    for folder in folders:
        for name in names(source, f"policy/{folder}"):
            into.put(name, source.get(name))


def test_a_stream_keeps_its_id_through_restarts(rng: Rng, store: MemoryStore) -> None:
    states = history(rng, 3)
    seen = set()
    for state in states:
        with Publisher(store, stream="policy") as publisher:
            publisher.publish(state)
            seen.add(publisher.stream_id)
    subscriber = Subscriber(store, stream="policy")
    assert subscriber.stream_id is None
    subscriber.sync()
    assert seen == {subscriber.stream_id} == {subscriber.manifest.stream_id}
    assert published(states[:1]).get("policy/versions/000000000000.json") != store.get(
        "policy/versions/000000000000.json"
    )


def test_signed_versions_of_another_run_are_passed_over(rng: Rng, signer: Signer) -> None:
    """Same key, same name: a replay of an earlier run was followed."""
    earlier = published(history(rng, 6), signer)
    states = history(rng, 3)
    store = published(states[:2], signer)
    events: list[Event] = []
    live = Live()
    worker = trusting(store, signer, events)
    live.apply(worker.sync())
    for name in names(earlier, "policy/versions")[2:]:
        store.put(name, earlier.get(name))
    replay(earlier, store, ("payloads", "links"))
    assert worker.sync() is None
    assert live.root == state_root(states[1])
    assert {event.kind for event in events if isinstance(event, FallbackUsed)} == {"untrusted"}
    # The publisher is not misled either: it goes on above what it did not write.
    publisher = Publisher(store, stream="policy", signer=signer)
    publisher.stream_id = worker.stream_id
    with pytest.raises(InputError, match="not"):
        publisher.stream_id = "0" * 32
    assert publisher.publish(states[2]).version == 6
    live.apply(worker.sync())
    assert (worker.version, live.root) == (6, state_root(states[2]))


def test_a_newcomer_who_knows_the_id_takes_no_other(rng: Rng, signer: Signer) -> None:
    earlier = published(history(rng, 6), signer)
    states = history(rng, 2)
    store = published(states, signer)
    with Publisher(store, stream="policy", signer=signer) as publisher:
        assert publisher.head() is not None
        stream_id = Subscriber(store, stream="policy").stream.newest().manifest.stream_id  # type: ignore[union-attr]
    for name in names(earlier, "policy/versions")[2:]:
        store.put(name, earlier.get(name))
    replay(earlier, store, ("payloads", "links"))
    worker = Subscriber(
        store, stream="policy", trusted_keys=[signer.public_key], stream_id=stream_id
    )
    reach(worker, state_root(states[1]), 1)
    with pytest.raises(InputError, match="not a stream ID"):
        Subscriber(store, stream="policy", stream_id="policy")
    with pytest.raises(InputError, match="allow_recreated"):
        worker.allow_recreated = True


@pytest.mark.parametrize("versions", [1, 2, 3, 6])
def test_a_stream_that_was_recreated_is_an_error_or_followed(versions: int, rng: Rng) -> None:
    """A worker waited for ever in silence, or mixed both streams."""
    states = history(rng, 3)
    store = published(states)
    strict = Subscriber(store, stream="policy")
    taken(strict)
    live, free = Live(), Subscriber(store, stream="policy")
    free.allow_recreated = True
    live.apply(free.sync())
    wipe(store)
    assert strict.sync() is None, "an empty store is one to wait for"
    anew = history(rng, versions)
    published(anew, store=store)
    with pytest.raises(StreamRecreated, match="recreated") as caught:
        strict.sync()
    assert "allow_recreated = True" in caught.value.hint
    assert (strict.version, strict.root) == (2, state_root(states[2]))
    update = present(free.sync())
    assert update.full
    live.apply(update)
    assert (free.version, live.root) == (versions - 1, state_root(anew[-1]))
    more = history(rng, 1)
    published(more, store=store)
    with pytest.raises(StreamRecreated):
        strict.sync()
    live.apply(free.sync())
    assert live.root == state_root(more[-1])


@pytest.mark.parametrize("what", ["everything", "versions"])
def test_a_publisher_whose_store_was_wiped_says_so_and_anchors(what: str, rng: Rng) -> None:
    """It went on with patches that nobody could restore."""
    states = history(rng, 6)
    store, events = MemoryStore(), list[Event]()
    publisher = Publisher(store, stream="policy", on_event=events.append)
    live, worker = Live(), Subscriber(store, stream="policy")
    for state in states[:3]:
        publisher.publish(state)
        live.apply(worker.sync())
    wipe(store, "policy" if what == "everything" else "policy/versions")
    done = publisher.publish(states[3])
    assert (done.version, done.anchored) == (3, True)
    (told,) = [event for event in events if isinstance(event, BaselineRestored)]
    assert (told.how, told.version) == ("anchored", 2)
    assert "no longer holds" in told.reason
    live.apply(worker.sync())
    assert live.root == state_root(states[3])
    publisher.publish(states[4])
    newcomer = Subscriber(store, stream="policy")
    reach(newcomer, state_root(states[4]))
    assert newcomer.stream_id == worker.stream_id
    assert Publisher(store, stream="policy").publish(states[5]).version == 5


def test_a_publisher_whose_stream_was_recreated_by_another_stops(rng: Rng) -> None:
    states = history(rng, 4)
    store = MemoryStore()
    old = Publisher(store, stream="policy")
    old.publish(states[0])
    old.publish(states[1])
    wipe(store)
    published(states[2:3], store=store)
    with pytest.raises(PublisherConflict, match="recreated"):
        old.publish(states[3])
    assert [report.root for report in verify_stream(store, "policy")] == roots(states[2:3])


def test_newborn_streams_of_two_publishers_become_one(rng: Rng, faulty: FaultyStore) -> None:
    """Both saw an empty store and chose an ID; the one that commits second takes the other's."""
    states = history(rng, 3)
    one, two = Publisher(faulty, stream="policy"), Publisher(faulty, stream="policy")
    one._rank._committer.find(None)
    two._rank._committer.find(None)
    with pytest.raises(PublisherConflict):
        one.publish(states[0])
    assert two.publish(states[0]).version == 0
    three, four = Publisher(faulty, stream="other"), Publisher(faulty, stream="other")
    three._rank._committer.find(None)
    four._rank._committer.find(None)
    faulty.hidden = set(names(faulty.inner, "other/epochs"))
    assert three.publish(states[0]).version == 0, "it did not see the claim"
    faulty.hidden = set()
    assert four.publish(states[1]).version == 1
    assert three.stream_id == four.stream_id
    with pytest.raises(PublisherConflict):
        three.publish(states[2])


def test_a_new_key_is_trusted_from_its_first_version_on(rng: Rng) -> None:
    states = history(rng, 4)
    old, new = Signer.generate(), Signer.generate()
    store = published(states[:2], old)
    publisher = Publisher(
        store, stream="policy", signer=new, trusted_keys=[old.public_key], anchor_ratio=1e9
    )
    done = publisher.publish(states[2])
    assert done.anchored
    assert done.changed is not None, "who trusted the old key takes the patch"
    assert not publisher.publish(states[3]).anchored
    reach(Subscriber(store, stream="policy", trusted_keys=[new.public_key]), state_root(states[3]))


def test_an_anchor_on_demand(rng: Rng) -> None:
    states = history(rng, 4)
    old, new = Signer.generate(), Signer.generate()
    store = published(states[:3], old)
    trusted = Subscriber(store, stream="policy", trusted_keys=[new.public_key])
    with Publisher(store, stream="policy", signer=old) as publisher:
        assert not publisher.publish(states[3], metadata={"step": 3}).anchored
        assert publisher.publish(states[3], metadata={"step": 4}, anchor=True).anchored
    done = anchor_stream(store, "policy", signer=new, trusted_keys=[old.public_key])
    assert (done.version, done.changed, done.root) == (5, 0, state_root(states[3]))
    assert done.metadata == {"step": 4}, "where a trainer was is not lost"
    reach(trusted, state_root(states[3]))


@pytest.mark.parametrize("waited", [False, True])
def test_a_commit_is_not_repeated_after_its_payloads_are_gone(
    waited: bool, rng: Rng, monkeypatch: pytest.MonkeyPatch, faulty: FaultyStore
) -> None:
    """publish failed at the commit; gc ran in between; the repeated commit named what was
    deleted."""
    states = history(rng, 4)
    publisher = Publisher(faulty, stream="policy")
    publisher.publish(states[0])
    faulty.fail_on("put_new", "versions")
    with pytest.raises(Exception, match="connection"):
        publisher.publish(states[1])
    if waited:
        from pulse_rl.sync import commit as module

        monkeypatch.setattr(module, "_LATEST_COMMIT_SECONDS", -1.0)
    else:
        gc_stream(faulty, "policy", keep=1, grace_seconds=0)
    done = publisher.publish(states[2])
    assert done.version == 1, "what might have been committed too late was given up"
    assert [report.root for report in verify_stream(faulty, "policy")] == roots(
        [states[0], states[2]]
    )
    assert all(report.ok for report in verify_stream(faulty, "policy"))


def test_a_late_commit_that_is_found_counts(rng: Rng, faulty: FaultyStore) -> None:
    """The reply was lost, gc ran: the version is there, and the next one follows it."""
    states = history(rng, 3)
    publisher = Publisher(faulty, stream="policy")
    publisher.publish(states[0])
    faulty.fail_on("put_new", "versions", after=True)
    with pytest.raises(Exception, match="connection"):
        publisher.publish(states[1])
    gc_stream(faulty, "policy", keep=1, grace_seconds=0)
    assert publisher.publish(states[2]).version == 2
    reach(Subscriber(faulty, stream="policy"), state_root(states[2]))


def test_folds_of_a_signed_stream_are_signed(rng: Rng, store: MemoryStore) -> None:
    signer, stranger = Signer.generate(), Signer.generate()
    states = history(rng, 12)
    with Publisher(store, stream="policy", signer=signer, anchor_ratio=1e9) as publisher:
        publish_each(publisher, states)
    for tool in (None, stranger):
        assert list(
            fold_stream(store, "policy", (8,), signer=tool, trusted_keys=[signer.public_key])
        ) == [(0, 8)]
        told: list[Event] = []
        worker = trusting(store, signer, told)
        worker.sync(target=0)
        assert worker.sync() is not None
        assert worker.root == state_root(states[-1])
        assert "0->8" not in str([event for event in told if isinstance(event, Synced)])
        for name in names(store, "policy/links"):
            if "-anchor-" not in name:
                store.delete(name)
    assert list(fold_stream(store, "policy", (8,), signer=signer)) == [(0, 8)]
    seen: list[Event] = []
    worker = trusting(store, signer, seen)
    worker.sync(target=0)
    worker.sync()
    assert "the fold 0->8" in seen[-1].links  # type: ignore[union-attr]
    (link,) = [name for name in names(store, "policy/links") if "-anchor-" not in name]
    moved = link.replace("000000000008-000000000000", "000000000009-000000000001")
    store.put(moved, store.get(link))
    worker = trusting(store, signer, seen)
    worker.sync(target=1)
    reach(worker, state_root(states[-1]))
    refused = [event for event in seen if isinstance(event, FallbackUsed)]
    assert {event.kind for event in refused} <= {"untrusted"}


def test_a_path_is_never_mixed(rng: Rng) -> None:
    """An explicit version of another stream is refused, too."""
    store = published(history(rng, 2))
    worker = Subscriber(store, stream="policy")
    worker.sync()
    other = published(history(rng, 4))
    store.put("policy/versions/000000000003.json", other.get("policy/versions/000000000003.json"))
    with pytest.raises(ChainGap, match="another stream of this name"):
        worker.sync(target=3)
    assert worker.version == 1


def test_a_stream_whose_manifests_were_all_damaged_in_silence_is_recreated(rng: Rng) -> None:
    """With lengths and times as they were; a publisher that signs cannot know the stream's ID. A
    follower waited for ever."""
    signer = Signer.generate()
    states = history(rng, 3)
    store = published(states[:2], signer)
    worker = Subscriber(store, stream="policy", trusted_keys=[signer.public_key])
    worker.sync()
    for name in names(store, "policy/versions"):
        data, modified = store._objects[name]
        store._objects[name] = (data.replace(b'"version"', b'"Version"'), modified)
    published(states[2:], signer, store)
    with pytest.raises(StreamRecreated):
        worker.sync()
    reach(
        Subscriber(store, stream="policy", trusted_keys=[signer.public_key]), state_root(states[2])
    )


def test_who_failed_to_claim_goes_on_from_what_is_there_now(rng: Rng) -> None:
    """It committed under the ID that the stream had when it looked first, above the version of a
    recreated one."""
    signer, states = Signer.generate(), history(rng, 3)
    store = FaultyStore(published(states[:1], signer))
    late = Publisher(store, stream="policy", signer=signer)
    store.fail_on("put_new", "epochs", after=True)
    with pytest.raises(StoreUnavailable):
        late.publish(states[0])
    store.inner.put("policy/versions/000000000000.json", b"{")
    published(states[1:2], signer, store)
    late.publish(states[2])
    assert roots(states[1:]) == [
        report.root for report in verify_stream(store, "policy") if report.ok
    ]
    worker = Subscriber(store, stream="policy", trusted_keys=[signer.public_key])
    for version, state in enumerate(states[1:], start=1):
        worker.sync(target=version)
        assert worker.root == state_root(state)


def test_a_publisher_keeps_its_stream_id_after_a_claim_that_failed(rng: Rng) -> None:
    """Also where no manifest of the stream can be read any more."""
    state, store = history(rng, 1)[0], FaultyStore(MemoryStore())
    tuned(store, stream="policy", stream_id="0123456789abcdef" * 2).publish(state)
    publisher = tuned(store, stream="policy", stream_id="0123456789abcdef" * 2)
    store.fail_on("put_new", "epochs")
    with pytest.raises(StoreUnavailable):
        publisher.publish(state)
    store.inner.put("policy/versions/000000000000.json", b"{")
    assert publisher.publish(state).version == 1
    assert publisher.stream_id == "0123456789abcdef" * 2
