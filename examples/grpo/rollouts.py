"""What a worker sends to a trainer, by way of the store, and when the trainer refuses it.

Each trainer has an inbox, a folder in the store, and what lies there waits. A trainer deletes what
it trained on when the step or round is over, and what it refuses at once. Either way a place gets
free that the workers fill: the listing of the folder is all that the two sides know of each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from safetensors.torch import load, save

from pulse_rl import Store


@dataclass(frozen=True)
class Origin:
    """Which weights made a batch of rollouts, and how the worker came by them.

    ``root`` is the digest of the worker's live model when it generated, not what a manifest
    claimed. ``sync_ms`` is the time to fetch and verify the version, ``pause_ms`` the part during
    which the model could not generate, ``live_ms`` the time since just before its publish.
    """

    worker: str
    version: int
    root: str
    sync_ms: float = 0.0
    pause_ms: float = 0.0
    live_ms: float = 0.0


@dataclass(frozen=True)
class Rollouts:
    """Answers to some prompts, ``group`` to each, side by side.

    ``tokens`` integers [sequences, prompt + answer]; ``log_probs`` float32 [sequences, answer],
    what the worker sampled with; ``rewards`` float32 [sequences].
    """

    origin: Origin
    tokens: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor

    def to_bytes(self) -> bytes:
        """An ordinary safetensors file with the origin in its metadata."""
        tensors = {
            name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return save(tensors, metadata={"origin": json.dumps(asdict(self.origin))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Rollouts:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return cls(Origin(**json.loads(header["__metadata__"]["origin"])), **load(data))


def folder_of(trainer: str) -> str:
    return f"rollouts/{trainer}"


def put(store: Store, trainer: str, number: int, rollouts: Rollouts) -> None:
    """Stores a worker's batch ``number`` of its version. Names sort by age."""
    origin = rollouts.origin
    store.put(
        f"{folder_of(trainer)}/{origin.version:08d}-{number:06d}-{origin.worker}",
        rollouts.to_bytes(),
    )


def waiting(store: Store, trainer: str, worker: str) -> int:
    """The batches of a worker that a trainer has not done with."""
    return sum(info.name.endswith(f"-{worker}") for info in store.list(folder_of(trainer)))


def version_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])


def refusal(origin: Origin, *, roots: Mapping[int, str], newest: int, max_lag: int) -> str | None:
    """Why a batch must not be trained on, None if it may be.

    ``roots`` are those of the versions that this trainer published and can vouch for.
    """
    if origin.version not in roots:
        return "unknown version"
    if origin.root != roots[origin.version]:
        return "wrong root"
    if newest - origin.version > max_lag:
        return "too old"
    return None


class Inbox:
    """The trainer's side. ``refused`` counts, by reason, what was refused since the last
    `finish`."""

    def __init__(self, store: Store, trainer: str) -> None:
        self.refused: Counter[str] = Counter()
        self._store = store
        self._folder = folder_of(trainer)
        self._taken: list[str] = []

    def take(self, *, roots: Mapping[int, str], newest: int, max_lag: int) -> Rollouts | None:
        """The oldest batch that may be trained on, None while there is none."""
        for info in self._store.list(self._folder):
            if info.name in self._taken:
                continue
            batch = Rollouts.from_bytes(self._store.get(info.name))
            reason = refusal(batch.origin, roots=roots, newest=newest, max_lag=max_lag)
            if reason is None:
                self._taken.append(info.name)
                return batch
            self.refused[reason] += 1
            self._store.delete(info.name)
        return None

    def finish(self) -> None:
        """Makes room. A trainer that dies before this finds what it has taken again."""
        for name in self._taken:
            self._store.delete(name)
        self._taken.clear()
        self.refused.clear()


# -- the last word of each worker


def put_report(store: Store, worker: str, version: int, root: str) -> None:
    """Says what is live in a worker at the end."""
    report = {"worker": worker, "version": version, "root": root}
    store.put(f"reports/{worker}/{version:012d}.json", json.dumps(report).encode())


def reported_root(store: Store, worker: str, version: int) -> str:
    """Raises NotFound before the worker has said it."""
    return str(json.loads(store.get(f"reports/{worker}/{version:012d}.json"))["root"])
