"""The header of a safetensors file: the names, dtypes, shapes and places of its tensors.

It is checked strictly: it must fit the file, and the tensors must tile the data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import CorruptCheckpoint, InputError, UnsupportedTensor
from .tensors import DTYPES, TensorSpec, dtype_of

MAX_HEADER_BYTES = 100 << 20


def header_bytes(specs: tuple[TensorSpec, ...], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length prefix and header of a safetensors file that holds ``specs`` in this order.

    The header is padded to 8 bytes. Raises InputError for metadata that safetensors cannot hold.
    """
    facts = metadata or {}
    if not isinstance(facts, Mapping) or not all(
        isinstance(text, str) for item in facts.items() for text in item
    ):
        raise InputError(
            "the metadata of a checkpoint must map strings to strings, as safetensors has it"
        )
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_header(
    prefix: bytes | memoryview, file_bytes: int
) -> tuple[list[tuple[TensorSpec, int]], dict[str, str], int]:
    """Parse the start of a safetensors file of ``file_bytes`` bytes.

    ``prefix`` must hold the whole header (`header_length`). Returns the tensors with their offsets
    in the data, the metadata, and the start of the data. Raises CorruptCheckpoint.
    """
    # 1. The JSON object. A key that occurs twice would let two readers see two files.
    length = header_length(prefix, file_bytes)
    try:
        header = json.loads(
            bytes(prefix[8 : 8 + length]).decode(), object_pairs_hook=_no_duplicates
        )
    except (ValueError, RecursionError) as error:  # of a number of 10,000 digits, too
        raise CorruptCheckpoint(f"the safetensors header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CorruptCheckpoint("the safetensors header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptCheckpoint("the safetensors metadata is not a map of strings")
    # 2. The tensors must tile the data. Empty tensors sort before the tensor at their offset.
    placed = sorted(
        (_entry(name, entry) for name, entry in header.items()), key=lambda p: (p[1], p[0].nbytes)
    )
    at = 0
    for spec, offset in placed:
        if offset != at:
            raise CorruptCheckpoint(
                f"tensor {spec.name!r} starts at byte {offset} of the data, not at {at}"
            )
        at += spec.nbytes
    # 3. No byte of the file may be outside of a tensor.
    if 8 + length + at != file_bytes:
        raise CorruptCheckpoint(
            f"the file has {file_bytes} bytes, its header implies {8 + length + at}"
        )
    return placed, metadata, 8 + length


def header_length(prefix: bytes | memoryview, file_bytes: int) -> int:
    """Bytes of JSON after the 8-byte length prefix.

    Raises CorruptCheckpoint if the length exceeds the file or 100 MiB.
    """
    length = int.from_bytes(prefix[:8], "little")
    if file_bytes < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CorruptCheckpoint(
            f"the safetensors header claims {length} bytes in a file of {file_bytes}"
        )
    return length


# Every number of an entry is checked for its type as well: JSON's true is 1 to Python, and 1e3 a
# float.
def _entry(name: str, entry: Any) -> tuple[TensorSpec, int]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or not all(
            type(n) is int and n >= 0 for n in [*shape, start, stop]
        ):
            raise ValueError("negative or non-integer number")
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpoint(f"the entry of tensor {name!r} is malformed: {error}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedTensor(
            f"tensor {name!r} has dtype {str(dtype)[:40]!r}, which is not supported",
            hint="The file is damaged, or has a dtype that pulse does not support.",
        )
    try:
        spec = TensorSpec(name, dtype_of(dtype), tuple(shape))
    except InputError as error:
        raise CorruptCheckpoint(str(error)) from None
    if stop - start != spec.nbytes:
        raise CorruptCheckpoint(
            f"tensor {name!r} needs {spec.nbytes} bytes, its offsets hold {stop - start}"
        )
    return spec, start


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise CorruptCheckpoint("the safetensors header has the same key twice")
    return result
