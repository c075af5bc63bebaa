"""Whoever can write to a store can leave anything there: it is passed over, and what it costs is
bounded."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from pulse_rl import (
    LocalStore,
    MemoryStore,
    Publisher,
    Signer,
    Subscriber,
    gc_stream,
    state_root,
    verify_stream,
)
from pulse_rl.errors import CorruptManifest, PublisherConflict, StoreError, StreamError
from pulse_rl.events import Event, FallbackUsed
from tests.support.folds import fold_link
from tests.support.manifests import manifest_of
from tests.support.states import Live, Rng, history, mutated, policy, present, publish_each, reach
from tests.support.stores import FaultyStore


def version_name(version: int) -> str:
    return f"policy/versions/{version:012d}.json"


JUNK: dict[str, tuple[str, bytes]] = {
    "far ahead": (version_name(99_999), b"junk"),
    "the next one, empty": (version_name(3), b""),
    "at the end of the range": (version_name(10**12 - 1), b"{}"),
    "an epoch at the end of the range": ("policy/epochs/999999999999", b"00ff00ff00ff00ff"),
    "the next epoch, not a claim": ("policy/epochs/000000000002", b"README"),
    "a huge claim": ("policy/epochs/000000000002", b"0" * 4_000_000),
}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("what", JUNK)
def test_one_junk_object_stops_nobody(what: str, signed: bool, rng: Rng) -> None:
    states = history(rng, 7)
    store, signer = MemoryStore(), Signer.generate() if signed else None
    keys = [signer.public_key] if signer else None
    publisher = Publisher(store, stream="policy", signer=signer)
    live, worker = Live(), Subscriber(store, stream="policy", trusted_keys=keys)
    publish_each(publisher, states[:3])
    live.apply(worker.sync())
    store.put(*JUNK[what])
    assert worker.sync() is None
    head = present(publisher.head())
    assert head.version == 2
    gc_stream(store, "policy", keep=2, grace_seconds=0)
    for state in states[3:5]:
        publisher.publish(state)
        live.apply(worker.sync())
        assert live.root == state_root(state)
    again = Publisher(store, stream="policy", signer=signer)
    done = again.publish(states[5])
    assert not done.anchored, "the head was found"
    with pytest.raises(PublisherConflict):
        publisher.publish(states[6])
    again.publish(states[6])
    live.apply(worker.sync())
    newcomer = Subscriber(store, stream="policy", trusted_keys=keys)
    newcomer.sync()
    assert live.root == newcomer.root == state_root(states[6])
    gc_stream(store, "policy", keep=1, grace_seconds=0, trusted_keys=keys)
    reach(Subscriber(store, stream="policy", trusted_keys=keys), state_root(states[6]))


def test_claims_of_strangers_do_not_stop_a_signing_publisher(rng: Rng, store: MemoryStore) -> None:
    states = history(rng, 5)
    signer = Signer.generate()
    publisher = Publisher(store, stream="policy", signer=signer)
    publisher.publish(states[0])
    own = store.get("policy/epochs/000000000001")
    store.put("policy/epochs/000000000002", own)  # replayed under another number
    other = MemoryStore()
    for state in states[:2]:
        Publisher(other, stream="policy", signer=signer).publish(state)
    store.put("policy/epochs/000000000003", other.get("policy/epochs/000000000002"))
    assert Publisher(store, stream="policy").publish(states[1]).version == 1  # one without a key
    Publisher(store, stream="policy", signer=Signer.generate()).publish(states[1])
    assert publisher.publish(states[2]).version == 3
    reach(
        Subscriber(store, stream="policy", trusted_keys=[signer.public_key]),
        state_root(states[2]),
        3,
    )
    Publisher(store, stream="policy", signer=signer).publish(states[3])
    with pytest.raises(PublisherConflict, match="taken over"):
        publisher.publish(states[4])


def test_a_stream_without_numbers_left_says_so(rng: Rng, store: MemoryStore) -> None:
    Publisher(store, stream="policy").publish(policy(rng))
    last = manifest_of(store, "policy", 0)
    end = msgspec.structs.replace(last, version=10**12 - 1).sealed()
    store.put(version_name(10**12 - 1), end.to_bytes())
    with pytest.raises(StreamError, match="no number above"):
        Publisher(store, stream="policy").publish(policy(rng))


def test_what_was_damaged_on_its_way_is_seen_a_poll_later(rng: Rng, faulty: FaultyStore) -> None:
    states = history(rng, 3)
    publisher = Publisher(faulty, stream="policy")
    live, worker = Live(), Subscriber(faulty, stream="policy")
    publisher.publish(states[0])
    live.apply(worker.sync())
    publisher.publish(states[1])
    publisher.publish(states[2])
    faulty.damage = lambda name, data: data[:-1] if name == version_name(2) else data
    live.apply(worker.sync())
    assert (worker.version, live.root) == (1, state_root(states[1]))
    faulty.damage = lambda name, data: data
    live.apply(worker.sync())
    assert (worker.version, live.root) == (2, state_root(states[2]))


def test_a_first_version_is_seen_as_soon_as_it_arrives_undamaged(
    rng: Rng, faulty: FaultyStore
) -> None:
    Publisher(faulty, stream="policy").publish(policy(rng))
    worker = Subscriber(faulty, stream="policy")
    faulty.damage = lambda name, data: data[:-1] if name == version_name(0) else data
    for _ in range(5):
        with pytest.raises(CorruptManifest):
            worker.sync()
    faulty.damage = lambda name, data: data
    assert worker.sync() is not None


@pytest.mark.slow
@pytest.mark.parametrize("who", ["follower", "newcomer", "publisher"])
def test_thousands_of_junk_versions_cost_little(who: str, rng: Rng, faulty: FaultyStore) -> None:
    """Who knows nothing reads each once; a follower's looks are bounded; after three tries each is
    left alone."""
    states = history(rng, 3)
    publisher = Publisher(faulty, stream="policy")
    publisher.publish(states[0])
    worker = Subscriber(faulty, stream="policy")
    worker.sync()
    publisher.publish(states[1])
    for version in range(2, 2002):
        faulty.inner.put(version_name(version), b"{}")
    faulty.calls.clear()
    if who == "publisher":
        assert publisher.publish(states[2]).version == 2002
        reach(worker, state_root(states[2]))
        assert len(faulty.calls) < 4100, "each twice"
        return
    seen = worker if who == "follower" else Subscriber(faulty, stream="policy")
    for look in range(30):
        faulty.calls.clear()
        seen.sync()
        assert len(faulty.calls) < (4100 if who == "newcomer" and look == 0 else 600)
    assert seen.root == state_root(states[1])
    assert len(faulty.calls) < 10
    publisher.publish(states[2])
    reach(seen, state_root(states[2]))


def false_folds(store: MemoryStore, count: int, versions: int, content: bytes = b"") -> None:
    for k in range(count):
        base, version = k % (versions - 3), versions - 1
        name, listed = fold_link("policy", base, version, (f"{k:064x}", 1 + k))
        store.put(name, listed + content)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "signed"), [(None, False), (0, True)])
def test_ten_thousand_false_links_cost_little(start: int | None, signed: bool, rng: Rng) -> None:
    states = history(rng, 20)
    store, signer = MemoryStore(), Signer.generate() if signed else None
    keys = [signer.public_key] if signer else None
    publish_each(Publisher(store, stream="policy", signer=signer, anchor_ratio=1e9), states)
    false_folds(store, 5000, 20, b"0" * 64 + b" " + b"0" * 128 if signed else b"")
    for k in range(5000):
        store.put(f"policy/links/{19 - k % 19:012d}-anchor-{1 + k:015d}", b"")
    counting = FaultyStore(store)
    worker = Subscriber(counting, stream="policy", trusted_keys=keys, threads=1)
    if start is not None:
        worker.sync(target=start)
    counting.calls.clear()
    tracemalloc.start()
    worker.sync()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert worker.root == state_root(states[-1])
    assert len(counting.calls) < 120
    assert peak < 50 << 20


def test_a_follower_never_goes_back(rng: Rng, faulty: FaultyStore) -> None:
    """A false fold, then a lost patch: the detour from the anchor of version 0 ended half-way, at
    version 0."""
    states = history(rng, 7)
    publisher = Publisher(faulty, stream="policy", anchor_ratio=1e9)
    publish_each(publisher, states[:3])
    events: list[Event] = []
    live, worker = Live(), Subscriber(faulty, stream="policy", on_event=events.append)
    live.apply(worker.sync())
    publish_each(publisher, states[3:])
    lost = present(manifest_of(faulty, "policy", 4).patch)
    faulty.inner.delete(f"policy/payloads/{lost.parts[0].sha256}.patch")
    with pytest.raises(StreamError):
        worker.sync()
    assert worker.version is not None
    assert worker.version >= 2
    assert worker.root == state_root(states[worker.version])
    assert any(isinstance(event, FallbackUsed) for event in events)
    publisher.publish(states[6], anchor=True)
    live.apply(worker.sync())
    assert live.root == state_root(states[6])


def test_a_path_from_an_anchor_shows_nothing_in_between(rng: Rng, faulty: FaultyStore) -> None:
    """From version 2 by an anchor of version 5 and a patch to 6, which fails: 2 is still there."""
    states = history(rng, 8)
    publisher = Publisher(faulty, stream="policy", anchor_ratio=1e9)
    for version, state in enumerate(states[:7]):
        publisher.publish(state, anchor=version == 5)
    worker = Subscriber(faulty, stream="policy")
    worker.sync(target=2)
    for version in (4, 6):
        patch = present(manifest_of(faulty, "policy", version).patch)
        faulty.inner.delete(f"policy/payloads/{patch.parts[0].sha256}.patch")
    with pytest.raises(StreamError):
        worker.sync()
    assert (worker.version, worker.root) in [(v, state_root(states[v])) for v in (2, 3)]
    publisher.publish(states[7], anchor=True)
    reach(worker, state_root(states[7]))


def test_gc_does_not_follow_a_link_out_of_the_store(tmp_path: Path, rng: Rng) -> None:
    root = tmp_path
    store = LocalStore(root / "store")
    publish_each(Publisher(store, stream="policy", anchor_ratio=0), history(rng, 3))
    outside = root / "outside"
    (root / "store" / "policy" / "payloads").rename(outside)
    (root / "store" / "policy" / "payloads").symlink_to(outside)
    before = sorted(path.name for path in outside.iterdir())
    with pytest.raises(StoreError, match="is a link"):
        gc_stream(store, "policy", keep=1, grace_seconds=0)
    assert sorted(path.name for path in outside.iterdir()) == before
    worker = Subscriber(store, stream="policy")
    worker.sync()
    assert worker.version == 2


def test_gc_takes_no_payload_that_an_unread_version_may_name(rng: Rng, faulty: FaultyStore) -> None:
    """The newest manifest arrived damaged, three times: what it names is not garbage."""
    states = history(rng, 6)
    publisher = Publisher(faulty, stream="policy", anchor_ratio=0)
    for state in states:
        publisher.publish(state)
        time.sleep(0.002)
    faulty.damage = lambda name, data: data[:-1] if name == version_name(5) else data
    plan = gc_stream(faulty, "policy", keep=1, grace_seconds=0)
    assert plan.oldest == 4
    faulty.damage = lambda name, data: data
    assert [report.ok for report in verify_stream(faulty, "policy")] == [True, True]
    reach(Subscriber(faulty, stream="policy"), state_root(states[5]), 5)


def test_gc_with_trusted_keys_does_not_believe_strangers(rng: Rng, store: MemoryStore) -> None:
    """An unsigned version, whole and newest, made gc delete all signed ones."""
    states = history(rng, 3)
    signer = Signer.generate()
    publish_each(Publisher(store, stream="policy", signer=signer), states)
    with Publisher(store, stream="policy", signer=Signer.generate()) as stranger:
        stranger.publish(mutated(rng, states[-1]))
    gc_stream(store, "policy", keep=1, grace_seconds=0, trusted_keys=[signer.public_key])
    reach(
        Subscriber(store, stream="policy", trusted_keys=[signer.public_key]), state_root(states[-1])
    )


def test_replayed_old_versions_move_nobody(rng: Rng, store: MemoryStore, signer: Signer) -> None:
    """After gc the objects of old versions come back, and the newest are withheld: a follower
    stays, and goes on."""
    states = history(rng, 8)
    publisher = Publisher(store, stream="policy", signer=signer, anchor_ratio=0)
    live, worker = Live(), Subscriber(store, stream="policy", trusted_keys=[signer.public_key])
    publish_each(publisher, states[:5])
    kept = {info.name: store.get(info.name) for info in store.list("policy")}
    publish_each(publisher, states[5:7])
    live.apply(worker.sync())
    gc_stream(store, "policy", keep=1, grace_seconds=0)
    newer = {info.name: store.get(info.name) for info in store.list("policy")}
    for name in newer:
        store.delete(name)
    for name, data in kept.items():
        store.put(name, data)
    assert worker.sync() is None
    assert (worker.version, live.root) == (6, state_root(states[6]))
    for name, data in newer.items():
        store.put(name, data)
    publisher.publish(states[7])
    live.apply(worker.sync())
    assert (worker.version, live.root) == (7, state_root(states[7]))


def test_who_begins_to_sign_goes_on_above_what_was_not_signed(rng: Rng, store: MemoryStore) -> None:
    """Workers without keys follow, too; nothing else would be newer to them."""
    states = history(rng, 5)
    for state in states[:4]:
        Publisher(store, stream="policy", anchor_ratio=0).publish(state)
    gc_stream(store, "policy", keep=1, grace_seconds=0)
    signer = Signer.generate()
    done = Publisher(store, stream="policy", signer=signer).publish(states[4])
    assert (done.version, done.anchored) == (4, True)
    for keys in (None, [signer.public_key]):
        reach(Subscriber(store, stream="policy", trusted_keys=keys), state_root(states[4]), 4)


def test_a_restarted_publisher_does_not_start_over_for_a_damaged_reply(rng: Rng) -> None:
    states = history(rng, 2)
    store, signer = FaultyStore(MemoryStore()), Signer.generate()
    first = Publisher(store, stream="policy", signer=signer)
    first.publish(states[0])
    replies = [b"", b"{}", b""]
    store.damage = lambda name, data: replies.pop() if "/versions/" in name and replies else data
    second = Publisher(store, stream="policy", signer=signer)
    assert second.publish(states[1]).changed is not None
    assert (replies, second.stream_id) == ([], first.stream_id)
