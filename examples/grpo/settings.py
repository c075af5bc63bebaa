"""What can be set, and what lies where in a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .processes import SavedSettings

STREAM = "policy"
"""The name of the policy's stream in the store."""


@dataclass(frozen=True)
class Settings(SavedSettings):
    """The options of a run, kept in its folder so that each role can be started by hand and a run be resumed."""

    lr: float = 1e-5
    steps: int = 300
    sft_steps: int = 250
    sft_accuracy: float = 0.35
    workers: int = 2
    prompts: int = 16
    group: int = 8
    max_lag: int = 4
    checkpoint_every: int = 10
    patience: float = 180.0
    seed: int = 0
    engine: str = "torch"

    def __post_init__(self) -> None:
        for name in ("lr", "steps", "sft_steps", "workers", "prompts", "checkpoint_every", "patience"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
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
class RunFolder:
    """The places in a run's folder. Trainer and workers share the store alone; the rest has one owner each."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def store_address(self) -> str:
        return (self.root / "store").absolute().as_uri()

    @property
    def checkpoint(self) -> Path:
        """The trainer's own: masters, optimizer state and where it was."""
        return self.root / "trainer.checkpoint"

    def engine_checkpoint(self, server: str) -> Path:
        """What a vLLM server starts from."""
        return self.root / server

    @property
    def journal(self) -> Path:
        """One JSON object per line that the trainer reports and the orchestrator shows."""
        return self.root / "trainer.jsonl"

    def events(self, role: str) -> Path:
        """The library's events in one process, for ``pulse report``."""
        return self.root / f"events-{role}.jsonl"

    @property
    def plot(self) -> Path:
        return self.root / "reward-and-density.png"

    def log(self, role: str) -> Path:
        return self.root / f"{role}.log"

    def lock(self, role: str) -> Path:
        return self.root / f"{role}.lock"
