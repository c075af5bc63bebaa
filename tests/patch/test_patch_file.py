"""The bytes of a patch file: damaged or hostile ones are refused and cost nothing (golden ones:
test_golden)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import Bits, State
from pulse_rl.codec import HISTORY, SAME, compress
from pulse_rl.errors import CorruptPatch, InputError, WrongBase
from pulse_rl.ops.diff import build_patch
from pulse_rl.patch import apply_patch, parse_patch
from pulse_rl.patch import header as patch_header
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.header import Base, BlockEntry, PatchHeader, check_of, parse_header
from pulse_rl.patch.history import HistoryName
from pulse_rl.state.digest import state_digest
from tests.support.states import Rng, Tensors, bits, mutated, snapshot


def test_an_unchanged_state_gives_this_header() -> None:
    """The plain header, byte by byte as docs/format.md has it."""
    state = State.of({"a.x": np.zeros((2, 3), np.float32), "a.y": np.uint8(1)})
    tree = state_digest(state)
    data = build_patch(state, state, tree).to_bytes()
    # Two roots; no history; a slice of seven elements from the start; two blocks, of which nothing
    # changed.
    expected = bytes.fromhex(tree.root + tree.root) + bytes([0, 1, 0, 7, 2, 0, 0])
    assert patch_header.open_header(memoryview(data)) == (expected, len(data))
    assert data[:12] == b"\x89PULSE\r\n" + (1).to_bytes(4, "little")


def refused_and_unchanged(broken: bytes, base: State) -> Exception:
    before = snapshot(base)
    with pytest.raises((CorruptPatch, WrongBase)) as caught:
        apply_patch(parse_patch([broken], state_digest(base)), base, state_digest(base), threads=1)
    assert snapshot(base) == before
    return caught.value


def a_patch(rng: Rng) -> tuple[bytes, State, PatchHeader]:
    """(patch, base, header): some small blocks of several dtypes, one of them untouched."""
    old: Tensors = {
        f"layer.{k}.{d}": bits(rng, d, 90) for k in range(2) for d in ("BF16", "F32", "U8")
    }
    new = mutated(rng, old, 0.05)
    new["layer.1.U8"] = old["layer.1.U8"]
    state = State.of(old).copy()
    made = build_patch(state, State.of(new), state_digest(state))
    return made.to_bytes(), state, made.header


@pytest.mark.slow
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
            assert f"block {index} ({cut(base.specs)[index]})" in str(error)
            assert "layer." in str(error)
    apply_patch(parse_patch([data], state_digest(base)), base, state_digest(base))


def test_every_truncation_and_every_leftover_is_refused(rng: Rng) -> None:
    data, base, _ = a_patch(rng)
    for end in {*range(0, len(data), 7), *range(len(data) - 40, len(data))}:
        refused_and_unchanged(data[:end], base)
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
    """A patch file's prelude and header around any bytes, with right checksums: what an attacker
    can write as well."""
    stored = compress(plain, 9)
    size = len(plain) if claimed is None else claimed
    return (
        patch_header._PRELUDE.pack(patch_header.MAGIC, 1, len(stored), size, check_of(stored))
        + stored
    )


def number(value: int) -> bytes:
    out = bytearray()
    patch_header.put_number(out, value)
    return bytes(out)


FIVE = State.of({"w": Bits(np.zeros(5, np.uint16), "BF16")})
BASE = state_digest(FIVE)
ROOTS = bytes.fromhex(BASE.root) * 2


def plain_header(
    history: bytes = b"\0", slices: bytes = b"\x01\0\x05", blocks: bytes = b"\x01\0"
) -> bytes:
    """A plain header piece by piece; as it stands, of all five elements of a tensor, without
    changes."""
    return ROOTS + history + slices + blocks


def test_the_crafted_header_of_this_file_is_well_formed() -> None:
    data = sealed(plain_header())
    found = parse_header(memoryview(data), Base(FIVE.specs, BASE.root))
    assert found.header == PatchHeader(BASE.root, BASE.root, ((0, 5),), (BlockEntry(SAME, 0, 0),))
    assert (found.header.to_bytes(), found.end) == (data, len(data))
    assert apply_patch(parse_patch([data], BASE), FIVE.copy(), BASE).changes == {}


CHECK = bytes(8)
BLOCK = b"\x01\x02\x01\x01" + CHECK


@pytest.mark.parametrize(
    "plain",
    [
        pytest.param(b"", id="empty"),
        pytest.param(ROOTS[:63], id="half-a-root"),
        pytest.param(plain_header(history=b"\x01\0" + CHECK), id="a-span-of-0"),
        pytest.param(plain_header(slices=b"\x81\0\0\x05"), id="padded-number"),
        pytest.param(plain_header(slices=b"\xff" * 10 + b"\x01"), id="endless-number"),
        pytest.param(plain_header(slices=number((1 << 20) + 1)), id="too-many-slices"),
        pytest.param(plain_header(slices=b"\x01\x01\x05"), id="past-the-state-by-its-gap"),
        pytest.param(plain_header(slices=b"\x01\0\x04"), id="not-all-of-it"),
        pytest.param(plain_header(slices=b"\0", blocks=b"\0"), id="nothing"),
        pytest.param(plain_header(slices=b"\x01\0" + number(1 << 48)), id="terabytes"),
        pytest.param(plain_header(blocks=number(1 << 40) + b"\0"), id="a-trillion-blocks"),
        pytest.param(plain_header(blocks=b"\x01\x02\0\x01" + CHECK), id="changed-without-changes"),
        pytest.param(plain_header(blocks=b"\x01\x02\x01\0" + CHECK), id="changed-without-bytes"),
        pytest.param(
            plain_header(blocks=b"\x01\x02\x06\x01" + CHECK), id="more-changes-than-elements"
        ),
        pytest.param(
            plain_header(blocks=b"\x01\x02\x01" + number((1 << 40) + 1) + CHECK),
            id="a-block-of-a-terabyte",
        ),
        pytest.param(plain_header(blocks=BLOCK[:-1]), id="half-a-checksum"),
        pytest.param(plain_header(blocks=BLOCK), id="no-body"),
    ],
)
def test_malformed_headers_are_refused(plain: bytes) -> None:
    """All with right checksums, so that only the reader's strictness stands in the way."""
    with pytest.raises(CorruptPatch):
        parse_patch([sealed(plain)], BASE)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda d: b"\x89PULSE\n\n" + d[8:], id="magic"),
        pytest.param(lambda d: d[:8] + b"\x02" + d[9:], id="format-2"),
        pytest.param(lambda d: d[:12] + b"\xff" * 4 + d[16:], id="stored-bytes"),
        pytest.param(lambda d: d[:16] + b"\xff" * 4 + d[20:], id="plain-bytes"),
        pytest.param(lambda d: d[:20] + bytes(8) + d[28:], id="checksum"),
    ],
)
def test_a_wrong_prelude_is_refused(edit: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CorruptPatch):
        parse_patch([edit(sealed(plain_header()))], BASE)


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


