"""NeMo-RL: a checkpoint engine, by which a refit reaches the rollout workers through a stream.

NeMo-RL imports this module where ``policy.generation.refit_transport`` names it.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Unpack

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from ..engines.updates import NumberedUpdates, UpdateSettings

__all__ = ["PulseEngine"]

_RUN = "pulse_run"


class PulseEngine(CheckpointEngine):
    """Makes each refit of NeMo-RL a version of a stream, which every rollout worker syncs to and
    verifies.

    NeMo-RL makes one in each process, from ``policy.generation.refit_cfg`` under this class's path.
    A refit is found by the run's number, which the first policy rank has drawn, and its own; so one
    of a restarted trainer is not mistaken for another.

    Args:
        bucket_size: NeMo-RL's own: the most bytes that a batch for vLLM has, or one tensor.
        release_after_refit: NeMo-RL's own; not used.
        settings: ``store``: the address of a store that all nodes reach, a folder by its absolute
            path. ``stream``: its name, one for each run. ``dtype``: the compute dtype of the
            rollout ("BF16", "F16"), to which wider floats are cast; None leaves them as they are.
            ``cache``, ``trusted_keys``: as for `Subscriber`. ``signing_key``: the file of the
            trainer's private key (`Signer.load`). ``timeout_seconds``: how long a rollout worker
            waits for the trainer's version.

    Raises:
        InputError: A setting makes no sense.
        StoreError: The store cannot be opened.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        release_after_refit: bool = False,
        **settings: Unpack[UpdateSettings],
    ) -> None:
        self._bucket_size = bucket_size
        self._updates = NumberedUpdates(
            "NeMo-RL",
            "policy.generation.refit_cfg['pulse_rl.frameworks.nemo_rl:PulseEngine']",
            "nemo_rl_refit",
            **settings,
        )
        self._run = ""
        self._refits = 0

    # -- what NeMo-RL calls once, or before each refit with ``release_after_refit``

    def prepare(self) -> dict[str, str]:
        """A number for the run, of which that of the first policy rank counts."""
        return {_RUN: uuid.uuid4().hex}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Make the policy's first rank the one that publishes.

        Args:
            worker_rank: 0 for the first one.
            train_world_size: How many policy ranks there are.
            rollout_world_size: How many rollout ranks there are.
            metadata: What `prepare` has returned on the policy's ranks, and then on the rollout's.
        """
        if worker_rank == 0 and not self._updates.publishes:
            self._updates.open_publisher()
        self._begin(metadata)

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Take the run's number. All rollout ranks are alike.

        Args:
            rollout_rank: Not needed.
            train_world_size: As for `init_policy_process_group`.
            rollout_world_size: As for `init_policy_process_group`.
            metadata: As for `init_policy_process_group`.
        """
        self._begin(metadata)

    def finalize(self) -> None:
        """Nothing: the host state stays for the next refit."""

    def _begin(self, metadata: list[Any]) -> None:
        self._run, self._refits = metadata[0][_RUN], 0

    def _next(self) -> str:
        """The number of the refit that begins. NeMo-RL calls all ranks for each one, so that all
        count alike."""
        self._refits += 1
        return f"{self._run}-{self._refits}"

    # -- each refit

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take the weights on all policy ranks, since to gather one is a collective, and publish
        them on the first.

        Args:
            weights: Pairs of name and tensor.

        Raises:
            PulseError: Whatever `Publisher.publish` raises; the next refit then has it all.
        """
        number = self._next()
        await self._updates.publish(weights, number, {"refit": self._refits})

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """Yield all tensors of this refit's version in batches, whole: copies of what was verified,
        on the accelerator if there is one.

        Raises:
            EngineError: No such version comes within ``timeout_seconds``.
            PulseError: Whatever `Subscriber.sync` raises.
        """
        await self._updates.arrive(self._next(), lambda: None)
        batch: list[tuple[str, torch.Tensor]] = []
        room = self._bucket_size
        for name, tensor in self._updates.tensors():
            if batch and tensor.nbytes > room:
                yield batch
                batch, room = [], self._bucket_size
            batch.append((name, tensor))
            room -= tensor.nbytes
        if batch:
            yield batch
