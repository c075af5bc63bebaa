"""What the trainers are asked to do, and what each of them answers."""

from __future__ import annotations

from dataclasses import dataclass

TRAINERS = 4
SYNC_EVERY = 8
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
WARM_UP = 20
PRETRAINED_RATES = (1e-6, 3e-6)

# Of 1e-5, 3e-5, 1e-4 and 3e-4 those with DiLoCo's and DDP's lowest loss after 32 rounds of the arithmetic task, on a
# seed that is in no table. DiLoCo's outer momentum makes its steps some seven times as long: it wants a lower one.
LR, LR_DDP = 3e-5, 1e-4
LAST = 5
"""The final reward and loss are means over so many last rounds."""


@dataclass(frozen=True)
class Job:
    """One training run: ``rounds`` times `SYNC_EVERY` inner steps of ``task`` by ``method``.

    ``lr`` rises over the first ``warm_up`` inner steps and stays. ``dense``: after each round, time a dense all-reduce
    of as many FP32 values.
    """

    task: str
    method: str
    lr: float
    rounds: int
    seed: int
    warm_up: int
    dense: bool = False

    @property
    def title(self) -> str:
        return f"{self.task}, {self.method}, lr {self.lr:g}, seed {self.seed}"


@dataclass(frozen=True)
class RoundRecord:
    """One round as one trainer saw it. Of DDP: as many inner steps as a round has.

    ``payload_bytes``: its own message; ``sent_bytes``: what left its process by its own count; ``interface_bytes``:
    what left its network interface (None without one of its own). ``seconds`` by phase; ``outer_seconds``: all that
    the round adds to its last inner step; ``dense_seconds``: the dense all-reduce right after it. ``reward``: the mean
    of its rollouts.
    """

    number: int
    parameters: int
    entries: int
    payload_bytes: int
    sent_bytes: int
    interface_bytes: int | None
    seconds: dict[str, float]
    outer_seconds: float
    dense_seconds: float | None
    reward: float
    root: str | None

    @property
    def density(self) -> float:
        return self.entries / self.parameters


STEADY_FROM = 6
"""A sparse method's first round that counts: the residual fills for some rounds, and until then less is sent."""

JobResult = list[list[RoundRecord]]
"""The records of one job: by trainer, then by round."""
