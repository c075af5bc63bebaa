"""What a worker sends to the trainer, and when the trainer refuses it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256

import torch
from safetensors.torch import load, save

from pulse_rl import Store

from .settings import STREAM


@dataclass(frozen=True)
class Origin:
    """Which weights made a batch of rollouts, and how the worker came by them.

    ``root`` is the digest of the worker's live model when it generated, not what a manifest claimed. ``sync_ms`` is
    the time to fetch and verify the version, ``pause_ms`` the part during which the model could not generate.
    """

    worker: str
    stream: str
    version: int
    root: str
    sync_ms: float
    pause_ms: float


@dataclass(frozen=True)
class Rollouts:
    """Answers to some prompts, ``group`` to each, side by side.

    ``tokens`` uint8 [sequences, prompt + answer]; ``log_probs`` float32 [sequences, answer], what the worker sampled
    with; ``rewards`` float32 [sequences].
    """

    origin: Origin
    tokens: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor

    def to_bytes(self) -> bytes:
        """An ordinary safetensors file with the origin in its metadata."""
        tensors = {"tokens": self.tokens, "log_probs": self.log_probs, "rewards": self.rewards}
        return save(tensors, metadata={"origin": json.dumps(asdict(self.origin))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Rollouts:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return cls(Origin(**json.loads(header["__metadata__"]["origin"])), **load(data))


def folder_of(worker: str) -> str:
    return f"rollouts/{worker}"


def send(store: Store, sequence: int, rollouts: Rollouts) -> str:
    """Stores a batch under its number and digest, and returns the name."""
    data = rollouts.to_bytes()
    name = f"{folder_of(rollouts.origin.worker)}/{sequence:08d}-{sha256(data).hexdigest()[:16]}"
    store.put(name, data)
    return name


def sequence_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])


def reports_of(worker: str) -> str:
    """The folder of a worker's final reports."""
    return f"reports/{worker}"


def refusal(origin: Origin, *, roots: Mapping[int, str], newest: int, max_lag: int) -> str | None:
    """Why a batch must not be trained on, None if it may be.

    ``roots`` are those of the versions that this trainer published and can vouch for.
    """
    if origin.stream != STREAM or origin.version not in roots:
        return "unknown version"
    if origin.root != roots[origin.version]:
        return "wrong root"
    if newest - origin.version > max_lag:
        return "too old"
    return None
