"""The weight transfer of TRL's AsyncGRPOTrainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...events import Listener, Published
from ...state.wrappers import unwrapped
from ..vllm import EngineSync
from ..weights import cast_to_host, torch_dtype
from .link import Link

__all__ = ["PulseWeightTransfer"]


class PulseWeightTransfer:
    """Brings each policy to a vLLM server through a stream: ``AsyncGRPOTrainer(..., weight_transfer=
    PulseWeightTransfer("http://localhost:8000", "s3://bucket/run", "policy"))``. AsyncDistillationTrainer has the
    same protocol.

    ``server_url`` is that of the trainer's ``vllm_server_base_url``; the server runs with the backend ``pulse``
    (docs/vllm.md). ``store``, an address that the server opens as well, ``stream``, ``on_event`` and all other
    keywords are those of `Publisher`; what ``signer`` signs, the server trusts. ``engine`` are keywords of
    `pulse_rl.integrations.vllm.connect` (``in_flight``, ``audit_every`` …).

    TRL waits until the weights are live, as it does with its own transfer. The server generates while they are cast to
    its dtype, published, fetched and verified, and is paused for the write of what changed. Every version is tagged
    (``weight_version``), and a server that was restarted is brought back to the newest one while TRL trains. The
    metadata of a version are its ``sync``, 1, 2 …

    While the store or the server is away, the training waits and says so; after ``retry_seconds`` the error is raised
    and ends it, since rollouts of old weights would pass for new ones. All other errors are raised at once:
    PublisherConflict, EngineError, StateMismatch. Raises InputError.
    """

    def __init__(
        self,
        server_url: str,
        store: str,
        stream: str,
        *,
        retry_seconds: float = 300.0,
        on_event: Listener | None = None,
        engine: Mapping[str, Any] | None = None,
        **publisher: Any,
    ) -> None:
        self._link = Link(
            server_url,
            store,
            stream,
            retry_seconds=retry_seconds,
            on_event=on_event,
            engine=engine,
            publisher=publisher,
        )
        self._syncs = 0

    @property
    def published(self) -> Published | None:
        """The newest version that was committed."""
        return self._link.published

    @property
    def synced(self) -> EngineSync | None:
        """The newest move of the server, with the seconds that it was paused."""
        return self._link.synced

    # -- what the trainer calls, on the first rank

    def init_weight_transfer(self) -> None:
        """Opens the store, and waits for the server."""
        self._link.open()

    def pause(self) -> None:
        """Nothing: TRL calls it before the upload. `send_weights` pauses the server when all is there."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publishes all pairs of name and weights of ``iterator``, and returns when they are live. The iterator is
        consumed first, since each of its steps may be a collective."""
        target = torch_dtype(self._link.dtype())
        weights = {name: cast_to_host(tensor, target) for name, tensor in iterator}
        self._syncs += 1
        self._link.push(unwrapped(weights), {"sync": self._syncs})

    def resume(self) -> None:
        """Nothing: `send_weights` has resumed the server."""

    def destroy(self) -> None:
        """Ends the following. The server keeps its weights."""
        self._link.close()
