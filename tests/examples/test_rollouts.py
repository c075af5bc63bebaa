"""What the examples' trainers take of what workers send; the runs themselves:
tests/trainers/test_demos.py."""

from __future__ import annotations

from dataclasses import replace

import torch

import pulse_rl
from examples.grpo.rollouts import Inbox, Origin, Rollouts, put, refusal, waiting


def test_rollouts_of_another_root_or_too_old_are_refused() -> None:
    origin = Origin("worker-0", 5, "aa")
    roots = {4: "99", 5: "aa"}
    assert refusal(origin, roots=roots, newest=7, max_lag=2) is None
    assert refusal(origin, roots=roots, newest=8, max_lag=2) == "too old"
    assert refusal(replace(origin, root="bb"), roots=roots, newest=7, max_lag=2) == "wrong root"
    assert (
        refusal(replace(origin, version=3), roots=roots, newest=7, max_lag=2) == "unknown version"
    )


def test_an_inbox_keeps_what_was_taken_until_the_round_is_over_and_drops_what_is_refused() -> None:
    store = pulse_rl.MemoryStore()
    good = Rollouts(Origin("worker-0", 5, "aa"), torch.zeros(2, 3), torch.zeros(2), torch.ones(2))
    put(store, "trainer-1", 0, good)
    put(store, "trainer-1", 1, replace(good, origin=replace(good.origin, worker="worker-1")))
    put(store, "trainer-1", 2, replace(good, origin=replace(good.origin, root="bb")))
    put(store, "trainer-1", 3, replace(good, origin=replace(good.origin, version=4)))
    put(store, "trainer-1", 4, replace(good, origin=replace(good.origin, version=2)))
    put(store, "trainer-0", 0, good)

    def take(inbox: Inbox) -> Rollouts | None:
        return inbox.take(roots={4: "99", 5: "aa"}, newest=6, max_lag=1)

    inbox = Inbox(store, "trainer-1")
    taken = [take(inbox), take(inbox), take(inbox)]
    assert [batch and batch.origin.worker for batch in taken] == ["worker-0", "worker-1", None]
    assert inbox.refused == {"unknown version": 1, "wrong root": 2}
    assert waiting(store, "trainer-1", "worker-0") == 1
    assert waiting(store, "trainer-1", "worker-1") == 1
    assert (
        take(Inbox(store, "trainer-1")) is not None
    )  # a trainer that was killed finds the round's batches again
    inbox.finish()
    assert [
        waiting(store, *of) for of in (("trainer-1", "worker-0"), ("trainer-1", "worker-1"))
    ] == [0, 0]
    assert waiting(store, "trainer-0", "worker-0") == 1
