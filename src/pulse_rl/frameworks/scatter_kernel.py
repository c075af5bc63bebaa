"""The kernel that writes into many tensors at once. Needs Triton, which CUDA builds of torch
bring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .torch import PROGRAM_ELEMENTS, Sent


def by_kernel(sent: Sent) -> None:
    """One launch for all tensors."""
    with torch.cuda.device(sent.values.get_device()):
        _scatter[(len(sent.programs),)](
            sent.programs, sent.positions, sent.values, size=PROGRAM_ELEMENTS
        )


@triton.jit
def _scatter(programs, positions, values, size: tl.constexpr):  # type: ignore[no-untyped-def] # Triton reads these
    row = programs + 3 * tl.program_id(0)
    target = tl.load(row).to(tl.pointer_type(values.dtype.element_ty))
    at = tl.load(row + 1) + tl.arange(0, size)
    inside = at < tl.load(row + 2)
    place = tl.load(positions + at, mask=inside, other=0)
    value = tl.load(values + at, mask=inside, other=0)
    tl.store(target + place, value, mask=inside)
