"""What can be set, and what lies where in a run's folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ..grpo import settings as grpo
from ..grpo.processes import SavedSettings


@dataclass(frozen=True)
class Settings(SavedSettings):
    """The options of a run, kept in its folder, where every process of the run finds them."""

    lr: float = 3e-6
    rounds: int = 80
    sync_every: int = 8
    trainers: int = 4
    workers: int = 2
    prompts: int = 8
    group: int = 8
    max_lag: int = 2
    sft_steps: int = 250
    sft_accuracy: float = 0.35
    patience: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 and name not in ("max_lag", "seed"):
                raise ValueError(f"{name} must be positive")
        if self.group < 2 or self.max_lag < 0:
            raise ValueError("group must be at least 2 and max_lag at least 0")

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{index}" for index in range(self.workers)]


class RunFolder(grpo.RunFolder):
    """The places in a run's folder. Each trainer has a checkpoint and a journal of its own; the store is for all."""

    def checkpoint_of(self, rank: int) -> Path:
        """The outer and the inner state of one trainer, which reads no other's."""
        return self.root / f"trainer-{rank}.checkpoint"

    def journal_of(self, rank: int) -> Path:
        """One JSON object per line that a trainer reports and `__main__` shows."""
        return self.root / f"trainer-{rank}.jsonl"
