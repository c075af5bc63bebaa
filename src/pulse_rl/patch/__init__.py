"""One patch: cut a state into blocks, build, parse, apply, undo (docs/format.md, section 3). Pure
functions."""

from __future__ import annotations

from .apply import (
    AppliedPatch,
    Patch,
    StateChanges,
    TensorChanges,
    advance_state,
    apply_patch,
    parse_patch,
)
from .blocks import BLOCK_ELEMENTS
from .build import BuiltPatch, build_patch

__all__ = [
    "BLOCK_ELEMENTS",
    "AppliedPatch",
    "BuiltPatch",
    "Patch",
    "StateChanges",
    "TensorChanges",
    "advance_state",
    "apply_patch",
    "build_patch",
    "parse_patch",
]
