"""The trainers' handshake: are they compatible, who leads, who is behind (docs/loco.md, section 5).

All but `exchange_handshakes` are pure functions of the handshakes, which are in rank order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Self

from ..errors import CorruptMessage, Diverged, InputError, StateMismatch
from ..state.tensors import TensorSpec
from .group import TrainerGroup
from .wire import FORMAT

_MAX_HANDSHAKE_BYTES = 1 << 20
_FIELDS: dict[str, type] = {
    "settings": dict,
    "round": int,
    "root": str,
    "momentum": str,
    "messages": list,
    "specs": str,
    "site": str,
    "format": int,
}


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a trainer sends when trainers meet.

    ``settings`` are those that all must share. ``round`` is its last common round, ``root`` the root of theta after it,
    ``momentum`` that of the outer momentum (both 64 hexadecimal digits). ``messages`` are the digests of that round's
    messages, one per trainer, and ``specs`` is the digest of its parameters (`specs_digest`).
    ``site``: the name of its site, "" if it was given none. ``format`` is that of the handshake and of all messages.
    """

    settings: dict[str, Any]
    round: int
    root: str
    momentum: str
    messages: list[str]
    specs: str
    site: str = ""
    format: int = FORMAT

    @property
    def state(self) -> tuple[int, str, str]:
        """Round and roots: equal for two trainers that hold the same outer state."""
        return self.round, self.root, self.momentum

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptMessage unless ``data`` is a handshake. Fields that are not known are ignored."""
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise CorruptMessage(f"a trainer's handshake is not JSON: {error}") from None
        if not isinstance(fields, dict) or any(not isinstance(fields.get(k), t) for k, t in _FIELDS.items()):
            raise CorruptMessage(f"a trainer's handshake lacks one of {', '.join(_FIELDS)}")
        if fields["format"] != FORMAT:
            raise CorruptMessage(f"a trainer's handshake has format {fields['format']}, this one reads {FORMAT}")
        return cls(**{name: fields[name] for name in _FIELDS})


def specs_digest(specs: Sequence[TensorSpec], untrained: Sequence[tuple[str, str, tuple[int, ...]]] = ()) -> str:
    """SHA-256 of names, dtypes and shapes in order, 64 hexadecimal digits. Without ``untrained`` tensors those of the
    trained parameters alone."""
    trained = repr([(s.name, s.dtype.name, s.shape) for s in specs])
    return sha256((trained + (repr(list(untrained)) if untrained else "")).encode()).hexdigest()


def exchange_handshakes(group: TrainerGroup, own: Handshake) -> list[Handshake]:
    """The handshakes of all trainers. Raises TrainerLost and CorruptMessage."""
    return [Handshake.parse(data) for data in group.all_gather(own.to_bytes(), max_bytes=_MAX_HANDSHAKE_BYTES)]


def require_same_model_and_settings(handshakes: Sequence[Handshake], own_rank: int) -> None:
    """Raises StateMismatch if a trainer has other parameters than ``own_rank``, InputError if it has other settings, or
    if some have a site and others have none."""
    own = handshakes[own_rank]
    for rank, handshake in enumerate(handshakes):
        if handshake.specs != own.specs:
            raise StateMismatch(
                f"trainer {rank} has other parameters or buffers, or trains others: names, dtypes or shapes differ"
            )
        if handshake.settings != own.settings:
            raise InputError(f"trainer {rank} runs with {handshake.settings}, this one with {own.settings}")
    nowhere = [rank for rank, handshake in enumerate(handshakes) if not handshake.site]
    if 0 < len(nowhere) < len(handshakes):
        raise InputError(
            f"trainers {nowhere} have no site, the others have one",
            hint="Give every trainer the name of its site, or none of them.",
        )


def find_leader(handshakes: Sequence[Handshake]) -> int:
    """The rank whose state all take up: the lowest one in the latest round."""
    latest = max(handshake.round for handshake in handshakes)
    return next(rank for rank, handshake in enumerate(handshakes) if handshake.round == latest)


def find_behind(handshakes: Sequence[Handshake], leader: int) -> list[int]:
    """The ranks that hold another state than the leader."""
    return [rank for rank, handshake in enumerate(handshakes) if handshake.state != handshakes[leader].state]


def require_no_divergence(handshakes: Sequence[Handshake], leader: int) -> None:
    """Raises Diverged if the leader's round, past round 0, left another trainer with another state.

    Before the first round all states may differ: each trainer still has its own weights.
    """
    latest = handshakes[leader].round
    diverged = [rank for rank in find_behind(handshakes, leader) if handshakes[rank].round == latest]
    if latest and diverged:
        raise Diverged(f"in round {latest} the state of trainers {diverged} is not that of trainer {leader}")


class Delivery(Enum):
    """What became of the message that a trainer sent in a round whose end it did not see."""

    COUNTED = "counted"
    NOT_COUNTED = "not counted"
    UNKNOWN = "unknown"


def delivery_of(message: str | None, number: int, leader: Handshake, *, from_checkpoint: bool) -> Delivery:
    """What became of the message of the round after ``number``, the last one that this trainer has completed.

    ``message`` is its digest, None if none was sent. The leader knows the messages of its last round alone. Of a
    trainer that resumed ``from_checkpoint`` and has met nobody since, it is unknown what it sent after it was saved.
    """
    if leader.round == number + 1 and message in leader.messages:
        return Delivery.COUNTED
    if from_checkpoint or (message is not None and leader.round > number + 1):
        return Delivery.UNKNOWN
    return Delivery.NOT_COUNTED
