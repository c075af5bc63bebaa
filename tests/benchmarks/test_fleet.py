"""The fleet's benchmark: what it counts."""

from __future__ import annotations

from benchmarks.fleet import last_after


def test_a_later_version_counts_for_those_that_it_leaps_over() -> None:
    had = [{1: 11.0, 2: 22.0}, {2: 25.0}]
    assert last_after({1: 10.0, 2: 20.0}, had) == [15.0, 5.0]
    assert last_after({1: 10.0}, []) == [0.0]
