"""One patch: cut a state into blocks, build, parse, apply, undo (docs/format.md, section 3).

All functions are pure.
"""

from __future__ import annotations

from .apply import AppliedPatch, Patch, apply_patch, parse_patch
from .blocks import BLOCK_ELEMENTS

__all__ = ["BLOCK_ELEMENTS", "AppliedPatch", "Patch", "apply_patch", "parse_patch"]
