"""TRL: a vLLM server that holds the trainer's newest weights (docs/trl.md).

`PulseWeightTransfer` is the ``weight_transfer`` of AsyncGRPOTrainer, `pulse_rollout` makes the
``rollout_func`` of GRPOTrainer. Neither imports TRL or vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._util.retry import retrying
from .._util.settings import checked_number
from ..engines.handle import EngineSync
from ..engines.rollouts import Rollout, Weights, append, new_seed
from ..engines.transport import Client, Generated
from ..engines.vllm import COMPLETED, EngineHandle, completions, connect
from ..errors import (
    ConcurrentUse,
    EmptyStream,
    EngineError,
    EngineUnavailable,
    InputError,
    PulseError,
)
from ..events import Metadata, Published, checked_listener
from ..follow.checkpoint import unwrapped
from ..stream.signing import keys_of
from ..sync.publisher import Publisher
from .weights import (
    advice,
    cast_to_host,
    log_lost,
    logged,
    of_first_rank,
    policy_weights,
    step_facts,
    torch_dtype,
)

__all__ = ["PulseWeightTransfer", "pulse_rollout"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_FIRST_WAIT_SECONDS = 0.5
_MAX_WAIT_SECONDS = 10.0
_POLL_SECONDS = 2.0
_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": None}


class PulseWeightTransfer:
    """Brings each policy to a vLLM server through a stream: ``AsyncGRPOTrainer(...,
    weight_transfer=PulseWeightTransfer("http://localhost:8000", "s3://bucket/run", "policy"))``.
    AsyncDistillationTrainer has the same protocol.

    TRL waits until the weights are live, as it does with its own transfer. The server generates
    while they are cast to its dtype, published, fetched and verified, and is paused for the write
    of what changed. Every version is tagged (``weight_version``). A server that was restarted gets
    the newest version again while TRL trains. The metadata of a version are its ``sync``, 1, 2 …

    While the store or the server is away, the training waits, and logs it; after ``retry_seconds``
    the error is raised and ends it, since rollouts of old weights would pass for new ones. All
    other errors are raised at once: PublisherConflict, EngineError, StateMismatch.

    Args:
        server_url: That of the trainer's ``vllm_server_base_url``. The server runs with the backend
            ``pulse`` (docs/vllm.md).
        store: The address of a store, which the server opens as well.
        stream: The stream's name.
        retry_seconds: How long the training waits for a store or a server that is away.
        engine: Keywords of `pulse_rl.engines.vllm.connect` (``in_flight``, ``audit_every`` …).
        publisher: All other keywords are those of `Publisher`. The server trusts what ``signer``
            signs.

    Raises:
        InputError: A setting makes no sense.
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
        self._link = ServerLink(server_url, store, stream, retry_seconds, engine, publisher)
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
        """Publish the weights, and return when they are live.

        Args:
            iterator: Pairs of name and weights. It is consumed first, since each of its steps may
                be a collective.

        Raises:
            PulseError: They cannot be published or made live.
        """
        target = torch_dtype(self._link.dtype())
        weights = {name: cast_to_host(tensor, target) for name, tensor in iterator}
        self._syncs += 1
        self._link.push(unwrapped(weights), {"sync": self._syncs})

    def resume(self) -> None:
        """Nothing: `send_weights` has resumed the server."""

    def destroy(self) -> None:
        """Stops following. The server keeps its weights."""
        self._link.close()


def pulse_rollout(
    server_url: str,
    store: str,
    stream: str,
    *,
    retry_seconds: float = 300.0,
    engine: Mapping[str, Any] | None = None,
    records: str | Path | None = None,
    **publisher: Any,
) -> PulseRollout:
    """A ``rollout_func`` that has a vLLM server generate with the trainer's newest weights:
    ``GRPOTrainer(..., rollout_func=pulse_rollout("http://localhost:8000", "s3://bucket/run",
    "policy"))``, without ``use_vllm``.

    Where the step has changed, the weights are taken as `PulseCallback` takes them (DDP, FSDP2,
    PEFT adapters merged into copies), cast to the server's dtype, published and made live before
    the prompts are sent. All ranks send theirs, the first one publishes. After the last step the
    final weights are published and made live as well. The trainer's log gets ``pulse/version``,
    ``pulse/density``, ``pulse/bytes`` (of what the server fetches) and ``pulse/pause_seconds``.

    While the store or the server is away, the training waits as with `PulseWeightTransfer`. A
    server that was restarted generates nothing for it before it has the newest weights again. At
    the end of the training errors are logged, not raised. An evaluation outside of a training
    publishes what it evaluates.

    Args:
        server_url: The server's address, as for `PulseWeightTransfer`.
        store: As for `PulseWeightTransfer`.
        stream: The stream's name.
        retry_seconds: How long the training waits for a store or a server that is away.
        engine: As for `PulseWeightTransfer`.
        records: A file to which a `pulse_rl.engines.rollouts.Rollout` is added for each completion,
            with the ``step`` as its metadata. Each prompt is then a request with a seed of its own,
            so that ``pulse replay`` can generate it again.
        publisher: All other keywords are those of `Publisher`.

    Raises:
        InputError: A setting makes no sense.
    """
    return PulseRollout(
        ServerLink(server_url, store, stream, retry_seconds, engine, publisher), records
    )


