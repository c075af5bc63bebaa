"""Which rollouts the example's trainer takes; the run itself: tests/trainers/test_demos.py."""

from __future__ import annotations

from dataclasses import replace

from examples.grpo.rollouts import Origin, refusal


def test_rollouts_of_another_root_or_too_old_are_refused() -> None:
    origin = Origin("worker-0", "policy", 5, "aa", 1.0, 1.0)
    roots = {4: "99", 5: "aa"}
    assert refusal(origin, roots=roots, newest=7, max_lag=2) is None
    assert refusal(origin, roots=roots, newest=8, max_lag=2) == "too old"
    assert refusal(replace(origin, root="bb"), roots=roots, newest=7, max_lag=2) == "wrong root"
    assert refusal(replace(origin, version=3), roots=roots, newest=7, max_lag=2) == "unknown version"
