"""Where what is remembered is lost, wrong, or not to be had: everybody finds a way, and nobody
shows a wrong weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import Bits, MemoryStore, Publisher, Relay, State, Subscriber, fold_stream, state_root
from pulse_rl.errors import ChainGap
from pulse_rl.events import Event, FallbackUsed, Synced
from pulse_rl.history import load_history, save_history
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.history import History, Records, Window
from pulse_rl.state.digest import state_digest
from pulse_rl.stream.stream import Stream
from tests.support.publishers import tuned
from tests.support.states import reach
from tests.sync.test_history import Made, momentum, put_fold

Windows = dict[int, Records]


def hot(seed: int = 0, elements: int = 400_000, changes: int = 2000) -> Iterator[State]:
    """States of which half of the same few elements change in each version."""
    rng = np.random.default_rng(seed)
    flat = (rng.normal(0, 0.02, elements).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    moving = rng.choice(elements, 2 * changes, replace=False)
    while True:
        yield State.of({"w": Bits(flat.copy(), "BF16")})
        at = rng.choice(moving, changes, replace=False)
        flat[at] += (rng.choice([-1, 1], changes) % 65536).astype(np.uint16)


def publisher(store: MemoryStore, **options: object) -> Publisher:
    return tuned(store, stream="s", history=True, threads=1, **options)


def reader(store: MemoryStore, **options: object) -> tuple[Subscriber, list[Event]]:
    seen: list[Event] = []
    return Subscriber(store, stream="s", threads=1, on_event=seen.append, **options), seen  # type: ignore[arg-type]


def fetched(seen: list[Event]) -> int:
    return sum(event.fetched_bytes for event in seen if isinstance(event, Synced))


def test_a_part_that_changes_more_than_the_whole() -> None:
    """All of it: what is to be remembered takes more than an eighth of the part."""
    store, states = MemoryStore(), momentum()
    made = publisher(store, folds=(8, 64))
    part, seen = reader(store, select=["norm.weight"])
    rest, of_rest = reader(store, select=["w"])
    norm = np.random.default_rng(0).normal(1, 0.1, 16).astype(np.float32)
    for _ in range(20):
        norm = (norm * 1.0001).astype(np.float32)
        w = next(states).read("w").copy()
        made.publish(
            State.of(
                {"w": Bits(w, "BF16"), "norm.weight": Bits(norm.view(np.uint32).copy(), "F32")}
            )
        )
        made.wait()
        part.sync(), rest.sync()
        np.testing.assert_array_equal(part.state.read("norm.weight"), norm.view(np.uint32))
        np.testing.assert_array_equal(rest.state.read("w").reshape(-1), w.reshape(-1))
    assert not [event for event in seen + of_rest if isinstance(event, FallbackUsed)]


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("before", "spans"), [(8, (8,)), (19, (4,))])
def test_a_relays_readers_go_on_after_folds_of_other_spans(
    before: int, spans: tuple[int, ...], restarts: bool
) -> None:
    store, target, states = MemoryStore(), MemoryStore(), hot()
    made = publisher(store, **({"folds": (4, 16)} if before == 8 else {}))
    for _ in range(1 if before == 8 else 9):
        made.publish(next(states)), made.wait()
    relay = Relay(store, target, stream="s", threads=1)
    relay.sync()
    for _ in range(before):
        made.publish(next(states)), made.wait()
    list(fold_stream(store, "s", spans, threads=1))
    relay.sync()
    newest = None
    for _ in range(20):
        if restarts:
            relay = Relay(store, target, stream="s", threads=1)
        made.publish(next(states)), made.wait()
        relay.sync()
        newest, _ = reader(target)
        newest.sync()
    assert newest is not None
    source, _ = reader(store)
    source.sync()
    assert (newest.version, newest.root) == (source.version, source.root)


@pytest.mark.slow
def test_a_base_that_is_a_later_version_too(tmp_path: Path) -> None:
    """The trainer went back to it: what came before it then is not what is remembered now."""
    store, states = MemoryStore(), momentum(chance=0.7)
    made = publisher(store)
    flat = step = np.empty(0)
    for version in range(70):
        state = next(states)
        made.publish(state)
        if version == 6:
            flat, step = state.read("w").copy(), state.read("step").copy()
            first, _ = reader(store)
            first.sync()
            first.save(tmp_path / "model.safetensors")
    at = np.random.default_rng(3).choice(flat.size, 800, replace=False)
    for _ in range(3):
        state = State.of({"w": Bits(flat.copy(), "BF16"), "step": Bits(step, "U64")})
        made.publish(state)
        flat.reshape(-1)[at] += 1
    again, _ = reader(store, base=tmp_path / "model.safetensors")
    again.sync()
    assert (again.version, again.root) == (72, state_root(state))


def other(records: Windows, byte: int) -> Windows:
    """With another value in a byte of each record."""
    found = {index: data.copy() for index, data in records.items()}
    for data in found.values():
        data[byte::4] ^= 255
    return found


WRONG: dict[str, Callable[[Windows], Windows]] = {
    "other steps": lambda records: other(records, 2),
    "nothing": lambda records: {},
    "other classes": lambda records: other(records, 3),
    "other blocks": lambda records: {index + 99: data for index, data in records.items()},
    "fewer": lambda records: {index: data[: data.size // 8 * 4] for index, data in records.items()},
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
@pytest.mark.parametrize("version", [6, 15])
def test_a_wrong_history_is_forgotten(tmp_path: Path, wrong: str, version: int) -> None:
    """A bit that flipped in memory, say, and was saved: never a wrong weight, and the stream goes
    on."""
    made = Made(version + 1)
    first, _ = made.subscriber()
    first.sync()
    first.save(tmp_path / "model.safetensors")
    file = tmp_path / "pulse.history"
    history = load_history(file, cut(first.digest.specs), first.digest.root)
    assert history is not None
    windows = [s._replace(records=WRONG[wrong](dict(s.records))) for s in history.windows]
    save_history(file, History(tuple(windows)), cut(first.digest.specs), first.digest.root)
    again, _ = made.subscriber(base=tmp_path)
    for _ in range(4):
        made.publish()
        reach(again, made.roots[-1])


@pytest.mark.parametrize("bytes_of_a_record", [3, 5])
def test_records_of_another_kind_are_none(tmp_path: Path, bytes_of_a_record: int) -> None:
    digest = state_digest(State.of({"w": np.zeros(99, np.uint8)}))
    file, records = tmp_path / "pulse.history", {0: np.zeros(2 * bytes_of_a_record, np.uint8)}
    save_history(
        file,
        History((Window(digest.root, records, cut(digest.specs)),)),
        cut(digest.specs),
        digest.root,
    )
    assert load_history(file, cut(digest.specs), digest.root) is None


@pytest.mark.slow
def test_a_gap_in_what_must_be_remembered_names_what_is_missing() -> None:
    """A fold leads past the missing version, but not to what changed in it."""
    made = Made(4, folds=())
    put_fold(made, 0, 2)
    worker, _ = made.subscriber()
    made.store.delete("s/versions/000000000001.json")
    with pytest.raises(ChainGap, match=r"000000000001\.json is not in the store"):
        worker.sync(3)


def test_junk_in_the_place_of_versions_does_not_stop_the_publisher() -> None:
    store, states = MemoryStore(), momentum(density=0.0005)
    made = publisher(store)
    following, _ = reader(store)
    made.publish(next(states))
    for version in range(8, 300, 8):
        store.put(Stream(store, "s").names.version(version), b"junk")
    for _ in range(150):
        state = next(states)
        done = made.publish(state)
        assert (
            len(made._rank._baseline.history.windows)
            == Stream(store, "s").manifest(done.version).remembers
        )
        assert len(made._rank._baseline.history.windows) < 32
    reach(following, state_root(state))
    made = publisher(store)
    made.publish(next(states))


def test_who_lacks_a_history_that_no_patch_needs_pays_for_patches_only() -> None:
    store, states = MemoryStore(), momentum(chance=0)
    made = publisher(store)
    for _ in range(12):
        state = next(states)
        made.publish(state)
    assert Stream(store, "s").manifest(11).remembers
    late, seen = reader(store, base=state)
    done = made.publish(next(states))
    reach(late, done.root)
    assert fetched(seen) < done.patch_bytes + 20_000
