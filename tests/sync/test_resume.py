"""Starting again: publishers continue their stream, subscribers start from what they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pulse_rl import MemoryStore, Publisher, State, Store, Subscriber, verify_stream
from pulse_rl.events import BaselineRestored, Event, Progress, Published, Synced
from tests.support.checkpoints import write_checkpoint
from tests.support.publishers import took_over, tuned
from tests.support.states import (
    Live,
    Rng,
    Tensors,
    history,
    mutated,
    policy,
    present,
    publish_each,
    roots,
    state_root,
    weights,
)
from tests.support.stores import FaultyStore, names


def stream_of(states: list[Tensors], **options: Any) -> MemoryStore:
    store = MemoryStore()
    publish_each(Publisher(store, stream="policy", **options), states)
    return store


def resumed(store: Store, state: Tensors, **options: Any) -> tuple[Published, BaselineRestored]:
    seen: list[Event] = []
    done = Publisher(store, stream="policy", on_event=seen.append, **options).publish(state)
    (event,) = [e for e in seen if isinstance(e, BaselineRestored)]
    return done, event


def assert_whole(store: Store, states: list[Tensors]) -> None:
    reports = list(verify_stream(store, "policy"))
    assert [(r.root, r.problems) for r in reports] == [(root, ()) for root in roots(states)]


def test_a_matching_state_is_the_baseline_without_a_download(rng: Rng) -> None:
    """A trainer that restarts from its checkpoint publishes it again: nothing but two manifests is
    read."""
    states = history(rng, 3)
    store = FaultyStore(stream_of(states))
    done, event = resumed(store, states[-1])
    assert (event.version, event.how, event.reason) == (2, "matched", "")
    assert (done.version, done.changed, done.anchored) == (3, 0, False)
    assert not [name for call, name in store.calls if call == "get" and "payloads" in name]
    assert_whole(store, [*states, states[-1]])


def test_another_state_is_published_against_the_restored_head(rng: Rng) -> None:
    states = history(rng, 4)
    store = stream_of(states[:3])
    done, event = resumed(store, states[3])
    assert (event.version, event.how) == (2, "restored")
    assert (done.version, done.anchored) == (3, False)
    assert 0 < (done.density or 0) < 0.03
    assert_whole(store, states)


def test_a_head_that_cannot_be_restored_is_followed_by_an_anchor(rng: Rng) -> None:
    states = history(rng, 4)
    store = stream_of(states[:3])
    (shard,) = [n for n in names(store, "policy/payloads") if n.endswith("safetensors")]
    store.delete(shard)
    done, event = resumed(store, states[3])
    assert (event.version, event.how) == (2, "anchored")
    assert shard in event.reason
    assert (done.version, done.anchored, done.changed) == (3, True, None)
    live, subscriber = Live(), Subscriber(store, stream="policy")
    live.apply(subscriber.sync())
    assert (subscriber.version, live.root) == (3, state_root(states[3]))


def test_a_damaged_head_manifest_is_passed_over(rng: Rng) -> None:
    """The newest version that can be read is the head; a worker that had taken the damaged one gets
    on all the same."""
    states = history(rng, 3)
    store = stream_of(states[:2])
    live, subscriber = Live(), Subscriber(store, stream="policy")
    live.apply(subscriber.sync())
    store.put("policy/versions/000000000001.json", b"{}")
    done, event = resumed(store, states[2])
    assert (event.version, event.how) == (0, "restored")
    assert (done.version, done.anchored) == (2, False)
    live.apply(subscriber.sync())
    assert (subscriber.version, live.root) == (2, state_root(states[2]))


def test_a_state_of_other_tensors_starts_anew(rng: Rng) -> None:
    states = [*history(rng, 2), {"other": weights(rng, 50)}]
    store = stream_of(states[:2])
    done, _ = resumed(store, states[2])
    assert (done.version, done.anchored) == (2, True)
    assert_whole(store, states)


def test_a_new_stream_is_not_resumed(rng: Rng) -> None:
    seen: list[Event] = []
    Publisher(MemoryStore(), stream="policy", on_event=seen.append).publish(policy(rng))
    assert not [e for e in seen if isinstance(e, BaselineRestored)]


@pytest.mark.parametrize("matched", [True, False])
def test_the_bytes_since_the_last_anchor_are_known_again(matched: bool, rng: Rng) -> None:
    """Otherwise a trainer that often restarts would never store an anchor again."""
    states = history(rng, 7, density=0.05)
    without = MemoryStore()
    publisher = Publisher(without, stream="policy", anchor_ratio=0.3)
    expected = [publisher.publish(s).anchored for s in states]
    store = MemoryStore()
    found = []
    for k, state in enumerate(states):
        again = Publisher(store, stream="policy", anchor_ratio=0.3)
        if matched and k:
            took_over(again, states[k - 1])
        found.append(again.publish(state).anchored)
    assert found == expected
    assert 0 < sum(expected[1:]) < 6


def test_a_restart_wipes_nothing(rng: Rng) -> None:
    """What is in the store before is there afterwards, byte for byte."""
    states = history(rng, 6)
    store = stream_of(states[:2])
    for k in range(2, 6):
        before = {n: store.get(n) for n in names(store, "policy")}
        resumed(store, states[k])
        assert {n: store.get(n) for n in before} == before
    assert_whole(store, states)


def test_head_finds_versions_of_others(rng: Rng) -> None:
    states = history(rng, 3)
    store = stream_of(states[:1])
    reader = Publisher(store, stream="policy")
    for k, state in enumerate(states[1:], start=1):
        Publisher(store, stream="policy").publish(state, metadata={"step": k})
        head = present(reader.head())
        assert (head.version, head.metadata) == (k, {"step": k})


def test_a_stale_list_at_the_start_is_told_and_harms_nothing(rng: Rng) -> None:
    """An object store whose lists lag hides the head: the commit itself finds that it is taken."""
    from pulse_rl.errors import PublisherConflict

    states = history(rng, 4)
    store = FaultyStore(stream_of(states[:3]))
    store.hidden = {"policy/versions/000000000002.json"}
    publisher = Publisher(store, stream="policy")
    with pytest.raises(PublisherConflict):
        publisher.publish(states[3])
    store.hidden = set()
    assert Publisher(store, stream="policy").publish(states[3]).version == 3
    assert_whole(store, states)


def test_a_stale_list_only_delays_a_subscriber(rng: Rng) -> None:
    states = history(rng, 4)
    store = FaultyStore(stream_of(states))
    store.hidden = {f"policy/versions/{k:012}.json" for k in (2, 3)}
    subscriber, live = Subscriber(store, stream="policy"), Live()
    live.apply(subscriber.sync())
    assert subscriber.version == 1
    assert subscriber.sync() is None
    store.hidden = {"policy/versions/000000000002.json"}
    live.apply(subscriber.sync())
    assert subscriber.version == 3
    assert live.root == state_root(states[3])


def synced(store: Store, base: Any) -> tuple[Synced | None, Subscriber]:
    seen: list[Event] = []
    subscriber = Subscriber(store, stream="policy", base=base, on_event=seen.append)
    subscriber.sync()
    return next((e for e in seen if isinstance(e, Synced)), None), subscriber


def test_a_subscriber_starts_from_the_state_that_it_has(tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 5)
    store = stream_of(states)
    write_checkpoint(tmp_path, states[2])
    for base in (states[2], State.of(states[2]), tmp_path):
        event, subscriber = synced(store, base)
        assert event is not None
        assert (event.previous, event.links) == (2, ("the patch 2->3", "the patch 3->4"))
        assert subscriber.root == state_root(states[4])


def test_a_base_at_the_head_needs_nothing(rng: Rng) -> None:
    states = history(rng, 3)
    event, subscriber = synced(stream_of(states), states[2])
    assert event is None
    assert subscriber.version == 2
    assert subscriber.root == state_root(states[2])
    assert subscriber.status == "ready"


def test_a_base_of_another_stream_is_not_used(rng: Rng) -> None:
    states = history(rng, 3)
    event, subscriber = synced(stream_of(states), mutated(rng, states[2]))
    assert event is not None
    assert event.previous is None
    assert subscriber.root == state_root(states[2])


def test_the_base_is_copied(rng: Rng) -> None:
    states = history(rng, 2)
    before = state_root(states[0])
    _, subscriber = synced(stream_of(states), states[0])
    assert state_root(states[0]) == before
    states[0]["steps"].array[...] = 0
    assert subscriber.root == state_root(subscriber.state) == state_root(states[1])


def test_a_base_is_kept_while_the_stream_is_empty(rng: Rng, store: MemoryStore) -> None:
    """Workers often start before their trainer, from the same checkpoint."""
    states = history(rng, 2)
    seen: list[Event] = []
    subscriber = Subscriber(store, stream="policy", base=states[0], on_event=seen.append)
    assert subscriber.sync() is None
    publisher = Publisher(store, stream="policy")
    publisher.publish(states[0])
    publisher.publish(states[1])
    subscriber.sync()
    (event,) = [e for e in seen if isinstance(e, Synced)]
    assert event.links == ("the patch 0->1",)


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_progress_adds_up_in_every_stage(shard_bytes: int, rng: Rng, store: MemoryStore) -> None:
    states = history(rng, 2)
    nbytes = State.of(states[0]).nbytes
    seen: list[Event] = []
    publisher = tuned(store, stream="policy", shard_bytes=shard_bytes, on_event=seen.append)
    publish_each(publisher, states)
    Subscriber(store, stream="policy", on_event=seen.append).sync()
    resumed(store, mutated(rng, states[1]))
    done: dict[str, list[tuple[int, int]]] = {}
    for event in seen:
        if isinstance(event, Progress):
            done.setdefault(event.stage, []).append((event.done, event.total))
    assert done.keys() == {"digest", "upload", "diff", "apply", "restore"}
    for stage, pairs in done.items():
        assert {t for _, t in pairs} == {nbytes}, stage
        assert max(d for d, _ in pairs) == nbytes, stage
