"""The methods by name, each on the same parameters, with the same inner optimizer and outer settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from benchmarks.loco.baselines import CastDifferenceGate, Ddp, NoFeedbackGate, TopKGate, gated, sparse_loco
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, SYNC_EVERY, Job
from pulse_rl.loco import DiLoCo, Exchange, PulseLoCo
from pulse_rl.loco.loop import OuterLoop
from pulse_rl.loco.wire import WireName

DDP, DILOCO, PULSE = "DDP", "DiLoCo", "PULSELoCo FP32"
WIRES = {f"PULSELoCo {name}": name for name in get_args(WireName)}
PAPER, PAPER_BF16, AHEAD_3 = "no lookahead", "no lookahead BF16", "lookahead 3"
GATED_SUMS = "gated sums"
NO_FEEDBACK, TOP_K, CAST_DIFFERENCE = "no error feedback", "top-k", "cast difference"
SPARSELOCO, SPARSELOCO_10 = "SparseLoCo 3%", "SparseLoCo 10%"
DENSE = (DDP, DILOCO)
METHODS = (
    *(DDP, DILOCO, *WIRES, PAPER, PAPER_BF16, AHEAD_3, GATED_SUMS),
    *(NO_FEEDBACK, TOP_K, CAST_DIFFERENCE, SPARSELOCO, SPARSELOCO_10),
)

_OUTER: dict[str, Callable[..., OuterLoop]] = {
    DILOCO: DiLoCo,
    **{method: partial(PulseLoCo, group=Exchange(wire=wire)) for method, wire in WIRES.items()},
    PAPER: partial(PulseLoCo, lookahead=0.0),
    PAPER_BF16: partial(PulseLoCo, lookahead=0.0, group=Exchange(wire="BF16")),
    AHEAD_3: partial(PulseLoCo, lookahead=3.0),
    GATED_SUMS: partial(PulseLoCo, group=Exchange(gate_sums=True)),
    NO_FEEDBACK: partial(gated, NoFeedbackGate(torch.bfloat16, 1.0)),
    CAST_DIFFERENCE: partial(gated, CastDifferenceGate(torch.bfloat16, 1.0)),
    # As published: no outer momentum, an outer lr of 1, and the most of the 1 to 3% of entries that it is for.
    SPARSELOCO: partial(sparse_loco, fraction=0.03),
    SPARSELOCO_10: partial(sparse_loco, fraction=0.1),
}
_TIMEOUT_SECONDS = 900.0

Parameters = Mapping[str, torch.Tensor]


def make_loop(job: Job, parameters: Parameters, optimizer: torch.optim.Optimizer) -> Ddp | OuterLoop:
    """The method's context manager. Four trainers share two cores, so each gets one thread."""
    if job.method == DDP:
        return Ddp(parameters, optimizer, timeout_seconds=_TIMEOUT_SECONDS)
    if job.method == TOP_K:
        assert job.fraction is not None
        make: Callable[..., OuterLoop] = partial(gated, TopKGate(job.fraction))
    else:
        make = _OUTER[job.method]
    outer = (
        {} if job.method in (SPARSELOCO, SPARSELOCO_10) else {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
    )
    given = getattr(make, "keywords", {}).get("group", Exchange())
    loop = make(
        parameters,
        optimizer,
        sync_every=SYNC_EVERY,
        **outer,
        group=replace(given, timeout_seconds=_TIMEOUT_SECONDS),
    )
    loop.threads = 1
    return loop
