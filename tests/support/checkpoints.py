"""Safetensors files made by hand, and those that no reader may accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pulse_rl import State
from pulse_rl.frameworks.torch import to_torch


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with any header: bytes as they are, another value as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


#: The corpus of tests/hostile/make.py, by title.
HOSTILE = {
    path.stem: path.read_bytes()
    for path in sorted((Path(__file__).parents[1] / "hostile").glob("*.safetensors"))
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
