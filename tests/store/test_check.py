"""`check_store` tells what a store does not keep, and calls no store unsafe that it cannot reach."""

from __future__ import annotations

import pytest

from pulse_rl import MemoryStore
from pulse_rl.errors import StoreUnavailable
from pulse_rl.store.check import check_store
from tests.support import broken_stores as broken
from tests.support.stores import unreachable_store

TWICE = "a second create is refused"
RACE = "of two racing creates one wins"
READ = "reads see the last finished write, whole and in ranges"
LIST = "lists are complete and in order"
DELETE = "a delete removes one object"


@pytest.mark.parametrize(
    ("store", "guarantees"),
    [
        (broken.Overwrites, {TWICE, RACE}),
        (broken.RefusesButOverwrites, {TWICE, RACE}),
        (broken.LooksBeforeItCreates, {RACE}),
        (broken.ListsInDisorder, {LIST}),
        (broken.ForgetsWhereToGoOn, {LIST}),
        (broken.IgnoresRanges, {READ}),
        (broken.KeepsTheFirst, {READ}),
        (broken.DeletesByPrefix, {DELETE}),
        (broken.DeletesNothing, {DELETE}),
    ],
)
def test_what_a_store_does_not_keep_is_told(store: type[MemoryStore], guarantees: set[str]) -> None:
    findings = check_store(store(), rounds=5)
    assert {f.guarantee for f in findings if not f.held} == guarantees
    assert all(f.seen for f in findings)


def test_an_unreachable_store_is_not_called_unsafe() -> None:
    with pytest.raises(StoreUnavailable):
        check_store(unreachable_store())
