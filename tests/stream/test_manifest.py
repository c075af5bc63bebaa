"""The manifest's bytes: one form for one content, and nothing else is accepted."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import MemoryStore
from pulse_rl.errors import CorruptManifest
from pulse_rl.events import Metadata
from pulse_rl.stream import manifest as manifests
from pulse_rl.stream.manifest import Manifest, ManifestCache, parse
from pulse_rl.stream.stream import Stream
from tests.support.manifests import FULL

# These bytes never change: stored streams are compared with them.
GOLDEN = (
    '{"format":"pulse.manifest.1","stream":"policy","stream_id":"5eed5eed5eed5eed5eed5eed5eed5eed","version":7,"epoch":2,'
    '"root":"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",'
    '"elements":1000,"dense_bytes":2000,"publisher":"00ff00ff00ff00ff","created":1764000000.125,"remembers":0,'
    '"aliases":{"lm_head.weight":"model.embed_tokens.weight"},'
    '"metadata":{"step":7,"reward":0.5,"note":"größe","kept":true},'
    f'"files":[{{"name":"config.json","sha256":"{"e" * 64}","bytes":31}},'
    f'{{"name":"tokenizer/vocab.txt","sha256":"{"f" * 64}","bytes":0}}],'
    f'"patch":{{"base":6,"base_root":"{"a" * 64}","changed":12,"parts":[{{"sha256":"{"b" * 64}","bytes":99}}]}},'  # noqa: E501
    f'"anchor":{{"shards":[{{"sha256":"{"c" * 64}","bytes":1500}},{{"sha256":"{"d" * 64}","bytes":700}}]}},'  # noqa: E501
    '"digest":"afd1c54dc85acdc3244e37940f423dc6a15c83c1fab651d87d8c6b73a3c30c83","signature":null}'
).encode()


def read(data: bytes, stream: str = "policy", version: int = 7) -> Manifest:
    return parse(data, stream=stream, version=version)


def test_golden_bytes() -> None:
    assert FULL.to_bytes() == GOLDEN
    assert read(GOLDEN) == FULL


def edited(edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The golden manifest with a change, in canonical spacing."""
    value = json.loads(GOLDEN)
    edit(value)
    if (
        value.get("digest") == FULL.digest
    ):  # right for what is there now: what else is wrong has to be noticed
        unsigned = value | {"digest": ""} | ({"signature": None} if "signature" in value else {})
        value["digest"] = sha256(compact(unsigned)).hexdigest()
    return compact(value)


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def test_an_edit_of_nothing_is_canonical() -> None:
    assert edited(lambda m: None) == GOLDEN


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return edit


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        del manifest[path[-1]]

    return edit


