"""How trainers meet, in a group or over a store: the settings, what each side does, and what a
round came to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from .._util.settings import checked_count, checked_number
from ..errors import InputError
from ..events import OneLine
from ..store import Store
from ..stream.signing import Signer, TrustedKeys
from .group import TrainerNote
from .parameters import Floats
from .store_format import TRAINER
from .wire import Wire, WireName

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Exchange:
    """Who takes part, and how messages travel between them: what a loop takes as ``over``. All
    trainers have the same settings.

    Args:
        group: The trainers. Default: all of torch.distributed; without it, this trainer alone.
        wire: How values travel: "FP32" exactly; "BF16", "int4" and "int2" rounded to 7, 2 and 0
            explicit bits of mantissa, for about nine, four and two bits a value once they are
            coded. The residual keeps what rounding loses.
        sweep: Every so many rounds the gates let all of a block of parameters pass, each block in
            its turn. For "int4" and "int2", and with a lookahead (docs/loco.md, 1.3).
        timeout_seconds: A trainer that dies, or stalls for longer, raises TrainerLost on the
            others.
    Raises: InputError.
    """

    group: dist.ProcessGroup | None = None
    wire: WireName = "FP32"
    sweep: int | None = None
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        require_sweep(self.sweep, self.wire)
        if self.timeout_seconds <= 0:
            raise InputError(
                f"timeout_seconds is {self.timeout_seconds}",
                hint="Give a number of seconds above 0.",
            )


def require_sweep(sweep: int | None, wire: WireName) -> None:
    """Raises InputError for a ``wire`` that there is not, and a ``sweep`` that is no number of
    rounds, or that the wire is too wide for."""
    few_bits = Wire(wire).few_bits
    if sweep is None:
        return
    checked_count("sweep", sweep)
    if not few_bits:
        raise InputError(
            f"a sweep sends every value of a block, which is for few bits, not for wire {wire!r}",
            hint='Set wire="int4" or wire="int2".',
        )


@dataclass(frozen=True)
class StoreExchange:
    """Trainers that meet in a ``store`` (or its address) instead of a process group: what
    `PulseLoCo` takes as ``over``. All trainers of a run give the same store. Without keys nobody
    else may write below ``loco/`` in it.

    Among many trainers each sums a share of the parameters for all (docs/loco.md, 7.3). Sums that
    are not there after ``grace_seconds`` are made by others than their owner.

    Args:
        store: The store, or its address.
        trainer: This trainer's name: letters, digits, "-" and "_", at most 64. With a name of its
            own a trainer that resumes from a checkpoint knows which of its messages counted.
            Default: a random name.
        quorum: The fewest trainers that make a round.
        grace_seconds: How long a round that has a quorum waits for the trainers of the round
            before. Stragglers are not in this round, and lose nothing.
        deadline_seconds: Without a quorum for that long, a round raises TrainerLost.
        wire: As for `Exchange`.
        sweep: As for `Exchange`.
        signer: This trainer's key, with which it signs all that it writes. Its name is the public
            key then.
        trusted_keys: The public keys of all members, its own among them. What others write is
            refused.
        max_norm: All refuse a message with a larger L2 norm, its own trainer with InputError. One
            setting of all trainers.
    Raises: InputError.
    """

    store: Store | str
    trainer: str | None = None
    quorum: int = 2
    grace_seconds: float = 60.0
    deadline_seconds: float = 3600.0
    wire: WireName = "FP32"
    sweep: int | None = None
    signer: Signer | None = None
    trusted_keys: Collection[str] | None = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        require_sweep(self.sweep, self.wire)
        checked_count("quorum", self.quorum)
        checked_number("grace_seconds", self.grace_seconds)
        checked_number("deadline_seconds", self.deadline_seconds)
        if self.max_norm is not None:
            checked_number("max_norm", self.max_norm)
        if self.trainer is not None and not (
            isinstance(self.trainer, str) and TRAINER.fullmatch(self.trainer)
        ):
            raise InputError(
                f"trainer is {self.trainer!r}",
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


@dataclass(frozen=True, slots=True, repr=False)
class Round(OneLine):
    """What a finished round did, as one of its trainers saw it.

    Args:
        number: The round, counted from 1.
        trainers: How many trainers were in it.
        parameters: How many parameters are trained.
        entries: How many of them passed this trainer's gate.
        summed: How many have a sum that is not 0, and passed its gate if there is one.
        scattered: Whether each trainer summed a share of the parameters (docs/loco.md, 4.3);
            otherwise all got all messages.
        payload_bytes: Bytes of this trainer's messages, those about frozen parameters and buffers
            included.
        sent_bytes: Bytes that left its process: headers, padding, and what it passed on or summed
            for others included.
        root: The root of theta, FP32.
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
        """Runs the round that is due; its ``seconds`` are the caller's. With overlap it ends the
        one before, if there is any, and begins the one that is due. Raises what `PulseLoCo`
        does."""

    def finish(self, phase: Phase, lookahead: np.float32) -> Round | None:
        """Ends the round that was begun, if there is any. Raises what `run` does."""
        return None

    @abstractmethod
    def note(self, note: TrainerNote) -> None:
        """Where this trainer is, for the others' errors."""

    @abstractmethod
    def averaged(self) -> Floats:
        """Theta less what all trainers hold back on average. Raises InputError where it cannot be
        had."""

    def rest(self) -> None:  # noqa: B027
        """Ends what goes on behind the inner steps, before another state is loaded."""

    def forget_steps(self) -> None:  # noqa: B027
        """The inner steps under way are discarded."""

    @abstractmethod
    def move(self, group: dist.ProcessGroup | None) -> None:
        """The next `join` is in ``group``."""

    @abstractmethod
    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the others, who hear that it was on purpose, or because of ``error``."""
