"""The convergence plot: held-out reward by round, and by the bytes that a trainer had sent by then."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.loco.convergence import Curve
from benchmarks.loco.methods import METHODS


def draw(curves: list[Curve], path: Path) -> None:
    """Mean over seeds, with one standard deviation as a band, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_round, by_bytes) = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    colors = {method: f"C{i}" for i, method in enumerate(METHODS)}
    for method in (m for m in METHODS if any(c.method == m for c in curves)):
        mine = [c for c in curves if c.method == method]
        rewards = np.array([c.rewards for c in mine])
        mean, deviation = rewards.mean(axis=0), rewards.std(axis=0, ddof=1)
        rounds = np.arange(1, len(mean) + 1)
        by_round.plot(rounds, mean, label=method, color=colors[method], linewidth=1.4)
        by_round.fill_between(rounds, mean - deviation, mean + deviation, color=colors[method], alpha=0.12, linewidth=0)
        megabytes = np.cumsum(np.mean([c.payloads for c in mine], axis=0)) / 1e6
        by_bytes.plot(megabytes, mean, color=colors[method], linewidth=1.4)
    by_round.set_xlabel("round")
    by_round.set_ylabel("held-out reward")
    by_bytes.set_xlabel("MB that one trainer had to send, up to then (logarithmic)")
    by_bytes.set_xscale("log")
    by_round.legend(frameon=False, fontsize=8)
    for axes in (by_round, by_bytes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
