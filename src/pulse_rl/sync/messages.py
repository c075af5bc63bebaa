"""What ranks tell each other of their tensors, as bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..state.tensors import Segment, TensorSpec, dtype_of
from .layout import Box, Fragment, Held, Layout


def of_held(held: Sequence[Held]) -> bytes:
    """What a rank has."""
    return _said([[*_spec(h.spec), h.box.of, h.storage] for h in held])


def to_held(message: bytes) -> list[Held]:
    """What `of_held` said."""
    found = []
    for name, dtype, shape, of, storage in json.loads(message):
        spec = _to_spec(name, dtype, shape)
        found.append(Held(spec, _to_box(of, spec), storage))
    return found


def of_layout(layout: Layout) -> bytes:
    """A layout, whole or what one rank needs of it."""
    number = {spec.name: k for k, spec in enumerate(layout.specs)}
    return _said(
        {
            "specs": [_spec(spec) for spec in layout.specs],
            "aliases": layout.aliases,
            "published": [
                [number[name], [[rank, s.start, s.stop] for rank, s in of.items()]]
                for name, of in layout.published.items()
            ],
            "moved": [
                [number[name], [[rank, box.of] for rank, box in boxes.items()]] for name, boxes in layout.moved.items()
            ],
            "shared": [
                [k, number[of[0].segment.spec.name], of[0].leaf, [[rank, s.start, s.stop] for rank, _, s in of]]
                for k, of in layout.shared.items()
            ],
            "shares": layout.shares,
            "digest": layout.digest,
        }
    )


def to_layout(message: bytes) -> Layout:
    """What `of_layout` said."""
    said: dict[str, Any] = json.loads(message)
    specs = tuple(_to_spec(*spec) for spec in said["specs"])
    return Layout(
        specs,
        said["aliases"],
        {
            specs[k].name: {rank: Segment(specs[k], start, stop) for rank, start, stop in of}
            for k, of in said["published"]
        },
        {specs[k].name: {rank: _to_box(of, specs[k]) for rank, of in boxes} for k, boxes in said["moved"]},
        {
            number: tuple(Fragment(rank, leaf, Segment(specs[k], start, stop)) for rank, start, stop in of)
            for number, k, leaf, of in said["shared"]
        },
        said["shares"],
        said["digest"],
    )


def _said(what: Any) -> bytes:
    return json.dumps(what, separators=(",", ":")).encode()


def _spec(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype.name, spec.shape


def _to_spec(name: str, dtype: str, shape: list[int]) -> TensorSpec:
    return TensorSpec(name, dtype_of(dtype), tuple(shape))


def _to_box(of: list[list[list[int]]], spec: TensorSpec) -> Box:
    return Box(tuple(tuple((start, stop) for start, stop in runs) for runs in of), spec.shape)
