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

from pulse_rl._util import zstd
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
    yield "two-frames", framed(b"", stored=zstd.compress(bytes(10), 1) * 2, claim=20)

    none, block = varint(2) + b"\0\0", varint(2) + b"\3\0"
    yield "header-ends-early", framed(plain_header(none)[:-1])
    yield "header-goes-on", framed(plain_header(none + b"more"))
    yield "padded-varint", framed(plain_header(none, slices=b"\x81\0\0\x90\x10"))
    yield "endless-varint", framed(plain_header(none, slices=b"\xff" * 30))
    yield "history-of-no-versions", framed(plain_header(none, history=b"\1\0" + bytes(8)))
    yield (
        "history-of-65-windows",
        framed(plain_header(none, history=varint(65) + b"\1" * 65 + bytes(8))),
    )
    yield "history-cut", framed(plain_header(b"", history=b"\1\1" + bytes(7), slices=b""))
    yield (
        "history-that-is-not-named",
        framed(plain_header(varint(2) + b"\6\0" + b"\1\1" + bytes(8)), b"x"),
    )
    yield "slices-2-to-the-60", framed(plain_header(none, slices=varint(1 << 60)))
    yield "slices-of-the-cap", framed(plain_header(none, slices=varint(1 << 20)))
    yield (
        "slices-of-the-cap-that-are-there",
        framed(plain_header(none, slices=varint(1 << 20) + b"\1\1" * (1 << 20))),
    )
    yield (
        "slices-that-touch",
        framed(plain_header(none, slices=b"\2\0" + varint(64) + b"\0" + varint(2000))),
    )
    yield "slices-of-nothing", framed(plain_header(none, slices=b"\2\0" + varint(2064) + b"\0\0"))
    yield "slices-of-too-little", framed(plain_header(none, slices=b"\1\0" + varint(2063)))
    yield "slices-of-too-much", framed(plain_header(none, slices=b"\1\0" + varint(2065)))
    yield (
        "slices-past-the-end",
        framed(plain_header(none, slices=b"\1" + varint(2060) + varint(2064))),
    )
    yield (
        "slices-with-a-hole",
        framed(
            plain_header(varint(2) + b"\0\0", slices=b"\2\0" + varint(5) + varint(1) + varint(2058))
        ),
    )
    yield "no-slices", framed(plain_header(b"\0", slices=b"\0"))
    yield "terabytes", framed(plain_header(none, slices=b"\1\0" + varint(TERA)))
    yield (
        "terabytes-in-blocks",
        framed(plain_header(varint(1 << 18) + bytes(1 << 18), slices=b"\1\0" + varint(TERA))),
    )
    yield "most-blocks", header_of_many_blocks()
    yield (
        "slice-overflows",
        framed(plain_header(none, slices=b"\1" + varint((1 << 64) - 1) + varint(2064))),
    )
    yield "blocks-2-to-the-60", framed(plain_header(varint(1 << 60) + b"\0\0"))
    yield "blocks-one-too-many", framed(plain_header(varint(3) + b"\0\0\0"))
    yield "blocks-one-too-few", framed(plain_header(varint(1) + b"\0"))
    yield "unknown-codec", with_block(b"x", 99, 1)
    yield (
        "changes-past-the-block",
        framed(plain_header(block + varint(2001) + varint(10) + bytes(8)), b"x" * 10),
    )
    yield "no-changes", framed(plain_header(block + varint(0) + varint(10) + bytes(8)), b"x" * 10)
    yield "payload-of-terabytes", framed(plain_header(block + varint(1) + varint(TERA) + bytes(8)))
    yield (
        "payload-of-no-checksum",
        framed(plain_header(block + varint(1) + varint(10) + bytes(8)), b"x" * 10),
    )
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
        where, what = zstd.compress(raw, 1), zstd.compress(data, 1)
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
    bomb = zstd.compress(bytes(1 << 26), 1)
    yield "dense-bomb", with_block((len(bomb).to_bytes(4, "little") + bomb) * 2, 1, 2000)
    yield "dense-length-past-the-end", with_block(b"\xff\xff\xff\xff" + bomb[:50], 1, 2000)
    yield "dense-empty", with_block(b"\0" * 8, 1, 2000)


