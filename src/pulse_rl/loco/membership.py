"""Who is there, and from which round they go on together (docs/loco.md, section 5)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from ..errors import CorruptMessage, Diverged, InputError, StateMismatch
from ..state.tensors import TensorSpec
from .exchange import Exchange

_MOST_BYTES = 1 << 20
_FIELDS: dict[str, type] = {"settings": dict, "round": int, "root": str, "momentum": str, "messages": list}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a trainer stands: its parameters and settings, its last common round, the roots of theta and momentum.

    ``messages`` are the digests of the messages of that round, one a trainer.
    """

    specs: tuple[TensorSpec, ...] = field(repr=False)
    settings: dict[str, object]
    round: int
    root: str
    momentum: str
    messages: list[str]

    def pack(self) -> bytes:
        told: dict[str, Any] = {k: v for k, v in asdict(self).items() if k != "specs"}
        return json.dumps(told | {"specs": _digest_of(self.specs)}).encode()


def meet(exchange: Exchange, own: Standing) -> tuple[int, Standing, bool]:
    """(the trainer that leads, its standing, whether anyone must get its state).

    The lowest rank of those in the latest round leads. Raises StateMismatch if the models differ, InputError if the
    settings do, Diverged if two trainers in the latest round, past round 0, hold different states.
    """
    standings = [_unpack(data) for data in exchange.gather(own.pack(), most=_MOST_BYTES)]
    for rank, told in enumerate(standings):
        if told["specs"] != _digest_of(own.specs):
            raise StateMismatch(f"trainer {rank} trains other parameters: names, order or shapes differ")
        if told["settings"] != json.loads(json.dumps(own.settings)):
            raise InputError(f"trainer {rank} runs with {told['settings']}, this one with {own.settings}")
    latest = max(int(told["round"]) for told in standings)
    leader = next(rank for rank, told in enumerate(standings) if told["round"] == latest)
    leading = standings[leader]
    odd = [
        rank
        for rank, told in enumerate(standings)
        if told["round"] == latest and (told["root"], told["momentum"]) != (leading["root"], leading["momentum"])
    ]
    if latest and odd:
        raise Diverged(f"in round {latest} the state of trainers {odd} is not that of trainer {leader}")
    anyone_behind = len({(told["round"], told["root"], told["momentum"]) for told in standings}) > 1
    return leader, Standing(own.specs, **{k: leading[k] for k in _FIELDS}), anyone_behind


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        told = json.loads(data)
    except ValueError as error:
        raise CorruptMessage(f"a trainer introduced itself with something else than JSON: {error}") from None
    if not isinstance(told, dict) or any(not isinstance(told.get(k), t) for k, t in {"specs": str, **_FIELDS}.items()):
        raise CorruptMessage("a trainer introduced itself without saying where it stands")
    return told


def _digest_of(specs: tuple[TensorSpec, ...]) -> str:
    return sha256(repr([(s.name, s.dtype.name, s.shape) for s in specs]).encode()).hexdigest()
