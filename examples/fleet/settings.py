"""What there is in a fleet, and what can be set."""

from __future__ import annotations

from dataclasses import dataclass

from ..grpo.run import SavedSettings, option

POLICIES = ("solver", "verifier")
#: Bits per second of a region's link to the origin, shared by all that is in the region, in each
#: direction.
REGIONS = {"near": 50e6, "far": 10e6}

FIRST = {
    "worker-0": "near",
    "worker-1": "near",
    "worker-2": "near",
    "worker-3": "far",
    "worker-4": "far",
    "worker-5": "far",
}
JOINING = {"worker-6": "near", "worker-7": "far"}
HOMES = FIRST | JOINING
KILLED = ("worker-1", "worker-4")
CUT = "far"


@dataclass(frozen=True)
class Settings(SavedSettings):
    """The options of a run. Workers are killed after a fifth of the solver's steps and join after
    two fifths; a region is cut off from a half to four fifths of them."""

    steps: int = option(140, "steps of each policy")
    lr: float = option(1e-4, "learning rate of the RL phase")
    ranks: int = option(2, "processes of a policy's trainer")
    prompts: int = option(8, "problems in a batch of rollouts")
    group: int = option(8, "answers per problem")
    max_lag: int = option(12, "trainers refuse rollouts that are more versions behind than this")
    sft_accuracy: float = option(
        0.5, "the warm-up ends once this share of sampled answers is right"
    )
    patience: float = option(240.0, "seconds after which a process gives up on its peers")
    seed: int = option(0, "seed of everything random")

    def __post_init__(self) -> None:
        self.require_positive("seed")
