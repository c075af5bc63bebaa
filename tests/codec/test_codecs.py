"""Every codec gives back exactly the changes, and refuses or bounds whatever else it is given."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl import codec
from pulse_rl.codec import Changes, Layout, Run, compress, decompress
from pulse_rl.errors import CorruptPatch, FormatError, InputError
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.tensors import DTYPES, DType
from tests.support.block_codecs import BY_NAME, GAPS, HISTORY, RAW, SPARSE, TABLE, ZSTD, BlockCodec
from tests.support.states import LIMIT_MEMORY, SPECIAL_BITS, run_python

# What `history` makes of a past, and that it makes nothing without one, is in test_history.
NAMES = [name for name in BY_NAME if name != "history"]
DTYPES_TRIED = ["F8_E4M3", "F8_E5M2", "U8", "BF16", "F16", "I16", "F32", "I32", "F64", "C64"]
CASES = [(name, d) for name in NAMES for d in DTYPES_TRIED if BY_NAME[name].supports(DTYPES[d])]
# Hostile input is tried on one dtype of each width.
HOSTILE = [(name, d) for name, d in CASES if d in ("F8_E4M3", "BF16", "F32", "F64")]
by_codec_and_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, d, marks=[] if d in ("BF16", "F32") else pytest.mark.slow)
        for name, d in CASES
    ],
)


@st.composite
def blocks(draw: st.DrawFn, dtype: DType) -> tuple[UIntArray, UIntArray, Layout]:
    """(old, new, layout) of one block: special values, changes at the ends, everything or nothing
    new, a part of one matrix or several tensors of any rows."""
    special = SPECIAL_BITS.get(dtype.name, [0, (1 << 8 * dtype.width) - 1])
    value = st.one_of(st.sampled_from(special), st.integers(0, (1 << 8 * dtype.width) - 1))
    old = np.array(draw(st.lists(value, min_size=1, max_size=120)), dtype.uint)
    density = draw(st.sampled_from(["none", "one", "ends", "some", "all"]))
    last = len(old) - 1
    at = {
        "none": st.just(set()),
        "one": st.sets(st.integers(0, last), min_size=1, max_size=1),
        "ends": st.just({0, last}),
        "some": st.sets(st.integers(0, last)),
        "all": st.just(set(range(len(old)))),
    }
    new = old.copy()
    for position in draw(at[density]):
        new[position] = draw(value)
    ends = sorted({*draw(st.sets(st.integers(1, len(old)), max_size=3)), len(old)})
    runs = []
    for start, stop in zip([0, *ends], ends, strict=False):
        row = draw(st.integers(1, stop - start + 10))
        runs.append(Run(stop - start, row, draw(st.integers(0, row - 1)) if len(ends) == 1 else 0))
    return old, new, Layout(dtype, tuple(runs))


def flat(dtype: str, old: UIntArray) -> Layout:
    return Layout(DTYPES[dtype], (Run(len(old), max(len(old), 1), 0),))


def check_round_trip(chosen: BlockCodec, old: UIntArray, new: UIntArray, layout: Layout) -> bytes:
    kept, dtype = (old.copy(), new.copy()), layout.dtype
    payload, changed = chosen.encode(old, new, layout)
    assert changed == np.count_nonzero(old != new)
    if changed:
        found = chosen.decode(memoryview(payload), old, layout)
        expected = np.flatnonzero(old != new)
        np.testing.assert_array_equal(found.positions, expected)
        np.testing.assert_array_equal(found.values, new[expected])
        assert (found.positions.dtype, found.values.dtype) == (np.uint32, dtype.uint)
        np.testing.assert_array_equal(found.replaced(old), old[expected])
    assert (old.tobytes(), new.tobytes()) == (kept[0].tobytes(), kept[1].tobytes())
    assert (payload, changed) == chosen.encode(old, new, layout), (
        "the same input must give the same bytes"
    )
    return payload


def check_sane(found: Changes, old: UIntArray, dtype: DType) -> None:
    positions = found.positions.astype(np.int64)
    assert found.positions.dtype == np.uint32
    assert (np.diff(positions) > 0).all()
    assert not len(positions) or 0 <= positions[0] <= positions[-1] < len(old)
    assert found.values.dtype == dtype.uint
    assert len(found.values) == len(positions)
    np.testing.assert_array_equal(found.replaced(old), old[positions])


def decodes_sanely_or_is_refused(
    chosen: BlockCodec, payload: bytes, old: UIntArray, layout: Layout
) -> bool:
    """True when it was refused; any exception but a FormatError fails the test."""
    kept = old.tobytes()
    try:
        found = chosen.decode(memoryview(payload), old, layout)
    except FormatError:
        return True
    finally:
        assert old.tobytes() == kept
    check_sane(found, old, layout.dtype)
    return False


@by_codec_and_dtype
def test_round_trips(name: str, dtype: str) -> None:
    examples = settings.default.max_examples // (1 if dtype in ("BF16", "F32") else 2)

    @settings(max_examples=examples)
    @given(blocks(DTYPES[dtype]))
    def check(block: tuple[UIntArray, UIntArray, Layout]) -> None:
        check_round_trip(BY_NAME[name], *block)

    check()


@by_codec_and_dtype
def test_densities_on_long_blocks(name: str, dtype: str, rng: np.random.Generator) -> None:
    uint = DTYPES[dtype].uint
    old = rng.integers(0, np.iinfo(uint).max, 70_000, uint, endpoint=True)
    for density in (0.0001, 0.003, 0.01, 0.2, 0.5, 1.0):
        new = np.where(rng.random(old.size) < density, old ^ uint.type(1), old)
        check_round_trip(BY_NAME[name], old, new, flat(dtype, old))


@by_codec_and_dtype
def test_constant_blocks(name: str, dtype: str) -> None:
    """One exponent, one value: models and byte planes degenerate."""
    old = np.zeros(1000, DTYPES[dtype].uint)
    new = old.copy()
    new[::7] = 1
    check_round_trip(BY_NAME[name], old, new, flat(dtype, old))
    check_round_trip(
        BY_NAME[name], old, np.full_like(old, np.iinfo(old.dtype).max), flat(dtype, old)
    )


WIDTHS = [0, 1, 254, 255, 256, 257, 65534, 65535, 65536, 65537, 199_990]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", WIDTHS)
def test_gaps_of_every_width(name: str, gap: int) -> None:
    """Unchanged runs around 2^8 and 2^16, first in the block and between two changes; the block
    ends on a change."""
    old = np.full(gap + 3 + 10, 0x3C00, np.uint16)
    first, between, last = old.copy(), old.copy(), old.copy()
    first[gap] = 1
    between[[1, gap + 2]] = 0x8000, 0xFFFF
    last[-1] = 7
    for new in (first, between, last):
        check_round_trip(BY_NAME[name], old, new, flat("BF16", old))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_block_of_the_largest_size(name: str) -> None:
    old = np.zeros(codec.MAX_BLOCK_ELEMENTS, np.uint8)
    new = old.copy()
    new[[0, 300, 70_000, -1]] = 1
    if BY_NAME[name].supports(DTYPES["F8_E4M3"]):
        check_round_trip(BY_NAME[name], old, new, flat("F8_E4M3", old))
    assert codec.encode_block(old, new, flat("U8", old)).changed == 4


def test_ids_and_names_are_unique_and_pinned() -> None:
    assert [chosen.id for chosen in (RAW, ZSTD, GAPS, TABLE, HISTORY, SPARSE)] == [1, 2, 3, 5, 6, 4]
    assert codec.SAME == 0
    assert all(codec.codec_name(chosen.id) == name for name, chosen in BY_NAME.items())


def test_unknown_codecs_are_refused() -> None:
    with pytest.raises(InputError, match="gzip") as caught:
        codec.check_codec("gzip")
    assert "zstd" in caught.value.hint
    for name in BY_NAME:
        if name not in codec.CODECS:
            with pytest.raises(InputError, match=name):
                codec.check_codec(name)
    for unknown in (8, 9, 250):
        with pytest.raises(CorruptPatch, match=str(unknown)):
            codec.decode_block(
                unknown,
                memoryview(b""),
                np.zeros(1, np.uint16),
                flat("BF16", np.zeros(1, np.uint16)),
            )


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_codec_takes_any_dtype_of_a_state(
    name: str, dtype: str, rng: np.random.Generator
) -> None:
    uint = DTYPES[dtype].uint
    old = rng.integers(0, np.iinfo(uint).max, 500, uint, endpoint=True)
    new = old.copy()
    assert codec.encode_block(old, new, flat(dtype, old), codec=name) == codec.Encoded(
        codec.SAME, b"", 0
    )
    new[[3, 77, 499]] ^= uint.type(1)
    found = codec.encode_block(old, new, flat(dtype, old), codec=name)
    changes = codec.decode_block(found.codec_id, memoryview(found.payload), old, flat(dtype, old))
    assert changes.positions.tolist() == [3, 77, 499]
    assert changes.replaced(old).tolist() == old[changes.positions].tolist()
    assert found.changed == 3


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("density", [0.01, 0.3, 0.6, 1.0])
def test_dense_is_taken_where_a_patch_would_be_larger(
    name: str, density: float, rng: np.random.Generator
) -> None:
    old = rng.integers(0, 1 << 16, 20_000, np.uint16)
    new = np.where(
        rng.random(old.size) < density, rng.integers(0, 1 << 16, old.size, np.uint16), old
    )
    dense, _ = RAW.encode(old, new, flat("BF16", old))
    found = codec.encode_block(old, new, flat("BF16", old), codec=name)
    assert len(found.payload) <= len(dense)
    if density == 1.0:
        assert found.codec_id == RAW.id


def small_block(dtype: str) -> tuple[UIntArray, UIntArray]:
    rng = np.random.default_rng(5)
    uint = DTYPES[dtype].uint
    old = rng.integers(0, np.iinfo(uint).max, 400, uint, endpoint=True)
    new = np.where(rng.random(400) < 0.05, old ^ uint.type(3), old)
    return old, new


@pytest.mark.parametrize(("name", "dtype"), HOSTILE)
def test_truncations_and_appended_bytes(name: str, dtype: str) -> None:
    chosen, (old, new) = BY_NAME[name], small_block(dtype)
    payload, _ = chosen.encode(old, new, flat(dtype, old))
    broken = [payload[:cut] for cut in range(len(payload))] + [payload + b"\0", payload * 2]
    refused = [decodes_sanely_or_is_refused(chosen, data, old, flat(dtype, old)) for data in broken]
    assert refused[0], "an empty payload has no changes, so nothing that encode makes is empty"
    assert name not in ("zstd", "raw") or all(refused)


@pytest.mark.parametrize(("name", "dtype"), HOSTILE)
def test_flipped_bits(name: str, dtype: str, rng: np.random.Generator) -> None:
    chosen, (old, new) = BY_NAME[name], small_block(dtype)
    payload, _ = chosen.encode(old, new, flat(dtype, old))
    # All bits of the first 24 bytes, where lengths and counts are, and a sample of the rest.
    flips = [*range(8 * min(24, len(payload))), *rng.integers(0, 8 * len(payload), 400).tolist()]
    for flip in flips:
        broken = bytearray(payload)
        broken[flip // 8] ^= 1 << flip % 8
        decodes_sanely_or_is_refused(chosen, bytes(broken), old, flat(dtype, old))


@pytest.mark.parametrize(("name", "dtype"), HOSTILE)
def test_random_bytes(name: str, dtype: str) -> None:
    old = np.arange(50).astype(DTYPES[dtype].uint)

    @given(st.binary(max_size=200))
    def check(payload: bytes) -> None:
        decodes_sanely_or_is_refused(BY_NAME[name], payload, old, flat(dtype, old))

    check()


def zstd_payload(count: int, width: int, gaps: bytes, values: bytes) -> memoryview:
    """A payload of the zstd codec whose head and planes need not fit each other."""
    where = compress(gaps, 1)
    return memoryview(struct.pack("<IBI", count, width, len(where)) + where + compress(values, 1))


def test_the_crafted_payloads_of_this_file_are_well_formed() -> None:
    old = np.zeros(50, np.uint16)
    found = ZSTD.decode(zstd_payload(2, 1, b"\3\0", b"\1\2\3\4"), old, flat("BF16", old))
    assert (found.positions.tolist(), found.values.tolist()) == ([3, 4], [0x0301, 0x0402])


@pytest.mark.parametrize(
    ("count", "width", "gaps", "values"),
    [
        pytest.param(51, 1, bytes(51), bytes(102), id="more-changes-than-elements"),
        pytest.param(0xFFFFFFFF, 1, b"\0", bytes(2), id="most-changes"),
        pytest.param(1, 0, b"", bytes(2), id="no-width"),
        pytest.param(1, 3, bytes(3), bytes(2), id="odd-width"),
        pytest.param(1, 8, bytes(8), bytes(2), id="wide-gaps"),
        pytest.param(2, 1, b"\0", bytes(4), id="a-gap-is-missing"),
        pytest.param(1, 1, b"\0", bytes(3), id="half-a-value"),
        pytest.param(1, 1, b"\0", bytes(4), id="a-value-too-many"),
    ],
)
def test_impossible_heads_of_the_zstd_codec(
    count: int, width: int, gaps: bytes, values: bytes
) -> None:
    old = np.zeros(50, np.uint16)
    with pytest.raises(FormatError):
        ZSTD.decode(zstd_payload(count, width, gaps, values), old, flat("BF16", old))


def test_no_changes_at_all_decode_to_none() -> None:
    old = np.zeros(50, np.uint16)
    for width in (1, 2, 4):
        found = ZSTD.decode(zstd_payload(0, width, b"", b""), old, flat("BF16", old))
        check_sane(found, old, DTYPES["BF16"])
        assert len(found.positions) == 0


@pytest.mark.parametrize(
    "gaps", [[50], [49, 0], [0, 49], [0xFFFFFFFF], [0xFFFFFFFF, 0xFFFFFFFF], [1, 0xFFFFFFFE]]
)
def test_gaps_that_lead_outside_are_refused(gaps: list[int]) -> None:
    """Positions neither wrap nor repeat, whatever the gaps."""
    old = np.zeros(50, np.uint16)
    planes = np.ascontiguousarray(np.array(gaps, "<u4").view(np.uint8).reshape(-1, 4).T).tobytes()
    with pytest.raises(CorruptPatch, match=r"beyond the block's 50"):
        ZSTD.decode(
            zstd_payload(len(gaps), 4, planes, bytes(2 * len(gaps))), old, flat("BF16", old)
        )


#: A complete zstd header of 13 bytes in one segment, whose content size is 2^50.
HUGE_FRAME = bytes.fromhex("28b52ffde0") + (1 << 50).to_bytes(8, "little")


@pytest.mark.slow
def test_a_tiny_frame_that_claims_a_huge_size_stays_bounded() -> None:
    done = run_python(
        LIMIT_MEMORY
        + f"""
