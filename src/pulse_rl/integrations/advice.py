"""What a trainer's log says of a stream: notices of its publisher, and, before the first step, why its patches will be
large (PULSE, arXiv 2602.03839, section 3)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..events import BaselineRestored, Event, FallbackUsed, Hint, Listener

_SAMPLE = 1 << 16  # elements of a tensor
_MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_DEFAULT = torch.bfloat16
_DENSE = 0.5


def logged(log: logging.Logger, listener: Listener | None) -> Listener:
    """A listener that logs notices as warnings and hands every event on to ``listener``. What is fused is so in the
    checkpoint, too, where `weights.as_saved` has made the names."""

    def hear(event: Event) -> None:
        if isinstance(event, Hint) and event.kind != "fused_names":
            log.warning("stream %s: %s. %s", event.stream, event.reason, event.hint)
        elif isinstance(event, FallbackUsed | BaselineRestored):
            log.info("%s", event)
        if listener:
            listener(event)

    return hear


def advice(model: nn.Module, optimizer: Any, lr: float, dtype: str | None) -> list[str]:
    """Why patches of ``model``, published in ``dtype`` (None: as it is), will not be small. ``lr`` counts where the
    ``optimizer`` says none."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if dtype is None:
        if any(p.dtype.itemsize > 2 for p in trained):
            return [
                "dtype=None publishes the trained weights in FP32, of which nearly all change at every step. "
                'Leave dtype at "BF16" unless the workers compute in FP32.'
            ]
        return []
    groups = getattr(optimizer, "param_groups", [])
    peak = max((float(group.get("initial_lr", group["lr"])) for group in groups), default=lr)
    density = 0.0 if any(hasattr(m, "base_layer") for m in model.modules()) else expected_density(model, peak)
    if density <= _DENSE:
        return []
    return [
        f"at the learning rate {peak:g} about {density:.0%} of the BF16 weights change in one step of Adam, so that "
        "patches save little. RL uses 1e-6 to 1e-5."
    ]


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
