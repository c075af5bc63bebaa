"""Safetensors files made by hand, and a collection of those that no reader may accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pulse_rl import State
from pulse_rl.integrations.torch import to_torch
from pulse_rl.state.checkpoint import MAX_HEADER_BYTES


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with any header: bytes as they are, another value as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


U8 = entry()
HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "no header": b"\x08\0\0\0",
    "header past the end": file_of({}, length=3),
    "header of exabytes": file_of({}, length=(1 << 64) - 1),
    "header past the cap": file_of({}, length=MAX_HEADER_BYTES + 1),
    "header not UTF-8": file_of(b'{"\xff": 1}'),
    "header not JSON": file_of(b"{'a': 1}"),
    "header cut": file_of(b'{"a":{"dtype":'),
    "header nested too deep": file_of(b"[" * 100_000),
    "header a list": file_of([]),
    "header null": file_of(None),
    "number of 5000 digits": file_of(
        b'{"a":{"dtype":"U8","shape":[' + b"1" * 5000 + b'],"data_offsets":[0,4]}}'
    ),
    "same key twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(U8).encode(),) * 2), bytes(4)),
    "same field twice": file_of(
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', bytes(4)
    ),
    "entry a list": file_of({"a": []}),
    "entry without a dtype": file_of({"a": {"shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
    "entry without offsets": file_of({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "three offsets": file_of({"a": entry(offsets=[0, 2, 4])}, bytes(4)),
    "shape a number": file_of({"a": entry(shape=4)}, bytes(4)),
    "shape a string": file_of({"a": entry(shape="", offsets=[0, 1])}, bytes(1)),
    "shape an object": file_of({"a": entry(shape={}, offsets=[0, 1])}, bytes(1)),
    "negative dimension": file_of({"a": entry(shape=[-4])}, bytes(4)),
    "two negative dimensions": file_of({"a": entry(shape=[-2, -2])}, bytes(4)),
    "fractional dimension": file_of({"a": entry(shape=[4.0])}, bytes(4)),
    "true for a dimension": file_of({"a": entry(shape=[True, 4])}, bytes(4)),
    "dimension not a number": file_of(
        b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)
    ),
    "too many dimensions": file_of({"a": entry(shape=[4] + [1] * 16)}, bytes(4)),
    "terabytes": file_of({"a": entry(shape=[1 << 42], offsets=[0, 1 << 42])}, bytes(4)),
    "elements past the cap": file_of({"a": entry(shape=[1 << 60], offsets=[0, 1 << 60])}, bytes(4)),
    "dimension past 64 bits": file_of({"a": entry(shape=[0, 1 << 70], offsets=[0, 0])}),
    "negative offsets": file_of({"a": entry(offsets=[-4, 0])}, bytes(4)),
    "offsets swapped": file_of({"a": entry(offsets=[4, 0])}, bytes(4)),
    "offsets of another length": file_of({"a": entry(offsets=[0, 3])}, bytes(4)),
    "overlap": file_of({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)),
    "same bytes twice": file_of({"a": entry(), "b": entry()}, bytes(4)),
    "gap": file_of({"a": entry(), "b": entry(offsets=[5, 9])}, bytes(9)),
    "gap at the start": file_of({"a": entry(offsets=[1, 5])}, bytes(5)),
    "beyond the file": file_of({"a": entry()}, bytes(3)),
    "bytes left over": file_of({"a": entry()}, bytes(5)),
    "empty name": file_of({"": entry()}, bytes(4)),
    "long name": file_of({"w" * 1025: entry()}, bytes(4)),
    "half a character": file_of(b'{"\\ud800":%s}' % json.dumps(U8).encode(), bytes(4)),
    "metadata a list": file_of({"__metadata__": [], "a": U8}, bytes(4)),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "a": U8}, bytes(4)),
}


def write_checkpoint(path: Path, tensors: Any) -> Path:
    """These tensors in a file, or in model.safetensors of a folder, as safetensors itself writes
    them: of two names for one tensor the first. Returns ``path``."""
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    state = State.of(tensors).copy()
    whole = to_torch(state)
    save_file({spec.name: whole[spec.name] for spec in state.specs}, file, {"format": "pt"})
    return path
