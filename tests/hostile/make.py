"""Writes the corpus of hostile files next to this program: python -m tests.hostile.make

Each is refused with a typed error and in little memory (tests/test_hostile.py). The files are kept,
so that what was once refused stays refused whatever becomes of this program.

    *.patch         a patch for BASE; digests are right unless they are what is wrong
    *.safetensors   a checkpoint, or the shard of an anchor
    *.json          the manifest of version 1 of the stream "policy"
    *.links         names below "policy/links/", one a line; of no use, and harmless
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from pulse_rl.codec import compress
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.header import BlockEntry, PatchHeader, all_of
from pulse_rl.stream.manifest import FORMAT
from tests.hostile.pieces import (
    base,
    changed,
    framed,
    header_of_many_blocks,
    honest,
    plain_header,
    varint,
    with_block,
)
from tests.support.block_codecs import GAPS, ZSTD
from tests.support.checkpoints import entry, file_of

HERE = Path(__file__).parent
TERA = 1 << 40


def patches() -> Iterator[tuple[str, bytes]]:
    good = honest()
    for at in (0, 7, 8, 20, 27, 28, 60, len(good) // 2, len(good) - 1):
        yield f"truncated-{at}", good[:at]
    yield "longer", good + b"\0"
    for at in (0, 9, 13, 17, 21, 30, 70, len(good) - 3):
        yield f"flipped-{at}", good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]
    yield "format-2", good[:8] + b"\2" + good[9:]
    yield "claims-4-gib-stored", good[:12] + b"\xff" * 4 + good[16:]
    yield "claims-4-gib-plain", good[:16] + b"\xff" * 4 + good[20:]

    # Headers that unfold: zstd bombs, and frames that claim more than they hold.
    yield "bomb-zeros", framed(bytes(1 << 27))
    yield "bomb-past-its-claim", framed(bytes(1 << 26), claim=100)
    yield (
        "frame-claims-terabytes",
        framed(b"", stored=b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", TERA) + b"\1\0\0", claim=90),
    )
    yield "frame-of-a-huge-window", framed(b"", stored=b"\x28\xb5\x2f\xfd\x00\xb8\1\0\0", claim=1)
    yield "not-a-frame", framed(b"", stored=bytes(range(64)), claim=64)
    yield "two-frames", framed(b"", stored=compress(bytes(10), 1) * 2, claim=20)

    def header(blocks: bytes, body: bytes = b"", **parts: bytes) -> bytes:
        return framed(plain_header(blocks, **parts), body)

    none, block = varint(2) + b"\0\0", varint(2) + b"\3\0"
    yield "header-ends-early", framed(plain_header(none)[:-1])
    ten = varint(10) + bytes(8)  # the length and checksum of a payload
    yield "header-goes-on", header(none + b"more")
    yield "padded-varint", header(none, slices=b"\x81\0\0\x90\x10")
    yield "endless-varint", header(none, slices=b"\xff" * 30)
    yield "history-of-no-versions", header(none, history=b"\1\0" + bytes(8))
    yield "history-of-65-windows", header(none, history=varint(65) + b"\1" * 65 + bytes(8))
    yield "history-cut", header(b"", history=b"\1\1" + bytes(7), slices=b"")
    yield "history-that-is-not-named", header(varint(2) + b"\6\0" + b"\1\1" + bytes(8), b"x")
    yield "slices-2-to-the-60", header(none, slices=varint(1 << 60))
    yield "slices-of-the-cap", header(none, slices=varint(1 << 20))
    yield (
        "slices-of-the-cap-that-are-there",
        header(none, slices=varint(1 << 20) + b"\1\1" * (1 << 20)),
    )
    yield "slices-that-touch", header(none, slices=b"\2\0" + varint(64) + b"\0" + varint(2000))
    yield "slices-of-nothing", header(none, slices=b"\2\0" + varint(2064) + b"\0\0")
    yield "slices-of-too-little", header(none, slices=b"\1\0" + varint(2063))
    yield "slices-of-too-much", header(none, slices=b"\1\0" + varint(2065))
    yield "slices-past-the-end", header(none, slices=b"\1" + varint(2060) + varint(2064))
    yield (
        "slices-with-a-hole",
        header(varint(2) + b"\0\0", slices=b"\2\0" + varint(5) + varint(1) + varint(2058)),
    )
    yield "no-slices", header(b"\0", slices=b"\0")
    yield "terabytes", header(none, slices=b"\1\0" + varint(TERA))
    yield (
        "terabytes-in-blocks",
        header(varint(1 << 18) + bytes(1 << 18), slices=b"\1\0" + varint(TERA)),
    )
    yield "most-blocks", header_of_many_blocks()
    yield "slice-overflows", header(none, slices=b"\1" + varint((1 << 64) - 1) + varint(2064))
    yield "blocks-2-to-the-60", header(varint(1 << 60) + b"\0\0")
    yield "blocks-one-too-many", header(varint(3) + b"\0\0\0")
    yield "blocks-one-too-few", header(varint(1) + b"\0")
    yield "unknown-codec", with_block(b"x", 99, 1)
    yield "changes-past-the-block", header(block + varint(2001) + ten, b"x" * 10)
    yield "no-changes", header(block + varint(0) + ten, b"x" * 10)
    yield "payload-of-terabytes", header(block + varint(1) + varint(TERA) + bytes(8))
    yield "payload-of-no-checksum", header(block + varint(1) + ten, b"x" * 10)
    entries = (BlockEntry(0, 0, 0),) * 2
    yield "another-base", PatchHeader("1" * 64, "2" * 64, all_of(base().specs), entries).to_bytes()

    yield from blocks()


def blocks() -> Iterator[tuple[str, bytes]]:
    """Patches whose header is right and whose payload is not."""
    noise = random.Random(1).randbytes(400)
    old, new = base(), changed()
    whole, count = GAPS.encode(old.read("a"), new.read("a"), cut(old.specs)[0].layout)
    yield "context-nothing", with_block(b"\1", 3, 1)
    yield "context-noise", with_block(varint(7) + b"\0\0\xff" + noise, 3, 7)
    yield "context-zeros", with_block(varint(2000) + b"\0\0\xff" + bytes(300), 3, 2000)
    yield "context-ones", with_block(varint(2000) + b"\0\0\xff" + b"\xff" * 300, 3, 2000)
    yield (
        "context-endless-escapes",
        with_block(varint(9) + b"\7\0\xff" + b"\xff\xff\xff\xff\xff\xff\xff\xfe" * 40, 3, 9),
    )
    yield "context-many-changes", with_block(varint((1 << 64) - 1) + b"\0\0\xff" + noise, 3, 2000)
    yield "context-no-changes", with_block(b"\0\0\0\xff" + noise, 3, 1)
    yield (
        "context-padded-count",
        with_block(bytes([0x80 | count & 0x7F, 0x80 | count >> 7, 0]) + whole[2:], 3, count),
    )
    yield "context-endless-count", with_block(b"\xff" * 40, 3, 1)
    yield "context-boost-255", with_block(varint(7) + b"\xff\0\xff" + noise, 3, 7)
    yield "context-classes-past-the-end", with_block(varint(7) + b"\0\xff\xff" + noise, 3, 7)
    yield "context-truncated", with_block(whole[:-1], 3, count)
    yield "context-longer", with_block(whole + b"\0", 3, count)
    yield "context-fewer-than-counted", with_block(whole, 3, count + 1)
    yield "context-wrong-target", with_block(whole, 3, count)
    yield "context-for-u64", with_block(whole, 3, 1, index=1)
    yield "nibbles-of-bf16", with_block(b"\0" + whole, 7, count)
    yield "nibbles-of-u64", with_block(b"\0" + whole, 7, 1, index=1)

    def gaps(values: Any, width: int, data: bytes, claimed: int, shown: int | None = None) -> bytes:
        raw = np.asarray(values, f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()
        where, what = compress(raw, 1), compress(data, 1)
        return struct.pack("<IBI", claimed, shown or width, len(where)) + where + what

    good, _ = ZSTD.encode(old.read("a"), new.read("a"), cut(old.specs)[0].layout)
    yield "zstd-head-cut", with_block(good[:5], 2, 1)
    yield "zstd-claims-4-billion", with_block(gaps([0], 1, b"xx", 0xFFFFFFFF), 2, 1)
    yield "zstd-width-3", with_block(gaps([0], 1, b"xx", 1, shown=3), 2, 1)
    yield "zstd-past-the-block", with_block(gaps([2000], 2, b"xx", 1), 2, 1)
    yield "zstd-wraps-around", with_block(gaps([0xFFFFFFFF, 0, 0xFFFFFFFF], 4, b"x" * 6, 3), 2, 3)
    yield "zstd-too-few-values", with_block(gaps([0, 0], 1, b"xx", 2), 2, 2)
    yield "zstd-bomb", with_block(gaps(np.zeros(1 << 26, np.uint8), 1, b"xx", 1), 2, 1)
    yield "zstd-bomb-of-values", with_block(gaps([0], 1, bytes(1 << 26), 1), 2, 1)
    yield (
        "zstd-length-past-the-end",
        with_block(struct.pack("<IBI", 1, 1, 0xFFFFFFFF) + good[9:], 2, 1),
    )
    bomb = compress(bytes(1 << 26), 1)
    yield "dense-bomb", with_block((len(bomb).to_bytes(4, "little") + bomb) * 2, 1, 2000)
    yield "dense-length-past-the-end", with_block(b"\xff\xff\xff\xff" + bomb[:50], 1, 2000)
    yield "dense-empty", with_block(b"\0" * 8, 1, 2000)


def checkpoints() -> Iterator[tuple[str, bytes]]:
    good = file_of({"a": entry("BF16", [4], [0, 8]), "b": entry("U8", [2], [8, 10])}, bytes(10))
    for at in (0, 3, 8, 20, len(good) - 1):
        yield f"truncated-{at}", good[:at]
    yield "longer", good + b"\0"
    yield "header-of-exabytes", file_of({}, length=(1 << 64) - 1)
    yield "header-of-100-mib", file_of({}, length=100 << 20)
    yield (
        "overlapping",
        file_of({"a": entry("U8", [8], [0, 8]), "b": entry("U8", [8], [4, 12])}, bytes(12)),
    )
    yield (
        "same-place",
        file_of({"a": entry("U8", [8], [0, 8]), "b": entry("U8", [8], [0, 8])}, bytes(8)),
    )
    yield "gap", file_of({"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [8, 12])}, bytes(12))
    yield "negative-start", file_of({"a": entry("U8", [8], [-8, 0])}, bytes(8))
    yield "negative-length", file_of({"a": entry("U8", [8], [8, 0])}, bytes(8))
    yield "negative-shape", file_of({"a": entry("U8", [-8], [0, 8])}, bytes(8))
    yield "negative-shape-twice", file_of({"a": entry("U8", [-2, -4], [0, 8])}, bytes(8))
    yield "header-cut", file_of(b'{"a":{"dtype":')
    yield "header-null", file_of(None)
    yield "gap-at-the-start", file_of({"a": entry(offsets=[1, 5])}, bytes(5))
    yield "offsets-of-another-length", file_of({"a": entry(offsets=[0, 3])}, bytes(4))
    yield "no-offsets", file_of({"a": {"dtype": "U8", "shape": [4]}}, bytes(4))
    yield "shape-a-number", file_of({"a": entry(shape=4)}, bytes(4))
    yield "shape-an-object", file_of({"a": entry(shape={}, offsets=[0, 1])}, bytes(1))
    yield "elements-past-the-cap", file_of({"a": entry("U8", [1 << 60], [0, 1 << 60])}, bytes(4))
    yield "dimension-past-2-to-the-64", file_of({"a": entry("U8", [0, 1 << 70], [0, 0])})
    yield "terabytes", file_of({"a": entry("U8", [TERA], [0, TERA])}, bytes(8))
    yield (
        "past-2-to-the-64",
        file_of({"a": entry("F64", [1 << 62, 1 << 62], [0, 1 << 127])}, bytes(8)),
    )
    yield "shape-of-floats", file_of({"a": entry("U8", [8.0], [0, 8])}, bytes(8))
    yield "shape-of-booleans", file_of({"a": entry("U8", [True], [False, True])}, bytes(1))
    yield "shape-of-words", file_of({"a": entry("U8", "8", ["0", "8"])}, bytes(8))
    yield "shape-of-17-dimensions", file_of({"a": entry("U8", [1] * 17, [0, 1])}, bytes(1))
    yield (
        "three-offsets",
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, bytes(1)),
    )
    yield "no-dtype", file_of({"a": {"shape": [1], "data_offsets": [0, 1]}}, bytes(1))
    yield "unknown-dtype", file_of({"a": entry("Q4_K", [1], [0, 1])}, bytes(1))
    yield (
        "dtype-a-list",
        file_of({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, bytes(1)),
    )
    yield "entry-a-list", file_of({"a": ["U8", [1], [0, 1]]}, bytes(1))
    yield "metadata-of-numbers", file_of({"__metadata__": {"a": 1}})
    yield "metadata-a-list", file_of({"__metadata__": ["a"]})
    once = json.dumps({"a": entry("U8", [1], [0, 1])}, separators=(",", ":"))[1:-1]
    field = once.replace(",", ',"dtype":"I8",', 1)
    yield "field-twice", file_of(f"{{{field}}}".encode(), bytes(1))
    yield "twice", file_of(f"{{{once},{once}}}".encode(), bytes(1))
    yield "name-empty", file_of({"": entry("U8", [1], [0, 1])}, bytes(1))
    yield "name-of-2000-bytes", file_of({"x" * 2000: entry("U8", [1], [0, 1])}, bytes(1))
    yield (
        "name-of-half-a-surrogate",
        file_of(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', bytes(1)),
    )
    yield "not-json", file_of(b"{'a': 1}")
    yield "not-an-object", file_of(b"[]")
    yield "not-utf-8", file_of(b'{"\xff":0}')
    yield "deep-lists", file_of(b"[" * 20_000)
    yield "deep-objects", file_of(b'{"a":' * 10_000)
    yield "digits", file_of(b'{"a":' + b"9" * 10_000 + b"}")
    yield "digits-in-the-shape", file_of({"a": entry("U8", [int("9" * 4000)], [0, 1])}, bytes(1))
    yield (
        "infinity",
        file_of(b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,NaN]}}', bytes(1)),
    )


FILES: dict[str, list[str]] = {
    "outside": ["../config.json"],
    "absolute": ["/etc/passwd"],
    "of-a-drive": ["C:\\config.json"],
    "in-and-out": ["a/../../config.json"],
    "hidden": [".bashrc"],
    "in-a-hidden-folder": [".pulse/current"],
    "here": ["."],
    "nothing": [""],
    "two-slashes": ["a//b"],
    "a-folder": ["a/"],
    "too-deep": ["a/b/c/d/e"],
    "a-line-feed": ["config.json\n"],
    "not-ascii": ["größe.json"],
    "too-long": ["x" * 256],
    "weights": ["model.safetensors"],
    "more-weights": ["x/Model.SafeTensors"],
    "a-pickle": ["pytorch_model.bin"],
    "pulses-own": ["pulse.history"],
    "twice": ["a.json", "a.json"],
    "twice-but-for-capitals": ["A.json", "a.json"],
    "disordered": ["b.json", "a.json"],
    "a-file-as-folder": ["a", "a/b"],
    "too-many": [f"{k:03d}" for k in range(257)],
}


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest of version 1 that would do."""
    good: dict[str, Any] = {
        "format": FORMAT, "stream": "policy", "stream_id": "5" * 32, "version": 1, "epoch": 1,
        "root": "0" * 64,
        "elements": 2064, "dense_bytes": 4512, "publisher": "hostile", "created": 0.5,
        "remembers": 0, "aliases": {},
        "metadata": {}, "files": [], "patch":
        {"base": 0, "base_root": "0" * 64, "changed": 1, "parts": [{"sha256": "0" * 64,
        "bytes": 100}]}, "anchor": None,
        "digest": "", "signature": None,
    }  # fmt: skip
    return good | changes


