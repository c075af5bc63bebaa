"""What trainers say of how they meet in a store: `StoreExchange`, which `PulseLoCo` takes as
``over``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .._util.settings import checked_count, checked_number
from ..errors import InputError
from ..store import Store
from ..stream.signing import Signer, TrustedKeys
from .exchange import Exchange
from .store_format import TRAINER
from .wire import WireName

_MOST_SECONDS = 30 * 86400.0  # torch counts in microseconds


@dataclass(frozen=True)
class StoreExchange:
    """Trainers that meet in a ``store`` (or its address) instead of a process group: what
    `PulseLoCo` takes as ``over``. All trainers of a run give the same store. Without keys nobody
    else may write below ``loco/`` in it.

    ``trainer``: this trainer's name, letters, digits, "-" and "_", at most 64; with one of its own
    a trainer that comes back from a checkpoint knows what became of the messages that it had sent.
    None: a name at random. ``quorum``: the fewest trainers that make a round. ``grace_seconds``:
    how long those that were in the round before are waited for once a quorum is there; who is later
    is left out of this round, and loses nothing. ``deadline_seconds``: without a quorum for that
    long, a round raises TrainerLost. ``wire`` and ``sweep``: how values travel, and when all of a
    block does, as with `Exchange`.

    Among many trainers each sums a share of the parameters for all (docs/loco.md, 7.3); sums that
    are not there after ``grace_seconds`` are made by others than their owner.

    ``signer``: this trainer's key, with which it signs all that it writes; its name is the public
    key then. ``trusted_keys``: the public keys of all members, its own among them; what others
    write is refused. ``max_norm``: a message with a larger L2 norm is refused by all alike, by
    its own trainer with InputError; one setting of all trainers. Raises InputError.
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
        travel_of(self)
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


def travel_of(exchange: StoreExchange) -> Exchange:
    """How its messages travel. Raises InputError."""
    return Exchange(wire=exchange.wire, sweep=exchange.sweep)


def rank_seconds_of(exchange: StoreExchange) -> float:
    """How long the ranks of a trainer wait for that which speaks for them: it may wait for two
    rounds."""
    return min(600 + 2 * (exchange.deadline_seconds + exchange.grace_seconds), _MOST_SECONDS)


def store_exchange_of(over: Store | str | StoreExchange) -> StoreExchange:
    return over if isinstance(over, StoreExchange) else StoreExchange(over)
