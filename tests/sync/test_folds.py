"""Folds: made in the background or afterwards, never larger than their patches, and taken by who is
far behind."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import MemoryStore, Subscriber, fold_stream, state_root, verify_stream
from pulse_rl.errors import ChainGap, StoreUnavailable
from pulse_rl.events import CallFailed, Event, Synced
from tests.support.folds import fold_link
from tests.support.manifests import folds_of, manifest_of
from tests.support.publishers import FoldingPublisher
from tests.support.states import TinyTrainer, present, reach


def published(store: MemoryStore, versions: int, **options: object) -> TinyTrainer:
    trainer = TinyTrainer()
    publisher = FoldingPublisher(store, stream="s", threads=1, **options)  # type: ignore[arg-type]
    trainer.publish(publisher, versions)
    publisher.wait()
    return trainer


def links_of_sync(store: MemoryStore, subscriber: Subscriber, seen: list[Event]) -> tuple[str, ...]:
    seen.clear()
    subscriber.sync()
    return next(e for e in seen if isinstance(e, Synced)).links


@pytest.mark.parametrize("background", [True, False])
def test_who_is_far_behind_takes_the_folds(background: bool) -> None:
    store, seen = MemoryStore(), []
    trainer = published(store, 23, folds=(4, 16) if background else ())
    if not background:
        made = list(fold_stream(store, "s", (4, 16), threads=1))
        assert made == [(0, 4), (0, 16), (4, 8), (8, 12), (12, 16), (16, 20)]
        assert list(fold_stream(store, "s", (4, 16), threads=1)) == []
    late = Subscriber(store, stream="s", threads=1, on_event=seen.append)
    assert links_of_sync(store, late, seen) == (
        "the anchor of version 0",
        "the fold 0->16",
        "the fold 16->20",
        "the patch 20->21",
        "the patch 21->22",
    )
    assert late.root == state_root(trainer.state)
    assert all(report.ok for report in verify_stream(store, "s"))


def test_a_damaged_fold_is_avoided() -> None:
    store, seen = MemoryStore(), []
    trainer = published(store, 18, folds=(4, 16))
    fold = next(fold for fold in folds_of(store, "s") if (fold.base, fold.version) == (0, 16))
    store.put(f"s/payloads/{fold.payloads[0].sha256}.patch", b"damaged")
    late = Subscriber(store, stream="s", threads=1, on_event=seen.append)
    links = links_of_sync(store, late, seen)
    assert links[:3] == ("the anchor of version 0", "the fold 0->4", "the fold 4->8")
    assert late.root == state_root(trainer.state)
    found = {
        report.version: report.problems for report in verify_stream(store, "s") if not report.ok
    }
    assert list(found) == [16]
    assert "the fold 0->16" in found[16][0]


def test_a_link_that_lies_is_avoided(store: MemoryStore) -> None:
    """Links are hints: a fold that leads elsewhere, or to no object, costs a detour and nothing
    else."""
    trainer = published(store, 12, folds=())
    store.put(*fold_link("s", 0, 8, ("0" * 64, 5)))
    wrong = present(manifest_of(store, "s", 3).patch)
    payload = wrong.parts[0]
    store.put(*fold_link("s", 2, 11, (payload.sha256, payload.bytes)))
    store.put("s/links/nonsense", b"")
    store.put(f"s/links/{7:012d}-anchor-{1:015d}", b"")
    reach(Subscriber(store, stream="s", threads=1), state_root(trainer.state))


def test_without_listed_links_the_manifests_lead_to_an_anchor(store: MemoryStore) -> None:
    trainer = published(store, 12, folds=(4,))
    for info in list(store.list("s/links")):
        store.delete(info.name)
    reach(Subscriber(store, stream="s", threads=1), state_root(trainer.state))


def test_a_fold_that_saves_nothing_is_not_stored(store: MemoryStore) -> None:
    """Two rewrites of the same half: the fold over both is about as large as either, and must be
    below their sum."""
    trainer = TinyTrainer()
    publisher = FoldingPublisher(store, stream="s", folds=(2,), threads=1)
    publisher.publish(trainer.state)
    for _ in range(2):
        for tensor in trainer.state.values():
            half = tensor.array.reshape(-1)[::2]
            half[...] = trainer.rng.integers(0, 1 << 16, half.shape, dtype=np.uint16)
        publisher.publish(trainer.state)
    publisher.wait()
    spanned = sum(p.bytes for v in (1, 2) for p in manifest_of(store, "s", v).patch.parts)  # type: ignore[union-attr]
    assert all(fold.nbytes < spanned for fold in folds_of(store, "s"))


def test_a_fold_that_cannot_be_stored_is_reported() -> None:
    class NoLinks(MemoryStore):
        def put(self, name: str, data: object) -> None:
            if "/links/" in name:
                raise StoreUnavailable("away")
            super().put(name, data)  # type: ignore[arg-type]

    store, seen = NoLinks(), []
    trainer = published(store, 10)
    assert list(fold_stream(store, "s", (4,), threads=1, on_event=seen.append)) == []
    assert [(e.kind, e.reason) for e in seen if isinstance(e, CallFailed)] == [
        ("store_unavailable", f"the fold {base}->{base + 4}: away") for base in (0, 4)
    ]
    reach(Subscriber(store, stream="s", threads=1), state_root(trainer.state))


def test_fold_of_a_stream_with_a_gap_says_so(store: MemoryStore) -> None:
    published(store, 6)
    patch = present(manifest_of(store, "s", 2).patch)
    store.delete(f"s/payloads/{patch.parts[0].sha256}.patch")
    with pytest.raises(ChainGap, match="1->2"):
        list(fold_stream(store, "s", (4,), threads=1))


@pytest.mark.slow
def test_delete_any_one_payload_and_it_is_still_restored_or_named(store: MemoryStore) -> None:
    """Anchors at 0 and later, folds over 4 and 16: most payloads can be missed; the error names one
    that cannot."""
    trainer = published(store, 27, folds=(4, 16), anchor_ratio=0.04)
    root = state_root(trainer.state)
    names = [info.name for info in store.list("s/payloads")]
    outcomes = {"reached": 0, "named": 0}
    for name in names:
        kept = store.get(name)
        store.delete(name)
        newcomer = Subscriber(store, stream="s", threads=1)
        gap = None
        try:
            newcomer.sync()
        except ChainGap as error:
            gap = str(error)
        outcomes["reached" if gap is None else "named"] += 1
        assert newcomer.root == root if gap is None else name in gap
        store.put(name, kept)
    assert outcomes["reached"] > len(names) - 5
    assert outcomes["named"] > 0, "the patches after the last anchor and fold have no detour"
