"""The weight transfer of TRL's AsyncGRPOTrainer; what it shares with the rollouts of GRPOTrainer: a
stream and the vLLM server that follows it, and what a trainer asks of that server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..._util.retry import retrying
from ..._util.settings import checked_number
from ...engines.handle import EngineSync
from ...engines.rollouts import Weights
from ...engines.transport import Client, Generated
from ...engines.vllm import COMPLETED, EngineHandle, completions, connect
from ...errors import (
    ConcurrentUse,
    EmptyStream,
    EngineError,
    EngineUnavailable,
    InputError,
    PulseError,
)
from ...events import Metadata, Published, checked_listener
from ...state.checkpoint import unwrapped
from ...stream.signing import keys_of
from ...sync.publisher import Publisher
from ..weights import cast_to_host, logged, torch_dtype

__all__ = ["PulseWeightTransfer"]

log = logging.getLogger("pulse_rl.frameworks.trl")
T = TypeVar("T")
_FIRST_WAIT_SECONDS = 0.5
_MAX_WAIT_SECONDS = 10.0
_POLL_SECONDS = 2.0
_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": None}


class ServerLink:
    """The settings of `PulseWeightTransfer` and `pulse_rollout`. Made on every rank; opened and
    used by the first."""

    def __init__(
        self,
        server_url: str,
        store: str,
        stream: str,
        *,
        retry_seconds: float,
        engine: Mapping[str, Any] | None,
        publisher: Mapping[str, Any],
    ) -> None:
        if not isinstance(server_url, str):
            raise InputError(
                f"{server_url!r} is no URL of a server", hint="Give it as http://host:port."
            )
        if not isinstance(store, str):
            raise InputError(
                f"the store must be an address, not a {type(store).__name__}: the server opens "
                "it as well"
            )
        self.stream = stream
        self.published: Published | None = None
        self.synced: EngineSync | None = None
        self._retry_seconds = checked_number("retry_seconds", retry_seconds)
        self._engine = dict(engine or {})
        self.server = VllmServer(server_url, self._engine.get("timeout_seconds", 600.0))
        self._store = (
            store if "://" in store else str(Path(store).absolute())
        )  # the server runs in another folder
        listener = logged(log, checked_listener(publisher.get("on_event")))
        self._settings: dict[str, Any] = {**publisher, "stream": stream, "on_event": listener}
        if keys := keys_of(publisher.get("signer"), publisher.get("trusted_keys")):
            self._engine.setdefault("trusted_keys", keys)
        self._publisher: Publisher | None = None
        self._handle: EngineHandle | None = None
        self._dtype: tuple[str | None] | None = None

    def open(self) -> None:
        """Finds wrong settings before the first step: opens the store, and waits for the server.
        Does nothing if it is open."""
        if self._publisher is None:
            publisher = Publisher(self._store, **self._settings)
            self.patiently(publisher.head)
            self._publisher = publisher
        self.dtype()
        if self._handle is None:
            self._handle = self.patiently(
                lambda: connect(
                    self.server.url, store=self._store, stream=self.stream, **self._engine
                )
            )
            self._handle.follow(on_sync=self._note, poll_seconds=_POLL_SECONDS)

    def dtype(self) -> str | None:
        """The server's compute dtype as `Publisher.publish` takes it, asked for once."""
        if self._dtype is None:
            self._dtype = (self.patiently(self.server.compute_dtype),)
        return self._dtype[0]

    def push(
        self, weights: Mapping[str, torch.Tensor], metadata: Metadata, *, patient: bool = True
    ) -> Weights:
        """Publishes ``weights`` and makes them live. Their version is the tag of outputs from then
        on. The server is paused for the write alone, after the upload and its own fetch. If not
        ``patient``, nothing is repeated."""
        self.open()
        publisher, handle = self._publisher, self._handle
        assert publisher is not None
        assert handle is not None
        done = self.patiently(
            lambda: publisher.publish(weights, metadata=metadata, dtype=self.dtype()), patient
        )
        self.published = done
        self._note(self.patiently(lambda: self._moved(handle), patient))
        moved = self.synced is not None and self.synced.version == done.version
        log.info(
            "stream %s: version %d is live (%d bytes, %.2f%% changed, %.3f s to publish, paused "
            "for %.3f s)",
            self.stream,
            done.version,
            done.patch_bytes or done.anchor_bytes,
            100 * done.density,
            done.seconds,
            self.synced.pause_seconds if self.synced and moved else 0.0,
        )
        return Weights(done.version, done.root)

    def close(self) -> None:
        """Ends following. The server keeps its weights. `open` starts again."""
        if self._handle is not None:
            self._handle.close()
        if self._publisher is not None:
            self._publisher.close()
        self._handle = self._publisher = None

    def patiently(self, call: Callable[[], T], patient: bool = True) -> T:
        """The result of ``call``, which is repeated for ``retry_seconds`` while a store or a server
        is away."""
        seconds = self._retry_seconds if patient else 0.0
        said = ""
        for attempt in retrying(_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS, seconds=seconds):
            try:
                result = call()
            except PulseError as error:
                # Whoever was killed while it drove the engine is forgotten after some seconds.
                passing = error.retryable or isinstance(error, ConcurrentUse)
                left = attempt.left
                if not passing or not left:
                    raise
                if str(error) != said:
                    log.warning(
                        "stream %s: %s; the training waits, for at most %.0f s more. %s",
                        self.stream,
                        error,
                        left,
                        error.hint,
                    )
                    said = str(error)
            else:
                if said:
                    log.warning("stream %s: the training goes on", self.stream)
                return result
        raise AssertionError

    def _moved(self, handle: EngineHandle) -> EngineSync | None:
        try:
            return handle.sync()
        except EmptyStream:
            raise EngineUnavailable(
                f"the server finds no version of {self.stream!r} in {self._store}, where the "
                "trainer has published",
                hint="Both must open the same store: give an address that means the same on both "
                "machines.",
            ) from None

    def _note(self, done: EngineSync | None) -> None:
        if done is not None:
            self.synced = done


