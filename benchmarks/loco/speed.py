"""GB/s of parameters (4 bytes each) on one core: gate, encode, decode and outer step, on a real pseudo-gradient.

One trainer alone trains the pretrained weights for some rounds; the kernels then work on its last round's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.library import best_of
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, SYNC_EVERY, TRAINERS
from benchmarks.loco.tasks import PRETRAINED, TASKS, ensure
from pulse_rl._native import add_entries, sparse_outer_step
from pulse_rl.loco import PulseLoCo
from pulse_rl.loco.gate import open_entries, rounding_of
from pulse_rl.loco.outer import OuterState
from pulse_rl.loco.parameters import BLOCK_ELEMENTS, FlatBlock, Floats, Positions
from pulse_rl.loco.wire import Entries, Wire

LR, WARM_UP, ROUNDS, REPEATS = 1e-6, 20, 6, 3
_ROUNDING = rounding_of(torch.bfloat16)


@dataclass(frozen=True)
class Speeds:
    """GB/s of parameters by phase. Decoding and adding are of the messages of the three other trainers together; the
    outer step gives the model its next start, too."""

    density: float
    gate: float
    encode_fp32: float
    encode_bf16: float
    decode_fp32: float
    decode_bf16: float
    outer_step: float


@dataclass(frozen=True)
class Block:
    """What the kernels see of one block: flat FP32 arrays of one length."""

    theta: Floats
    momentum: Floats
    residual: Floats
    now: Floats
    lookahead: float


def record_blocks(loop: PulseLoCo) -> dict[int, Block]:
    """The blocks of the last round as they were before it, by number."""
    kept: dict[int, Block] = {}
    gate = loop.reduction.gate
    select = gate.select

    def record(
        state: OuterState, block: FlatBlock, residual: Floats, s: Floats, lookahead: np.float32
    ) -> Positions | None:
        now = np.empty_like(s)
        state.parameters.read_block(block, now)
        theta, momentum = (block.of(flat).copy() for flat in (state.theta, state.momentum))
        kept[block.number] = Block(theta, momentum, residual.copy(), now, float(lookahead))
        return select(state, block, residual, s, lookahead)

    gate.select = record  # type: ignore[method-assign]
    return kept


def measure(rounds: int = ROUNDS) -> Speeds:
    """Trains, then times; best of some repetitions of all blocks in turn."""
    torch.set_num_threads(1)
    ensure(PRETRAINED)
    task = TASKS[PRETRAINED](0, 0)
    optimizer = torch.optim.AdamW(task.masters.values(), lr=LR, weight_decay=0.0)
    loop = PulseLoCo(task.masters, optimizer, sync_every=SYNC_EVERY)
    loop.threads = 1
    blocks = record_blocks(loop)
    with loop:
        for step in range(rounds * SYNC_EVERY):
            task.gradient(step)
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, (step + 1) / WARM_UP)
            optimizer.step()
            task.cast()
    return time_kernels(list(blocks.values()))


def time_kernels(blocks: Sequence[Block]) -> Speeds:
    """One thread, best of some repetitions, all blocks in turn."""
    count = sum(len(block.theta) for block in blocks)
    s = [np.empty_like(block.theta) for block in blocks]

    def speed(work: Callable[[], Any]) -> float:
        return 4e-9 * count / best_of(REPEATS, work)[0]

    def gate() -> list[Positions]:
        opened = []
        for block, out in zip(blocks, s, strict=True):
            positions = open_entries(block.theta, block.now, block.residual, out, _ROUNDING, lookahead=block.lookahead)
            assert positions is not None
            opened.append(positions)
        return opened

    opened, speeds = gate(), {"gate": speed(gate)}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        wire = Wire(dtype)
        sent = [(positions, wire.round(out[positions])) for positions, out in zip(opened, s, strict=True)]
        coder = _Coder(blocks, wire)
        payloads = coder.encode(sent)
        speeds[f"encode_{name}"] = speed(partial(coder.encode, sent))
        speeds[f"decode_{name}"] = speed(partial(coder.decode, payloads))

    def outer() -> None:
        for block, residual, entries in zip(blocks, s, sent, strict=True):
            arrays, outer = (block.theta, block.momentum, residual), (TRAINERS, OUTER_LR, OUTER_MOMENTUM)
            counts = np.zeros(1, np.int64)
            summands = [entries] * TRAINERS
            classes = _ROUNDING, (0, 0), np.empty(len(residual), np.uint8)
            sparse_outer_step(
                *arrays, block.lookahead, block.now, 0, summands, *outer, 0, BLOCK_ELEMENTS, counts, *classes
            )

    # Last: it changes theta.
    speeds["outer_step"] = speed(outer)
    return Speeds(density=sum(map(len, opened)) / count, **speeds)


@dataclass(frozen=True)
class _Coder:
    blocks: Sequence[Block]
    wire: Wire

    def encode(self, sent: list[Entries]) -> list[bytes]:
        return [
            self.wire.encode(block.theta, block.momentum, _ROUNDING, entries)
            for block, entries in zip(self.blocks, sent, strict=True)
        ]

    def decode(self, payloads: list[bytes]) -> None:
        for block, payload in zip(self.blocks, payloads, strict=True):
            total = np.zeros_like(block.theta)
            others = [memoryview(payload)] * (TRAINERS - 1)
            for entries in self.wire.decode(others, block.theta, block.momentum, _ROUNDING):
                add_entries(total, *entries)


def text(speeds: Speeds) -> str:
    """The figures as lines."""
    return "\n".join(
        [
            f"PULSELoCo on one core, a real pseudo-gradient (lr {LR:g}, density {speeds.density:.2%}):",
            f"GB/s of parameters at 4 bytes each. decode: the messages of the {TRAINERS - 1} others, summed.",
            f"gate {speeds.gate:.2f}, encode {speeds.encode_fp32:.2f} (BF16 {speeds.encode_bf16:.2f}), "
            f"decode {speeds.decode_fp32:.2f} (BF16 {speeds.decode_bf16:.2f}), outer step {speeds.outer_step:.2f}",
        ]
    )
