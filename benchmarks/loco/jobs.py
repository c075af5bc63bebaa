"""What the trainers are asked to do, and what each of them answers."""

from __future__ import annotations

from dataclasses import dataclass

TRAINERS = 4
SYNC_EVERY = 8
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
WARM_UP = 20
PRETRAINED_RATES = (1e-6, 3e-6)


@dataclass(frozen=True)
class Job:
    """One training run: ``rounds`` times `SYNC_EVERY` inner steps of ``task`` by ``method``.

    ``lr`` rises over the first ``warm_up`` inner steps and stays. ``fraction`` is for top-k alone. ``evaluate``: after
    each round, measure reward and loss on held-out problems. ``dense``: after each round, time a dense all-reduce of as
    many FP32 values.
    """

    task: str
    method: str
    lr: float
    rounds: int
    seed: int
    warm_up: int
    fraction: float | None = None
    evaluate: bool = False
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
    of its rollouts; ``held_out_reward`` and ``held_out_loss``: of its share of the held-out problems.
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
    held_out_reward: float | None
    held_out_loss: float | None
    root: str | None

    @property
    def density(self) -> float:
        return self.entries / self.parameters


STEADY_FROM = 6
"""A sparse method's first round that counts: the residual fills for some rounds, and until then less is sent."""

JobResult = list[list[RoundRecord]]
"""The records of one job: by trainer, then by round."""
