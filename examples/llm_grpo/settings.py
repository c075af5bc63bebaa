"""What can be set in a run of this example."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..grpo.run import option
from ..grpo.settings import GrpoSettings
from .model import FOLDER


@dataclass(frozen=True)
class Settings(GrpoSettings):
    lr: float = option(3e-6, "learning rate")
    steps: int = option(100, "RL steps")
    prompts: int = option(4, "problems in a batch of rollouts")
    checkpoint_every: int = option(25, "steps between two checkpoints of the trainer")
    evaluate_every: int = option(25, "steps between two evaluations on held-out problems")
    model: str = option(str(FOLDER), "folder of a checkpoint; the default is made once")

    @property
    def folder(self) -> Path:
        return Path(self.model)
