"""The leaves' SHA-256 on every path that this processor has: the published vectors, and hashlib's
digests."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl._native import (
    sha256_absorb,
    sha256_begin,
    sha256_changed_leaves,
    sha256_digests,
    sha256_leaves,
    sha256_messages,
)
from pulse_rl._native._kernels import sha256_paths
from pulse_rl.state.digest import Changed, changed_leaves_of, leaves_of

Bytes = npt.NDArray[np.uint8]
PATHS = ["", *sha256_paths()]
LEAF = 128  # so that short arrays have many leaves: the kernels know no other size

# FIPS 180-2, appendix B, and the NIST example of a million times "a".
VECTORS = [
    (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    (
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
    ),
    (
        b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1",
    ),
    (b"a" * 1_000_000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
]


def by_the_book(arrays: list[Bytes], leaf: int = LEAF) -> bytes:
    return b"".join(
        sha256(a[i : i + leaf].tobytes()).digest() for a in arrays for i in range(0, len(a), leaf)
    )


def test_the_plain_path_is_everywhere() -> None:
    assert sha256_paths()[-1] == "portable"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("message", "digest"), VECTORS)
def test_published_vectors(path: str, message: bytes, digest: str) -> None:
    array = np.frombuffer(message, np.uint8)
    found = sha256_leaves([array] * 5, 1 << 20, path)
    assert found == bytes.fromhex(digest) * (5 if message else 0)  # an empty array has no leaf


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count", range(1, 36))
def test_any_number_of_leaves(path: str, count: int, rng: np.random.Generator) -> None:
    """Full and half-filled groups of lanes; the last leaf ends at each place of a block's
    padding."""
    for rest in (1, 55, 56, 63, 64, 65, 119, 120, 127, 128):
        array = rng.integers(0, 256, (count - 1) * LEAF + rest, np.uint8)
        assert sha256_leaves([array], LEAF, path) == by_the_book([array])


@pytest.mark.parametrize("path", PATHS)
@given(
    sizes=st.lists(st.integers(0, 2000), max_size=40),
    leaf=st.sampled_from([64, 128, 1024]),
    seed=st.integers(0, 99),
)
def test_arrays_of_any_lengths(path: str, sizes: list[int], leaf: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 256, n, np.uint8) for n in sizes]
    assert sha256_leaves(arrays, leaf, path) == by_the_book(arrays, leaf)


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data(), width=st.sampled_from([1, 2, 4, 8]), leaf=st.sampled_from([64, 4096, 8192]))
def test_changed_leaves(path: str, data: st.DataObject, width: int, leaf: int) -> None:
    """Changes at the first and last elements of leaves and of the tiles of 4096 bytes among
    them."""
    lengths = data.draw(st.lists(st.integers(0, 20_000 // width), min_size=1, max_size=12))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = [random.integers(0, 256, n * width, np.uint8) for n in lengths]
    before = [a.copy() for a in arrays]
    total = sum(lengths)
    edges = np.arange(0, total, 4096 // width)
    chosen = np.concatenate(
        [edges, edges - 1, random.integers(0, total + 1, data.draw(st.integers(0, 500)))]
    )
    positions = np.unique(chosen[(chosen >= 0) & (chosen < total)]).astype(np.uint32)
    values = random.integers(0, 256, len(positions) * width, np.uint8)
    whole = np.concatenate(arrays).reshape(-1, width)
    whole[positions] = values.reshape(-1, width)
    changed = np.split(whole.reshape(-1), np.cumsum([n * width for n in lengths])[:-1])
    ends = np.cumsum(lengths)
    parts = []
    for array, end, length in zip(arrays, ends, lengths, strict=True):
        inside = slice(*np.searchsorted(positions, [end - length, end]))
        parts.append(
            (
                array,
                positions[inside],
                int(end - length),
                values.reshape(-1, width)[inside].reshape(-1),
            )
        )
    assert sha256_changed_leaves(parts, leaf, width, path) == by_the_book(changed, leaf)
    for array, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_leaves_of_real_size(rng: np.random.Generator) -> None:
    arrays = [
        rng.integers(0, 1 << 16, n, np.uint16) for n in (3 << 19, 5, 0, (1 << 19) + 1, 1 << 19)
    ]
    raw = [a.view(np.uint8) for a in arrays]
    assert leaves_of(arrays) == [by_the_book([a], 1 << 20) for a in raw]
    at = [np.uint32([0, (3 << 19) - 1]), np.uint32([1004])]
    bits = [np.uint16([1, 2]), np.uint16([3])]
    none = (np.uint32([]), 0, np.uint16([]))
    of = [
        (at[0], 0, bits[0]),
        (at[1], 1000, bits[1]),
        none,
        none,
        (np.uint32([(1 << 19) + 6]), 7, np.uint16([4])),
    ]
    found = changed_leaves_of(
        [Changed(array, *made) for array, made in zip(arrays, of, strict=True)]
    )
    arrays[0][[0, -1]], arrays[1][4], arrays[4][-1] = (1, 2), 3, 4
    assert found == [by_the_book([a], 1 << 20) for a in raw]


def test_any_address(rng: np.random.Generator) -> None:
    raw = rng.integers(0, 256, 4000, np.uint8)
    for path in PATHS:
        for start in range(1, 70, 7):
            assert sha256_leaves([raw[start:]], LEAF, path) == by_the_book([raw[start:]])


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@given(data=st.data(), seed=st.integers(0, 99))
def test_messages_in_pieces(path: str, data: st.DataObject, seed: int) -> None:
    """Of any lengths, also beyond the 16 KiB that a lane takes at once."""
    random = np.random.default_rng(seed)
    lengths = st.one_of(st.integers(0, 200), st.integers(16_300, 40_000))
    cut = data.draw(st.lists(st.lists(lengths, max_size=5), max_size=9))
    messages = [[random.integers(0, 256, n, np.uint8) for n in pieces] for pieces in cut]
    whole = [b"".join(piece.tobytes() for piece in pieces) for pieces in messages]
    assert sha256_messages(messages, path) == b"".join(
        sha256(message).digest() for message in whole
    )


def test_refusals() -> None:
    one, none, four = np.zeros(8, np.uint8), np.uint32([]), np.uint32([4])
    with pytest.raises(ValueError, match="no path abacus"):
        sha256_leaves([one], 64, "abacus")
    for leaf in (0, 63, 100):
        with pytest.raises(ValueError, match="leaf_bytes"):
            sha256_leaves([one], leaf)
    with pytest.raises(ValueError, match="width"):
        sha256_changed_leaves([(one, none, 0, one[:0])], 64, 3)
    with pytest.raises(ValueError, match="whole number"):
        sha256_changed_leaves([(one[:7], none, 0, one[:0])], 64, 2)
    with pytest.raises(ValueError, match="values and positions differ"):
        sha256_changed_leaves([(one, four, 0, one[:1])], 64, 2)
    for base in (0, 100):
        for positions in (
            [4],
            [0, 0],
            [2, 1],
            [1, 2**32 - 1 - base],
            [3, 9, 2],
            [-1 % 2**32 - base, 1],
        ):
            at = np.array(positions, np.uint32) + np.uint32(base)
            with pytest.raises(IndexError, match="ascending"):
                sha256_changed_leaves(
                    [(one, at, base, np.zeros(2 * len(positions), np.uint8))], 64, 2
                )


def absorbed(pieces: list[bytes], path: str) -> bytes:
    """The digest of a message of which each piece is absorbed by itself, from the midstate of the
    one before."""
    midstate = sha256_begin(1)
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        midstate = sha256_absorb(np.frombuffer(midstate, np.uint8), [data], path)
    return sha256_digests(np.frombuffer(midstate, np.uint8), path)


@pytest.mark.parametrize("path", PATHS)
def test_a_hash_is_passed_on_at_every_cut(path: str, rng: np.random.Generator) -> None:
    message = rng.bytes(3 * 64 + 11)
    for cut in range(len(message) + 1):
        assert absorbed([message[:cut], message[cut:]], path) == sha256(message).digest()


@given(pieces=st.lists(st.binary(max_size=200), max_size=9))
def test_a_hash_is_passed_on_through_many_hands(pieces: list[bytes]) -> None:
    assert absorbed(pieces, "") == sha256(b"".join(pieces)).digest()


def test_midstates_side_by_side_and_what_is_none(rng: np.random.Generator) -> None:
    messages = [rng.bytes(n) for n in (0, 1, 64, 1000)]
    midstates = np.frombuffer(sha256_begin(4), np.uint8)
    absorbed_by_all = sha256_absorb(midstates, [np.frombuffer(m, np.uint8) for m in messages])
    found = sha256_digests(np.frombuffer(absorbed_by_all, np.uint8))
    assert found == b"".join(sha256(m).digest() for m in messages)
    with pytest.raises(ValueError, match="104 bytes"):
        sha256_digests(midstates[1:])
    with pytest.raises(ValueError, match="number"):
        sha256_absorb(midstates, [midstates])
