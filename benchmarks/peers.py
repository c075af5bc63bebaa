"""Layouts of other systems, written from their descriptions, so that one run compares all on the same data.

Every layout is a pair of functions on a whole state, given as lists of flat uint16 arrays (BF16 bit patterns, one
array per tensor): encode(old, new, workers) -> bytes, and decode(state, data, workers), which turns the old state into
the new one in place. They are plain numpy and made for honest sizes; where a description leaves a choice, the smaller
one is taken. Names, shapes and checksums are not counted.

int32+bf16    int32 flat index and new value of each change (verl, vime, AstraFlow, prime-rl)
xor+zstd1     old ^ new through zstd level 1, per tensor (SkyRL, slime, Miles, ModelExpress, stitch)
rice+zstd     gaps counted inside the class of the old exponent, Rice-coded with the best parameter per tensor and
              class; zigzag of the bit-pattern step through zstd (PULSEPT1 v3, the best peer). Its zstd level
              is not told: 3 is zstd's default, 19 the smallest
zipnn         the installed zipnn package with its own delta mode (XOR, byte planes, Huffman)
"""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

U16 = np.ndarray
State = Sequence[U16]
CHUNK = 1 << 20


@dataclass(frozen=True)
class Peer:
    name: str
    encode: Callable[[State, State, int], bytes]
    decode: Callable[[State, bytes, int], None]
    parallel: bool = True


def _per_tensor(name: str, encode: Callable[[U16, U16], bytes], decode: Callable[[U16, bytes], None]) -> Peer:
    """A peer from functions on one tensor: payloads one after another, each behind its uint32 length."""

    def encode_state(old: State, new: State, workers: int) -> bytes:
        with ThreadPoolExecutor(workers) as pool:
            parts = list(pool.map(encode, old, new))
        return b"".join(struct.pack("<I", len(p)) + p for p in parts)

    def decode_state(state: State, data: bytes, workers: int) -> None:
        parts, at = [], 0
        for _ in state:
            (size,) = struct.unpack_from("<I", data, at)
            parts.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(decode, state, parts))

    return Peer(name, encode_state, decode_state)


def _int32_encode(old: U16, new: U16) -> bytes:
    index = np.flatnonzero(old != new)
    return index.astype("<i4").tobytes() + new[index].tobytes()


def _int32_decode(tensor: U16, data: bytes) -> None:
    count = len(data) // 6
    tensor[np.frombuffer(data, "<i4", count)] = np.frombuffer(data, "<u2", offset=4 * count)


def _xor_encode(old: U16, new: U16) -> bytes:
    return zstd.compress(np.bitwise_xor(old, new).tobytes(), level=1)


def _xor_decode(tensor: U16, data: bytes) -> None:
    tensor ^= np.frombuffer(zstd.decompress(data), np.uint16)


def _exponent(bits: U16) -> np.ndarray:
    return (bits >> 7).astype(np.uint8)


def _class_walk(old: U16) -> Iterable[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
    """Per chunk: its slice, its members sorted by class, where each class starts there, and ranks so far.

    Member j of class c in the chunk sits at order[start[c] + j] and has the rank before[c] + j in its tensor.
    """
    before = np.zeros(256, np.int64)
    for begin in range(0, old.size, CHUNK):
        part = slice(begin, min(begin + CHUNK, old.size))
        exponent = _exponent(old[part])
        counts = np.bincount(exponent, minlength=256)
        order = np.argsort(exponent, kind="stable")
        yield part, order, np.cumsum(counts) - counts, before.copy()
        before += counts


def _rice_bits(gaps: np.ndarray, k: int) -> int:
    return int((gaps >> k).sum()) + gaps.size * (1 + k)


def _best_rice(gaps: np.ndarray) -> int:
    guess = int(np.log2(gaps.mean() + 1))
    return min(range(max(0, guess - 2), guess + 3), key=lambda k: _rice_bits(gaps, k))


def _unary(values: np.ndarray) -> np.ndarray:
    """Zeros then a one for each value, as a uint8 array of bits."""
    bits = np.zeros(int(values.sum()) + values.size, np.uint8)
    bits[np.cumsum(values + 1) - 1] = 1
    return bits


def _low_bits(values: np.ndarray, width: int) -> np.ndarray:
    return ((values[:, None] >> np.arange(width)) & 1).astype(np.uint8).reshape(-1)


def _gamma(value: int) -> np.ndarray:
    """Elias gamma code of value >= 1."""
    width = value.bit_length() - 1
    return np.concatenate([_unary(np.array([width])), _low_bits(np.array([value]), width)])


class BitReader:
    def __init__(self, data: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8))
        self.at = 0

    def unary(self, count: int) -> np.ndarray:
        """`count` unary values; looks ahead in doubling windows."""
        window = 4 * count + 64
        while True:
            ones = np.flatnonzero(self.bits[self.at : self.at + window])
            if ones.size >= count:
                break
            window *= 2
        self.at += int(ones[count - 1]) + 1
        return np.diff(ones[:count], prepend=-1) - 1

    def low_bits(self, count: int, width: int) -> np.ndarray:
        bits = self.bits[self.at : self.at + count * width].reshape(count, width).astype(np.int64)
        self.at += count * width
        return bits @ (1 << np.arange(width)) if width else np.zeros(count, np.int64)

    def gamma(self) -> int:
        width = int(self.unary(1)[0])
        return (1 << width) | int(self.low_bits(1, width)[0])