def entry(dtype: str, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def checkpoint(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def checkpoints() -> Iterator[tuple[str, bytes]]:
    good = checkpoint({"a": entry("BF16", [4], 0, 8), "b": entry("U8", [2], 8, 10)}, bytes(10))
    for at in (0, 3, 8, 20, len(good) - 1):
        yield f"truncated-{at}", good[:at]
    yield "longer", good + b"\0"
    yield "header-of-exabytes", checkpoint({}, length=(1 << 64) - 1)
    yield "header-of-100-mib", checkpoint({}, length=100 << 20)
    yield (
        "overlapping",
        checkpoint({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 4, 12)}, bytes(12)),
    )
    yield (
        "same-place",
        checkpoint({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 0, 8)}, bytes(8)),
    )
    yield "gap", checkpoint({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 8, 12)}, bytes(12))
    yield "negative-start", checkpoint({"a": entry("U8", [8], -8, 0)}, bytes(8))
    yield "negative-length", checkpoint({"a": entry("U8", [8], 8, 0)}, bytes(8))
    yield "negative-shape", checkpoint({"a": entry("U8", [-8], 0, 8)}, bytes(8))
    yield "negative-shape-twice", checkpoint({"a": entry("U8", [-2, -4], 0, 8)}, bytes(8))
    yield "terabytes", checkpoint({"a": entry("U8", [TERA], 0, TERA)}, bytes(8))
    yield (
        "past-2-to-the-64",
        checkpoint({"a": entry("F64", [1 << 62, 1 << 62], 0, 1 << 127)}, bytes(8)),
    )
    yield "shape-of-floats", checkpoint({"a": entry("U8", [8.0], 0, 8)}, bytes(8))
    yield "shape-of-booleans", checkpoint({"a": entry("U8", [True], False, True)}, bytes(1))
    yield "shape-of-words", checkpoint({"a": entry("U8", "8", "0", "8")}, bytes(8))
    yield "shape-of-17-dimensions", checkpoint({"a": entry("U8", [1] * 17, 0, 1)}, bytes(1))
    yield (
        "three-offsets",
        checkpoint({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, bytes(1)),
    )
    yield "no-dtype", checkpoint({"a": {"shape": [1], "data_offsets": [0, 1]}}, bytes(1))
    yield "unknown-dtype", checkpoint({"a": entry("Q4_K", [1], 0, 1)}, bytes(1))
    yield (
        "dtype-a-list",
        checkpoint({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, bytes(1)),
    )
    yield "entry-a-list", checkpoint({"a": ["U8", [1], [0, 1]]}, bytes(1))
    yield "metadata-of-numbers", checkpoint({"__metadata__": {"a": 1}})
    yield "metadata-a-list", checkpoint({"__metadata__": ["a"]})
    once = json.dumps({"a": entry("U8", [1], 0, 1)}, separators=(",", ":"))[1:-1]
    yield "twice", checkpoint(f"{{{once},{once}}}".encode(), bytes(1))
    yield "name-empty", checkpoint({"": entry("U8", [1], 0, 1)}, bytes(1))
    yield "name-of-2000-bytes", checkpoint({"x" * 2000: entry("U8", [1], 0, 1)}, bytes(1))
    yield (
        "name-of-half-a-surrogate",
        checkpoint(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', bytes(1)),
    )
    yield "not-json", checkpoint(b"{'a': 1}")
    yield "not-an-object", checkpoint(b"[]")
    yield "not-utf-8", checkpoint(b'{"\xff":0}')
    yield "deep-lists", checkpoint(b"[" * 20_000)
    yield "deep-objects", checkpoint(b'{"a":' * 10_000)
    yield "digits", checkpoint(b'{"a":' + b"9" * 10_000 + b"}")
    yield "digits-in-the-shape", checkpoint({"a": entry("U8", [int("9" * 4000)], 0, 1)}, bytes(1))
    yield (
        "infinity",
        checkpoint(b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,NaN]}}', bytes(1)),
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
    good = sealed(manifest())
    for at in (0, 1, 50, len(good) - 1):
        yield f"truncated-{at}", good[:at]
    yield "longer", good + b"\n"
    yield "spaces", json.dumps(manifest()).encode()
    yield "flipped", good.replace(b'"elements":2064', b'"elements":2065')
    huge = 10**40
    parts = [{"sha256": "0" * 64, "bytes": 100}]
    link = manifest()["patch"]
    for key in ("version", "epoch", "elements", "dense_bytes", "created"):
        yield f"{key}-huge", sealed(manifest(**{key: huge}))
        yield (
            f"{key}-negative",
            sealed(manifest(**{key: -1})) if key != "created" else sealed(manifest(created="1")),
        )
        yield f"{key}-a-word", sealed(manifest(**{key: "1"}))
        yield f"{key}-null", sealed(manifest(**{key: None}))
    yield "epoch-0", sealed(manifest(epoch=0))
    yield "version-true", sealed(manifest(version=True))
    yield "version-1.0", sealed(manifest(version=1.0))
    yield "created-infinite", good.replace(b"0.5", b"1e999")
    yield "created-not-a-number", good.replace(b"0.5", b"NaN")
    yield "other-version", sealed(manifest(version=2))
    yield "other-stream", sealed(manifest(stream="other"))
    yield "path-as-stream", sealed(manifest(stream="../../policy"))
    yield "stream_id-missing", sealed({k: v for k, v in manifest().items() if k != "stream_id"})
    for tag, stream_id in (
        ("empty", ""),
        ("upper-case", "A" * 32),
        ("short", "a" * 31),
        ("null", None),
    ):
        yield f"stream_id-{tag}", sealed(manifest(stream_id=stream_id))
    for tag, versions in (("65", 65), ("negative", -1), ("null", None), ("list", [1])):
        yield f"remembers-{tag}", sealed(manifest(remembers=versions))
    shard = {"shards": [{"sha256": "0" * 64, "bytes": 100}]}
    yield "remembers-at-an-anchor", sealed(manifest(remembers=1, anchor=shard))
    yield "part-twice", sealed(manifest(patch=link | {"parts": parts * 2}))
    yield "other-format", sealed(manifest(format="pulse.manifest.9"))
    for wrong in ("", "0" * 63, "0" * 65, "A" * 64, "../" * 21 + "x", "0" * 63 + "\n", "０" * 64):
        tag = sha256(wrong.encode()).hexdigest()[:6]
        yield f"root-{tag}", sealed(manifest(root=wrong))
        yield (
            f"payload-{tag}",
            sealed(manifest(patch=link | {"parts": [{"sha256": wrong, "bytes": 1}]})),
        )
        yield (
            f"shard-{tag}",
            sealed(manifest(patch=None, anchor={"shards": [{"sha256": wrong, "bytes": 1}]})),
        )
    yield "nothing", sealed(manifest(patch=None))
    yield "no-parts", sealed(manifest(patch=link | {"parts": []}))
    yield "no-shards", sealed(manifest(patch=None, anchor={"shards": []}))
    yield (
        "payload-of-no-bytes",
        sealed(manifest(patch=link | {"parts": [{"sha256": "0" * 64, "bytes": 0}]})),
    )
    yield (
        "payload-of-negative-bytes",
        sealed(manifest(patch=link | {"parts": [{"sha256": "0" * 64, "bytes": -5}]})),
    )
    yield "base-itself", sealed(manifest(patch=link | {"base": 1}))
    yield "base-later", sealed(manifest(patch=link | {"base": 7}))
    yield "base-negative", sealed(manifest(patch=link | {"base": -1}))
    yield "changed-more-than-all", sealed(manifest(patch=link | {"changed": 2065}))
    yield "unknown-key", sealed(manifest() | {"run": "rm -rf"})
    yield (
        "unknown-key-of-a-payload",
        sealed(manifest(patch=link | {"parts": [parts[0] | {"url": "http://x"}]})),
    )
    yield "missing-key", sealed({k: v for k, v in manifest().items() if k != "root"})
    yield "other-order", sealed(dict(reversed(manifest().items())))
    yield "key-twice", good.replace(b'"version":1', b'"version":1,"version":1')
    yield "escaped", good.replace(b"hostile", b"hosti\\u006ce")
    yield "metadata-deep", sealed(manifest(metadata={"a": {"b": {}}}))
    yield "metadata-list", sealed(manifest(metadata={"a": [1]}))
    yield "metadata-null", sealed(manifest(metadata={"a": None}))
    yield "metadata-huge", sealed(manifest(metadata={"a": huge}))
    yield "aliases-of-numbers", sealed(manifest(aliases={"a": 1}))
    yield "nested", b'{"format":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    yield "nested-objects", b'{"metadata":' * 4_000
    yield "digits", good.replace(b'"elements":2064', b'"elements":' + b"9" * 5000)
    yield "half-a-surrogate", sealed(manifest(publisher="\ud800"))
    yield "escaped-surrogate", good.replace(b"hostile", b"\\ud800")
    yield "not-utf-8", good.replace(b"hostile", b"hosti\xffe")
    for tag, names in FILES.items():
        yield (
            f"files-{tag}",
            sealed(manifest(files=[{"name": n, "sha256": "0" * 64, "bytes": 5} for n in names])),
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
        yield f"files-{tag}", sealed(manifest(files=files))
    yield (
        "files-of-no-digest",
        sealed(manifest(files=[{"name": "a", "sha256": "../a", "bytes": 5}])),
    )
    yield "files-null", sealed(manifest(files=None))
    yield "zeros", bytes(1000)
    yield "signature-a-word", sealed(manifest(signature="trust me"))
    yield "signature-of-words", sealed(manifest(signature={"key": "x", "value": "y", "more": "z"}))


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
