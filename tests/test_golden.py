"""What was written once is read for ever: the files of tests/golden, literal roots and literal
bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, Subscriber, state_root, verify_stream
from tests.golden.make import STREAM_ID, states
from tests.support.manifests import show_next

GOLDEN = Path(__file__).parent / "golden" / "format-1"
OLD_ROOT = "8c280e6a5c57ce63481fba1f388f9b0092e4da04a46d4b1d328a56c0e4c607f6"
NEW_ROOT = "bfb230d12315f933e5762c1d341fca7ddea1c5127dcd67dc5cfcd946bbce0381"
#: The public key of 32 zero bytes.
KEY = "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"


def stored() -> MemoryStore:
    """A copy of the golden store."""
    store = MemoryStore()
    for file in sorted((GOLDEN / "store").rglob("*")):
        if file.is_file():
            store.put(file.relative_to(GOLDEN / "store").as_posix(), file.read_bytes())
    return store


def test_roots() -> None:
    assert state_root(GOLDEN / "old.safetensors") == state_root(states()[0]) == OLD_ROOT
    assert state_root(GOLDEN / "new.safetensors") == state_root(states()[-1]) == NEW_ROOT


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.patch")), ids=lambda file: file.stem)
def test_patches_decode(file: Path, store: MemoryStore) -> None:
    Publisher(store, stream="old").publish(GOLDEN / "old.safetensors")
    worker = Subscriber(store, stream="old")
    worker.sync()
    show_next(store, "old", "patch", file.read_bytes(), NEW_ROOT)
    worker.sync()
    assert (worker.root, state_root(worker.state)) == (NEW_ROOT, NEW_ROOT)


def test_a_signed_stream_is_followed() -> None:
    """Patch by patch with a history, by a fold, from the anchor, and in part."""
    store, roots = LocalStore(GOLDEN / "store"), [state_root(state) for state in states()]
    follower = Subscriber(store, stream="golden", trusted_keys=[KEY], stream_id=STREAM_ID)
    for version, root in enumerate(roots):
        update = follower.sync(version)
        assert update.root == root
        assert update.metadata == {"step": version, "reward": 0.5, "note": "é"}
    late = Subscriber(store, stream="golden", trusted_keys=[KEY], stream_id=STREAM_ID)
    late.sync(0)
    (fold,) = [link for link in late.stream.links() if link.base is not None]
    assert (fold.base, fold.version) == (0, 8)
    assert len(late.stream.resolved(fold).payloads or ()) == 1
    for version in (8, 11):
        late.sync(version)
        assert late.root == roots[version]
    assert late.stream.claims.superseded_by(0, "", STREAM_ID) == 1
    part = Subscriber(store, stream="golden", select="norm", trusted_keys=[KEY])
    part.sync()
    assert part.root == roots[-1]
    assert part.state.read("norm").tobytes() == states()[-1].read("norm").tobytes()
    assert any(late.stream.manifest(version).remembers for version in range(12))
    assert all(report.ok for report in verify_stream(store, "golden", trusted_keys=[KEY]))


def test_a_stream_of_three_ranks_is_followed() -> None:
    """An anchor whose shards hold slices, and patches in parts."""
    subscriber = Subscriber(stored(), stream="sharded", stream_id=STREAM_ID)
    for version, state in enumerate(states()[:3]):
        update = subscriber.sync(target=version)
        assert (update.root, update.metadata) == (state_root(state), {"step": version})
