"""What can be set in a run of this example."""

from __future__ import annotations

from dataclasses import dataclass

from ..grpo.run import SavedSettings, option


@dataclass(frozen=True)
class Settings(SavedSettings):
    """The options of a run, kept in its folder, where every process of the run finds them."""

    lr: float = option(3e-6, "learning rate of the inner steps")
    rounds: int = option(80, "outer rounds")
    sync_every: int = option(8, "inner steps in a round (H)")
    trainers: int = option(4, "trainer processes")
    workers: int = option(2, "rollout-worker processes")
    prompts: int = option(8, "problems in a batch of rollouts; an inner step takes one batch")
    group: int = option(8, "answers per problem")
    max_lag: int = option(2, "trainers refuse rollouts that are more rounds behind than this")
    sft_steps: int = option(250, "supervised warm-up steps, at most")
    sft_accuracy: float = option(
        0.35, "the warm-up ends earlier once this share of sampled answers is right"
    )
    patience: float = option(120.0, "seconds after which a process gives up on its peers")
    seed: int = option(0, "seed of everything random")

    def __post_init__(self) -> None:
        self.require_positive("max_lag", "seed")
        if self.group < 2 or self.max_lag < 0:
            raise ValueError("group must be at least 2 and max_lag at least 0")

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{index}" for index in range(self.workers)]

    @property
    def trainer_names(self) -> list[str]:
        return [f"trainer-{rank}" for rank in range(self.trainers)]
