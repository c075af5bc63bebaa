"""Measures the sparsity of a live run from a hook on the optimizer's step; needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._util.serial import Closing
from .._util.settings import counted
from .._util.threads import ordered_map
from ..errors import InputError, UnsupportedTensor
from ..state.bits import UIntArray
from ..state.cast import COMPUTE_DTYPES
from ..state.tensors import DType, State, TensorSpec
from .tally import STEP_SECONDS, BlockRecord, Tally, study_dict


class SparsityMeter(Closing):
    """Takes a state after every ``every``-th optimizer step and compares it, bitwise after the cast
    to ``dtype``, with the states ``ks`` before; the first state is taken when the meter is created.
    ::

        with SparsityMeter(model) as meter:
            train(model)
        print(meter.rows())

    ``target`` is a model or an optimizer. Given a model, its parameters are the state, frozen ones
    too, and the steps of the first optimizer that steps any of them are counted. Given an
    optimizer, the parameters in its groups are the state: FP32 masters, or the trained part of a
    model. Floats wider than ``dtype`` are cast to it, other tensors compared as they are. With
    ``every=4`` and four updates per rollout batch, k = 1 is from one published version to the next.

    Memory: on the device one block of 4 Mi elements at a time. On the host one copy of the cast
    weights, and for each of the ``max(ks)`` states before it 6 bytes per changed BF16 weight, or a
    copy if that is less: at most ``max(ks) + 1`` copies, `memory_bytes` now; plus some hundred
    bytes per state.

    Raises InputError for invalid arguments and UnsupportedTensor for sharded or fake parameters.
    """

    def __init__(
        self,
        target: torch.nn.Module | torch.optim.Optimizer,
        *,
        dtype: torch.dtype = torch.bfloat16,
        ks: Sequence[int] = (1, 8, 32),
        every: int = 1,
    ) -> None:
        if not isinstance(dtype, torch.dtype) or _dtype_of(dtype).name not in COMPUTE_DTYPES:
            raise InputError(
                f"{dtype} is not a compute dtype",
                hint=f"Give the torch dtype of one of: {', '.join(COMPUTE_DTYPES)}.",
            )
        if not ks or min(ks) < 1 or every < 1:
            raise InputError("ks and every must be 1 or more")
        self._live = _LiveState(_parameters(target), dtype)
        self._tally = Tally(self._live.specs, sorted(set(ks)))
        self._records = [BlockRecord(block, self._tally.ks) for block in self._tally.blocks]
        self._every = every
        self._steps = 0
        self._coded = 0
        self._states: list[str] = []
        self._gradients: list[float | None] = []
        self._shares: list[float] = []
        self._optimizer = target if isinstance(target, torch.optim.Optimizer) else None
        self._record_state()
        if self._optimizer is not None:
            self._hook = self._optimizer.register_step_post_hook(self._after_step)
        else:
            self._hook = register_optimizer_step_post_hook(self._after_step)

    @property
    def memory_bytes(self) -> int:
        """Host memory used by the kept states."""
        return sum(record.nbytes for record in self._records)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `to_dict`, one per k with enough states."""
        rows: list[dict[str, Any]] = self.to_dict()["rows"]
        return rows

    def to_dict(self, *, step_seconds: float = STEP_SECONDS) -> dict[str, Any]:
        """The measurements so far, as `pulse_rl.study` describes them; bandwidths assume
        ``step_seconds`` of compute between syncs.

        Each call builds the patches from the states k before to the newest one. So bytes
        describe the states at the time of the call; sparsity covers all states.
        """
        if self._coded < len(self._states):
            for record in self._records:
                self._tally.add_coded_blocks(record.code_newest())
            self._coded = len(self._states)
        return study_dict(
            self._tally,
            source="live",
            states=self._states,
            step_seconds=step_seconds,
            gradients=self._gradients,
        )

    def close(self) -> None:
        """Stops measuring; the results stay available."""
        self._hook.remove()

    def __repr__(self) -> str:
        tensors, states = len(self._live.specs), len(self._states)
        return f"<SparsityMeter of {counted(tensors, 'tensor')}: {counted(states, 'state')}>"

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._optimizer is None and self._live.is_trained_by(optimizer):
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._steps += 1
        share = self._live.gradient_density()
        if share is not None:
            self._shares.append(share)
        if self._steps % self._every == 0:
            self._record_state()

    def _record_state(self) -> None:
        def add(record: BlockRecord) -> None:
            record.add(record.block.read(self._live))

        for record, _ in zip(self._records, ordered_map(add, self._records), strict=True):
            self._tally.add(record)
        self._tally.finish_pairs()
        self._states.append(f"step {self._steps}")
        self._gradients.append(sum(self._shares) / len(self._shares) if self._shares else None)
        self._shares = []


class _LiveState(State):
    """Parameters after the cast, as they are when they are read."""

    def __init__(self, parameters: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._cast = {
            name: dtype if p.is_floating_point() and p.dtype.itemsize > dtype.itemsize else p.dtype
            for name, p in parameters.items()
        }
        super().__init__(
            tuple(_spec(name, p, self._cast[name]) for name, p in parameters.items()), {}
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> UIntArray:
        part = self._parameters[name].detach().reshape(-1)[start:stop].to(self._cast[name])
        raw: UIntArray = part.view(torch.uint8).cpu().numpy()
        return raw.view(self.spec(name).dtype.uint)

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(p) for p in self._parameters.values()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def gradient_density(self) -> float | None:
        """Non-zero entries of all gradients / their entries; None without gradients."""
        found = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not found:
            return None
        nonzero = sum(
            int((g.coalesce().values() if g.is_sparse else g).count_nonzero()) for g in found
        )
        return nonzero / max(sum(g.numel() for g in found), 1)


def _parameters(target: torch.nn.Module | torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters by name, tied ones once; those of an optimizer without names are called by group
    and place."""
    if isinstance(target, torch.nn.Module):
        found: dict[str, torch.Tensor] = dict(target.named_parameters())
    elif isinstance(target, torch.optim.Optimizer):
        found = {}
        for g, group in enumerate(target.param_groups):
            names = group.get("param_names") or [
                f"group{g}.{i}" for i in range(len(group["params"]))
            ]
            found |= dict(zip(names, group["params"], strict=True))
    else:
        raise InputError(f"{type(target).__name__} is neither a torch module nor an optimizer")
    if not any(p.numel() for p in found.values()):
        raise InputError("there are no parameters to measure")
    return found


def _spec(name: str, parameter: torch.Tensor, dtype: torch.dtype) -> TensorSpec:
    if hasattr(parameter, "full_tensor") or parameter.is_meta:
        raise UnsupportedTensor(
            f"parameter {name!r} is a {type(parameter).__name__} without plain storage"
        )
    return TensorSpec(name, _dtype_of(dtype), tuple(parameter.shape))


def _dtype_of(dtype: torch.dtype) -> DType:
    return State.of({"w": torch.empty(0, dtype=dtype)}).spec("w").dtype
