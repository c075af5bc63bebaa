"""What can be set in a run of this example."""

from __future__ import annotations

from dataclasses import dataclass

from .run import SavedSettings, option


@dataclass(frozen=True)
class GrpoSettings(SavedSettings):
    """The options that every asynchronous GRPO has, kept in the run's folder so that each role can
    be started by hand and a run be resumed."""

    lr: float = option(1e-5, "learning rate of the RL phase")
    steps: int = option(300, "RL steps")
    workers: int = option(2, "rollout-worker processes; a step takes as many batches")
    prompts: int = option(16, "problems in a batch of rollouts")
    group: int = option(8, "answers per problem")
    max_lag: int = option(4, "the trainer refuses rollouts that are more versions behind than this")
    checkpoint_every: int = option(10, "steps between two checkpoints of the trainer")
    patience: float = option(180.0, "seconds after which a process gives up on its peers")
    seed: int = option(0, "seed of everything random")
    engine: str = option("torch", "what generates: torch, or vllm, a server for each worker")

    def __post_init__(self) -> None:
        self.require_positive("max_lag", "seed", "engine", "model", "sft_accuracy")
        if self.engine not in ("torch", "vllm"):
            raise ValueError("engine must be torch or vllm")
        if self.group < 2 or self.max_lag < 0:
            raise ValueError("group must be at least 2 and max_lag at least 0")

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{index}" for index in range(self.workers)]

    @property
    def server_names(self) -> list[str]:
        """One vLLM server for each worker."""
        return [f"server-{index}" for index in range(self.workers)] if self.engine == "vllm" else []

    @property
    def roles(self) -> list[str]:
        return ["trainer", *self.server_names, *self.worker_names]


@dataclass(frozen=True)
class Settings(GrpoSettings):
    sft_steps: int = option(250, "supervised warm-up steps, at most")
    sft_accuracy: float = option(
        0.35, "the warm-up ends earlier once this share of sampled answers is right"
    )