def test_a_claimed_plain_size_allocates_nothing() -> None:
    with bounded(4 << 20), pytest.raises(CorruptPatch):
        parse_patch([sealed(b"", claimed=patch_header.MAX_HEADER_BYTES)], BASE)


def test_a_header_is_no_longer_than_any_for_its_state() -> None:
    """A megabyte of blocks is a few bytes of zstd; a reader who knows that there is one refuses to
    unfold them."""
    data = sealed(plain_header(blocks=number(1 << 20) + bytes(1 << 20)))
    with bounded(1 << 19), pytest.raises(CorruptPatch, match="more than one for these tensors"):
        parse_patch([data], BASE)


def test_what_cannot_be_read_back_is_not_written() -> None:
    with pytest.raises(InputError, match="blocks"):
        PatchHeader(
            "0" * 64, "1" * 64, ((0, 5),), (BlockEntry(SAME, 0, 0),) * ((1 << 20) + 1)
        ).to_bytes()
    with pytest.raises(InputError, match="slices"):
        PatchHeader("0" * 64, "1" * 64, ((0, 1),) * ((1 << 20) + 1), ()).to_bytes()


@given(
    slices=st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(1, 1 << 40)), max_size=20),
    blocks=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 1 << 22), st.integers(1, 1 << 40)), max_size=20
    ),
    windows=st.integers(0, 64),
)
def test_a_header_is_read_as_it_was_written(
    slices: list[tuple[int, int]], blocks: list[tuple[int, int, int]], windows: int
) -> None:
    at, placed = -1, []
    for gap, length in slices:
        placed.append((at + gap, at + gap + length))
        at += gap + length
    entries = tuple(
        BlockEntry(codec_id, changed, length, bytes([codec_id] * 8))
        if codec_id
        else BlockEntry(SAME, 0, 0)
        for codec_id, changed, length in blocks
    )
    history = HistoryName(windows, b"historic") if windows else None
    if history is None:
        entries = tuple(
            BlockEntry(SAME, 0, 0) if entry.codec_id == HISTORY else entry for entry in entries
        )
    header = PatchHeader("a" * 64, "b" * 64, tuple(placed), entries, history)
    data = header.to_bytes()
    assert parse_header(memoryview(data + b"payloads")) == (header, None, len(data))
