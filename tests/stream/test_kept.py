"""Manifests in memory take little of it, however many aliases and how much metadata they carry."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from pulse_rl import MemoryStore
from pulse_rl.stream.manifest import Manifest, ManifestCache
from pulse_rl.stream.stream import Stream
from tests.support.manifests import FULL


def numbered(version: int, **changes: object) -> Manifest:
    return msgspec.structs.replace(FULL, version=version, **changes).sealed()


def held(kept: ManifestCache, versions: int) -> list[int]:
    return [v for v in range(versions) if kept.get(v) is not None]


def test_equal_aliases_are_held_once() -> None:
    """A version of 500 tied names took 100 KB of memory, and 16,384 are kept."""
    store, stream = MemoryStore(), "policy"
    aliases = {f"model.layers.{i}.shared.weight": f"model.layers.{i}.weight" for i in range(500)}
    where = Stream(store, stream)
    for version in range(7, 207):
        store.put(where.names.version(version), numbered(version, aliases=aliases).to_bytes())
    where.manifest(7)
    tracemalloc.start()
    try:
        for version in range(8, 207):
            assert where.manifest(version).aliases == aliases
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 199 * 10_000


def test_what_is_kept_is_what_was_read() -> None:
    """Aliases in another order are other bytes, with another digest."""
    kept = ManifestCache()
    orders = [{"a": "x", "b": "x"}, {"a": "x", "b": "x"}, {"b": "x", "a": "x"}, {}, {"a": "x", "b": "x"}]
    read = [numbered(version, aliases=aliases) for version, aliases in enumerate(orders)]
    for manifest in read:
        kept.keep(manifest)
    assert [kept.get(version) for version in range(5)] == read
    assert [kept.get(version).to_bytes() for version in range(5)] == [m.to_bytes() for m in read]  # type: ignore[union-attr]


@pytest.mark.parametrize("field", ["aliases", "metadata"])
def test_large_manifests_are_kept_up_to_a_number_of_bytes(field: str) -> None:
    kept = ManifestCache(most_bytes=50_000)
    for version in range(20):
        kept.keep(numbered(version, **{field: {f"{version}.{'x' * 10_000}": "x"}}))
        kept.keep(numbered(version, **{field: {f"{version}.{'x' * 10_000}": "x"}}))
    assert held(kept, 20) == [16, 17, 18, 19]


def test_one_that_is_larger_than_all_room_is_kept() -> None:
    kept = ManifestCache(most_bytes=10)
    for version in range(3):
        kept.keep(numbered(version))
        assert held(kept, 3) == [version]


def test_they_are_kept_up_to_a_number() -> None:
    kept = ManifestCache(most=3)
    for version in (0, 1, 1, 2, 3):
        kept.keep(numbered(version))
    assert held(kept, 4) == [1, 2, 3]
