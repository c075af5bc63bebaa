"""Hugging Face transformers: a callback that publishes the policy of any Trainer, TRL's GRPO and
SFT among them."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import secrets
import shutil
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from .._util import extra

with extra("torch"):
    import torch
    from torch import nn
    from transformers import (
        PreTrainedModel,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.dynamic_module_utils import custom_object_save
    from transformers.trainer_callback import CallbackHandler

from .._util.files import make_folder, sync_folder
from .._util.settings import checked_count
from ..errors import InputError, PulseError, StateMismatch
from ..events import Metadata, Published, checked_listener
from ..follow.aux_files import files_of, of_dtype
from ..follow.checkpoint import ADAPTER_NAME, FILE_NAME, INDEX_NAME, load, save
from ..quantize.states import Quantize
from ..state.cast import DTypeLike, compute_dtype_named
from ..state.digest import state_digest
from ..state.tensors import State
from ..store import Store
from ..stream.signing import keys_of
from ..submit import Submission
from ..sync.publisher import Publisher
from ..sync.request import LocalState
from ..sync.subscriber import Subscriber
from .restart import moved_to, step_of
from .torch import host_tensors
from .weights import (
    adapter_weights,
    advice,
    base_of,
    is_sharded,
    log_lost,
    logged,
    of_first_rank,
    policy_weights,
    step_facts,
)

__all__ = ["PulseCallback", "checkpoint_files", "checkpoint_weights"]

_log = logging.getLogger(__name__)
_OURS = "pulse/"
#: Of the Trainer's checkpoints.
TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
_SHARDED = ("global_step*", "pytorch_model_fsdp_*", "pytorch_model_fsdp.bin")


def checkpoint_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name a model's weights as its ``save_pretrained`` writes them.

    For `pulse_rl.frameworks.torch.apply_`, and for what a training loop publishes
    (``publisher.publish(module)`` does it by itself). A plain ``model.state_dict()`` has other
    tensors: transformers 5 fuses experts in memory, and tied tensors come under all of their names.
    The conversion is transformers' own.

    Args:
        model: The model. DDP, torch.compile, FSDP or DeepSpeed ZeRO-3 may have wrapped it.

    Returns:
        The model's own tensors, or views of parts of them, by name. PEFT adapters are merged into
        copies. Of a sharded model each rank gets its own shards, for
        `pulse_rl.frameworks.fsdp.ShardedPublisher`.

    Raises:
        UnsupportedTensor: Adapters lie over shards, or fused tensors are not sharded by expert.
    """
    return policy_weights(model, gather=False)


def checkpoint_files(
    model: nn.Module, *processors: Any, dtype: DTypeLike | None = "BF16"
) -> dict[str, bytes]:
    """Make the files that ``save_pretrained`` writes in addition to the weights.

    For a training loop without a Trainer: ``publisher.publish(model,
    files=checkpoint_files(model, tokenizer), dtype="BF16")``.

    Args:
        model: The model. Without one of transformers there is no config.
        processors: A tokenizer, an image processor.
        dtype: The compute dtype to which wider weights are published; the config names it.

    Returns:
        The bytes by name: config, generation config, tokenizer, chat template, a model's own code.

    Raises:
        InputError: There are too many files, or they are too large.
        Exception: Whatever ``save_pretrained`` raises.
    """
    core: Any = base_of(model)
    with TemporaryDirectory() as folder:
        if isinstance(core, PreTrainedModel):
            config: Any = copy.deepcopy(core.config)
            config.architectures = [type(core).__name__.removeprefix("FSDP")]
            config.dtype = str(core.dtype).removeprefix("torch.")
            if core._auto_class is not None:
                custom_object_save(core, folder, config=config)
            config.save_pretrained(folder)
            if core.can_generate() and core.generation_config is not None:
                core.generation_config.save_pretrained(folder)
        for processor in processors:
            processor.save_pretrained(folder)
        return of_dtype(files_of(Path(folder)), dtype)