import struct
import numpy as np
from pulse_rl import codec
from pulse_rl.codec import compress, decompress
from pulse_rl.codec import Layout, Run
from pulse_rl.errors import FormatError
from pulse_rl.state.tensors import DTYPES
huge, real_bomb = bytes.fromhex("{HUGE_FRAME.hex()}"), compress(bytes(1 << 29), 1)
limit_memory(192 << 20)
for frame in (huge, huge + bytes(100), real_bomb):
    try:
        decompress(frame, 1000)
    except FormatError:
        print("refused")
    planes = (len(frame).to_bytes(4, "little") + frame) * 2
    for payload in (planes, struct.pack("<IBI", 9, 1, len(frame)) + frame * 2, frame):
        for codec_id in range(1, 8):
            try:
                layout = Layout(DTYPES["BF16"], (Run(9, 9, 0),))
                codec.decode_block(codec_id, memoryview(payload), np.zeros(9, np.uint16), layout)
            except FormatError:
                pass
"""
    )
    assert (done.returncode, done.stdout) == (0, "refused\n" * 3), done.stderr


def test_decompress_takes_exactly_one_frame_of_the_promised_size() -> None:
    frame = compress(b"abc", 1)
    assert decompress(frame, 3) == b"abc"
    assert decompress(compress(b"", 1), 0) == b""
    for data, size in [
        (frame, 2),
        (frame, 4),
        (frame, 0),
        (frame + b"\0", 3),
        (frame * 2, 3),
        (frame * 2, 6),
    ]:
        with pytest.raises(FormatError):
            decompress(data, size)
    for data in (b"", b"\0", frame[:-1], HUGE_FRAME):
        with pytest.raises(FormatError):
            decompress(data, 3)
