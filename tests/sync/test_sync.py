"""A publisher and its subscribers when nothing goes wrong: every way to a version ends at the
trainer's bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    Bits,
    MemoryStore,
    Publisher,
    State,
    Store,
    Subscriber,
    state_root,
    verify_stream,
)
from pulse_rl.errors import EmptyStream, InputError
from pulse_rl.events import Event, Published, Synced
from tests.support.checkpoints import write_checkpoint
from tests.support.publishers import tuned
from tests.support.states import (
    Live,
    Rng,
    Tensors,
    bits,
    history,
    mutated,
    policy,
    present,
    reach,
    roots,
    snapshot,
    taken,
    weights,
)
from tests.support.stores import FaultyStore, names, s3_store

counter = itertools.count()
NAN = float("nan")


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.slow)])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store | str:
    if request.param == "s3":
        return s3_store(request.getfixturevalue("s3"), f"sync/{next(counter)}")
    return MemoryStore() if request.param == "memory" else f"file://{tmp_path}/store"


def published(states: list[Tensors], **options: Any) -> tuple[Store, list[Published]]:
    store = MemoryStore()
    publisher = tuned(store, stream="policy", **options)
    return store, [publisher.publish(state) for state in states]


def assert_whole(store: Store | str, states: list[Tensors]) -> None:
    reports = list(verify_stream(store, "policy"))
    assert [r.problems for r in reports] == [()] * len(states)
    assert [r.root for r in reports] == roots(states)


def test_a_worker_follows_every_version(any_store: Store | str, rng: Rng) -> None:
    publisher = Publisher(any_store, stream="policy")
    seen: list[Event] = []
    subscriber, live = Subscriber(any_store, stream="policy", on_event=seen.append), Live()
    assert subscriber.sync() is None
    states = history(rng, 4)
    for version, state in enumerate(states):
        done = publisher.publish(state)
        update = present(subscriber.sync())
        live.apply(update)
        assert live.root == update.root == done.root == subscriber.root == state_root(state)
        assert (update.version, subscriber.version, done.version) == (version,) * 3
        assert update.previous == (version - 1 if version else None)
        assert update.full == (version == 0)
        assert snapshot(subscriber.state) == snapshot(state)
        if version:
            assert (update.changed, update.payload_bytes) == (done.changed, done.patch_bytes)
        assert subscriber.sync() is None
    assert [e.links for e in seen if isinstance(e, Synced)] == [
        ("the anchor of version 0",),
        ("the patch 0->1",),
        ("the patch 1->2",),
        ("the patch 2->3",),
    ]
    assert_whole(any_store, states)


def test_a_target_between_is_reached_and_never_left_backwards(rng: Rng) -> None:
    states = history(rng, 5)
    store, _ = published(states)
    subscriber, live = Subscriber(store, stream="policy"), Live()
    for target, version in ((2, 2), (1, 2), (2, 2), (3, 3), (None, 4)):
        live.apply(subscriber.sync(target))
        assert subscriber.version == version
        assert live.root == subscriber.root == state_root(states[version])


def test_a_state_without_changes_is_a_version_too(rng: Rng) -> None:
    state = policy(rng)
    store, done = published([state, state])
    assert (done[1].changed, done[1].density) == (0, 0.0)
    assert done[1].patch_bytes < 400
    subscriber = Subscriber(store, stream="policy")
    taken(subscriber, 0)
    update = present(subscriber.sync())
    assert (update.version, update.tensors, update.root) == (1, (), done[0].root)


def test_what_published_tells(rng: Rng) -> None:
    old = {"w": weights(rng, 10_000)}
    new = mutated(rng, old, 0.01)
    store, (first, second) = published([old, new])
    assert (first.changed, first.density, first.patch_bytes) == (None, 1.0, 0)
    assert first.ratio == 20_000 / first.anchor_bytes < 1, "its header is on top"
    assert f"{first.density:.1%} {first.ratio:.1f}" == "100.0% 1.0", "figures that print"
    assert first.anchored
    assert second.elements == 10_000
    assert second.dense_bytes == 20_000
    assert second.changed == 100
    assert second.density == 0.01
    assert second.ratio == 20_000 / second.patch_bytes > 30
    assert not second.anchored
    stored = {n: store.head(n).nbytes for n in names(store, "policy/payloads")}
    assert sorted(stored.values()) == sorted([first.anchor_bytes, second.patch_bytes])
    assert names(store, "policy/versions") == [
        "policy/versions/000000000000.json",
        "policy/versions/000000000001.json",
    ]


def assert_root(store: Store, state: Tensors) -> None:
    reach(Subscriber(store, stream="policy"), state_root(state))


@pytest.mark.parametrize("shard_bytes", [1, 5000])
def test_anchors_of_several_shards(shard_bytes: int, rng: Rng) -> None:
    states = history(rng, 3)
    store, done = published(states, shard_bytes=shard_bytes, anchor_ratio=0.0)
    assert len([n for n in names(store, "policy/payloads") if n.endswith(".safetensors")]) > len(
        states
    )
    assert all(d.anchored for d in done)
    assert_root(store, states[-1])
    assert_whole(store, states)


def test_anchors_are_placed_by_the_bytes_since_the_last(rng: Rng) -> None:
    states = history(rng, 12, density=0.05)
    _, every = published(states, anchor_ratio=0.0)
    assert all(d.anchored for d in every)
    _, never = published(states, anchor_ratio=1e9)
    assert [d.anchored for d in never] == [True] + [False] * 11
    _, some = published(states, anchor_ratio=0.3)
    since, expected = 0, []
    for done in some[1:]:
        since += done.patch_bytes
        expected.append(since > 0.3 * done.dense_bytes)
        since = 0 if done.anchored else since
    assert [d.anchored for d in some[1:]] == expected
    assert 1 < sum(expected) < 11


CHANGES: dict[str, Any] = {
    "added": lambda t, rng: t | {"layers.2.weight": weights(rng, 40)},
    "removed": lambda t, rng: {n: v for n, v in t.items() if n != "layers.1.mlp.weight"},
    "renamed": lambda t, rng: {n.replace("mlp", "ffn"): v for n, v in t.items()},
    "reshaped": lambda t, rng: (
        t | {"layers.0.mlp.weight": Bits(t["layers.0.mlp.weight"].array.reshape(-1, 10), "BF16")}
    ),
    "other dtype": lambda t, rng: t | {"layers.0.norm.weight": bits(rng, "BF16", 16)},
    "same width, other dtype": lambda t, rng: t | {"steps": Bits(t["steps"].array, "F64")},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_set_of_tensors_starts_anew_with_an_anchor(change: Any, rng: Rng) -> None:
    states = history(rng, 2)
    states.append(change(states[-1], rng))
    states.append(mutated(rng, states[-1]))
    store = MemoryStore()
    publisher = Publisher(store, stream="policy")
    subscriber = Subscriber(store, stream="policy")
    live = Live()
    for version, state in enumerate(states):
        done = publisher.publish(state)
        update = subscriber.sync()
        live.apply(update)
        assert live.root == subscriber.root == state_root(state)
        assert done.anchored == (version in (0, 2))
        assert (done.changed is None) == (version in (0, 2))
        assert update is not None
        assert update.full == (version in (0, 2))
    late, behind = Live(), Live()
    late.apply(Subscriber(store, stream="policy").sync())
    slow = Subscriber(store, stream="policy")
    behind.apply(slow.sync(1))
    behind.apply(slow.sync())
    assert late.root == behind.root == state_root(states[-1])
    assert_whole(store, states)


def test_full_update_gives_a_new_model_everything(rng: Rng) -> None:
    states = history(rng, 3)
    store, _ = published(states)
    subscriber = Subscriber(store, stream="policy")
    for version in (0, 2):
        subscriber.sync(version)
        update, live = subscriber.full_update(), Live()
        live.apply(update)
        assert (update.version, update.previous, update.full) == (version, None, True)
        assert live.root == update.root == state_root(states[version])


def test_before_the_first_version(rng: Rng, store: MemoryStore) -> None:
    subscriber = Subscriber(store, stream="policy")
    assert Publisher(store, stream="policy").head() is None
    for _ in range(2):
        assert subscriber.sync() is None
        assert (subscriber.status, subscriber.version) == ("empty", None)
    for ask in (
        lambda: subscriber.state,
        lambda: subscriber.root,
        lambda: subscriber.manifest,
        subscriber.full_update,
    ):
        with pytest.raises(EmptyStream):
            ask()
    with pytest.raises(EmptyStream):
        list(verify_stream(store, "policy"))
    Publisher(store, stream="policy").publish(policy(rng))
    assert subscriber.sync() is not None
    assert subscriber.status == "ready"


def test_the_state_is_read_only(rng: Rng) -> None:
    store, _ = published(history(rng, 1))
    subscriber = Subscriber(store, stream="policy")
    subscriber.sync()
    with pytest.raises(ValueError, match="read-only"):
        subscriber.state.read("steps")[0] = 1


def test_metadata_travels_with_its_version(rng: Rng, store: MemoryStore) -> None:
    publisher, subscriber = Publisher(store, stream="policy"), Subscriber(store, stream="policy")
    for version, state in enumerate(history(rng, 3)):
        facts = {
            "step": np.int64(version),
            "reward": np.float64(version / 3),
            "note": "größe",
            "last": version == 2,
        }
        done = publisher.publish(state, metadata=facts)
        update = present(subscriber.sync())
        assert done.metadata == update.metadata == subscriber.manifest.metadata == facts
        head = present(Publisher(store, stream="policy").head())
        assert (head.version, head.metadata) == (version, facts)


REWARDS = [NAN, float("inf"), None, [1], {"a": 1}, np.float32("nan"), object(), "\ud800", b"x"]


@pytest.mark.parametrize(
    "wrong", [0, "", [], {"step": 1 << 63}, {1: 1}, *({"reward": reward} for reward in REWARDS)]
)
def test_metadata_that_cannot_be_stored_is_refused_before_anything_is(wrong: Any, rng: Rng) -> None:
    """A reward is NaN sooner or later: the caller must learn that it is the metadata."""
    states = history(rng, 3)
    store = FaultyStore(MemoryStore())
    publisher = Publisher(store, stream="policy")
    publisher.publish(states[0])
    store.calls.clear()
    with pytest.raises(InputError, match="metadata"):
        publisher.publish(states[1], metadata=wrong)
    assert [call for call, _ in store.calls if call.startswith("put")] == []
    assert publisher.publish(states[2]).version == 1
    assert_whole(store, [states[0], states[2]])


def test_updates_yields_until_nothing_comes(rng: Rng, store: MemoryStore) -> None:
    states = history(rng, 4)
    publisher, live = Publisher(store, stream="policy"), Live()
    publisher.publish(states[0])
    found = []
    for update in Subscriber(store, stream="policy").updates(
        poll_seconds=0.001, timeout_seconds=0.05
    ):
        live.apply(update)
        found.append(update.version)
        if update.version < 3:
            publisher.publish(states[update.version + 1])
    assert found == [0, 1, 2, 3]
    assert live.root == state_root(states[3])


def test_streams_in_one_store_do_not_meet(rng: Rng) -> None:
    store, streams = MemoryStore(), ["a", "a-b", "a.b", "A", "a0"]
    states = {name: policy(rng) for name in streams}
    for name in streams:
        assert Publisher(store, stream=name).publish(states[name]).version == 0
    for name in streams:
        reach(Subscriber(store, stream=name), state_root(states[name]))


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "a b", "x" * 129, "-a", "ü", "a\n"])
def test_names_that_are_no_streams(name: str) -> None:
    for make in (Publisher, Subscriber):
        with pytest.raises(InputError):
            make(MemoryStore(), stream=name)
    with pytest.raises(InputError):
        list(verify_stream(MemoryStore(), name))


def test_any_source_can_be_published(tmp_path: Path, rng: Rng, store: MemoryStore) -> None:
    states = history(rng, 3)
    write_checkpoint(tmp_path, states[1])
    publisher = Publisher(store, stream="policy")
    publisher.publish(states[0])
    publisher.publish(tmp_path)
    publisher.publish(State.of(states[2]))
    assert_whole(store, states)


def test_full_updates_that_are_kept_do_not_change(rng: Rng, store: MemoryStore) -> None:
    """Their values are views of the host state: while any of them is alive, the state moves on in a
    copy."""
    states = history(rng, 3)
    publisher, subscriber = Publisher(store, stream="policy"), Subscriber(store, stream="policy")
    publisher.publish(states[0])
    first = present(subscriber.sync())
    again = subscriber.full_update()
    before = {name: values.copy() for name, _, values in first}
    del again
    for state in states[1:]:
        publisher.publish(state)
        subscriber.sync()
    assert subscriber.root == state_root(states[-1])
    for name, indices, values in first:
        assert indices is None
        np.testing.assert_array_equal(values, before[name])
