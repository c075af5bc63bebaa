"""How trainers meet, in a group or over a store: the settings, what each side does, and what a
round came to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from .._util.settings import (
    checked_count,
    checked_number,
    format_bytes,
    format_number,
    format_percent,
)
from ..errors import InputError
from ..events import OneLine
from ..store import Store
from ..stream.signing import Signer, TrustedKeys
from .group import TrainerNote
from .store_format import TRAINER

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class GroupExchange:
    """Trainers that meet in a process group: an ``exchange`` of `PulseLoCo`.

    Args:
        group: The trainers. Default: all of torch.distributed; without it, this trainer alone.
        timeout_seconds: A trainer that dies, or stalls for longer, raises TrainerLost on the
            others.
    Raises: InputError.
    """

    group: dist.ProcessGroup | None = None
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise InputError(
                f"timeout_seconds is {self.timeout_seconds}",
                hint="Give a number of seconds above 0.",
            )


@dataclass(frozen=True)
class StoreExchange:
    """Trainers that meet in a ``store`` instead of a process group: an ``exchange`` of `PulseLoCo`.

    All trainers of a run give the same store, ``min_trainers`` and ``grace_seconds``. Without keys
    nobody else may write below ``loco/`` in it.

    Args:
        store: The store, or its address.
        run: The run's name, which the first trainer gives it; or the ID of a run, which pins it.
            Trainers of another run are refused. A trainer that gives it may join a run that has
            begun with other weights than its own: it takes the run's.
        trainer: This trainer's name: letters, digits, "-" and "_", at most 64. A trainer that is to
            resume from a checkpoint needs a name of its own. Default: a random name.
        min_trainers: The fewest trainers that make a round.
        grace_seconds: How long a round that has ``min_trainers`` waits for the other trainers of
            the round before. Stragglers are not in this round, and lose nothing.
        timeout_seconds: Without ``min_trainers`` for that long, a round raises TrainerLost.
        signer: This trainer's key, with which it signs all that it writes. Its name is the public
            key then.
        trusted_keys: The public keys of all members, its own among them. What others write is
            refused.
    Raises: InputError.
    """

    store: Store | str
    run: str | None = None
    trainer: str | None = None
    min_trainers: int = 2
    grace_seconds: float = 60.0
    timeout_seconds: float = 3600.0
    signer: Signer | None = None
    trusted_keys: Collection[str] | None = None

    def __post_init__(self) -> None:
        checked_count("min_trainers", self.min_trainers)
        checked_number("grace_seconds", self.grace_seconds)
        checked_number("timeout_seconds", self.timeout_seconds)
        for what, name in (("run", self.run), ("trainer", self.trainer)):
            if name is not None and not (isinstance(name, str) and TRAINER.fullmatch(name)):
                raise InputError(
                    f"{what} is {name!r}",
                    hint="Give a name of letters, digits, '-' and '_', at most 64.",
                )
        if self.signer is None and self.trusted_keys is None:
            return
        if not isinstance(self.signer, Signer) or self.trusted_keys is None:
            raise InputError(
                "members sign, and know each other's keys", hint="Give signer= and trusted_keys=."
            )
        if self.trainer is not None:
            raise InputError("a trainer that signs is named by its key", hint="Leave trainer= out.")
        if self.signer.public_key not in TrustedKeys(self.trusted_keys).keys:
            raise InputError(
                "this trainer's own key is not among trusted_keys", hint="Add signer.public_key."
            )


def first_difference(theirs: object, own: Mapping[str, object]) -> str:
    """Words for the first setting that differs, "" without one: "sync_every is 4 there, 8 here"."""
    found = theirs if isinstance(theirs, dict) else {}
    for key in sorted(found.keys() | own.keys()):
        if found.get(key) != own.get(key) or (key in found) != (key in own):
            return f"{key} is {found.get(key)!r} there, {own.get(key)!r} here"
    return ""


@dataclass(frozen=True, slots=True, repr=False)
class Round(OneLine):
    """What a finished round did, as one of its trainers saw it.

    Args:
        number: The round, counted from 1.
        trainers: How many trainers were in it.
        parameters: How many parameters are trained.
        entries: How many of them passed this trainer's gate.
        summed: How many have a sum that is not 0.
        scattered: Whether each trainer summed a share of the parameters (docs/loco.md, 4.3);
            otherwise all got all messages.
        payload_bytes: Bytes of this trainer's messages, those about frozen parameters and buffers
            included.
        sent_bytes: Bytes that left its process: headers, padding, and what it passed on or summed
            for others included.
        root: The root of the global weights, FP32.
        seconds: By phase: "gate", "exchange", "decode", "update", "verify", and "frozen" for frozen
            parameters and buffers.
        excluded_reason: Over a store, why messages of this trainer were not in this round, or in
            those that it took up before it; "" where it was not left out.
    """

    number: int
    trainers: int
    parameters: int
    entries: int
    summed: int
    scattered: bool
    payload_bytes: int
    sent_bytes: int
    root: str
    seconds: dict[str, float]
    excluded_reason: str = ""

    def __str__(self) -> str:
        """One line: density, bytes, and how many times less than DiLoCo."""
        times = self.dense_bytes / self.sent_bytes if self.sent_bytes else 0.0
        less = f", {format_number(times)} times less than DiLoCo" if times else ""
        line = (
            f"round {self.number}: {self.trainers} trainers, {format_percent(self.density)} of "
            f"{self.parameters} parameters, sent {format_bytes(self.sent_bytes)}{less}"
        )
        return f"{line}; left out of {self.excluded_reason}" if self.excluded_reason else line

    @property
    def density(self) -> float:
        """Entries sent / parameters."""
        return self.entries / self.parameters

    @property
    def dense_bytes(self) -> int:
        """What would have left this process in a ring all-reduce of FP32 values, as DiLoCo's."""
        return 2 * (self.trainers - 1) * 4 * self.parameters // self.trainers

    @property
    def metadata(self) -> dict[str, int]:
        """What a publisher may note of the round next to its reward: ``pulse report`` draws reward
        by bytes from it."""
        return {
            "round": self.number,
            "loco_sent_bytes": self.sent_bytes,
            "loco_dense_bytes": self.dense_bytes,
        }


class Meeting(ABC):
    """One trainer's side of what the trainers of a run meet in."""

    #: Whether the trainer is among them, and may run a round. An error of `run` after which it may
    #: not says so here.
    joined: bool

    @abstractmethod
    def join(self, settings: dict[str, object], lookahead: np.float32, note: TrainerNote) -> None:
        """Meets the others, who must have the same ``settings``, and takes up the common state,
        whose next inner steps start with ``lookahead``. After an error this trainer is as it was.
        Raises InputError, StateMismatch, Diverged, CorruptMessage, NonFinite, TrainerLost and
        StoreError."""

    @abstractmethod
    def run(self, phase: Phase, lookahead: np.float32) -> Round | None:
        """Runs the round that is due; its ``seconds`` are the caller's. None where this trainer has
        only taken up what the others did. Raises what `PulseLoCo` does."""

    @abstractmethod
    def note(self, note: TrainerNote) -> None:
        """Where this trainer is, for the others' errors."""

    def reset(self) -> None:  # noqa: B027
        """Another state is loaded."""

    def forget_steps(self) -> None:  # noqa: B027
        """The inner steps under way are discarded."""

    @abstractmethod
    def move(self, group: dist.ProcessGroup | None) -> None:
        """Leaves the others, to `join` again, in ``group``."""

    @abstractmethod
    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the others, who hear that it was on purpose, or because of ``error``."""
