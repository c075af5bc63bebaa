"""gc deletes what no kept version needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pulse_rl import (
    LocalStore,
    MemoryStore,
    Publisher,
    Store,
    Subscriber,
    gc_stream,
    state_root,
    verify_stream,
)
from pulse_rl.errors import EmptyStream, InputError, StoreFull, StoreUnavailable
from pulse_rl.events import CallFailed, Event
from pulse_rl.store import Data
from tests.support.lying_store import LyingStore
from tests.support.publishers import FoldingPublisher, tuned
from tests.support.states import TinyTrainer, reach
from tests.support.stores import FaultyStore, names


def stream_with_anchors(
    store: Store, versions: int = 30
) -> tuple[Publisher, TinyTrainer, list[str]]:
    trainer = TinyTrainer()
    publisher = FoldingPublisher(store, stream="s", folds=(4, 16), anchor_ratio=0.02, threads=1)
    roots = []
    for _ in range(versions):
        roots.append(trainer.publish(publisher).root)
    publisher.wait()
    return publisher, trainer, roots


def test_what_goes_is_what_nothing_names(store: MemoryStore) -> None:
    stream_with_anchors(store)
    before = {info.name for info in store.list("s")}
    dry = gc_stream(store, "s", keep=3, grace_seconds=0, dry_run=True)
    assert {info.name for info in store.list("s")} == before
    done = gc_stream(store, "s", keep=3, grace_seconds=0)
    assert done == dry
    assert {info.name for info in store.list("s")} == before - set(done.names)
    assert done.names
    assert gc_stream(store, "s", keep=3, grace_seconds=0).names == ()


def test_no_number_is_used_again_where_gc_was_cut_short_and_the_head_is_damaged() -> None:
    """What gc took leaves a hole below the head, which the next publisher cannot read."""
    store, trainer = FaultyStore(MemoryStore()), TinyTrainer()
    publisher = Publisher(store, stream="s", anchor_ratio=0.0, threads=1)
    trainer.publish(publisher, 10)
    reader = Subscriber(store, stream="s", threads=1)
    reader.sync()
    store.fail_on("delete", "versions", after=True)
    with pytest.raises(StoreUnavailable):
        gc_stream(store, "s", keep=1)
    assert names(store, "s/versions")[-2:] == [
        f"s/versions/{version:012d}.json" for version in (7, 9)
    ]
    store.put("s/versions/000000000009.json", b"{")
    again = Publisher(store, stream="s", threads=1)
    for version in (10, 11):
        assert trainer.publish(again).version == version
        reach(reader, state_root(trainer.state))


def test_a_payload_whose_manifest_is_on_its_way_stays(store: MemoryStore) -> None:
    stream_with_anchors(store)
    store.put(f"s/payloads/{'ab' * 32}.patch", b"just uploaded")
    assert not any(
        "payloads" in name for name in gc_stream(store, "s", keep=1, grace_seconds=3600).names
    )
    assert f"s/payloads/{'ab' * 32}.patch" in gc_stream(store, "s", keep=1, grace_seconds=0).names


def test_a_reader_in_mid_restore_finds_another_path() -> None:
    """gc runs between the reader's planning and its fetching: the read that fails makes it plan
    again."""

    def collect(liar: LyingStore[MemoryStore], name: str, right: Callable[[], bytes]) -> bytes:
        if name.endswith(".patch"):
            liar.tell()
            gc_stream(liar, "s", keep=1, grace_seconds=0)
        return right()

    store = LyingStore(MemoryStore())
    trainer = TinyTrainer()
    publisher = Publisher(store, stream="s", anchor_ratio=0.02, threads=1)
    trainer.publish(publisher, 30)
    reader = Subscriber(store, stream="s", threads=1)
    reader.sync(target=1)
    store.tell("get", collect)
    reach(reader, state_root(trainer.state))
    assert not store.call


def test_bad_wishes() -> None:
    with pytest.raises(EmptyStream):
        gc_stream(MemoryStore(), "s", keep=1)
    with pytest.raises(InputError):
        gc_stream(MemoryStore(), "s", keep=0)


def test_a_clock_that_goes_backwards_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The times of manifests only inform; gc measures age by the store's clock, whatever this
    machine's says."""
    now = 2e9
    monkeypatch.setattr("time.time", lambda: now)
    store, trainer = LocalStore(tmp_path), TinyTrainer()
    publisher = Publisher(store, stream="s", anchor_ratio=0.02, threads=1)
    for _ in range(20):
        now -= 1000
        trainer.publish(publisher)
    store.put(f"s/payloads/{'ab' * 32}.patch", b"on its way")
    now = 9e9
    gc_stream(store, "s", keep=2)
    assert f"s/payloads/{'ab' * 32}.patch" in {info.name for info in store.list("s/payloads")}
    reach(Subscriber(store, stream="s", threads=1), state_root(trainer.state))
    assert all(report.ok for report in verify_stream(store, "s"))


