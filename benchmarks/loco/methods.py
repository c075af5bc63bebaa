"""The methods by name, each on the same parameters, with the same inner optimizer and outer
settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch

from benchmarks.loco.baselines import (
    CastDifferenceGate,
    Ddp,
    NoFeedbackGate,
    gated,
    quantized_diloco,
    sparse_loco,
)
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM
from pulse_rl.loco import DiLoCo, GroupExchange, PulseLoCo
from pulse_rl.loco.loop import OuterLoop
from pulse_rl.loco.messages import CompressionName

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """What makes a loop, and its settings. ``outer``: it takes the common outer ones."""

    make: Callable[..., Ddp | OuterLoop]
    settings: Mapping[str, Any] = field(default_factory=dict)
    outer: bool = True


DDP, DILOCO, PULSE = "DDP", "DiLoCo", "PULSELoCo fp32"
DILOCO_INT8, DILOCO_FP4 = "DiLoCo int8", "DiLoCo FP4"
COMPRESSED = {f"PULSELoCo {name}": name for name in get_args(CompressionName)}
E8M2, E8M0 = "PULSELoCo e8m2", "PULSELoCo e8m0"
PAPER, NO_FEEDBACK, CAST_DIFFERENCE = "no lookahead", "no error feedback", "cast difference"
SPARSELOCO = {f"SparseLoCo {percent}%": percent / 100 for percent in (1, 3, 10)}
DENSE = (DDP, DILOCO, DILOCO_INT8, DILOCO_FP4)
METHODS = {
    DDP: Method(Ddp, outer=False),
    DILOCO: Method(DiLoCo),
    DILOCO_INT8: Method(partial(quantized_diloco, code="int8")),
    DILOCO_FP4: Method(partial(quantized_diloco, code="FP4")),
    # As published: no outer momentum, an outer lr of 1; 1 to 3% of entries are what it is for.
    **{
        name: Method(partial(sparse_loco, fraction=share), outer=False)
        for name, share in SPARSELOCO.items()
    },
    **{name: Method(PulseLoCo, {"compression": form}) for name, form in COMPRESSED.items()},
    PAPER: Method(PulseLoCo, {"lookahead": 0.0, "compression": "fp32"}),
    NO_FEEDBACK: Method(partial(gated, NoFeedbackGate(torch.bfloat16))),
    CAST_DIFFERENCE: Method(partial(gated, CastDifferenceGate(torch.bfloat16))),
}
_TIMEOUT_SECONDS = 900.0


def make_loop(
    name: str,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    *,
    sync_every: int,
    **changed: Any,
) -> Ddp | OuterLoop:
    """The method's context manager, its settings ``changed``. Trainers share few cores, so each
    gets one thread."""
    method = METHODS[name]
    if method.make is Ddp:
        return Ddp(parameters, optimizer, timeout_seconds=_TIMEOUT_SECONDS)
    outer = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM} if method.outer else {}
    settings = {**outer, **method.settings, **changed}
    exchange = GroupExchange(timeout_seconds=_TIMEOUT_SECONDS)
    loop = method.make(parameters, optimizer, sync_every=sync_every, exchange=exchange, **settings)
    assert isinstance(loop, OuterLoop)
    loop.threads = 1
    return loop
