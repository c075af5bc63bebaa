"""What was written once is read for ever: the files of every format, and literal roots and bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pulse_rl
from pulse_rl import LocalStore, MemoryStore, Subscriber, patch
from pulse_rl.patch import Patch
from pulse_rl.state.checkpoint import load
from pulse_rl.state.digest import state_digest
from tests.golden import make_groups, make_history
from tests.support.block_codecs import GAPS, HISTORY, RAW, SPARSE, TABLE, ZSTD

GOLDEN = Path(__file__).parent / "golden" / "format-1"
IDENTITY = "37e9b03dc6af78ee4e1a0c15c3a021fc"
OLD_ROOT = "c365318b7a56004f0309e5a7de77910a8c7e6556b8bcc883a054a194f8d3065c"
NEW_ROOT = "48ad83900ff7ff4b9ee9e8792f01b613c75af044b56401d13eafb90a8a1aa4ae"


def test_roots() -> None:
    assert pulse_rl.state_root(GOLDEN / "old.safetensors") == OLD_ROOT
    assert pulse_rl.state_root(GOLDEN / "new.safetensors") == NEW_ROOT


IDS = {"context": GAPS.id, "dense": RAW.id, "rans": TABLE.id, "zstd": ZSTD.id}


@pytest.mark.parametrize(
    ("folder", "name"), [("format-1", "context"), ("format-1", "dense"), ("format-1", "zstd"), ("rans-1", "rans")]
)
def test_patches_decode(folder: str, name: str) -> None:
    parsed = Patch.parse((GOLDEN.parent / folder / f"{name}.patch").read_bytes())
    assert (parsed.header.base_root, parsed.header.target_root) == (OLD_ROOT, NEW_ROOT)
    assert IDS[name] in {entry.codec_id for entry in parsed.header.blocks}
    state = load(GOLDEN / "old.safetensors")[0].copy()
    patch.apply_patch(parsed, state, state_digest(state))
    new = load(GOLDEN / "new.safetensors")[0]
    for spec in new.specs:
        np.testing.assert_array_equal(state.read(spec.name), new.read(spec.name))


def test_a_patch_by_groups_decodes() -> None:
    old, new = make_groups.states()
    parsed = Patch.parse((GOLDEN.parent / "groups-1" / "groups.patch").read_bytes())
    assert {entry.codec_id for entry in parsed.header.blocks} == {SPARSE.id}
    assert parsed.header.base_root == state_digest(old).root
    assert parsed.header.target_root == "50bbd30a270854c30117b4396e4d88771852d3d3b36b300c7e0ae3b60e561cf5"
    patch.apply_patch(parsed, old, state_digest(old))
    for spec in new.specs:
        np.testing.assert_array_equal(old.read(spec.name), new.read(spec.name))


def test_a_stream_is_followed() -> None:
    store = MemoryStore()
    for file in sorted((GOLDEN / "store").rglob("*")):
        if file.is_file():
            store.put(file.relative_to(GOLDEN / "store").as_posix(), file.read_bytes())
    subscriber = Subscriber(store, stream="golden")
    first = subscriber.sync(target=0)
    assert first is not None
    assert (first.root, first.metadata) == (OLD_ROOT, {"step": 0, "reward": 0.5, "note": "é"})
    second = subscriber.sync()
    assert second is not None
    assert (second.root, second.previous, second.changed) == (NEW_ROOT, 0, 243)


def test_a_signed_stream_with_an_identity_is_followed() -> None:
    """Manifests of format 2, a claim, and a fold's link, all signed by the key of 32 zero bytes."""
    key = "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
    store = LocalStore(GOLDEN.parent / "format-2" / "store")
    subscriber = Subscriber(store, stream="golden", trusted_keys=[key], identity=IDENTITY)
    roots = {0: OLD_ROOT, 1: NEW_ROOT, 2: OLD_ROOT, 3: NEW_ROOT}
    for version, root in roots.items():
        subscriber.sync(version)
        assert subscriber.root == root
    (fold,) = [link for link in subscriber.stream.links() if link.base is not None]
    assert (fold.base, fold.version) == (0, 2)
    subscriber.stream.check_link(fold)
    assert subscriber.stream.claims.after(0, "", IDENTITY) == 1


def test_an_unchanged_state_gives_this_header() -> None:
    """The plain header, byte by byte as docs/format.md has it."""
    state = pulse_rl.State.of({"a.x": np.zeros((2, 3), np.float32), "a.y": np.uint8(1)})
    built = patch.build_patch(state, state, state_digest(state))
    root = state_digest(state).root
    expected = bytes.fromhex(root + root) + bytes([4, 2, 0, 3]) + b"a.x" + bytes([2, 1]) + b"y"
    assert built.header._plain() == expected + bytes([15, 2, 2, 2, 3, 0, 0, 0])
    assert built.chunks[0][:16] == b"\x89PULSE\r\n" + (1).to_bytes(4, "little") + bytes(4)


def test_a_stream_of_three_ranks_is_followed() -> None:
    """Manifests of format 3: an anchor whose shards hold slices, and patches in parts."""
    subscriber = Subscriber(LocalStore(GOLDEN.parent / "format-3" / "store"), stream="golden", identity=IDENTITY)
    for version, root in enumerate([OLD_ROOT, NEW_ROOT, OLD_ROOT]):
        update = subscriber.sync(target=version)
        assert update is not None
        assert (update.root, update.metadata) == (root, {"step": version})
        assert version == 0 or update.changed == 243


def test_a_patch_with_a_history_decodes() -> None:
    """A block whose other changes are by groups, and one by context."""
    old, history, new = make_history.last_patch()
    parsed = Patch.parse((GOLDEN.parent / "history-1" / "history.patch").read_bytes())
    payloads = parsed.payloads()
    assert {entry.codec_id for entry in parsed.header.blocks} == {HISTORY.id}
    assert [payloads[k][0] for k in range(2)] == [3 | 128, 3]
    assert parsed.header.history == history.name
    assert parsed.header.base_root == state_digest(old).root
    assert parsed.header.target_root == "b89cae6024cfb92417ce62fc9a7f55e25e929e3dce57e23cce3984b3067f1391"
    patch.apply_patch(parsed, old, state_digest(old), history=history)
    for spec in new.specs:
        np.testing.assert_array_equal(old.read(spec.name), new.read(spec.name))


def test_a_stream_that_remembers_is_followed() -> None:
    """Manifests of format 4 and patches of format 3, by single patches, and by a fold into the middle."""
    store = LocalStore(GOLDEN.parent / "history-1" / "store")
    roots = [state_digest(state).root for state in make_history.states(make_history.SMALL, make_history.VERSIONS, 40)]
    follower, late = Subscriber(store, stream="golden"), Subscriber(store, stream="golden")
    for version, root in enumerate(roots):
        follower.sync(version)
        assert follower.root == root
    assert roots[-1] == "ce635cb9a27fcff93c6509da1cb9efbe5b4d46b7c125854b28e93536a7a68967"
    late.sync(0)
    for version in (8, 11):
        late.sync(version)
        assert late.root == roots[version]
