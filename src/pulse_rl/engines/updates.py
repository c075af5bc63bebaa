"""What transfer plugins of RL frameworks share: a weight update is the version that has its number
as metadata."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TypedDict

import torch

from .._util.settings import checked_number
from ..errors import EngineError, InputError, PulseError
from ..events import Event, FallbackUsed, Hint, Metadata, Published
from ..frameworks.torch import host_tensors
from ..frameworks.weights import host_copy, torch_dtype
from ..state.cast import DTypeLike
from ..stream.signing import Signer
from ..sync.publisher import Publisher
from ..sync.subscriber import Subscriber

__all__ = ["NumberedUpdates", "UpdateSettings"]

_log = logging.getLogger(__name__)
_FIRST_POLL, _LONGEST_POLL = 0.05, 1.0  # seconds


class UpdateSettings(TypedDict, total=False):
    """The settings of a framework's checkpoint engine, by name."""

    store: str | None
    stream: str | None
    dtype: DTypeLike | None
    cache: str | None
    trusted_keys: Collection[str] | None
    signing_key: str | None
    timeout_seconds: float


class NumberedUpdates:
    """One process's end of the stream ``stream`` in ``store``: it publishes updates, or waits for
    them.

    ``framework`` and ``settings`` (where its users set these) are words for errors; ``key`` is the
    name of the number in a version's metadata. All others are `UpdateSettings`, as the integrations
    document them. Raises InputError and StoreError.
    """

    def __init__(
        self,
        framework: str,
        settings: str,
        key: str,
        *,
        store: str | None = None,
        stream: str | None = None,
        dtype: DTypeLike | None = "BF16",
        cache: str | None = None,
        trusted_keys: Collection[str] | None = None,
        signing_key: str | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if not (store and stream):
            raise InputError(
                f"{framework}'s transfer by pulse needs a store and a stream",
                hint=f"Set {settings}.store and .stream.",
            )
        if store.startswith("memory:") or not (
            "://" in store or Path(store).expanduser().is_absolute()
        ):
            raise InputError(
                f"{store} is another place in every process of {framework}",
                hint="Use s3://, gs://, az://, or the absolute path of a folder that all nodes "
                "share.",
            )
        self._store, self._stream, self._key, self._settings = store, stream, key, settings
        self._dtype = torch_dtype(dtype)
        self._timeout = checked_number("timeout_seconds", timeout_seconds)
        self._trusted, self._signing_key = trusted_keys, signing_key
        self._publisher: Publisher | None = None
        self._subscriber = Subscriber(
            store, stream=stream, cache=cache, trusted_keys=trusted_keys, on_event=self._hear
        )
        self._subscriber.allow_recreated = True
        self._doubt = ""

    def open_publisher(self) -> None:
        """Makes this process the one that publishes. Raises InputError."""
        if self._trusted and not self._signing_key:
            raise InputError(
                "trusted_keys without a signing_key: the rollout workers would refuse what the "
                "trainer publishes",
                hint=f"Make a key with `pulse keygen`, and set {self._settings}.signing_key to "
                "its file.",
            )
        self._publisher = Publisher(
            self._store,
            stream=self._stream,
            signer=Signer.load(self._signing_key) if self._signing_key else None,
            trusted_keys=self._trusted or (),
            on_event=self._hear,
        )

    @property
    def publishes(self) -> bool:
        """Whether this process does."""
        return self._publisher is not None

    async def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], number: str, metadata: Metadata
    ) -> Published | None:
        """Takes all ``weights``, since to gather one is a collective, and publishes them as the
        update ``number``; None where another process does. Raises what `Publisher.publish` raises;
        the next update then has it all."""
        if self._publisher is None:
            for _ in weights:
                pass
            return None
        state = {name: host_copy(tensor, self._dtype) for name, tensor in weights}
        return await asyncio.to_thread(
            self._publisher.publish, state, metadata={**metadata, self._key: number}
        )

    async def arrive(self, number: str, require_current: Callable[[], None]) -> None:
        """Follows the stream until its newest version is the update ``number``. ``require_current``
        is asked before each poll. Raises EngineError when it does not come in time, and what
        `Subscriber.sync` raises."""
        deadline, pause = time.monotonic() + self._timeout, _FIRST_POLL
        while not await asyncio.to_thread(self._holds, number):
            require_current()
            if time.monotonic() > deadline:
                raise EngineError(
                    "the trainer has published no version for this update within "
                    f"{self._timeout:g} s" + (f"; {self._doubt}" if self._doubt else ""),
                    hint="See the trainer's log. A folder must be on a file system that all "
                    "nodes share.",
                )
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL)
        self._doubt = ""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of all tensors of what was verified, on the accelerator if there is one."""
        # vLLM's adapters share a tensor that is larger than their buffer from the device alone.
        device = torch.accelerator.current_accelerator(check_available=True)
        for name, tensor in host_tensors(self._subscriber.state):
            yield name, tensor if device is None else tensor.to(device)

    def _holds(self, number: str) -> bool:
        try:
            self._subscriber.sync()
        except PulseError as error:
            if not error.retryable:
                raise
            self._doubt = str(error)
            return False
        found = self._subscriber
        return found.version is not None and found.manifest.metadata.get(self._key) == number

    def _hear(self, event: Event) -> None:
        if isinstance(event, Hint):
            _log.warning("stream %s: %s. %s", event.stream, event.reason, event.hint)
        elif isinstance(event, FallbackUsed):
            self._doubt = f"{event.link}: {event.reason}"