class VllmServer:
    """``url``: the server's, without a path. ``timeout_seconds`` holds for each request."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self._client = Client(url, timeout_seconds)
        self.url = self._client.address

    def compute_dtype(self) -> str | None:
        """The dtype of the server's weights as `Publisher.publish` takes it; None for FP32."""
        facts = self._ask("server_info?config_format=json")
        name = str(facts["vllm_config"]["model_config"]["dtype"])
        if name not in _DTYPES:
            raise EngineError(
                f"the server at {self.url} computes in {name}",
                hint="Start it with --dtype bfloat16.",
            )
        return _DTYPES[name]

    def weight_version(self) -> str:
        """The tag of outputs now: a version's number once it was synced."""
        return str(self._ask("weight_info")["weight_version"])

    def engine_version(self) -> str:
        return str(self._ask("version")["version"])

    def model(self) -> str:
        """The name under which the server serves its model."""
        return str(self._ask("v1/models")["data"][0]["id"])

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Generated]:
        """One completion for each of ``prompts``, which are token ids."""
        wanted = {"prompt": [list(prompt) for prompt in prompts], **sampling, **COMPLETED}
        return completions(self._ask("v1/completions", wanted))

    def _ask(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        answer = self._client.get(route) if body is None else self._client.post(route, body)
        if answer.status == 404:
            hint = "Start vLLM 0.28 or later with VLLM_SERVER_DEV_MODE=1 in its environment."
            raise EngineError(f"{self.url} has no route /{route}", hint=hint)
        if answer.status >= 300:
            # A server whose engine dies says 500 first.
            kind = EngineUnavailable if answer.status >= 500 else EngineError
            raise kind(f"{self.url} refused /{route} ({answer.status}): {answer.words}")
        return answer.json()


class PulseWeightTransfer:
    """Brings each policy to a vLLM server through a stream: ``AsyncGRPOTrainer(...,
    weight_transfer= PulseWeightTransfer("http://localhost:8000", "s3://bucket/run", "policy"))``.
    AsyncDistillationTrainer has the same protocol.

    ``server_url`` is that of the trainer's ``vllm_server_base_url``; the server runs with the
    backend ``pulse`` (docs/vllm.md). ``store``, an address that the server opens as well,
    ``stream`` and all other keywords are those of `Publisher`; what ``signer`` signs, the server
    trusts. ``engine`` are keywords of `pulse_rl.engines.vllm.connect` (``in_flight``,
    ``audit_every`` …).

    TRL waits until the weights are live, as it does with its own transfer. The server generates
    while they are cast to its dtype, published, fetched and verified, and is paused for the write
    of what changed. Every version is tagged (``weight_version``), and a server that was restarted
    is brought back to the newest one while TRL trains. The metadata of a version are its ``sync``,
    1, 2 …

    While the store or the server is away, the training waits and says so; after ``retry_seconds``
    the error is raised and ends it, since rollouts of old weights would pass for new ones. All
    other errors are raised at once: PublisherConflict, EngineError, StateMismatch. Raises
    InputError.
    """

    def __init__(
        self,
        server_url: str,
        store: str,
        stream: str,
        *,
        retry_seconds: float = 300.0,
        engine: Mapping[str, Any] | None = None,
        **publisher: Any,
    ) -> None:
        self._link = ServerLink(
            server_url,
            store,
            stream,
            retry_seconds=retry_seconds,
            engine=engine,
            publisher=publisher,
        )
        self._syncs = 0

    def __repr__(self) -> str:
        return f"<PulseWeightTransfer of {self._link.stream!r}>"

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
        """Nothing: TRL calls it before the upload. `send_weights` pauses the server when all is
        there."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publishes all pairs of name and weights of ``iterator``, and returns when they are live.
        The iterator is consumed first, since each of its steps may be a collective."""
        target = torch_dtype(self._link.dtype())
        weights = {name: cast_to_host(tensor, target) for name, tensor in iterator}
        self._syncs += 1
        self._link.push(unwrapped(weights), {"sync": self._syncs})

    def resume(self) -> None:
        """Nothing: `send_weights` has resumed the server."""

    def destroy(self) -> None:
        """Ends the following. The server keeps its weights."""
        self._link.close()
