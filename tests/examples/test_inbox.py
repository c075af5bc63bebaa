"""The inbox of the example of trainers in step; the run itself: tests/trainers/test_demos.py."""

from __future__ import annotations

from dataclasses import replace

import torch

import pulse_rl
from examples.grpo.rollouts import Origin, Rollouts
from examples.loco.inbox import Inbox, put, waiting


def test_an_inbox_keeps_what_was_taken_until_the_round_is_over_and_drops_what_is_refused() -> None:
    store = pulse_rl.MemoryStore()
    good = Rollouts(Origin("worker-0", "policy", 5, "aa", 1.0, 1.0), torch.zeros(2, 3), torch.zeros(2), torch.ones(2))
    put(store, 1, 0, good)
    put(store, 1, 1, replace(good, origin=replace(good.origin, worker="worker-1")))
    put(store, 1, 2, replace(good, origin=replace(good.origin, root="bb")))
    put(store, 1, 3, replace(good, origin=replace(good.origin, version=4)))
    put(store, 1, 4, replace(good, origin=replace(good.origin, version=2)))
    put(store, 0, 0, good)

    def take(inbox: Inbox) -> Rollouts | None:
        return inbox.take(roots={4: "99", 5: "aa"}, newest=6, max_lag=1)

    inbox = Inbox(store, rank=1)
    taken = [take(inbox), take(inbox), take(inbox)]
    assert [batch and batch.origin.worker for batch in taken] == ["worker-0", "worker-1", None]
    assert inbox.refused == {"unknown version": 1, "wrong root": 2}
    assert (waiting(store, 1, "worker-0"), waiting(store, 1, "worker-1")) == (1, 1)
    assert take(Inbox(store, rank=1)) is not None  # a trainer that was killed finds the round's batches again
    inbox.finish_round()
    assert (waiting(store, 1, "worker-0"), waiting(store, 1, "worker-1"), waiting(store, 0, "worker-0")) == (0, 0, 1)
