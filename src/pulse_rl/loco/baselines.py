"""Baselines for PULSELoCo in the same loop: DDP, DiLoCo, top-k, and two ablations."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

from ..errors import InputError, NonFinite
from .exchange import Exchange
from .gate import Floats, Positions
from .outer import OuterLoop
from .parameters import FlatBlock, Parameters, parts
from .pulseloco import PulseLoCo
from .rounds import Received


class DiLoCo(OuterLoop):
    """Dense FP32 pseudo-gradients, summed by an all-reduce (DiLoCo, arXiv 2311.08105). Same settings as `OuterLoop`."""

    def _outer_round(self, exchange: Exchange) -> Received:
        with self._phase("gate"):
            total = np.empty_like(self.theta_flat)
            for block in self.parameters.blocks:
                out, start = block.of(total), self.parameters.as_written(block, block.of(self.theta_flat))
                for part, segment in parts(block):
                    np.subtract(start[part], self.parameters.now(segment), out=out[part])
        with self._phase("exchange"):
            exchange.all_reduce(total)
        # The sum is the same on all trainers, so all of them raise this, and before theta changes.
        if name := self.parameters.first_non_finite(total):
            raise NonFinite(f"the sum of the pseudo-gradients of {name!r} is not finite")

        def apply() -> int:
            self._each_block(lambda block: self._update(block, block.of(total), exchange.size))
            self._start_steps()
            return self.parameters.count

        return Received(self.parameters.count, total.nbytes, apply)


class _AsPublished(PulseLoCo):
    """Without a lookahead, unless one is given."""

    def __init__(self, *args: Any, lookahead: float | Literal["auto"] = 0.0, **settings: Any) -> None:
        super().__init__(*args, lookahead=lookahead, **settings)


class TopK(_AsPublished):
    """The entries of largest magnitude in each block, with error feedback (as in SparseLoCo), on PULSELoCo's wire.

    ``fraction``: entries sent / parameters, above 0 and at most 1.
    """

    def __init__(self, *args: Any, fraction: float, **settings: Any) -> None:
        if not 0 < fraction <= 1:
            raise InputError(f"fraction is {fraction}, it must be above 0 and at most 1")
        self.fraction = fraction
        super().__init__(*args, **settings)

    def _select(self, block: FlatBlock, residual: Floats, s: Floats) -> Positions | None:
        if super()._select(block, residual, s) is None:
            return None
        kept = max(1, round(self.fraction * len(s)))
        largest = np.argpartition(np.abs(s), len(s) - kept)[len(s) - kept :]
        return np.sort(largest).astype(np.uint32)

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "fraction": self.fraction}


class WithoutFeedback(_AsPublished):
    """An ablation: what the gate holds back is dropped, not carried over to the next round (no error feedback)."""

    def _select(self, block: FlatBlock, residual: Floats, s: Floats) -> Positions | None:
        return super()._select(block, np.zeros_like(residual), s)


class CastDifference(_AsPublished):
    """An ablation that failed in the paper: sends ``cast(theta) - cast(theta - s)`` instead of ``s``."""

    def _values(self, theta: Floats, s: Floats) -> Floats:
        before, after = (torch.from_numpy(x).to(self.gate_dtype).float() for x in (theta, theta - s))
        return (before - after).numpy()

    def _remainder(self, s: Floats, sent: Floats) -> Floats:
        return np.zeros_like(s)


class Ddp:
    """Data parallelism: the mean of the FP32 gradients before every step of ``inner_optimizer``, which trains
    ``model``.

    A context manager like `OuterLoop`, with the same ``group`` and ``timeout_seconds``.

    A parameter without a gradient on a trainer counts as having a zero gradient there. ``payload_bytes`` counts the
    gradients so far, ``sent_bytes`` everything that left this process. Raises TrainerLost and InputError.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.parameters = Parameters(model, inner_optimizer)
        self.sent_bytes = 0
        self.payload_bytes = 0
        self._optimizer, self._group, self._timeout_seconds = inner_optimizer, group, timeout_seconds
        self._exchange: Exchange | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        if self._hook is None:
            exchange = Exchange(self._group, timeout_seconds=self._timeout_seconds)
            try:
                weights = self.parameters.read()
                exchange.broadcast(weights, 0)
                self.parameters.write(weights)
            except BaseException:
                exchange.close()
                raise
            self._exchange = exchange
            self._hook = self._optimizer.register_step_pre_hook(lambda *_: self._average())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hook and leaves the group; the model stays as it is."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    @torch.no_grad()
    def _average(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        gradients = np.zeros(self.parameters.count, np.float32)
        views = self.parameters.views(gradients)
        for name, p in self.parameters.tensors.items():
            if p.grad is not None:
                torch.from_numpy(views[name]).copy_(p.grad)
        before = exchange.sent_bytes
        exchange.all_reduce(gradients)
        self.sent_bytes += exchange.sent_bytes - before
        self.payload_bytes += gradients.nbytes
        gradients /= np.float32(exchange.size)
        for name, p in self.parameters.tensors.items():
            mean = torch.from_numpy(views[name]).to(p.dtype).to(p.device)
            p.grad = mean.reshape(p.shape).clone()