def as_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
        errors="surrogatepass"
    )


def sealed(value: dict[str, Any]) -> bytes:
    """Its bytes, with its own digest: what is wrong with it is not that."""
    return as_json(value | {"digest": sha256(as_json(value)).hexdigest()})


def manifests() -> Iterator[tuple[str, bytes]]:
    def made(**changes: Any) -> bytes:
        return sealed(manifest(**changes))

    def patched(**changes: Any) -> bytes:
        return made(patch=manifest()["patch"] | changes)

    def payload(digest: str = "0" * 64, nbytes: int = 100) -> list[dict[str, Any]]:
        return [{"sha256": digest, "bytes": nbytes}]

    good = made()
    for at in (0, 1, 50, len(good) - 1):
        yield f"truncated-{at}", good[:at]
    yield "longer", good + b"\n"
    yield "spaces", json.dumps(manifest()).encode()
    yield "flipped", good.replace(b'"elements":2064', b'"elements":2065')
    huge = 10**40
    parts = payload()
    for key in ("version", "epoch", "elements", "dense_bytes", "created"):
        yield f"{key}-huge", made(**{key: huge})
        yield f"{key}-negative", made(**{key: -1}) if key != "created" else made(created="1")
        yield f"{key}-a-word", made(**{key: "1"})
        yield f"{key}-null", made(**{key: None})
    yield "epoch-0", made(epoch=0)
    yield "version-true", made(version=True)
    yield "version-1.0", made(version=1.0)
    yield "created-infinite", good.replace(b"0.5", b"1e999")
    yield "created-not-a-number", good.replace(b"0.5", b"NaN")
    yield "other-version", made(version=2)
    yield "other-stream", made(stream="other")
    yield "path-as-stream", made(stream="../../policy")
    yield "stream_id-missing", sealed({k: v for k, v in manifest().items() if k != "stream_id"})
    for tag, stream_id in (
        ("empty", ""),
        ("upper-case", "A" * 32),
        ("short", "a" * 31),
        ("null", None),
    ):
        yield f"stream_id-{tag}", made(stream_id=stream_id)
    for tag, versions in (("65", 65), ("negative", -1), ("null", None), ("list", [1])):
        yield f"remembers-{tag}", made(remembers=versions)
    shard = {"shards": payload()}
    yield "remembers-at-an-anchor", made(remembers=1, anchor=shard)
    yield "part-twice", patched(parts=parts * 2)
    yield "other-format", made(format="pulse.manifest.9")
    for wrong in ("", "0" * 63, "0" * 65, "A" * 64, "../" * 21 + "x", "0" * 63 + "\n", "０" * 64):
        tag = sha256(wrong.encode()).hexdigest()[:6]
        yield f"root-{tag}", made(root=wrong)
        yield f"payload-{tag}", patched(parts=payload(wrong, 1))
        yield f"shard-{tag}", made(patch=None, anchor={"shards": payload(wrong, 1)})
    yield "nothing", made(patch=None)
    yield "no-parts", patched(parts=[])
    yield "no-shards", made(patch=None, anchor={"shards": []})
    yield "payload-of-no-bytes", patched(parts=payload(nbytes=0))
    yield "payload-of-negative-bytes", patched(parts=payload(nbytes=-5))
    yield "base-itself", patched(base=1)
    yield "base-later", patched(base=7)
    yield "base-negative", patched(base=-1)
    yield "changed-more-than-all", patched(changed=2065)
    yield "unknown-key", sealed(manifest() | {"run": "rm -rf"})
    yield "unknown-key-of-a-payload", patched(parts=[parts[0] | {"url": "http://x"}])
    yield "missing-key", sealed({k: v for k, v in manifest().items() if k != "root"})
    yield "other-order", sealed(dict(reversed(manifest().items())))
    yield "key-twice", good.replace(b'"version":1', b'"version":1,"version":1')
    yield "escaped", good.replace(b"hostile", b"hosti\\u006ce")
    yield "metadata-deep", made(metadata={"a": {"b": {}}})
    yield "metadata-list", made(metadata={"a": [1]})
    yield "metadata-null", made(metadata={"a": None})
    yield "metadata-huge", made(metadata={"a": huge})
    yield "aliases-of-numbers", made(aliases={"a": 1})
    yield "nested", b'{"format":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    yield "nested-objects", b'{"metadata":' * 4_000
    yield "digits", good.replace(b'"elements":2064', b'"elements":' + b"9" * 5000)
    yield "half-a-surrogate", made(publisher="\ud800")
    yield "escaped-surrogate", good.replace(b"hostile", b"\\ud800")
    yield "not-utf-8", good.replace(b"hostile", b"hosti\xffe")
    for tag, names in FILES.items():
        yield (
            f"files-{tag}",
            made(files=[{"name": n, "sha256": "0" * 64, "bytes": 5} for n in names]),
        )
    for tag, wrong in (
        ("of-terabytes", TERA),
        ("negative", -1),
        ("past-the-cap", (128 << 20) - 4),
        ("a-word", "5"),
    ):
        files = [
            {"name": name, "sha256": "0" * 64, "bytes": n} for name, n in (("a", 5), ("b", wrong))
        ]
        yield f"files-{tag}", made(files=files)
    yield "files-of-no-digest", made(files=[{"name": "a", "sha256": "../a", "bytes": 5}])
    yield "files-null", made(files=None)
    yield "zeros", bytes(1000)
    yield "signature-a-word", made(signature="trust me")
    yield "signature-of-words", made(signature={"key": "x", "value": "y", "more": "z"})


def links() -> Iterator[tuple[str, bytes]]:
    """Listed shortcuts that lead nowhere. A sync has to find its way without them."""
    zero, digest = "0" * 12, "0" * 64
    absurd = [
        f"{5:012d}-{zero}-{1:015d}-{digest}",  # of one byte, and not there
        f"{5:012d}-{zero}-{0:015d}-{digest}",
        f"{5:012d}-{zero}-{10**15 - 1}-{digest}",
        f"{5:012d}-{5:012d}-{1:015d}-{digest}",  # from itself
        f"{3:012d}-{5:012d}-{1:015d}-{digest}",  # backwards
        f"{999_999_999_999}-{zero}-{1:015d}-{digest}",  # to a version that is not there
        f"{5:012d}-{999_999_999_998}-{1:015d}-{digest}",
        f"{5:012d}-anchor-{1:015d}",  # an anchor that its manifest does not name
        f"{4:012d}-anchor-{0:015d}",
        f"{999_999_999_999}-anchor-{1:015d}",
    ]
    yield "false", "\n".join(absurd).encode()
    strange = [
        "x",
        "5-0-1-x",
        "a/b/c",
        f"{5:012d}-{zero}-{1:015d}-{digest}x",
        f"{5:012d}-{zero}-{1:015d}-{'A' * 64}",
    ]
    strange += [
        f"{5:012d}-anchor",
        f"{5:012d}-anchor-{1:015d}-{digest}",
        f"{5:012d}-{zero}",
        f"{5:012d}.json",
        "0" * 250,
    ]
    yield "strange", "\n".join(strange).encode()
    yield "many", "\n".join(f"{5:012d}-{zero}-{k:015d}-{k:064x}" for k in range(1, 60)).encode()


def corpus() -> Iterator[tuple[str, bytes]]:
    for kind, made in (
        ("patch", patches()),
        ("safetensors", checkpoints()),
        ("json", manifests()),
        ("links", links()),
    ):
        for title, data in made:
            yield f"{title}.{kind}", data


def main() -> None:
    for suffix in ("patch", "safetensors", "json", "links"):
        for path in HERE.glob(f"*.{suffix}"):
            path.unlink()
    files = dict(corpus())
    for title, data in files.items():
        (HERE / title).write_bytes(data)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes")


if __name__ == "__main__":
    main()
