"""The bytes of a patch file: damaged or hostile ones are refused and cost nothing (golden ones: test_golden)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import pytest

from pulse_rl import State
from pulse_rl._util import zstd
from pulse_rl.codec import SAME
from pulse_rl.errors import CorruptPatch, InputError, StateMismatch, WrongBase
from pulse_rl.patch import Patch, apply_patch, build_patch
from pulse_rl.patch import header as patch_header
from pulse_rl.patch.header import BlockEntry, PatchHeader, parse_header
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import DTYPES, TensorSpec
from tests.support.states import Rng, Tensors, bits, mutated, snapshot, weights

MIB = 1 << 20


def refused_and_unchanged(broken: bytes, base: State) -> Exception:
    before = snapshot(base)
    with pytest.raises((CorruptPatch, WrongBase)) as caught:
        apply_patch(Patch.parse(broken), base, state_digest(base), threads=1)
    assert snapshot(base) == before
    return caught.value


def a_patch(rng: Rng) -> tuple[bytes, State, PatchHeader]:
    """(patch, base, header): some small blocks of several dtypes, one of them untouched."""
    old: Tensors = {f"layer.{k}.{d}": bits(rng, d, 90) for k in range(2) for d in ("BF16", "F32", "U8")}
    new = mutated(rng, old, 0.05)
    new["layer.1.U8"] = old["layer.1.U8"]
    state = State.of(old).copy()
    made = build_patch(state, State.of(new), state_digest(state))
    return made.to_bytes(), state, made.header


def test_every_flipped_bit_is_refused(rng: Rng) -> None:
    """Of 300 flips in a peer's file, 220 decoded to wrong weights without an error."""
    data, base, header = a_patch(rng)
    body = len(data) - header.body_bytes
    ends = body + np.cumsum([b.length for b in header.blocks])
    for flip in rng.choice(8 * len(data), 500, replace=False).tolist():
        broken = bytearray(data)
        broken[flip // 8] ^= 1 << flip % 8
        error = refused_and_unchanged(bytes(broken), base)
        if flip // 8 >= body:
            index = int(np.searchsorted(ends, flip // 8, side="right"))
            assert f"block {index} ({header.cut()[index]})" in str(error)
            assert "layer." in str(error)
    apply_patch(Patch.parse(data), base, state_digest(base))


def test_every_truncation_and_every_leftover_is_refused(rng: Rng) -> None:
    data, base, _ = a_patch(rng)
    for cut in {*range(0, len(data), 7), *range(len(data) - 40, len(data))}:
        refused_and_unchanged(data[:cut], base)
    for extra in (b"\0", data, b"x" * 100):
        refused_and_unchanged(data + extra, base)


def test_exchanged_bytes_are_refused(rng: Rng) -> None:
    data, base, header = a_patch(rng)
    body = len(data) - header.body_bytes
    refused_and_unchanged(data[:body] + data[body:][::-1], base)
    refused_and_unchanged(data[:body] + bytes(header.body_bytes), base)
    refused_and_unchanged(b"", base)
    refused_and_unchanged(rng.bytes(5000), base)


def sealed(plain: bytes, *, claimed: int | None = None) -> bytes:
    """A patch file's prelude and header around any bytes, with right digests: what an attacker can write as well."""
    stored = zstd.compress(plain, 9)
    size = len(plain) if claimed is None else claimed
    prelude = patch_header._PRELUDE.pack(patch_header.MAGIC, 1, 0, len(stored), size, sha256(stored).digest())
    return bytes(prelude + stored)


def number(value: int) -> bytes:
    out = bytearray()
    patch_header.put_number(out, value)
    return bytes(out)


def plain_header(
    names: bytes = b"\x01\x00\x01w", ids: bytes = b"\x0c", shapes: bytes = b"\x01\x05", blocks: bytes = b"\x00"
) -> bytes:
    """A plain header piece by piece; as it stands, one BF16 tensor "w" of five elements without changes."""
    return bytes(64) + b"\x04" + names + ids + shapes + blocks


def test_the_crafted_header_of_this_file_is_well_formed() -> None:
    header, size = parse_header(memoryview(sealed(plain_header())))
    assert header.specs == (TensorSpec("w", DTYPES["BF16"], (5,)),)
    assert header.blocks == (BlockEntry(SAME, 0, 0),)
    assert size == len(sealed(plain_header()))


DIGEST = bytes(32)
BLOCK = b"\x02\x01\x01" + DIGEST


@pytest.mark.parametrize(
    "plain",
    [
        pytest.param(b"", id="empty"),
        pytest.param(bytes(63), id="half-a-root"),
        pytest.param(plain_header()[:-1], id="no-blocks"),
        pytest.param(plain_header() + b"\0", id="leftover"),
        pytest.param(bytes(64) + b"\x00" + plain_header()[65:], id="no-block-elements"),
        pytest.param(bytes(64) + b"\x11" + plain_header()[65:], id="block-elements-past-the-cap"),
        pytest.param(plain_header(names=b"\x81\x00\x00\x01w"), id="padded-number"),
        pytest.param(plain_header(names=b"\xff" * 10 + b"\x01"), id="endless-number"),
        pytest.param(plain_header(names=number((1 << 20) + 1)), id="too-many-tensors"),
        pytest.param(plain_header(names=b"\x02\x00\x01w\x00\x01w", ids=b"\x0c\x0c"), id="repeated-name"),
        pytest.param(plain_header(names=b"\x02\x00\x01w\x00\x01a", ids=b"\x0c\x0c"), id="unsorted-names"),
        pytest.param(plain_header(names=b"\x01\x01\x01w"), id="prefix-of-nothing"),
        pytest.param(plain_header(names=b"\x01\x00\x00"), id="name-without-bytes"),
        pytest.param(plain_header(names=b"\x01\x00\x01\xff"), id="name-not-utf8"),
        pytest.param(plain_header(names=b"\x01\x00" + number(1025) + b"w" * 1025), id="long-name"),
        pytest.param(
            plain_header(
                names=b"\x02\x00" + number(1024) + b"w" * 1024 + number(1024) + b"\x01w",
                ids=b"\x0c\x0c",
                shapes=b"\x00\x00",
            ),
            id="long-name-by-its-prefix",
        ),
        pytest.param(plain_header(ids=b"\x00"), id="dtype-0"),
        pytest.param(plain_header(ids=b"\x63"), id="dtype-99"),
        pytest.param(plain_header(shapes=b"\x11" + b"\x01" * 17), id="too-many-dimensions"),
        pytest.param(plain_header(shapes=b"\x01" + number((1 << 48) + 1)), id="too-many-elements"),
        pytest.param(plain_header(shapes=b"\x02" + number(1 << 40) * 2), id="overflowing-shape"),
        pytest.param(plain_header(shapes=b"\x01" + number(1 << 48)), id="terabytes"),
        pytest.param(plain_header(blocks=b"\x02\x00\x01" + DIGEST), id="changed-without-changes"),
        pytest.param(plain_header(blocks=b"\x02\x01\x00" + DIGEST), id="changed-without-bytes"),
        pytest.param(plain_header(blocks=b"\x02\x06\x01" + DIGEST), id="more-changes-than-elements"),
        pytest.param(plain_header(blocks=b"\x02\x01" + number((1 << 40) + 1) + DIGEST), id="a-block-of-a-terabyte"),
        pytest.param(plain_header(blocks=BLOCK[:-1]), id="half-a-digest"),
        pytest.param(plain_header(blocks=BLOCK), id="no-body"),
    ],
)
def test_malformed_headers_are_refused(plain: bytes) -> None:
    """All with right digests, so that only the reader's strictness stands in the way."""
    with pytest.raises(CorruptPatch):
        Patch.parse(sealed(plain))


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda d: b"\x89PULSE\n\n" + d[8:], id="magic"),
        pytest.param(lambda d: d[:8] + b"\x02" + d[9:], id="format-2"),
        pytest.param(lambda d: d[:12] + b"\x01" + d[13:], id="flags"),
        pytest.param(lambda d: d[:16] + b"\xff" * 4 + d[20:], id="stored-bytes"),
        pytest.param(lambda d: d[:20] + b"\xff" * 4 + d[24:], id="plain-bytes"),
        pytest.param(lambda d: d[:24] + bytes(32) + d[56:], id="digest"),
    ],
)
def test_a_wrong_prelude_is_refused(edit: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CorruptPatch):
        Patch.parse(edit(sealed(plain_header())))


@contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """Fails when Python and numpy allocate more than so many bytes at a time in between."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak / 1e6:.1f} MB were allocated"


def test_a_header_that_claims_terabytes_allocates_nothing() -> None:
    terabytes = TensorSpec("w", DTYPES["F64"], (1 << 40,))
    header = PatchHeader("0" * 64, "1" * 64, 1 << 20, (terabytes,), ())
    with bounded(4 << 20), pytest.raises(CorruptPatch, match="blocks"):
        Patch.parse(header.to_bytes())


@pytest.mark.slow
def test_a_consistent_claim_of_terabytes_is_not_applied(rng: Rng) -> None:
    """All of its blocks are listed as unchanged, which a short header can afford: it must fail at the base."""
    terabytes = TensorSpec("w", DTYPES["F64"], (1 << 38,))
    blocks = (BlockEntry(SAME, 0, 0),) * (1 << 14)
    state = State.of({"w": weights(rng, 10)}).copy()
    digest = state_digest(state)
    with bounded(32 << 20):
        parsed = Patch.parse(PatchHeader(digest.root, "1" * 64, 1 << 24, (terabytes,), blocks).to_bytes())
        assert parsed.header.dense_bytes == 1 << 41
        with pytest.raises(StateMismatch):
            apply_patch(parsed, state, digest)


def test_a_claimed_plain_size_allocates_nothing() -> None:
    with bounded(4 << 20), pytest.raises(CorruptPatch):
        Patch.parse(sealed(b"", claimed=patch_header.MAX_HEADER_BYTES))


def test_names_that_grow_by_their_prefix_stay_bounded() -> None:
    """Each name repeats the one before and adds 1 kB: a few kB of zstd that would unfold to terabytes."""
    count = 500
    names = number(count) + b"\0" + number(1024) + b"w" * 1024
    names += b"".join(number(1024 * k) + number(1024) + b"w" * 1024 for k in range(1, count))
    data = sealed(plain_header(names=names, ids=b"\x0c" * count, shapes=b"\0" * count, blocks=b"\0"))
    with bounded(16 << 20), pytest.raises(CorruptPatch):
        Patch.parse(data)


def test_what_cannot_be_read_back_is_not_written() -> None:
    spec = TensorSpec("w", DTYPES["BF16"], (5,))
    for wrong in (0, MIB // 2, MIB + 1, 17 * MIB):
        with pytest.raises(InputError):
            PatchHeader("0" * 64, "1" * 64, wrong, (spec,), (BlockEntry(SAME, 0, 0),)).to_bytes()
    with pytest.raises(InputError, match="blocks"):
        PatchHeader("0" * 64, "1" * 64, MIB, (spec,), (BlockEntry(SAME, 0, 0),) * ((1 << 20) + 1)).to_bytes()
