"""How many weights a step at some learning rate changes, before the first step (PULSE, arXiv 2602.03839, section 3)."""

from __future__ import annotations

import torch
from torch import nn

_SAMPLE = 1 << 16  # elements of a tensor
_MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_DEFAULT = torch.bfloat16


def expected_density(model: nn.Module, lr: float) -> float:
    """The share of all parameters that one step changes in BF16, if its update of each trained one is about ``lr``, as
    Adam's are.

    Behind wider weights an update crosses a rounding edge with chance lr / ulp; narrow ones absorb it below half an ulp
    (`pulse_rl.study.theory`). From samples, on this rank's shards alone.
    """
    changed, elements = 0.0, 0
    for parameter in model.parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        elements += local.numel()
        if not (parameter.requires_grad and local.is_floating_point() and local.numel()):
            continue
        sample = local.reshape(-1)[:: -(-local.numel() // _SAMPLE)].float()
        exponents = (torch.frexp(sample).exponent - 1).clamp(min=-126)
        wide = local.dtype.itemsize > _DEFAULT.itemsize
        ulps = torch.exp2((exponents - _MANTISSA_BITS[_DEFAULT if wide else local.dtype]).double())
        chances = (lr / ulps).clamp(max=1.0) if wide else (lr >= ulps / 2).double()
        changed += float(chances.mean()) * local.numel()
    return changed / max(elements, 1)
