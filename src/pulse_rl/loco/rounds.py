"""What a round is to those outside it (`Round`) and to the loop that ends it (`Received`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """What the finished round ``number``, counted from 1, of so many ``trainers`` did, as one of them saw it.

    ``entries`` of ``parameters`` passed this trainer's gate; its messages took ``payload_bytes``, those about buffers
    and frozen parameters included; ``sent_bytes`` left its process in all (headers, padding, and what it passed on or
    summed for others), and ``between_bytes`` of them went to trainers of another site. ``summed`` parameters have a sum
    that is not 0, and passed its gate if there is one.
    ``scattered``: each trainer summed a share of the parameters (docs/loco.md, 4.3); otherwise all got all messages.
    ``root`` is that of theta, FP32. ``seconds`` by phase: "gate", "exchange", "decode", "update", "verify", and
    "untrained" for buffers and frozen parameters.
    """

    number: int
    trainers: int
    parameters: int
    entries: int
    summed: int
    scattered: bool
    payload_bytes: int
    sent_bytes: int
    between_bytes: int
    root: str
    seconds: dict[str, float]

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
        """What a publisher may note of the round beside its reward: ``pulse report`` draws reward by bytes from it."""
        return {"round": self.number, "loco_sent_bytes": self.sent_bytes, "loco_dense_bytes": self.dense_bytes}


@dataclass(frozen=True, slots=True)
class Received:
    """A round whose messages have all arrived. What is left cannot fail: ``apply`` gives theta, momentum and the model
    what follows from them, and returns the number of parameters whose sum is not 0.

    ``entries`` and ``payload_bytes`` are those of this trainer's own message.
    """

    entries: int
    payload_bytes: int
    apply: Callable[[], int]
    scattered: bool = False