SHARD = ("anchor", "shards", 0)
PART = ("patch", "parts", 0)
EDITS = {
    "unknown field": put("extra", value=1),
    "unknown field of the patch": put("patch", "extra", value=1),
    "unknown field of a payload": put(*SHARD, "path", value="../../x"),
    "another format": put("format", value="pulse.manifest.2"),
    "no stream_id": drop("stream_id"),
    "an empty stream_id": put("stream_id", value=""),
    "a short stream_id": put("stream_id", value="5" * 31),
    "a stream_id that is a word": put("stream_id", value="policy"),
    "stream_id null": put("stream_id", value=None),
    "another stream": put("stream", value="other"),
    "another version": put("version", value=8),
    "version a string": put("version", value="7"),
    "version a float": put("version", value=7.0),
    "version true": put("version", value=True),
    "epoch 0": put("epoch", value=0),
    "epoch null": put("epoch", value=None),
    "signature a string": put("signature", value="x"),
    "root a number": put("root", value=1),
    "root null": put("root", value=None),
    "short root": put("root", value="a" * 63),
    "long root": put("root", value="a" * 65),
    "upper-case root": put("root", value="A" * 64),
    "root with a line's end": put("root", value="a" * 63 + "\n"),
    "digest that is a path": put(*SHARD, "sha256", value="../" * 21 + "x"),
    "digest of other letters": put(*PART, "sha256", value="g" * 64),
    "digest of other digits": put(*PART, "sha256", value="\u0661" * 64),
    "bad base root": put("patch", "base_root", value="x"),
    "patch from itself": put("patch", "base", value=7),
    "patch from the future": put("patch", "base", value=9),
    "patch from a negative version": put("patch", "base", value=-1),
    "patch without parts": put("patch", "parts", value=[]),
    "a part twice": lambda m: m["patch"]["parts"].append(m["patch"]["parts"][0]),
    "history at an anchor": put("remembers", value=1),
    "a negative history": lambda m: m.update(anchor=None, remembers=-1),
    "a history of 65": lambda m: m.update(anchor=None, remembers=65),
    "a history of spans": lambda m: m.update(anchor=None, remembers=[1]),
    "remembers null": put("remembers", value=None),
    "anchor without shards": lambda m: m.update(patch=None, anchor={"shards": []}),
    "neither patch nor anchor": lambda m: m.update(patch=None, anchor=None),
    "payload without bytes": put(*PART, "bytes", value=0),
    "payload of negative bytes": put(*SHARD, "bytes", value=-1),
    "payload of half a byte": put(*SHARD, "bytes", value=1.5),
    "negative elements": put("elements", value=-1),
    "negative bytes of the state": put("dense_bytes", value=-1),
    "negative changes": put("patch", "changed", value=-1),
    "parts an object": put("patch", "parts", value={}),
    "aliases a list": put("aliases", value=[]),
    "alias of a number": put("aliases", "x", value=1),
    "nested metadata": put("metadata", "x", value={"y": 1}),
    "metadata null": put("metadata", "x", value=None),
    "created a string": put("created", value="now"),
    "created without fraction": put("created", value=1764000000),
} | {f"without {key}": drop(key) for key in json.loads(GOLDEN)}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_wrong_contents_are_refused(edit: Callable[[dict[str, Any]], None]) -> None:
    data = edited(edit)
    assert data != GOLDEN
    with pytest.raises(CorruptManifest, match=r"version 7 of 'policy'"):
        read(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(GOLDEN[:-1], id="cut"),
        pytest.param(GOLDEN + b"}", id="leftover"),
        pytest.param(GOLDEN + b"\n", id="line-end"),
        pytest.param(b" " + GOLDEN, id="space-before"),
        pytest.param(GOLDEN.replace(b'"version":7', b'"version": 7'), id="space-inside"),
        pytest.param(GOLDEN.replace(b'"version":7', b'"version":07'), id="leading-zero"),
        pytest.param(
            GOLDEN.replace(b'"version":7', b'"version":7,"version":7'), id="same-key-twice"
        ),
        pytest.param(GOLDEN.replace("ö".encode(), b"\\u00f6"), id="escaped-letter"),
        pytest.param(GOLDEN.replace("ö".encode(), b"\xf6"), id="not-utf8"),
        pytest.param(GOLDEN.replace(b"1764000000.125", b"1764000000.1250"), id="padded-float"),
        pytest.param(GOLDEN.replace(b"1764000000.125", b"1.764000000125e9"), id="other-float"),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_other_spellings_are_refused(data: bytes) -> None:
    assert data != GOLDEN
    with pytest.raises(CorruptManifest):
        read(data)


def test_keys_in_another_order_are_refused() -> None:
    value = json.loads(GOLDEN)
    swapped = {"stream": value.pop("stream"), **value}
    with pytest.raises(CorruptManifest, match="canonical"):
        read(json.dumps(swapped, separators=(",", ":"), ensure_ascii=False).encode())


def test_a_manifest_of_another_place_is_refused() -> None:
    for place in ({"version": 8}, {"stream": "other"}):
        with pytest.raises(CorruptManifest, match="claims to be version 7 of 'policy'"):
            read(GOLDEN, **place)


def test_an_oversized_manifest_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifests.MAX_BYTES == 16 << 20
    monkeypatch.setattr(manifests, "MAX_BYTES", len(GOLDEN))
    assert read(GOLDEN) == FULL
    monkeypatch.setattr(manifests, "MAX_BYTES", len(GOLDEN) - 1)
    with pytest.raises(CorruptManifest, match="more than"):
        read(GOLDEN)


def test_every_flipped_bit_is_refused() -> None:
    for flip in range(8 * len(GOLDEN)):
        broken = bytearray(GOLDEN)
        broken[flip // 8] ^= 1 << flip % 8
        with pytest.raises(CorruptManifest):
            read(bytes(broken))


values = st.one_of(
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=5),
    st.floats(0, 1e12),
)
def test_any_metadata_comes_back(metadata: Metadata, created: float) -> None:
    given_manifest = msgspec.structs.replace(FULL, created=created, metadata=metadata).sealed()
    found = read(given_manifest.to_bytes())
    assert found == given_manifest
    assert {k: type(v) for k, v in found.metadata.items()} == {
        k: type(v) for k, v in metadata.items()
    }


def numbered(version: int, **changes: object) -> Manifest:
    return msgspec.structs.replace(FULL, version=version, **changes).sealed()


def held(kept: ManifestCache, versions: int) -> list[int]:
    return [v for v in range(versions) if kept.get(v) is not None]


@pytest.mark.slow
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
    orders = [
        {"a": "x", "b": "x"},
        {"a": "x", "b": "x"},
        {"b": "x", "a": "x"},
        {},
        {"a": "x", "b": "x"},
    ]
    read = [numbered(version, aliases=aliases) for version, aliases in enumerate(orders)]
    for manifest in read:
        kept.keep(manifest)
    assert [kept.get(version) for version in range(5)] == read
    assert [kept.get(version).to_bytes() for version in range(5)] == [m.to_bytes() for m in read]  # type: ignore[union-attr]


@pytest.mark.parametrize("field", ["aliases", "metadata"])
def test_large_manifests_are_kept_up_to_a_number_of_bytes(field: str) -> None:
    kept = ManifestCache(max_bytes=50_000)
    for version in range(20):
        kept.keep(numbered(version, **{field: {f"{version}.{'x' * 10_000}": "x"}}))
        kept.keep(numbered(version, **{field: {f"{version}.{'x' * 10_000}": "x"}}))
    assert held(kept, 20) == [16, 17, 18, 19]


def test_one_that_is_larger_than_all_room_is_kept() -> None:
    kept = ManifestCache(max_bytes=10)
    for version in range(3):
        kept.keep(numbered(version))
        assert held(kept, 3) == [version]


def test_they_are_kept_up_to_a_number() -> None:
    kept = ManifestCache(most=3)
    for version in (0, 1, 1, 2, 3):
        kept.keep(numbered(version))
    assert held(kept, 4) == [1, 2, 3]
