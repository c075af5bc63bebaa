"""Where each trainer is, for the errors of the others: notes in the group's store (docs/loco.md, section 4.2).

Nothing depends on them but the words of an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import TrainerLeft, TrainerLost

T = TypeVar("T")
_PATIENCE_SECONDS = 5.0
"""A store may be on a machine that stands still."""
_CAUSES = "fewer batches, or steps that a GradScaler skipped"


@dataclass(frozen=True, slots=True)
class Note:
    """A trainer has taken ``inner_step`` of the ``steps`` inner steps of a round, counted from 1.

    ``left`` is None while it is in the group, "" if it has left it on purpose, otherwise the error that made it leave.
    """

    round: int
    inner_step: int
    steps: int
    left: str | None = None

    def __str__(self) -> str:
        return f"{self.inner_step} of {self.steps} inner steps of round {self.round}"


class Progress:
    """One trainer's notes and its view of the others'. Without a store, or where it fails, it knows nothing."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._store: Any = None if group is None else _store_of(group)
        self._rank, self._size = rank, size
        self._met = False
        self._own = Note(0, 0, 0)

    def begin(self, own: Note) -> None:
        """The first note in the group. Those of the others may be left over from an earlier group until `met`."""
        self._met = False
        self.note(own)

    def met(self) -> None:
        """All others have begun."""
        self._met = True

    def note(self, own: Note) -> None:
        """Replaces this trainer's note. Does not wait for the store."""
        self._own = own
        if self._store is not None:
            try:
                self._store.set(_key(self._rank), json.dumps(asdict(own)))
            except RuntimeError:
                self._store = None

    def leave(self, error: BaseException | None) -> None:
        """The last note, which the store has when this returns."""
        if self._store is None or self._own.left is not None or isinstance(error, TrainerLost):
            return
        left = "" if error is None else f"{type(error).__name__}: {error}"[:500]
        self.note(Note(self._own.round, self._own.inner_step, self._own.steps, left))
        self._wait_for(lambda store: store.check([_key(self._rank)]))

    def lost(self, error: Exception, timeout_seconds: float) -> TrainerLost:
        """What ``error``, a failed collective, is to this trainer."""
        others = self._others()
        left = {rank: note for rank, note in others.items() if note.left is not None}
        if on_purpose := {rank: note for rank, note in left.items() if note.left == ""}:
            where = "; ".join(f"trainer {rank} left after {note}" for rank, note in on_purpose.items())
            return TrainerLeft(f"{where}; this one has taken {self._own.inner_step} of round {self._own.round}")
        if left:
            return TrainerLost("; ".join(f"trainer {rank} left with {note.left}" for rank, note in left.items()))
        at = (self._own.round, self._own.inner_step)
        behind = {rank: note for rank, note in others.items() if (note.round, note.inner_step) < at}
        where = "; ".join(f"trainer {rank} had taken {note}" for rank, note in behind.items())
        ended = f"died, stalled for {timeout_seconds:g} s, or ended its loop ({_CAUSES}?)"
        said = f"{where}, and has {ended}" if behind else f"a trainer {ended}"
        here = f"; this one has taken {self._own}" if self._own.steps else ""
        return TrainerLost(f"{said}{here}: {error}")

    def _others(self) -> dict[int, Note]:
        """The notes of the other trainers, as far as they can be had."""
        if not self._met:
            return {}

        def read(store: Any) -> dict[int, Note]:
            keys = {rank: _key(rank) for rank in range(self._size) if rank != self._rank}
            return {rank: Note(**json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

        return self._wait_for(read) or {}

    def _wait_for(self, work: Callable[[Any], T]) -> T | None:
        """``work(store)``, or None if it fails or takes too long; then the store is not asked again."""
        store, result = self._store, []

        def call() -> None:
            try:
                result.append(work(store))
            except (RuntimeError, ValueError, TypeError):
                self._store = None

        if store is None:
            return None
        thread = Thread(target=call, daemon=True)
        thread.start()
        thread.join(_PATIENCE_SECONDS)
        if not result:
            self._store = None
            return None
        return result[0]


def _store_of(group: dist.ProcessGroup) -> Any:
    """The group's key-value store, None where there is none."""
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # an older torch, or a backend without a store
        known: Any = getattr(dist.distributed_c10d, "_get_process_group_store", None)
        return None if known is None else known(group)


def _key(rank: int) -> str:
    return f"pulse-loco/{rank}"
