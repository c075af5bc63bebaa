"""How rollouts get from a worker to a trainer: each trainer has a folder in the store, and what lies there waits.

A trainer deletes what it trained on when the round is over and saved, and what it refuses at once. Either way a place
gets free that the workers fill: the listing of the folder is all that the two sides know of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pulse_rl import Store

from ..grpo.rollouts import Rollouts, refusal


def folder_of(rank: int) -> str:
    return f"rollouts/trainer-{rank}"


def put(store: Store, rank: int, number: int, rollouts: Rollouts) -> None:
    """Stores a worker's batch ``number`` of its version. Names sort by age."""
    origin = rollouts.origin
    store.put(f"{folder_of(rank)}/{origin.version:06d}-{number:06d}-{origin.worker}", rollouts.to_bytes())


def waiting(store: Store, rank: int, worker: str) -> int:
    """The batches of a worker that a trainer has not done with."""
    return sum(info.name.endswith(f"-{worker}") for info in store.list(folder_of(rank)))


class Inbox:
    """The trainer's side. ``refused`` counts, by reason, what was refused since the last `finish_round`."""

    def __init__(self, store: Store, rank: int) -> None:
        self.refused: Counter[str] = Counter()
        self._store = store
        self._folder = folder_of(rank)
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

    def finish_round(self) -> None:
        """Makes room. A trainer that dies before this finds the round's batches again."""
        for name in self._taken:
            self._store.delete(name)
        self._taken.clear()
        self.refused.clear()
