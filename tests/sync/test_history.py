"""Streams whose patches are coded by what changed before: smaller, and readable by all, whatever
way they came, and whatever they have lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    Bits,
    LocalStore,
    MemoryStore,
    Publisher,
    Relay,
    State,
    Subscriber,
    fold_stream,
    gc_stream,
    state_root,
    verify_stream,
)
from pulse_rl.errors import ChainGap
from pulse_rl.events import Event, FallbackUsed, Published, Synced
from pulse_rl.history import load_history, save_history
from pulse_rl.ops.diff import build_patch
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.history import History, Records, Window
from pulse_rl.state.digest import state_digest
from pulse_rl.stream.manifest import Payload
from pulse_rl.stream.names import PATCH
from pulse_rl.stream.stream import Stream
from tests.support.interrupts import armed
from tests.support.manifests import history_named, manifest_of
from tests.support.publishers import tuned
from tests.support.states import present, reach

ROWS, COLUMNS = 600, 200


def drawn(rng: np.random.Generator, elements: int) -> np.ndarray:
    bits = rng.normal(0, 0.02, elements).astype(np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16)


def momentum(seed: int = 0, chance: float = 0.9, density: float = 0.005) -> Iterator[State]:
    """States of which most of what moved last moves on, as weights do under momentum."""
    rng = np.random.default_rng(seed)
    flat = drawn(rng, ROWS * COLUMNS)
    moving: dict[int, int] = {}
    for step in range(10_000):
        yield State.of(
            {
                "w": Bits(flat.reshape(ROWS, COLUMNS).copy(), "BF16"),
                "step": Bits(np.uint64([step]), "U64"),
            }
        )
        moving = {at: by for at, by in moving.items() if rng.random() < chance}
        while len(moving) < density * flat.size:
            moving[int(rng.integers(flat.size))] = int(rng.choice([-1, 1]))
        at = np.array(sorted(moving))
        flat[at] += np.array([moving[int(a)] % (1 << 16) for a in at], np.uint16)


def reader(store: MemoryStore | LocalStore, **options: object) -> tuple[Subscriber, list[Event]]:
    seen: list[Event] = []
    return Subscriber(store, stream="s", threads=1, on_event=seen.append, **options), seen  # type: ignore[arg-type]


class Made:
    """A stream of ``versions`` versions."""

    def __init__(
        self, versions: int, store: MemoryStore | LocalStore | None = None, **options: object
    ) -> None:
        self.store = store or MemoryStore()
        self.states = momentum()
        self.roots: list[str] = []
        self.done: list[Published] = []
        self.publisher = self.new_publisher(**options)
        for _ in range(versions):
            self.publish()

    def new_publisher(self, **options: object) -> Publisher:
        given: dict[str, Any] = {"history": True, "folds": (4, 16), "threads": 1} | options
        return tuned(self.store, stream="s", **given)

    def publish(self, **options: object) -> Published:
        state = next(self.states)
        self.roots.append(state_root(state))
        self.done.append(self.publisher.publish(state, **options))  # type: ignore[arg-type]
        self.publisher.wait()
        return self.done[-1]

    def subscriber(self, **options: object) -> tuple[Subscriber, list[Event]]:
        return reader(self.store, **options)

    def remembers(self, version: int) -> int:
        return manifest_of(self.store, "s", version).remembers

    def named(self, version: int) -> int:
        """How many versions the patch of a version names."""
        return history_named(self.store, "s", version)


def links(seen: list[Event]) -> list[str]:
    return [link for event in seen if isinstance(event, Synced) for link in event.links]


def detours(seen: list[Event]) -> list[str]:
    return [event.reason for event in seen if isinstance(event, FallbackUsed)]


@pytest.mark.slow
def test_patches_become_smaller_and_every_root_is_right() -> None:
    plain, made = Made(40, history=False), Made(40)
    following, _ = made.subscriber()
    assert plain.roots == made.roots
    before, now = (sum(done.patch_bytes for done in each.done[8:]) for each in (plain, made))
    assert now < 0.65 * before
    for version, root in enumerate(made.roots):
        following.sync(version)
        assert following.root == root
    assert all(report.ok for report in verify_stream(made.store, "s"))


def test_what_is_remembered_follows_the_versions() -> None:
    made = Made(10)
    assert [made.remembers(v) for v in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [made.named(v) for v in range(1, 10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("folds", [(), (2,), (3, 6), (4, 16), (8, 64), (20,)])
def test_who_comes_by_folds_reads_on(folds: tuple[int, ...]) -> None:
    made = Made(1, folds=folds)
    behind = [made.subscriber() for _ in range(5)]
    for subscriber, _ in behind:
        subscriber.sync()
    for version in range(1, 45):
        made.publish()
        for lag, (subscriber, _) in enumerate(behind, 5):
            if version % lag == 0:
                reach(subscriber, made.roots[version])
    assert [detours(seen) for _, seen in behind] == [[]] * 5
    if folds == (4, 16):
        assert any("fold" in link for _, seen in behind for link in links(seen))


@pytest.mark.slow
def test_folds_that_the_publisher_does_not_know_of() -> None:
    """Those that would end where something is remembered are not made."""
    made = Made(40, folds=())
    assert list(fold_stream(made.store, "s", (4, 8), threads=1)) == [(24, 32)]
    for version in range(40):
        newcomer, _ = made.subscriber()
        newcomer.sync(version)
        assert newcomer.root == made.roots[version]
    newcomer.sync(39)
    made.publish()
    reach(newcomer, made.roots[40])


def test_an_anchor_begins_anew() -> None:
    made = Made(6)
    made.publish(anchor=True)
    assert (made.remembers(5), made.remembers(6)) == (1, 0)
    made.publish()
    made.publish()
    assert (made.named(7), made.remembers(7), made.named(8), made.remembers(8)) == (0, 1, 1, 0)
    newcomer, seen = made.subscriber()
    newcomer.sync()
    assert newcomer.root == made.roots[8]
    assert links(seen)[0] == "the anchor of version 6"
    assert detours(seen) == []


def test_a_new_publisher_goes_on() -> None:
    made = Made(7)
    following, seen = made.subscriber()
    following.sync()
    made.publisher.close()
    made.publisher = made.new_publisher()
    made.publish()
    assert made.named(7) == 2, "what it restores it remembers as its readers do"
    made.publisher = made.new_publisher(history=False)
    made.publish()
    assert (made.named(8), made.remembers(8)) == (0, 0)
    made.publisher = made.new_publisher()
    made.publish()
    made.publish()
    assert (made.named(9), made.named(10)) == (0, 1)
    following.sync()
    assert (following.root, detours(seen)) == (made.roots[-1], [])


def test_a_base_with_what_it_remembers_goes_on_from_there(tmp_path: Path) -> None:
    made = Made(7)
    first, _ = made.subscriber()
    first.sync()
    first.save(tmp_path / "model.safetensors", {"format": "pt"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "pulse.history"]
    made.publish()
    for base in (tmp_path, tmp_path / "model.safetensors"):
        again, seen = made.subscriber(base=base)
        again.sync()
        assert (again.root, links(seen), detours(seen)) == (made.roots[7], ["the patch 6->7"], [])


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "another's"])
def test_a_base_without_it_takes_another_way(tmp_path: Path, damage: str) -> None:
    made = Made(7)
    first, _ = made.subscriber()
    first.sync()
    first.save(tmp_path / "model.safetensors")
    file = tmp_path / "pulse.history"
    if damage == "another's":
        made.publish()
        first.sync()
        first.save(tmp_path / "other" / "model.safetensors")
        (tmp_path / "other" / "pulse.history").replace(file)
    elif damage == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    made.publish()
    again, seen = made.subscriber(base=tmp_path)
    reach(again, made.roots[-1])
    assert links(seen)[0] == "the anchor of version 0"


def test_where_nothing_is_remembered_a_base_needs_nothing(tmp_path: Path) -> None:
    made = Made(17)
    first, _ = made.subscriber()
    first.sync()
    first.save(tmp_path / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    made.publish()
    again, seen = made.subscriber(base=first.state)
    again.sync()
    assert (again.root, links(seen)) == (made.roots[17], ["the patch 16->17"])


def test_a_refused_patch_leaves_the_history_as_it_was() -> None:
    made = Made(7)
    following, seen = made.subscriber()
    following.sync()
    made.publish()
    patch = manifest_of(made.store, "s", 7).patch
    assert patch
    assert made.named(7)
    name = f"s/payloads/{patch.parts[0].sha256}.patch"
    whole = made.store.get(name)
    made.store.put(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ChainGap):
        following.sync()
    assert (following.version, following.root) == (6, made.roots[6])
    made.store.put(name, whole)
    seen.clear()
    following.sync()
    assert (following.root, links(seen)) == (made.roots[7], ["the patch 6->7"])


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_a_dense_stream_remembers_no_more_than_its_share(density: float) -> None:
    made = Made(0)
    made.states = momentum(density=density)
    for _ in range(12):
        made.publish()
        assert made.publisher._rank._baseline.history.nbytes <= ROWS * COLUMNS * 2 / 12
    newcomer, seen = made.subscriber()
    newcomer.sync()
    assert (newcomer.root, detours(seen)) == (made.roots[-1], [])


@pytest.mark.slow
def test_a_relay_and_garbage_collection() -> None:
    made, target = Made(10), MemoryStore()
    relay = Relay(made.store, target, stream="s", keep=2, threads=1)
    far = Subscriber([target, made.store], stream="s", threads=1)
    for version in range(10, 40):
        made.publish()
        if version % 3 == 0:
            relay.sync()
            reach(far, made.roots[version])
        if version % 7 == 0:
            gc_stream(made.store, "s", keep=3)
        newcomer, seen = made.subscriber()
        newcomer.sync()
        assert (newcomer.root, detours(seen)) == (made.roots[version], [])
        assert Subscriber(target, stream="s", threads=1).sync() or version < 12


def put_fold(made: Made, base: int, version: int) -> None:
    """Lists a fold that no maker of folds would make."""
    states = list(islice(momentum(), version + 1))
    data = build_patch(states[base], states[version], state_digest(states[base])).to_bytes()
    payload = Payload(sha256(data).hexdigest(), len(data))
    stream = Stream(made.store, "s")
    stream.adopt(manifest_of(made.store, "s", version))
    stream.put_payload(payload, PATCH, data)
    stream.put_fold_link(base, version, [payload])


def test_folds_that_end_where_something_is_remembered_are_passed_over() -> None:
    """Who came by them could not read on."""
    made, target = Made(2, folds=()), MemoryStore()
    relay, (late, seen) = Relay(made.store, target, stream="s", threads=1), made.subscriber()
    near = Subscriber(target, stream="s", threads=1)
    relay.sync(), near.sync(), late.sync(0)
    for _ in range(12):
        made.publish()
    put_fold(made, 0, 12)
    done = relay.sync()
    assert done
    assert not any("fold" in link for link in done.links)
    late.sync()
    assert not any("fold" in link for link in links(seen))
    made.publish()
    relay.sync(), near.sync(), late.sync()
    assert near.root == late.root == made.roots[-1]


def test_a_part_of_the_tensors() -> None:
    made = Made(1)
    part, seen = made.subscriber(select=["step"])
    whole, _ = made.subscriber(select=["w"])
    for version in range(1, 20):
        made.publish()
        for subscriber in (part, whole) if version % 2 else (whole,):
            subscriber.sync()
    part.sync()
    assert (part.state.read("step")[0], detours(seen)) == (19, [])
    last, _ = made.subscriber()
    last.sync()
    np.testing.assert_array_equal(whole.state.read("w"), last.state.read("w"))


def test_interrupted_commits_remember_what_was_committed() -> None:
    made = Made(5)
    following, _ = made.subscriber()
    following.sync()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with armed("commit.after", interrupt), pytest.raises(KeyboardInterrupt):
        made.publish()
    for _ in range(4):
        made.publish()
        reach(following, made.roots[-1])


# -- where what is remembered is lost, wrong, or not to be had: everybody finds a way


Windows = dict[int, Records]


def hot(seed: int = 0, elements: int = 400_000, changes: int = 2000) -> Iterator[State]:
    """States of which half of the same few elements change in each version."""
    rng = np.random.default_rng(seed)
    flat = drawn(rng, elements)
    moving = rng.choice(elements, 2 * changes, replace=False)
    while True:
        yield State.of({"w": Bits(flat.copy(), "BF16")})
        at = rng.choice(moving, changes, replace=False)
        flat[at] += (rng.choice([-1, 1], changes) % 65536).astype(np.uint16)


def publisher(store: MemoryStore, **options: object) -> Publisher:
    return tuned(store, stream="s", history=True, threads=1, **options)


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
    assert detours(seen + of_rest) == []


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
    reach(again, state_root(state), 72)


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
    history = present(load_history(file, cut(first.digest.specs), first.digest.root))
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
