"""Layouts of other systems, written from their descriptions, so that one run compares all on the
same data.

Every layout is a pair of functions on a whole state, given as lists of flat uint16 arrays (BF16 bit
patterns, one array per tensor): encode(old, new, workers) -> bytes, and decode(state, data,
workers), which turns the old state into the new one in place. They are plain numpy and made for
honest sizes; where a description leaves a choice, the smaller one is taken. Names, shapes and
checksums are not counted.

int32+bf16    int32 flat index and new value of each change (verl, vime, AstraFlow, prime-rl)
xor+zstd1     old ^ new through zstd level 1, per tensor (SkyRL, slime, Miles, ModelExpress, stitch)
zipnn         the installed zipnn package with its own delta mode (XOR, byte planes, Huffman)
"""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

U16 = np.ndarray
State = Sequence[U16]


@dataclass(frozen=True)
class Peer:
    """``encode`` and ``decode`` get the number of workers, too; ``size``: bytes of what was
    encoded."""

    name: str
    encode: Callable[[State, State, int], Any]
    decode: Callable[[State, Any, int], None]
    size: Callable[[Any], int] = len


def _per_tensor(
    name: str, encode: Callable[[U16, U16], bytes], decode: Callable[[U16, bytes], None]
) -> Peer:
    """A peer from functions on one tensor: payloads one after another, each behind its uint32
    length."""

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


def _zipnn() -> Peer:
    from zipnn import ZipNN

    def codec() -> ZipNN:
        return ZipNN(bytearray_dtype="bfloat16", delta_compressed_type="byte", threads=1)

    def encode(old: U16, new: U16) -> bytes:
        return bytes(codec().compress(new.tobytes(), delta_second_data=old.tobytes()))

    def decode(tensor: U16, data: bytes) -> None:
        tensor[:] = np.frombuffer(
            codec().decompress(data, delta_second_data=tensor.tobytes()), np.uint16
        )

    return _per_tensor("zipnn", encode, decode)


def peers() -> list[Peer]:
    """All layouts that run here; zipnn only where it is installed."""
    found = [
        _per_tensor("int32+bf16", _int32_encode, _int32_decode),
        _per_tensor("xor+zstd1", _xor_encode, _xor_decode),
    ]
    if importlib.util.find_spec("zipnn"):
        found.append(_zipnn())
    return found