class PulseRollout(TrainerCallback):
    """Made by `pulse_rollout`; joins the trainer's callbacks at its first call."""

    def __init__(self, link: ServerLink, records: str | Path | None) -> None:
        self._link = link
        self._records = records
        self._step: int | None = None
        self._weights: Weights | None = None
        self._model: str | None = None
        self._engine_version = ""
        self._training = False

    @property
    def published(self) -> Published | None:
        """The newest version that was committed, on the first rank; its metadata has the
        ``step``."""
        return self._link.published

    @property
    def synced(self) -> EngineSync | None:
        """The newest move of the server, with the seconds that it was paused, on the first rank."""
        return self._link.synced

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate one completion for each prompt.

        Args:
            prompts: Texts or conversations, which repeat for the generations of a group.
            trainer: The GRPOTrainer.

        Returns:
            ``prompt_ids`` and ``completion_ids``, lists of token ids, and ``logprobs``, those of
            the completion's tokens.

        Raises:
            PulseError: The weights could not be made live, or the server did not generate.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            # What reports the log comes later, and so reports these figures too.
            callbacks.insert(0, self)
        self._training = trainer.is_in_train
        if self._model is None:
            self._begin(trainer)
        step = trainer.state.global_step
        if step != self._step:
            self._weights = of_first_rank(lambda first: self._pushed(trainer, first))
            self._step = step
        ids = _tokenized(prompts, trainer)
        found = self._completed(ids, _sampling(trainer))
        return {
            "prompt_ids": ids,
            "completion_ids": [completion.tokens for completion in found],
            "logprobs": [completion.logprobs for completion in found],
        }

    # -- the trainer's callbacks

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds this object's figures to the log.

        ``args``, ``state`` and ``control`` are the Trainer's.
        """
        published, synced = self.published, self.synced
        if published is None or not state.is_world_process_zero:
            return
        figures: dict[str, float] = {
            "pulse/version": published.version,
            "pulse/bytes": published.patch_bytes or published.anchor_bytes,
        }
        if published.changed is not None:
            figures["pulse/density"] = published.density
        if synced is not None:
            figures["pulse/pause_seconds"] = synced.pause_seconds
        kwargs.get("logs", {}).update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the last weights live.

        ``args``, ``state`` and ``control`` are the Trainer's.
        """
        model, first = kwargs["model"], state.is_world_process_zero
        weights = policy_weights(model, self._link.dtype(), keep=first)
        if first:
            try:
                if self._step != state.global_step:
                    self._link.push(weights, step_facts(state), patient=False)
            except PulseError as error:
                log_lost(_log, self._link.stream, state.global_step, "live", error)
        self._close(state)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Lets the server go after an evaluation outside of a training, which nothing else ends.

        ``args``, ``state`` and ``control`` are the Trainer's.
        """
        if not self._training:
            self._close(state)

    # -- the parts

    def _close(self, state: TrainerState) -> None:
        if state.is_world_process_zero:
            self._link.close()
        self._step = self._model = None

    def _begin(self, trainer: Any) -> None:
        link, model = self._link, trainer.model
        self._model = link.patiently(link.model)
        if self._records is not None:
            self._engine_version = link.patiently(link.engine_version)
        dtype = link.dtype()
        if trainer.state.is_world_process_zero:
            for words in advice(model, trainer.optimizer, trainer.args.learning_rate, dtype):
                _log.warning("stream %s: %s", link.stream, words)

    def _pushed(self, trainer: Any, first: bool) -> Weights | None:
        """All ranks take the weights; on the first one the server generates with them then."""
        weights = policy_weights(trainer.model, self._link.dtype(), keep=first)
        return self._link.push(weights, step_facts(trainer.state)) if first else None

    def _completed(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Generated]:
        """By the weights that are tagged so: a server that comes back has those of its checkpoint
        at first."""
        link, wanted = self._link, {"model": self._model, **sampling}
        # A seed is a request's: with one for several prompts all completions of a prompt would be
        # the same.
        seeds = [sampling["seed"] if "seed" in sampling else new_seed() for _ in prompts]

        def one(prompt: Sequence[int], seed: int) -> Generated:
            return link.complete([prompt], wanted | {"seed": seed})[0]

        def generate() -> list[Generated]:
            self._require_these_weights()
            if self._records is None:
                found = link.complete(prompts, wanted)
            else:
                with ThreadPoolExecutor(len(prompts)) as pool:
                    found = [*pool.map(one, prompts, seeds)]
            self._require_these_weights()
            return found

        found = link.patiently(generate)
        if self._records is not None:
            assert self._weights is not None
            facts: dict[str, Any] = {
                "stream": link.stream,
                "weights": (self._weights,),
                "engine": "vllm",
                "engine_version": self._engine_version,
                "sampling": {name: value for name, value in sampling.items() if name != "seed"},
                "metadata": {"step": self._step},
            }
            records = []
            for prompt, seed, completion in zip(prompts, seeds, found, strict=True):
                tokens, logprobs = tuple(completion.tokens), tuple(completion.logprobs)
                facts |= {"seed": seed, "token_ids": tokens, "logprobs": logprobs}
                records.append(Rollout.of(prompt, **facts))
            append(self._records, records)
        return found

    def _require_these_weights(self) -> None:
        """Raises EngineUnavailable unless the server has the trainer's weights."""
        link, weights = self._link, self._weights
        if weights is None or link.weight_version() != str(weights.version):
            raise EngineUnavailable(
                f"the server at {link.url} was restarted, and has not caught up yet"
            )