def test_a_publisher_keeps_what_it_is_told_to() -> None:
    store, trainer = MemoryStore(), TinyTrainer()
    with Publisher(store, stream="s", anchor_ratio=0.02, keep=5) as publisher:
        root = trainer.publish(publisher, 30).root
    left = [int(name[-17:-5]) for name in names(store, "s/versions")]
    assert left == list(range(left[0], 30))
    assert 0 < left[0] <= 25
    newcomer = Subscriber(store, stream="s")
    newcomer.sync(25)
    reach(newcomer, root)
    with Publisher(store, stream="s", anchor_ratio=0.02, keep=1) as again:
        trainer.publish(again, anchor=True)
    assert names(store, "s/versions") == [f"s/versions/{30:012d}.json"], (
        "a restarted one begins with what was left"
    )
    with pytest.raises(InputError, match="keep"):
        Publisher(store, stream="s", keep=0)


@pytest.mark.parametrize("keep", [1, 5, 12])
def test_keep_bounds_what_is_stored(keep: int) -> None:
    """Without anchors of its own accord `keep` would delete nothing here: the patches of 60
    versions are smaller than the state."""
    store, trainer = MemoryStore(), TinyTrainer()
    most = most_anchors = 0
    with Publisher(store, stream="s", anchor_ratio=1e9, keep=keep, threads=1) as publisher:
        for _ in range(60):
            root = trainer.publish(publisher).root
            publisher.wait()
            most = max(most, len(names(store, "s/versions")))
            most_anchors = max(most_anchors, len(names(store, "s/links")))
    assert most <= 2 * max(keep, 4)
    assert most_anchors == 2
    newcomer = Subscriber(store, stream="s")
    newcomer.sync(60 - keep)
    reach(newcomer, root)
    assert all(report.ok for report in verify_stream(store, "s"))


def test_an_anchor_that_finds_no_room_stops_no_training() -> None:
    """A patch still fits. What was stored of the anchor goes, so that it does."""
    events, store, trainer = list[Event](), Full(), TinyTrainer()
    with tuned(
        store, stream="s", keep=4, threads=1, on_event=events.append, shard_bytes=300
    ) as publisher:
        for version in range(45):
            store.room = 1 if 1 <= version < 25 else 1000
            trainer.publish(publisher)
    failed = [event for event in events if isinstance(event, CallFailed)]
    assert [(event.call, event.kind) for event in failed] == [("anchor", "store_full")] * 2
    assert names(store, "s/versions")[0] > f"s/versions/{24:012d}", "later ones found room"
    assert all(report.ok for report in verify_stream(store, "s"))
    shards = [name for name in names(store, "s/payloads") if name.endswith(".safetensors")]
    store.room = 1
    with pytest.raises(StoreFull):
        trainer.publish(publisher, anchor=True)
    left = [name for name in names(store, "s/payloads") if name.endswith(".safetensors")]
    assert left == shards


class Full(MemoryStore):
    """Has room for so many shards of an anchor."""

    room = 1000

    def put(self, name: str, data: Data) -> None:
        if name.endswith(".safetensors"):
            if not self.room:
                raise StoreFull("no space left")
            self.room -= 1
        super().put(name, data)


def test_unfinished_files_of_killed_writers_go(tmp_path: Path) -> None:
    with Publisher(tmp_path, stream="s") as publisher:
        TinyTrainer().publish(publisher)
    left = tmp_path / ".unfinished" / ".shard.safetensors.abcdefgh"
    left.write_bytes(bytes(1000))
    (tmp_path / ".unfinished" / "of somebody else").write_bytes(b"")
    assert gc_stream(tmp_path, "s", keep=1).unfinished == 0
    assert gc_stream(tmp_path, "s", keep=1, grace_seconds=0, dry_run=True).unfinished == 0
    assert gc_stream(tmp_path, "s", keep=1, grace_seconds=0).unfinished == 1000
    assert [path.name for path in left.parent.iterdir()] == ["of somebody else"]


def test_what_cannot_be_deleted_is_said_and_the_version_is_there() -> None:
    events, store, trainer = list[Event](), FaultyStore(MemoryStore()), TinyTrainer()
    with Publisher(
        store, stream="s", anchor_ratio=0.0, keep=1, on_event=events.append
    ) as publisher:
        for _ in range(3):
            store.fail_on("delete", "links")
            trainer.publish(publisher)
    failed = [event for event in events if isinstance(event, CallFailed)]
    assert failed
    assert {(event.call, event.kind) for event in failed} == {("gc", "store_unavailable")}
    assert publisher.head() is not None