class PulseCallback(TrainerCallback):
    """Publishes the policy as versions of a stream while a Trainer trains it:
    ``GRPOTrainer(..., callbacks=[PulseCallback("s3://bucket/run", stream="policy")])``.

    A version is published before the first step, after each ``every`` steps, and at the end. It has
    the tensors that ``save_pretrained`` of the base model writes (see `checkpoint_weights`): all
    ranks gather the shards of FSDP and ZeRO-3, one tensor at a time, and the first publishes them;
    PEFT adapters are merged into copies. A version carries what ``save_pretrained`` of the model
    and of the trainer's tokenizer or processor writes in addition (`checkpoint_files`), as it was
    when the training began, so that what `Subscriber.save` or ``pulse follow`` writes is a
    checkpoint that engines load.

    The training waits for merging, gathering and copying; the rest is done in the background
    (`Publisher.submit`). The callback publishes a step from its place in the Trainer's list: what
    later callbacks change within the step becomes another version of it. The last version has what
    the callbacks change at the end of the training. The metadata of a version are its ``step``,
    ``epoch``, and the numbers that the trainer has last logged, at ``logged_step``. The trainer's
    log, and so TensorBoard, W&B and whatever else it reports to, gets the newest
    ``pulse/version``, and of the versions since the last log ``pulse/density``, ``pulse/bytes`` (of
    what a worker fetches) and ``pulse/blocked_seconds``, each the mean; and ``pulse/replaced`` and
    ``pulse/failed``, counts, if not 0. Where a trainer has several of these callbacks, the names
    are ``pulse/STREAM/version`` and so on.

    The first version is committed before the first step, and any error is raised, so that a wrong
    address, model or permission is found at once. After it a store that is away
    (`PulseError.retryable`) is logged as a warning, and the training goes on: the next version has
    it all. Other errors (PublisherConflict, UnsupportedTensor) end the training at its next step.
    At its end all errors are logged and kept in `error`, so that the program can still save its
    model.

    Args:
        store: As for `Publisher`.
        stream: The stream's name.
        dtype: Compute dtype to which wider floats are cast, as by `Publisher.publish`. None: as
            they are.
        every: Steps from one version to the next.
        optimizer_every: The Trainer saves a checkpoint, optimizer and all, at the first step and at
            each so many, whatever its own ``save_strategy``. `restart` makes of the newest one a
            checkpoint with the weights of the newest version. None: it does not.
        replace: Where the store is slower than the steps, whether the newest weights replace those
            that still wait, which then get no version; else the training waits.
        adapter: A version is the PEFT adapter alone, by PEFT's names, with its config: the folder
            is one that PEFT and engines load.
        quantize: As for `Publisher.publish`: a version has codes and scales in place of weights.
        publisher: All other keywords are those of `Publisher`, such as ``signer`` and ``keep``.

    Raises:
        InputError: A setting makes no sense.
        StoreError: The store cannot be opened.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        dtype: DTypeLike | None = "BF16",
        every: int = 1,
        optimizer_every: int | None = None,
        replace: bool = True,
        adapter: bool = False,
        quantize: Quantize | None = None,
        **publisher: Any,
    ) -> None:
        self._dtype = None if dtype is None else compute_dtype_named(dtype).name
        self._every = checked_count("every", every)
        self._optimizer_every = (
            None if optimizer_every is None else checked_count("optimizer_every", optimizer_every)
        )
        self._replace = replace
        self._adapter = adapter
        self._quantize = quantize
        publisher["on_event"] = logged(_log, checked_listener(publisher.get("on_event")))
        self._publisher = Publisher(store, stream=stream, **publisher)
        self._keys = keys_of(publisher.get("signer"), publisher.get("trusted_keys"))
        self._store, self._stream = store, stream
        self._prefix = _OURS
        self._placed = False
        self._processor: Any = None
        self._shapes: dict[str, torch.Size] | None = None
        self._files: dict[str, bytes] | None = None
        self._written: list[tuple[int, int]] = []
        self._ended: deque[tuple[int, Submission]] = deque()
        self._since_log: list[Published] = []
        self._blocked: list[float] = []
        self._counts = {"replaced": 0, "failed": 0}
        self._published: Published | None = None
        self._committed_step: int | None = None
        self._error: BaseException | None = None
        self._fatal: BaseException | None = None

    def __repr__(self) -> str:
        return f"<PulseCallback of {self._publisher!r}>"

    @property
    def published(self) -> Published | None:
        """The newest version that was committed, on the first rank; its metadata has the step."""
        return self._published

    @property
    def error(self) -> BaseException | None:
        """Why the newest weights are not in the stream, None if nothing is wrong."""
        return self._error

    def restart(self, output_dir: str | Path) -> str | None:
        """Make the folder to go on from after a crash, on all ranks:
        ``trainer.train(resume_from_checkpoint=callback.restart(args.output_dir))``.

        The folder has the newest version's weights, bit for bit, and of the Trainer's newest
        whole checkpoint the optimizer and all else (hard links). A checkpoint that a crash left
        incomplete is passed over. A weight that the Trainer holds in FP32
        and that has had the version's BF16 bits since that checkpoint has its number from there.

        Args:
            output_dir: The Trainer's. The folder is made there as ``checkpoint-STEP`` of the newest
                version's step.

        Returns:
            The folder; the Trainer's own checkpoint where that is no older than the version; None
            for a new run.

        Raises:
            InputError: No checkpoint is whole.
            StateMismatch: The checkpoint has other weights than the stream: a merged PEFT adapter,
                a quantized stream, shards of FSDP and DeepSpeed.
            PulseError: Whatever `Subscriber.sync` raises.
        """
        return of_first_rank(lambda first: self._restart(Path(output_dir)) if first else None)

    def _restart(self, output: Path) -> str | None:
        newest = _newest_whole(output)
        if newest is None:
            return None
        with Subscriber(self._store, stream=self._stream, trusted_keys=self._keys) as subscriber:
            subscriber.sync()
            metadata = {} if subscriber.version is None else subscriber.manifest.metadata
            steps = step_of(metadata) - _number(newest) if metadata else 0
            if steps <= 0:
                return str(newest)
            target = output / f"checkpoint-{metadata['step']}"
            made = output / f".pulse-restart-{secrets.token_hex(4)}"
            try:
                make_folder(made)
                _move_on(newest, made, subscriber.state, metadata, steps)
                sync_folder(made)
                if target.exists():  # one that is not whole, and stays under another name
                    target.rename(output / f"incomplete-{target.name}-{secrets.token_hex(4)}")
                made.rename(target)
                sync_folder(output)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        return str(target)

    # -- what the Trainer calls, on all ranks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes what the training starts from, waits for it, and says what will make patches
        large.

        ``args``, ``state`` and ``control`` are the Trainer's.
        """
        self._prefix, self._placed = _put_around(self)
        self._processor = kwargs.get("processing_class") or kwargs.get("tokenizer")
        self._shapes = None
        self._collect()
        self._committed_step = self._fatal = None
        first, model = state.is_world_process_zero, kwargs["model"]
        if first and not self._adapter:
            for words in advice(model, kwargs.get("optimizer"), args.learning_rate, self._dtype):
                _log.warning("stream %s: %s", self._stream, words)
        weights = self._take(model, first)
        if first:
            done = self._publisher.publish(weights, **self._arguments(state))
            self._committed(state.global_step, done)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes the step, if it is one of ``every``, and has the Trainer save the first and
        those of ``optimizer_every``.

        ``args``, ``state`` and ``control`` are the Trainer's.
        """
        step, saved_every = state.global_step, self._optimizer_every
        if saved_every and (step == 1 or step % saved_every == 0):
            control.should_save = True
        if step % self._every:
            self._raise_fatal()
            return
        self._publish_step(kwargs["model"], state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds this callback's figures to the log.

        ``args``, ``state`` and ``control`` are the Trainer's.
        """
        if not self._placed:
            self._add_figures(state, kwargs.get("logs", {}))

    def _add_figures(self, state: TrainerState, logs: dict[str, float]) -> None:
        if not state.is_world_process_zero:
            return
        # The Trainer's last log comes after its last step: an error must not keep the program from
        # saving its model. The next step raises it.
        self._collect()
        # The newest version, and the means of the versions since the last call.
        since, newest = self._since_log, self._published
        found: dict[str, float] = {} if newest is None else {"version": newest.version}
        # Of the same versions as the density: the first one is an anchor, and no measure of what
        # follows.
        patches = [each for each in since if each.changed is not None]
        if patches:
            found["density"] = fmean(each.density for each in patches)
        fetched = [each.patch_bytes for each in patches] or [each.anchor_bytes for each in since]
        if fetched:
            found["bytes"] = fmean(fetched)
        if self._blocked:
            found["blocked_seconds"] = fmean(self._blocked)
        found |= {name: count for name, count in self._counts.items() if count}
        self._since_log, self._blocked, self._counts = [], [], dict.fromkeys(self._counts, 0)
        figures = {self._prefix + name: value for name, value in found.items()}
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes the last weights, if they are not yet, and waits for them.

        ``args``, ``state`` and ``control`` are the Trainer's.
        """
        if not self._placed:
            self._end(kwargs["model"], state)

    def _end(self, model: nn.Module, state: TrainerState) -> None:
        try:
            self._finish(model, state)
        except Exception as error:
            self._error = error
        if self._error:
            log_lost(_log, self._stream, state.global_step, "published", self._error)

    def _finish(self, model: nn.Module, state: TrainerState) -> None:
        """Publishes the last weights, unless they are, and closes."""
        first = state.is_world_process_zero
        try:
            # On all ranks before anything can fail on the first one, which alone knows whether it
            # is needed.
            weights = self._take(model, first)
            if first:
                self._publisher.wait()
                self._raise_fatal()
                if self._committed_step != state.global_step or self._differs(weights):
                    self._hand_over(weights, state, replace=False)
                    self._publisher.wait()
                    self._raise_fatal()
        finally:
            if first:
                self._publisher.close()

    def _publish_step(self, model: nn.Module, state: TrainerState) -> None:
        began = time.perf_counter()
        weights = self._take(model, state.is_world_process_zero)
        if state.is_world_process_zero:
            self._hand_over(weights, state, replace=self._replace)
            self._blocked.append(time.perf_counter() - began)
            self._written = [] if is_sharded(model) else _writes(model)

    def _publish_changed(self, model: nn.Module, state: TrainerState) -> None:
        """Publishes a step again that callbacks have changed since. Shards are not: to gather them
        is a collective, and other ranks may have changed nothing."""
        published = state.is_world_process_zero and state.global_step % self._every == 0
        if published and not is_sharded(model) and _writes(model) != self._written:
            self._publish_step(model, state)

    # -- on the first rank, after the gathering

    def _differs(self, weights: dict[str, torch.Tensor]) -> bool:
        """Whether the newest version has other bits."""
        state = LocalState.of(weights, self._dtype, self._quantize).state
        return self._published is None or state_digest(state).root != self._published.root

    def _take(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        """What is published. A collective where `is_sharded`."""
        if not self._adapter:
            # What is quantized is so from the trainer's own numbers.
            weights = policy_weights(model, None if self._quantize else self._dtype, keep=keep)
            shapes = {name: tensor.shape for name, tensor in weights.items()}
            if keep and shapes != self._shapes:  # such as a vocabulary that has grown
                self._shapes, self._files = shapes, self._checkpoint_files(model)
            return weights
        weights, config = adapter_weights(model, self._dtype, keep=keep)
        self._files = {"adapter_config.json": config.encode()}
        return weights

    def _checkpoint_files(self, model: nn.Module) -> dict[str, bytes] | None:
        """Those of the model and the Trainer's tokenizer; None, and a warning, where there are none
        to be had."""
        processors = [self._processor] if hasattr(self._processor, "save_pretrained") else []
        try:
            return checkpoint_files(model, *processors, dtype=self._dtype)
        except Exception as error:
            # Of somebody's own tokenizer or config: the weights are worth more than it.
            _log.warning(
                "stream %s: config and tokenizer are not published: %s", self._stream, error
            )
            return None

    def _arguments(self, state: TrainerState) -> dict[str, Any]:
        """Those of `Publisher.publish`, for the weights of now."""
        return {
            "metadata": _metadata(state),
            "dtype": self._dtype,
            "files": self._files,
            "quantize": self._quantize,
        }

    def _hand_over(
        self, weights: dict[str, torch.Tensor], state: TrainerState, *, replace: bool
    ) -> None:
        self._raise_fatal()
        submission = self._publisher.submit(weights, replace=replace, **self._arguments(state))
        step = state.global_step

        def ended(done: Any) -> None:
            if not done.cancelled():
                done.exception()  # marked as retrieved: `_collect` decides how bad an error is
            self._ended.append((step, done))

        submission.add_done_callback(ended)

    def _collect(self) -> None:
        """Takes the versions that have ended since. An error that a retry cannot repair ends the
        training at its next step."""
        while self._ended:
            step, submission = self._ended.popleft()
            if submission.cancelled():
                self._counts["replaced"] += 1
                continue
            error = submission.exception()
            if error is None:
                self._committed(step, submission.result())
                continue
            if not (isinstance(error, PulseError) and error.retryable):
                self._error = error
                self._fatal = self._fatal or error
                continue
            self._counts["failed"] += 1
            if self._error is None:
                _log.warning(
                    "stream %s: step %d is not published (%s); the training goes on, and the "
                    "next version has it all",
                    self._stream,
                    step,
                    error,
                )
            self._error = error

    def _raise_fatal(self) -> None:
        self._collect()
        if self._fatal is not None:
            raise self._fatal

    def _committed(self, step: int, published: Published) -> None:
        if self._error is not None:
            _log.warning(
                "stream %s: published again, version %d of step %d",
                self._stream,
                published.version,
                step,
            )
        self._error = None
        self._published = published
        self._committed_step = step
        self._since_log.append(published)


def _move_on(newest: Path, made: Path, version: State, metadata: Metadata, steps: int) -> None:
    """Puts into the folder ``made`` the Trainer's checkpoint ``newest``, moved on by ``steps`` to
    ``version``."""
    saved, weights = dict(host_tensors(load(newest)[0])), dict(host_tensors(version))
    shapes = [{name: t.shape for name, t in of.items()} for of in (saved, weights)]
    if shapes[0] != shapes[1]:
        raise StateMismatch(
            f"{newest} has other weights than the stream",
            hint="An adapter restarts from a stream of its own (adapter=True).",
        )
    weights = {name: moved_to(saved[name], tensor) for name, tensor in weights.items()}
    file_name = ADAPTER_NAME if (newest / ADAPTER_NAME).is_file() else FILE_NAME
    save(made / file_name, State.of(weights), {"format": "pt"})
    remade = (TRAINER_STATE, SCHEDULER, INDEX_NAME)
    for file in newest.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in remade:
            try:
                (made / file.name).hardlink_to(file)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, made / file.name)
    trainer = TrainerState.load_from_json(str(newest / TRAINER_STATE))
    trainer.global_step += steps
    trainer.epoch = float(metadata.get("epoch", trainer.epoch or 0))
    trainer.save_to_json(str(made / TRAINER_STATE))
    scheduler = torch.load(newest / SCHEDULER, weights_only=True)
    for count in {"last_epoch", "_step_count"} & scheduler.keys():
        scheduler[count] += steps
    torch.save(scheduler, made / SCHEDULER)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _newest_whole(output: Path) -> Path | None:
    """The Trainer's newest checkpoint that a training can go on from, None where there is none at
    all. Raises InputError where none is whole."""
    found = [each for each in output.glob("checkpoint-*") if each.name[11:].isdecimal()]
    missing = {}
    for each in sorted(filter(Path.is_dir, found), key=_number, reverse=True):
        if not (why := _lacking(each)):
            return each
        missing[each.name] = why
    if not missing:
        return None
    listed = "; ".join(f"{name}: {why}" for name, why in missing.items())
    raise InputError(
        f"{output} has no whole checkpoint ({listed[:1000]})",
        hint="Delete these folders to train from the start, or load the weights of the newest "
        "version, and train without resume_from_checkpoint. save_only_model leaves no optimizer.",
    )


def _lacking(checkpoint: Path) -> str:
    """Why nothing can go on from a checkpoint; "" if it is whole."""
    try:
        # The Trainer writes it last.
        TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
    except (OSError, ValueError, TypeError) as error:
        return f"{TRAINER_STATE} cannot be read ({type(error).__name__})"
    # What DeepSpeed and FSDP have written, their own loaders check.
    if any(True for pattern in _SHARDED for _ in checkpoint.glob(pattern)):
        return ""
    if not (checkpoint / SCHEDULER).is_file():
        return f"no {SCHEDULER}"
    try:
        load(checkpoint)
    except PulseError as error:
        return str(error)
    return ""


def _writes(model: nn.Module) -> list[tuple[int, int]]:
    """What is another list after torch has written to a tensor of ``model``."""
    plain = (torch.Tensor, nn.Parameter)
    tensors = [t for t in (*model.parameters(), *model.buffers()) if type(t) in plain]
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]


class _Around(TrainerCallback):
    """What stands before or behind all callbacks of a ``handler``."""

    def __init__(self, handler: CallbackHandler) -> None:
        self._handler = handler

    @property
    def ours(self) -> list[PulseCallback]:
        return [one for one in self._handler.callbacks if isinstance(one, PulseCallback)]


class _First(_Around):
    """Adds to the log before others report it."""

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        for one in self.ours:
            one._add_figures(state, kwargs.get("logs", {}))


class _Last(_Around):
    """Publishes what other callbacks have changed."""

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        for one in self.ours:
            one._publish_changed(kwargs["model"], state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        for one in self.ours:
            one._end(kwargs["model"], state)


def _put_around(callback: PulseCallback) -> tuple[str, bool]:
    """Puts `_First` and `_Last` around the Trainer's callbacks. Returns what the figures' names
    begin with, and whether there is a Trainer."""
    # Callbacks are not given the Trainer's list of them, but its handler is what calls them.
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            break
        frame = frame.f_back
    else:  # called by other means: it has the figures in the log all the same
        return _OURS, False
    ours = [one for one in handler.callbacks if isinstance(one, PulseCallback)]
    # A new list: the handler is going through the old one.
    given = [one for one in handler.callbacks if not isinstance(one, _Around)]
    handler.callbacks = [_First(handler), *given, _Last(handler)]
    return _OURS if len(ours) == 1 else f"{_OURS}{callback._stream}/", True


def _metadata(state: TrainerState) -> Metadata:
    """The step, the epoch, and the numbers of the trainer's last log."""
    last = state.log_history[-1] if state.log_history else {}
    facts: Metadata = {
        name: value
        for name, value in last.items()
        if type(value) in (int, float) and math.isfinite(value) and not name.startswith(_OURS)
    }
    if "step" in facts:
        facts["logged_step"] = facts["step"]
    return facts | step_facts(state)
