from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Kind = tuple[int, int, int, bool]
_Decoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

class Malformed(ValueError): ...

def history_records(
    positions: npt.NDArray[np.uint32],
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    kind: _Kind,
) -> npt.NDArray[np.uint8]: ...
def encode_block(
    history: list[npt.NDArray[np.uint8]],
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    kind: _Kind,
    runs: Sequence[tuple[int, int, int]],
    prove: bool = False,
    only: int = 0,
) -> tuple[
    int, bytes, int, tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]] | None, _Decoded | None
]: ...
def decode_block(
    codec: int,
    history: list[npt.NDArray[np.uint8]],
    payload: npt.NDArray[np.uint8],
    old: npt.NDArray[np.uint8],
    kind: _Kind,
    runs: Sequence[tuple[int, int, int]],
) -> _Decoded: ...
def scan(
    old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], width: int
) -> npt.NDArray[np.uint32]: ...
def gather(
    elements: npt.NDArray[np.uint8], width: int, positions: npt.NDArray[np.uint32], base: int
) -> npt.NDArray[np.uint8]: ...
def holds(
    elements: npt.NDArray[np.uint8],
    width: int,
    positions: npt.NDArray[np.uint32],
    base: int,
    values: npt.NDArray[np.uint8],
) -> bool: ...
def scatter(
    elements: npt.NDArray[np.uint8],
    width: int,
    positions: npt.NDArray[np.uint32],
    base: int,
    values: npt.NDArray[np.uint8],
) -> None: ...
def use_vectors(use: bool) -> None: ...
def sha256_begin(count: int) -> bytes: ...
def sha256_absorb(
    midstates: npt.NDArray[np.uint8], arrays: list[npt.NDArray[np.uint8]], path: str = ""
) -> bytes: ...
def sha256_digests(midstates: npt.NDArray[np.uint8], path: str = "") -> bytes: ...
def sha256_paths() -> list[str]: ...
def sha256_leaves(
    arrays: list[npt.NDArray[np.uint8]], leaf_bytes: int, path: str = ""
) -> bytes: ...
def sha256_messages(messages: list[list[npt.NDArray[np.uint8]]], path: str = "") -> bytes: ...
def sha256_changed_leaves(
    changed: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32], int, npt.NDArray[np.uint8]]],
    leaf_bytes: int,
    width: int,
    path: str = "",
) -> bytes: ...
def block_maxima(
    elements: npt.NDArray[np.uint8], width: int, blocks: tuple[int, int, int]
) -> npt.NDArray[np.float32]: ...
def to_e4m3(
    elements: npt.NDArray[np.uint8],
    width: int,
    start: int,
    blocks: tuple[int, int, int],
    scales: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint8],
) -> None: ...
def to_e2m1(
    elements: npt.NDArray[np.uint8],
    width: int,
    blocks: tuple[int, int, int],
    scales: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint8],
) -> None: ...
def round_values(
    bits: npt.NDArray[np.uint32],
    rounding: tuple[int, int, int, int],
    nan: int,
    width: int,
    out: npt.NDArray[np.uint8],
) -> None: ...
def gate(
    theta: npt.NDArray[np.float32],
    now: npt.NDArray[np.float32],
    residual: npt.NDArray[np.float32],
    lookahead: float,
    bf16_start: bool,
    s: npt.NDArray[np.float32],
    rounding: tuple[int, int, int, int],
    base: int,
) -> npt.NDArray[np.uint32] | None: ...
def encode_entries(
    theta: npt.NDArray[np.float32],
    momentum: npt.NDArray[np.float32],
    rounding: tuple[int, int, int, int],
    positions: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
    mantissa: int,
    known: tuple[npt.NDArray[np.uint8], tuple[int, int]] | None = None,
) -> bytes: ...
def decode_entries(
    payloads: list[npt.NDArray[np.uint8]],
    theta: npt.NDArray[np.float32],
    momentum: npt.NDArray[np.float32],
    rounding: tuple[int, int, int, int],
    mantissa: int,
    known: tuple[npt.NDArray[np.uint8], tuple[int, int]] | None = None,
) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]]: ...
def sum_entries(
    summands: Sequence[tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]], elements: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]: ...
def outer_step(
    theta: npt.NDArray[np.float32],
    momentum: npt.NDArray[np.float32],
    total: npt.NDArray[np.float32],
    trainers: float,
    lr: float,
    mu: float,
) -> None: ...
def sparse_outer_step(
    theta: npt.NDArray[np.float32],
    momentum: npt.NDArray[np.float32],
    residual: npt.NDArray[np.float32],
    lookahead: float,
    start: npt.NDArray[np.float32],
    from_: int,
    summands: Sequence[tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]],
    trainers: float,
    lr: float,
    mu: float,
    offset: int,
    granule: int,
    counts: npt.NDArray[np.int64],
    rounding: tuple[int, int, int, int],
    octaves: tuple[int, int],
    classes: npt.NDArray[np.uint8],
) -> None: ...
def shared_octaves(momentum: npt.NDArray[np.float32]) -> tuple[int, int]: ...
