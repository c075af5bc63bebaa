"""What there is in a fleet, and what lies where in a run's folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ..grpo.processes import SavedSettings

POLICIES = ("solver", "verifier")
PORT, INBOX_PORT = 8734, 8735
"""Of the origin, in namespaces: where its folder is read, and where batches are put."""
REGIONS = {"near": 50e6, "far": 10e6}
"""Bits per second of a region's link to the origin, shared by all that is in the region, in each direction."""

FIRST = {
    "worker-0": "near",
    "worker-1": "near",
    "worker-2": "near",
    "worker-3": "far",
    "worker-4": "far",
    "worker-5": "far",
}
JOINING = {"worker-6": "near", "worker-7": "far"}
KILLED = ("worker-1", "worker-4")
CUT = "far"
FOLDS = (8, 64)
"""Versions that the trainers' folds stand for."""


@dataclass(frozen=True)
class Settings(SavedSettings):
    """The options of a run. ``links``: the regions are "namespaces" with rate limits, or their links are "simulated" by
    waiting in the processes. ``killed_at``, ``joined_at``, ``cut_at`` and ``mended_at`` are steps of the solver."""

    steps: int = 140
    lr: float = 1e-4
    ranks: int = 2
    prompts: int = 8
    group: int = 8
    max_lag: int = 12
    sft_accuracy: float = 0.5
    patience: float = 240.0
    seed: int = 0
    links: str = "namespaces"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("seed", "links") and value <= 0:
                raise ValueError(f"{name} must be positive")
        if self.links not in ("namespaces", "simulated"):
            raise ValueError("links must be namespaces or simulated")

    @property
    def killed_at(self) -> int:
        return self.steps // 5

    @property
    def joined_at(self) -> int:
        return self.steps * 2 // 5

    @property
    def cut_at(self) -> int:
        return self.steps // 2

    @property
    def mended_at(self) -> int:
        return self.steps * 4 // 5


@dataclass(frozen=True)
class RunFolder:
    """The places in a run's folder. A region's processes reach the origin over the region's link alone."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def origin(self) -> Path:
        return self.root / "origin"

    def near(self, region: str) -> Path:
        """The store that a region's relay keeps."""
        return self.root / f"store-{region}"

    def link(self, region: str, way: str) -> Path:
        return self.root / f"link-{region}-{way}"

    def cut(self, region: str) -> Path:
        """Exists while the region is cut off."""
        return self.root / f"cut-{region}"

    def start(self, policy: str) -> Path:
        """The weights that a policy starts from."""
        return self.root / f"{policy}.pt"

    def meeting(self, policy: str) -> Path:
        return self.root / f"meeting-{policy}"

    def journal(self, role: str) -> Path:
        return self.root / f"{role}.jsonl"

    def events(self, role: str) -> Path:
        """The library's events in one process, for ``pulse report``."""
        return self.root / f"events-{role}.jsonl"

    def log(self, role: str) -> Path:
        return self.root / f"{role}.log"
