"""What a worker sends to the trainers of a policy, by way of the origin."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from safetensors.torch import load, save

from pulse_rl import Store


@dataclass(frozen=True)
class Made:
    """Which version of the policy made a batch, and in which worker."""

    worker: str
    version: int


@dataclass(frozen=True)
class Batch:
    """``tokens`` uint8 [sequences, length]; ``log_probs`` float32 [sequences, last tokens]; ``rewards`` and ``right``,
    whether the solver's answer is right, float32 [sequences]."""

    made: Made
    tokens: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor
    right: torch.Tensor

    def to_bytes(self) -> bytes:
        tensors = {"tokens": self.tokens, "log_probs": self.log_probs, "rewards": self.rewards}
        tensors["right"] = self.right
        return save(tensors, metadata={"made": json.dumps(asdict(self.made))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return cls(Made(**json.loads(header["__metadata__"]["made"])), **load(data))


def folder_of(policy: str) -> str:
    return f"batches-{policy}"


def send(store: Store, policy: str, sequence: int, batch: Batch) -> None:
    """Stores a batch; its name says by which version and worker it was made."""
    name = f"{folder_of(policy)}/{batch.made.version:08d}-{batch.made.worker}-{sequence:06d}"
    store.put(name, batch.to_bytes())


def version_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])
