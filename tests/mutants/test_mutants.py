"""The planted faults still fit the library's text, and some that are caught early still are."""

from __future__ import annotations

import pytest

from .__main__ import judge
from .catalogue import MUTANTS


def test_every_fault_can_be_planted() -> None:
    """One that a refactoring has passed by would never be caught, and never be missed."""
    for mutant in MUTANTS:
        compile(mutant.planted(), mutant.module, "exec")
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert sum(bool(mutant.survives) for mutant in MUTANTS) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "payloads are stored after the commit",
        "resuming believes that the trainer has the head",
        "changes of steps between are lost",
    ],
)
def test_a_fault_is_caught(name: str) -> None:
    verdict = judge(name, sequences=60)
    assert verdict.caught, f"{name} survived {verdict.sequences} sequences"