def _class_changes(old: U16, new: U16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class, rank in class and zigzag step of every change, sorted by class, then rank."""
    classes, ranks, steps = [], [], []
    for part, order, start, before in _class_walk(old):
        a, b = old[part], new[part]
        slots = np.flatnonzero((a != b)[order])
        at = order[slots]
        c = _exponent(a[at])
        classes.append(c)
        ranks.append(slots - start[c] + before[c])
        step = (b[at] - a[at]).astype(np.int16).astype(np.int32)
        steps.append(((step << 1) ^ (step >> 31)).astype(np.uint16))
    if not classes:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.uint16)
    c = np.concatenate(classes)
    order = np.argsort(c, kind="stable")
    return c[order], np.concatenate(ranks)[order], np.concatenate(steps)[order]


def _rice_encode(old: State, new: State, level: int) -> bytes:
    """One bit stream of headers and gaps, one zstd frame of steps (low bytes, then high bytes if any is set)."""
    bits: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    for a, b in zip(old, new, strict=True):
        c, rank, step = _class_changes(a, b)
        present = np.flatnonzero(np.bincount(c, minlength=256))
        bits.append(_gamma(present.size + 1))
        ends = np.searchsorted(c, present, side="right")
        last = -1
        for exponent, begin, end in zip(present, [0, *ends], ends, strict=False):
            gaps = np.diff(rank[begin:end], prepend=-1) - 1
            k = _best_rice(gaps)
            bits += [_gamma(int(exponent) - last), _gamma(gaps.size), _gamma(k + 1)]
            bits += [_unary(gaps >> k), _low_bits(gaps, k)]
            last = int(exponent)
        steps.append(step)
    positions = np.packbits(np.concatenate(bits)).tobytes()
    step = np.concatenate(steps)
    planes = [(step & 0xFF).astype(np.uint8)] + ([(step >> 8).astype(np.uint8)] if (step > 0xFF).any() else [])
    values = zstd.compress(np.concatenate(planes).tobytes(), level=level)
    return struct.pack("<I", len(positions)) + positions + values


def _rice_decode(state: State, data: bytes) -> None:
    (size,) = struct.unpack_from("<I", data)
    reader = BitReader(data[4 : 4 + size])
    coded: list[dict[int, np.ndarray]] = []
    for _ in state:
        ranks: dict[int, np.ndarray] = {}
        last = -1
        for _ in range(reader.gamma() - 1):
            last += reader.gamma()
            count, k = reader.gamma(), reader.gamma() - 1
            gaps = reader.unary(count) << k
            gaps += reader.low_bits(count, k)
            ranks[last] = np.cumsum(gaps + 1) - 1
        coded.append(ranks)
    total = sum(r.size for ranks in coded for r in ranks.values())
    planes = np.frombuffer(zstd.decompress(data[4 + size :]), np.uint8)
    zigzag = planes[:total].astype(np.int32)
    if planes.size > total:
        zigzag |= planes[total:].astype(np.int32) << 8
    steps = ((zigzag >> 1) ^ -(zigzag & 1)).astype(np.int16).view(np.uint16)
    used = 0
    for tensor, ranks in zip(state, coded, strict=True):
        count = sum(r.size for r in ranks.values())
        _rice_apply(tensor, ranks, steps[used : used + count])
        used += count


def _rice_apply(tensor: U16, ranks: dict[int, np.ndarray], steps: U16) -> None:
    if not ranks:
        return
    offset = dict(zip(ranks, np.cumsum([0] + [r.size for r in ranks.values()]).tolist(), strict=False))
    for part, order, start, before in _class_walk(tensor):
        target = tensor[part]
        for c, rank in ranks.items():
            members = (start[c + 1] if c < 255 else order.size) - start[c]
            lo, hi = np.searchsorted(rank, (before[c], before[c] + members))
            at = order[start[c] + rank[lo:hi] - before[c]]
            target[at] += steps[offset[c] + lo : offset[c] + hi]


def _rice(level: int) -> Peer:
    def encode(old: State, new: State, workers: int) -> bytes:
        return _rice_encode(old, new, level)

    def decode(state: State, data: bytes, workers: int) -> None:
        _rice_decode(state, data)

    return Peer(f"rice+zstd{level}", encode, decode, parallel=False)


def _zipnn() -> Peer:
    from zipnn import ZipNN

    def codec() -> ZipNN:
        return ZipNN(bytearray_dtype="bfloat16", delta_compressed_type="byte", threads=1)

    def encode(old: U16, new: U16) -> bytes:
        return bytes(codec().compress(new.tobytes(), delta_second_data=old.tobytes()))

    def decode(tensor: U16, data: bytes) -> None:
        tensor[:] = np.frombuffer(codec().decompress(data, delta_second_data=tensor.tobytes()), np.uint16)

    return _per_tensor("zipnn", encode, decode)


def peers() -> list[Peer]:
    """All layouts that run here; zipnn only where it is installed."""
    found = [
        _per_tensor("int32+bf16", _int32_encode, _int32_decode),
        _per_tensor("xor+zstd1", _xor_encode, _xor_decode),
        _rice(3),
        _rice(19),
    ]
    if importlib.util.find_spec("zipnn"):
        found.append(_zipnn())
    return found
