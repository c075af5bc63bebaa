"""The methods by name, each on the same parameters, with the same inner optimizer and outer settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from benchmarks.loco.baselines import CastDifferenceGate, Ddp, NoFeedbackGate, TopKGate, gated, sparse_loco
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, SYNC_EVERY, Job
from pulse_rl.loco import DiLoCo, Exchange, PulseLoCo
from pulse_rl.loco.loop import OuterLoop
from pulse_rl.loco.parameters import Positions

if TYPE_CHECKING:
    from benchmarks.loco.torchft_diloco import TorchftDiLoCo

DDP, DILOCO, PULSE, PULSE_BF16 = "DDP", "DiLoCo", "PULSELoCo FP32", "PULSELoCo BF16"
PAPER, PAPER_BF16, AHEAD_3 = "no lookahead", "no lookahead BF16", "lookahead 3"
GATED_SUMS, GATED_SUMS_BF16 = "gated sums", "gated sums BF16"
GATE_2, GATE_2_SUMS, GATE_2_SUMS_BF16 = "gate scale 2", "gate scale 2, gated sums", "gate scale 2, gated sums BF16"
NO_FEEDBACK, TOP_K, CAST_DIFFERENCE = "no error feedback", "top-k", "cast difference"
SPARSELOCO, SPARSELOCO_10 = "SparseLoCo 3%", "SparseLoCo 10%"
TORCHFT = "torchft's DiLoCo"
"""Not among `METHODS`: it has an environment of its own (`benchmarks.loco.torchft_diloco`)."""
DENSE = (DDP, DILOCO)
METHODS = (
    *(DDP, DILOCO, PULSE, PULSE_BF16, PAPER, PAPER_BF16, AHEAD_3, GATED_SUMS),
    *(NO_FEEDBACK, TOP_K, CAST_DIFFERENCE, SPARSELOCO, SPARSELOCO_10),
)

_OUTER: dict[str, Callable[..., OuterLoop]] = {
    DILOCO: DiLoCo,
    PULSE: PulseLoCo,
    PULSE_BF16: partial(PulseLoCo, group=Exchange(wire_dtype=torch.bfloat16)),
    PAPER: partial(PulseLoCo, lookahead=0.0),
    PAPER_BF16: partial(PulseLoCo, lookahead=0.0, group=Exchange(wire_dtype=torch.bfloat16)),
    AHEAD_3: partial(PulseLoCo, lookahead=3.0),
    GATED_SUMS: partial(PulseLoCo, group=Exchange(gate_sums=True)),
    GATED_SUMS_BF16: partial(PulseLoCo, group=Exchange(gate_sums=True, wire_dtype=torch.bfloat16)),
    GATE_2: partial(PulseLoCo, gate_scale=2.0),
    GATE_2_SUMS: partial(PulseLoCo, gate_scale=2.0, group=Exchange(gate_sums=True)),
    GATE_2_SUMS_BF16: partial(PulseLoCo, gate_scale=2.0, group=Exchange(gate_sums=True, wire_dtype=torch.bfloat16)),
    NO_FEEDBACK: partial(gated, NoFeedbackGate(torch.bfloat16, 1.0)),
    CAST_DIFFERENCE: partial(gated, CastDifferenceGate(torch.bfloat16, 1.0)),
    # As published: no outer momentum, an outer lr of 1, and the most of the 1 to 3% of entries that it is for.
    SPARSELOCO: partial(sparse_loco, fraction=0.03),
    SPARSELOCO_10: partial(sparse_loco, fraction=0.1),
}
LOOPS = (*_OUTER, TOP_K)
"""Those of `METHODS` that take rounds."""
_TIMEOUT_SECONDS = 900.0

Parameters = Mapping[str, torch.Tensor]
Loop: TypeAlias = "Ddp | OuterLoop | TorchftDiLoCo"


def make_loop(job: Job, parameters: Parameters, optimizer: torch.optim.Optimizer) -> Loop:
    """The method's context manager. Four trainers share two cores, so each gets one thread."""
    if job.method == DDP:
        return Ddp(parameters, optimizer, timeout_seconds=_TIMEOUT_SECONDS)
    if job.method == TORCHFT:
        from benchmarks.loco.torchft_diloco import TorchftDiLoCo

        return TorchftDiLoCo(parameters, optimizer, timeout_seconds=_TIMEOUT_SECONDS)
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


def record_positions(loop: Loop) -> Callable[[], list[Positions]]:
    """A function that returns the positions that ``loop`` selected in the last round, by block, and forgets them."""
    selected: list[Positions] = []
    if isinstance(loop, PulseLoCo):
        gate = loop.reduction.gate
        select = gate.select

        def record(*arrays: Any) -> Positions | None:
            positions = select(*arrays)
            if positions is not None:
                selected.append(positions)
            return positions

        gate.select = record  # type: ignore[method-assign]

    def take() -> list[Positions]:
        taken = selected.copy()
        selected.clear()
        return taken

    return take


def u32_bytes(blocks: list[Positions]) -> int:
    """The plainest layout: a u32 position and an FP32 value an entry."""
    return sum(8 * len(positions) for positions in blocks)


def gap16_bytes(blocks: list[Positions]) -> int:
    """Positions as u16 gaps, 0xFFFF meaning "as many, and on"; FP32 values."""
    total = 0
    for positions in blocks:
        gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
        total += 6 * len(gaps) + 2 * int((gaps // 0xFFFF).sum())
    return total
