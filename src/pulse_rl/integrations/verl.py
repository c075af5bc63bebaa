"""verl: the checkpoint engine "pulse", by which the actor's weights reach the rollout workers through a stream.

verl imports this module where ``rollout.checkpoint_engine.custom_backend_module`` names it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from .._util.settings import checked_number
from ..errors import EngineError, InputError, PulseError
from ..events import Event, FallbackUsed, Hint, Metadata
from ..stream.signing import Signer
from ..sync.publisher import Publisher
from ..sync.subscriber import Subscriber
from .torch import host_tensors
from .weights import host_copy, torch_dtype

__all__ = ["PulseCheckpointEngine"]

_log = logging.getLogger(__name__)
_SYNC = "verl_sync"
_FIRST_POLL, _LONGEST_POLL = 0.05, 1.0  # seconds


@CheckpointEngineRegistry.register("pulse")
class PulseCheckpointEngine(CheckpointEngine):
    """Makes each weight update of verl a version of a stream, which every rollout worker syncs to and verifies.

    verl makes one in each process, from ``checkpoint_engine.engine_kwargs.pulse``; ``bucket_size`` (bytes, unused) and
    ``is_master`` (the actor's first rank, which publishes) are its own. ``store``: the address of a store that all
    nodes reach, a folder by its absolute path. ``stream``: its name, one for each run. ``dtype``: the compute dtype of
    the rollout ("BF16", "F16"); wider floats are cast to it, None leaves them as they are. ``cache``,
    ``trusted_keys``: as for `Subscriber`. ``signing_key``: the file of the actor's private key (`Signer.load`).
    ``timeout_seconds``: how long a rollout worker waits for the actor's version.

    The version of an update is found by a number that the manager hands to all ranks, so neither a retried update nor
    one of a restarted actor is mistaken for another. A worker that joins late or restarts fetches what it lacks. The
    metadata of a version has verl's ``global_steps``. Errors carry their hint as a note, which Ray prints. Raises
    InputError and StoreError.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        store: str | None = None,
        stream: str | None = None,
        dtype: str | None = "BF16",
        cache: str | None = None,
        trusted_keys: Collection[str] | None = None,
        signing_key: str | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if not (store and stream):
            raise InputError(
                "the checkpoint engine pulse needs a store and a stream",
                hint="Set checkpoint_engine.engine_kwargs.pulse.store and .stream.",
            )
        self._store, self._stream = _shared(store), stream
        self._dtype = torch_dtype(dtype)
        self._timeout = checked_number("timeout_seconds", timeout_seconds)
        self._publisher = self._new_publisher(signing_key, trusted_keys) if is_master else None
        self._subscriber = Subscriber(
            self._store,
            stream=stream,
            cache=cache,
            trusted_keys=trusted_keys,
            allow_recreated=True,
            on_event=self._hear,
        )
        self._sync = ""
        self._turn = asyncio.Lock()
        self._doubt = ""

    # -- what verl calls before and after each update

    def prepare(self) -> dict[str, str]:
        """The number of the next update, on the actor's first rank."""
        return {"sync": uuid.uuid4().hex} if self._publisher else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, str]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Hands the number of the update, from the actor's first rank, to all ranks.

        There are ``actor_wg_world_size`` and ``rollout_world_size`` of them; ``metadata`` is what `prepare` has
        returned on each, the actor's first.
        """
        sync = metadata[0]["sync"]
        return {"sync": [sync] * actor_wg_world_size}, {"sync": [sync] * rollout_world_size}

    def init_process_group(self, sync: str) -> None:
        """The update of number ``sync`` begins; a worker that still waits for another one gives up."""
        self._sync = sync

    def finalize(self) -> None:
        """Nothing: the host state stays for the next update."""

    # -- the actor

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Takes ``weights`` on all ranks, since to gather one is a collective, and publishes them on the first.

        Returns the metrics of the update on that rank. ``global_steps`` becomes metadata. Raises what
        `Publisher.publish` raises; the next update then has it all.
        """
        if self._publisher is None:
            for _ in weights:
                pass
            return {}
        state = {name: host_copy(tensor, self._dtype) for name, tensor in weights}
        metadata: Metadata = {_SYNC: self._sync} | ({} if global_steps is None else {"global_steps": global_steps})
        published = await asyncio.to_thread(self._publisher.publish, state, metadata=metadata)
        return {
            "pulse/version": published.version,
            "pulse/density": published.density,
            "pulse/bytes": published.patch_bytes or published.anchor_bytes,
            "pulse/publish_seconds": published.seconds,
        }

    def _new_publisher(self, signing_key: str | None, trusted_keys: Collection[str] | None) -> Publisher:
        if trusted_keys and not signing_key:
            raise InputError(
                "trusted_keys without a signing_key: the rollout workers would refuse what the actor publishes",
                hint="Make a key with `pulse keygen`, and set engine_kwargs.pulse.signing_key to its file.",
            )
        return Publisher(
            self._store,
            stream=self._stream,
            signer=Signer.load(signing_key) if signing_key else None,
            trusted_keys=trusted_keys or (),
            on_event=self._hear,
        )

    # -- a rollout worker

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields all tensors of this update's version, whole: copies of what was verified, on the accelerator if there
        is one.

        ``global_steps`` is not needed to find it. Raises EngineError when no such version comes within
        ``timeout_seconds`` or another update begins, and what `Subscriber.sync` raises.
        """
        sync = self._sync
        async with self._turn:
            await self._arrive(sync)
        # vLLM's adapter shares a tensor that is larger than its buffer from the device alone.
        device = torch.accelerator.current_accelerator(check_available=True)
        for name, tensor in host_tensors(self._subscriber.state):
            self._require_current(sync)
            yield name, tensor if device is None else tensor.to(device)

    async def _arrive(self, sync: str) -> None:
        """Follows the stream until its newest version is that of ``sync``."""
        deadline, pause = time.monotonic() + self._timeout, _FIRST_POLL
        while not await asyncio.to_thread(self._holds, sync):
            self._require_current(sync)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the actor has published no version for this update within {self._timeout:g} s"
                    + (f"; {self._doubt}" if self._doubt else ""),
                    hint="See the actor's log. A folder must be on a file system that all nodes share.",
                )
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL)
        self._doubt = ""

    def _holds(self, sync: str) -> bool:
        try:
            self._subscriber.sync()
        except PulseError as error:
            if not error.retryable:
                raise
            self._doubt = str(error)
            return False
        return self._subscriber.version is not None and self._subscriber.manifest.metadata.get(_SYNC) == sync

    def _require_current(self, sync: str) -> None:
        if sync != self._sync:
            raise EngineError("another weight update began before this one had ended", hint="See the actor's log.")

    def _hear(self, event: Event) -> None:
        if isinstance(event, Hint):
            _log.warning("stream %s: %s. %s", event.stream, event.reason, event.hint)
        elif isinstance(event, FallbackUsed):
            self._doubt = f"{event.link}: {event.reason}"


def _shared(store: str) -> str:
    """``store`` itself; raises InputError for an address that each process reads in its own way."""
    if store.startswith("memory:") or not ("://" in store or Path(store).expanduser().is_absolute()):
        raise InputError(
            f"{store} is another place in every process of verl",
            hint="Use s3://, gs://, az://, or the absolute path of a folder that all nodes share.",
        )
    return store
