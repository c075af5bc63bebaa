"""Downsamples long series to what a chart some hundred pixels wide can show, keeping extremes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

BUCKETS = 400
"""A series of up to twice as many points is drawn as it is."""


def thinned(xs: Sequence[float], ys: Sequence[float | None]) -> dict[str, Any]:
    """The points whose y is known, as lists ``xs`` and ``ys``.

    Of a long series they are runs of points, each with its first x, the mean of its ys, and with ``lows`` and ``highs``
    for its extremes.
    """
    points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True) if y is not None]
    if len(points) <= 2 * BUCKETS:
        return {"xs": [x for x, _ in points], "ys": [y for _, y in points]}
    cuts = [i * len(points) // BUCKETS for i in range(BUCKETS + 1)]
    runs = [points[start:stop] for start, stop in pairwise(cuts)]
    return {
        "xs": [run[0][0] for run in runs],
        "ys": [sum(y for _, y in run) / len(run) for run in runs],
        "lows": [min(y for _, y in run) for run in runs],
        "highs": [max(y for _, y in run) for run in runs],
    }


def running_mean(ys: Sequence[float | None], window: int) -> list[float | None]:
    """The mean of the last ``window`` known values at each known value; None elsewhere."""
    known: list[float] = []
    total = 0.0
    means: list[float | None] = []
    for y in ys:
        if y is None:
            means.append(None)
            continue
        known.append(y)
        total += y - (known[-window - 1] if len(known) > window else 0.0)
        means.append(total / min(len(known), window))
    return means


def busy(spans: Sequence[tuple[float, float]], until: float) -> list[list[float]]:
    """When something was done in ``spans`` of (start, seconds): rows of start, seconds, and the share of it.

    Few spans are given as they are, of many the share in equal parts of the time from 0 to ``until``.
    """
    if len(spans) <= BUCKETS:
        return [[start, seconds, 1.0] for start, seconds in spans]
    width = until / BUCKETS
    filled = [0.0] * BUCKETS
    for start, seconds in spans:
        first = min(max(int(start / width), 0), BUCKETS - 1)
        last = min(max(int((start + seconds) / width), first), BUCKETS - 1)
        for part in range(first, last + 1):
            overlap = min(start + seconds, (part + 1) * width) - max(start, part * width)
            filled[part] += max(0.0, overlap)
    return [[part * width, width, min(1.0, filled[part] / width)] for part in range(BUCKETS) if filled[part]]
