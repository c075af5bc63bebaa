"""Changed elements of many tensors on a device: one transfer and, with Triton, one kernel launch for all of a group."""

from .group import Scatter
from .launch import scatter

__all__ = ["Scatter", "scatter"]
