"""Random sequences of a fleet under faults: relays that stop anywhere, stores that lose and damage objects."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from . import fleet
from .driver import repeatable
from .store import FAULTS

_SEED = 20260404


def run_many(count: int, destructive: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(_SEED, _SEED + count):
        with repeatable(Random(seed)):
            counts += fleet.run(seed, destructive=destructive)
    return counts


@pytest.mark.parametrize("destructive", [False, True])
def test_a_few_sequences(destructive: bool) -> None:
    counts = run_many(15, destructive)
    assert counts["relayed"]
    assert counts["relays_failed"]
    assert counts["sharded"]
    assert bool(counts["destroyed"]) == destructive


@pytest.mark.slow
@pytest.mark.parametrize("destructive", [False, True])
def test_many_sequences(destructive: bool) -> None:
    counts = run_many(60, destructive)
    assert set(FAULTS) <= set(counts), "each fault befell somebody"