def _sampling(trainer: Any) -> dict[str, Any]:
    """The trainer's settings of generation, as vLLM's server takes them."""
    return {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        **(trainer.args.generation_kwargs or {}),
    }


def _tokenized(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Token ids of texts, or of conversations by the chat template."""
    if isinstance(prompts[0], str):
        return [list(ids) for ids in trainer.processing_class(text=prompts)["input_ids"]]
    if getattr(trainer, "environment_factories", None):
        raise InputError("pulse_rollout has no environments", hint="Leave environment_factory out.")
    contents = [message["content"] for prompt in prompts for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(part["type"] != "text" for part in parts):
        raise InputError(
            "pulse_rollout takes text only", hint="Write a rollout_func of your own for images."
        )
    templated = trainer.processing_class.apply_chat_template(
        conversation=prompts,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [list(ids) for ids in templated["input_ids"]]


class ServerLink:
    """A stream, the vLLM server that follows it, and what a trainer asks of that server. Takes the
    settings of `PulseWeightTransfer` and `pulse_rollout`. Made on every rank; opened and used by
    the first."""

    def __init__(
        self,
        server_url: str,
        store: str,
        stream: str,
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
        self._client = Client(server_url, self._engine.get("timeout_seconds", 600.0))
        self.url = self._client.address
        # The server runs in another folder.
        self._store = store if "://" in store else str(Path(store).absolute())
        listener = logged(_log, checked_listener(publisher.get("on_event")))
        self._settings: dict[str, Any] = {**publisher, "stream": stream, "on_event": listener}
        if keys := keys_of(publisher.get("signer"), publisher.get("trusted_keys")):
            self._engine.setdefault("trusted_keys", keys)
        self._publisher: Publisher | None = None
        self._handle: EngineHandle | None = None
        self._dtype: tuple[str | None] | None = None

    def open(self) -> tuple[Publisher, EngineHandle]:
        """Finds wrong settings before the first step: opens the store, and waits for the server,
        where they are not open."""
        if self._publisher is None:
            publisher = Publisher(self._store, **self._settings)
            self.patiently(publisher.head)
            self._publisher = publisher
        self.dtype()
        if self._handle is None:
            self._handle = self.patiently(
                lambda: connect(self.url, store=self._store, stream=self.stream, **self._engine)
            )
            self._handle.follow(on_sync=self._note, poll_seconds=_POLL_SECONDS)
        return self._publisher, self._handle

    def push(
        self, weights: Mapping[str, torch.Tensor], metadata: Metadata, *, patient: bool = True
    ) -> Weights:
        """Publishes ``weights`` and makes them live. Their version is the tag of outputs from then
        on. The server is paused for the write alone, after the upload and its own fetch. If not
        ``patient``, nothing is repeated."""
        publisher, handle = self.open()
        done = self.patiently(
            lambda: publisher.publish(weights, metadata=metadata, dtype=self.dtype()), patient
        )
        self.published = done
        self._note(self.patiently(lambda: self._moved(handle), patient))
        moved = self.synced is not None and self.synced.version == done.version
        _log.info(
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
        """Stops following. The server keeps its weights. `open` starts again."""
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
                # A process that was killed while it drove the engine is forgotten after some
                # seconds.
                passing = error.retryable or isinstance(error, ConcurrentUse)
                left = attempt.left
                if not passing or not left:
                    raise
                if str(error) != said:
                    _log.warning(
                        "stream %s: %s; the training waits, for at most %.0f s more. %s",
                        self.stream,
                        error,
                        left,
                        error.hint,
                    )
                    said = str(error)
            else:
                if said:
                    _log.warning("stream %s: the training goes on", self.stream)
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

    # -- requests to the server

    def dtype(self) -> str | None:
        """The dtype of the server's weights as `Publisher.publish` takes it, asked for once; None
        for FP32."""
        if self._dtype is None:
            facts = self.patiently(lambda: self._ask("server_info?config_format=json"))
            name = str(facts["vllm_config"]["model_config"]["dtype"])
            if name not in _DTYPES:
                raise EngineError(
                    f"the server at {self.url} computes in {name}",
                    hint="Start it with --dtype bfloat16.",
                )
            self._dtype = (_DTYPES[name],)
        return self._dtype[0]

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
