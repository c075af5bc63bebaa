"""verl: the checkpoint engine "pulse", by which the actor's weights reach the rollout workers
through a stream.

verl imports this module where ``rollout.checkpoint_engine.custom_backend_module`` names it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Unpack

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ..engines.updates import NumberedUpdates, UpdateSettings
from ..errors import EngineError
from ..events import Metadata

__all__ = ["PulseCheckpointEngine"]


@CheckpointEngineRegistry.register("pulse")
class PulseCheckpointEngine(CheckpointEngine):
    """Makes each weight update of verl a version of a stream, which every rollout worker syncs to
    and verifies.

    verl makes one in each process, from ``checkpoint_engine.engine_kwargs.pulse``. The version of
    an update is found by a number that the manager hands to all ranks, so neither a retried update
    nor one of a restarted actor is mistaken for another. A worker that joins late or restarts
    fetches what it lacks. The metadata of a version has verl's ``global_steps``. Errors carry their
    hint as a note, which Ray prints.

    Args:
        bucket_size: verl's own, in bytes; not used.
        is_master: verl's own: whether this is the actor's first rank, which publishes.
        settings: ``store``: the address of a store that all nodes reach, a folder by its absolute
            path. ``stream``: its name, one for each run. ``dtype``: the compute dtype of the
            rollout ("BF16", "F16"), to which wider floats are cast; None leaves them as they are.
            ``cache``, ``trusted_keys``: as for `Subscriber`. ``signing_key``: the file of the
            actor's private key (`Signer.load`). ``timeout_seconds``: how long a rollout worker
            waits for the actor's version.

    Raises:
        InputError: A setting makes no sense.
        StoreError: The store cannot be opened.
    """

    wire_format = "named_tensors"

    def __init__(
        self, bucket_size: int = 0, is_master: bool = False, **settings: Unpack[UpdateSettings]
    ) -> None:
        self._updates = NumberedUpdates(
            "verl", "checkpoint_engine.engine_kwargs.pulse", "verl_sync", **settings
        )
        if is_master:
            self._updates.open_publisher()
        self._sync = ""
        self._turn = asyncio.Lock()

    # -- what verl calls before and after each update

    def prepare(self) -> dict[str, str]:
        """The number of the next update, on the actor's first rank."""
        return {"sync": uuid.uuid4().hex} if self._updates.publishes else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, str]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Hand the number of the update, from the actor's first rank, to all ranks.

        Args:
            actor_wg_world_size: How many ranks the actor has.
            rollout_world_size: How many ranks the rollout has.
            metadata: What `prepare` has returned on each rank, the actor's first.

        Returns:
            The arguments of `init_process_group` on the actor's ranks, and on the rollout's.
        """
        sync = metadata[0]["sync"]
        return {"sync": [sync] * actor_wg_world_size}, {"sync": [sync] * rollout_world_size}

    def init_process_group(self, sync: str) -> None:
        """The update of number ``sync`` begins; a worker that still waits for another one gives
        up."""
        self._sync = sync

    def finalize(self) -> None:
        """Nothing: the host state stays for the next update."""

    # -- the actor

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Take the weights on all ranks, since to gather one is a collective, and publish them on
        the first.

        Args:
            weights: Pairs of name and tensor.
            global_steps: Becomes metadata of the version.

        Returns:
            The metrics of the update on the first rank, nothing on the others.

        Raises:
            PulseError: Whatever `Publisher.publish` raises; the next update then has it all.
        """
        metadata: Metadata = {} if global_steps is None else {"global_steps": global_steps}
        published = await self._updates.publish(weights, self._sync, metadata)
        if published is None:
            return {}
        return {
            "pulse/version": published.version,
            "pulse/density": published.density,
            "pulse/bytes": published.patch_bytes or published.anchor_bytes,
            "pulse/publish_seconds": published.seconds,
        }

    # -- a rollout worker

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield all tensors of this update's version, whole: copies of what was verified, on the
        accelerator if there is one.

        Args:
            global_steps: verl's own; the version is found without it.

        Raises:
            EngineError: No such version comes within ``timeout_seconds``, or another update begins.
            PulseError: Whatever `Subscriber.sync` raises.
        """
        sync = self._sync
        async with self._turn:
            await self._updates.arrive(sync, lambda: self._require_current(sync))
        for name, tensor in self._updates.tensors():
            self._require_current(sync)
            yield name, tensor

    def _require_current(self, sync: str) -> None:
        if sync != self._sync:
            raise EngineError(
                "another weight update began before this one had ended", hint="See the actor's log."
            )
