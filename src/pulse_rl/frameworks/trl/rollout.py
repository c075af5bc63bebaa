"""The rollouts of TRL's GRPOTrainer, by a vLLM server that follows the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...engines.handle import EngineSync
from ...engines.rollouts import Rollout, Weights, append, new_seed
from ...engines.transport import Generated
from ...errors import EngineUnavailable, InputError, PulseError
from ...events import Metadata, Published
from ..weights import advice, policy_weights
from .transfer import ServerLink, log

__all__ = ["PulseRollout", "pulse_rollout"]

_POLL_SECONDS = 0.2


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
    PEFT adapters merged aside), cast to the server's dtype, published and made live before the
    prompts are sent. All ranks send theirs, the first one publishes. After the last step the final
    weights are published and made live as well. The trainer's log gets ``pulse/version``,
    ``pulse/density``, ``pulse/bytes`` (of what the server fetches) and ``pulse/pause_seconds``.

    ``server_url``, ``store``, ``stream``, ``engine`` and all other keywords are those of
    `PulseWeightTransfer`, and so is what happens while the store or the server is away: the
    training waits, at most for ``retry_seconds``. A server that was restarted generates nothing for
    it before it has the newest weights again. At ``records``: a file to which a
    `pulse_rl.engines.rollouts.Rollout` is added for each completion, with the ``step`` as its
    metadata; each prompt is then a request with a seed of its own, so that ``pulse replay`` can
    generate it again. At the end of the training errors are logged, not raised. An evaluation
    outside of a training publishes what it evaluates. Raises InputError.
    """
    link = ServerLink(
        server_url, store, stream, retry_seconds=retry_seconds, engine=engine, publisher=publisher
    )
    return PulseRollout(link, records)


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
        """One completion for each of ``prompts``, which repeat for the generations of a group.

        Returns ``prompt_ids`` and ``completion_ids``, lists of token ids, and ``logprobs``, those
        of the completion's tokens. Raises PulseError.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            callbacks.insert(
                0, self
            )  # what reports the log comes later, and so reports these figures too
        self._training = trainer.is_in_train
        if self._model is None:
            self._begin(trainer)
        step = trainer.state.global_step
        if step != self._step:
            self._follow(trainer)
            self._step = step
        ids = _tokenized(prompts, trainer)
        found = self._complete(ids, _sampling(trainer))
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
                    self._link.push(weights, _metadata(state), patient=False)
            except PulseError as error:
                log.error(
                    "stream %s: the weights of step %d are not live: %s. %s",
                    self._link.stream,
                    state.global_step,
                    error,
                    error.hint,
                )
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
        self._model = link.patiently(link.server.model)
        if self._records is not None:
            self._engine_version = link.patiently(link.server.engine_version)
        dtype = link.dtype()
        if trainer.state.is_world_process_zero:
            for words in advice(model, trainer.optimizer, trainer.args.learning_rate, dtype):
                log.warning("stream %s: %s", link.stream, words)

    def _follow(self, trainer: Any) -> None:
        """All ranks: returns when the server generates with the trainer's weights."""
        model, first = trainer.model, trainer.state.is_world_process_zero
        outcome: Weights | PulseError | None = None
        try:
            weights = policy_weights(model, self._link.dtype(), keep=first)
            if first:
                outcome = self._link.push(weights, _metadata(trainer.state))
        except PulseError as error:  # the other ranks wait, and must hear of it
            outcome = error
        outcome = _from_first(outcome, trainer)
        if isinstance(outcome, PulseError):
            raise outcome
        self._weights = outcome

    def _complete(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Generated]:
        """By the weights that are tagged so: a server that comes back has those of its checkpoint
        at first."""
        wanted = {"model": self._model, **sampling}
        server, link = self._link.server, self._link
        if self._records is None:
            return link.patiently(
                lambda: self._by_these_weights(lambda: server.complete(prompts, wanted))
            )
        # A seed is a request's: with one for several prompts all completions of a prompt would be
        # the same.
        seeds = [sampling["seed"] if "seed" in sampling else new_seed() for _ in prompts]

        def one(prompt: Sequence[int], seed: int) -> Generated:
            return server.complete([prompt], wanted | {"seed": seed})[0]

        with ThreadPoolExecutor(len(prompts)) as pool:
            found = link.patiently(
                lambda: self._by_these_weights(lambda: [*pool.map(one, prompts, seeds)])
            )
        weights = self._weights
        assert weights is not None
        append(
            self._records,
            (
                Rollout.of(
                    prompt,
                    stream=link.stream,
                    weights=(weights,),
                    engine="vllm",
                    engine_version=self._engine_version,
                    sampling={name: value for name, value in sampling.items() if name != "seed"},
                    seed=seed,
                    token_ids=tuple(completion.tokens),
                    logprobs=tuple(completion.logprobs),
                    metadata={"step": self._step},
                )
                for prompt, seed, completion in zip(prompts, seeds, found, strict=True)
            ),
        )
        return found

    def _by_these_weights(self, generate: Callable[[], list[Generated]]) -> list[Generated]:
        """What ``generate`` returns, if the server has the trainer's weights before and after."""
        self._require_these_weights()
        found = generate()
        self._require_these_weights()
        return found

    def _require_these_weights(self) -> None:
        server, weights = self._link.server, self._weights
        if weights is None or server.weight_version() != str(weights.version):
            raise EngineUnavailable(
                f"the server at {server.url} was restarted, and has not caught up yet"
            )


def _from_first(value: Any, trainer: Any) -> Any:
    """What the first rank has."""
    if trainer.accelerator.num_processes == 1:
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0)
    return held[0]


def _metadata(state: TrainerState) -> Metadata:
    facts: Metadata = {"step": state.global_step}
    if state.epoch is not None:
        facts["epoch"] = float(state.epoch)
    return facts


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
    if any(
        isinstance(content, list) and any(part["type"] != "text" for part in content)
        for content in contents
    ):
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
