"""The header of an anchor's shard that holds slices of tensors (docs/format.md, section 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CorruptCheckpoint, InputError
from ..state.checkpoint import header_bytes
from ..state.tensors import Segment, TensorSpec

KEY = "pulse.slices"
"""Of the safetensors metadata that says of which tensors the file holds slices, and where they begin."""


def in_file_order(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Wider types first, as `checkpoint.serialize` has them."""
    return tuple(sorted(segments, key=lambda segment: -segment.spec.dtype.width))


def sliced_header(segments: Sequence[Segment]) -> bytes:
    """Length prefix and header of the safetensors file that holds ``segments`` in this order, one of a tensor at
    most."""
    entries, slices = [], {}
    for segment in segments:
        spec = segment.spec
        if not segment.is_whole:
            slices[spec.name] = {"shape": list(spec.shape), "start": segment.start}
            spec = TensorSpec(spec.name, spec.dtype, (segment.elements,))
        entries.append(spec)
    text = json.dumps(slices, separators=(",", ":"), ensure_ascii=False)
    return header_bytes(tuple(entries), {KEY: text} if slices else None)


def segments_of(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> list[Segment]:
    """What the entries ``specs`` of a file with this ``metadata`` are in their whole tensors. Raises
    CorruptCheckpoint."""
    slices = _parsed(metadata[KEY]) if KEY in metadata else {}
    segments = []
    for spec in specs:
        segments.append(
            _segment(spec, slices.pop(spec.name)) if spec.name in slices else Segment(spec, 0, spec.elements)
        )
    for name in slices:
        raise CorruptCheckpoint(f"{KEY} speaks of tensor {name[:100]!r}, which the file does not hold")
    return segments


def _parsed(text: str) -> dict[str, Any]:
    try:
        slices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{KEY} is not JSON: {error}") from None
    if not isinstance(slices, dict):
        raise CorruptCheckpoint(f"{KEY} is not an object")
    return slices


def _segment(entry: TensorSpec, said: Any) -> Segment:
    try:
        shape, start = said["shape"], said["start"]
        if set(said) != {"shape", "start"} or type(start) is not int or not isinstance(shape, list):
            raise ValueError("another type, or an unknown key")
        spec = TensorSpec(entry.name, entry.dtype, tuple(shape))
    except (TypeError, KeyError, ValueError, InputError) as error:
        raise CorruptCheckpoint(f"the slice of tensor {entry.name!r} is malformed: {error}") from None
    if len(entry.shape) != 1 or not 0 <= start < start + entry.elements <= spec.elements:
        raise CorruptCheckpoint(f"the slice of tensor {entry.name!r} is empty or does not lie in the tensor")
    return Segment(spec, start, start + entry.elements)
