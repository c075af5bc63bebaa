"""What a run amounted to, in words and as a plot. A row is a "step" line of the trainer's journal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import mean, median
from typing import Any

from .settings import Settings

Row = dict[str, Any]


def print_summary(rows: list[Row], settings: Settings, *, seconds: float, restarts: int) -> None:
    fifth = max(1, len(rows) // 5)
    first, last = (mean(row["reward"] for row in part) for part in (rows[:fifth], rows[-fifth:]))
    densities = [row["density"] for row in rows]
    patch, dense = mean(row["patch_bytes"] for row in rows), rows[-1]["dense_bytes"]
    per_changed = sum(row["patch_bytes"] for row in rows) / max(1, sum(row["changed"] for row in rows))
    publish, sync, pause = (median(row[key] for row in rows) for key in ("publish_ms", "sync_ms", "pause_ms"))
    lags = [row["lag"] for row in rows]
    reasons: Counter[str] = sum((Counter(row["refused"]) for row in rows), Counter())
    refused = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    print(f"\n{rows[-1]['step']} steps at learning rate {settings.lr:g}, {seconds:.0f} s")
    print(f"  reward    {first:.3f} -> {last:.3f}: means of the first and the last {fifth} steps")
    print(f"  density   {mean(densities):.2%} of the weights changed in a step ({min(densities):.2%} to ", end="")
    print(f"{max(densities):.2%}), with this toy's weights\n            and this learning rate; ", end="")
    print("in the PULSE paper 0.3% to 1.1%, LLMs of 0.5 to 7 billion weights at 1e-6 to 3e-6")
    print(f"  patch     {patch / 1e3:.1f} kB instead of {dense / 1e3:.0f} kB: ratio {dense / patch:.1f}, ", end="")
    print(f"{per_changed:.2f} bytes per changed weight")
    print(f"  medians   publish {publish:.1f} ms, sync {sync:.1f} ms, the model paused for {pause:.1f} ms")
    print(f"  rollouts  {mean(lags):.1f} versions behind on average, at most {max(lags)}; refused: {refused}")
    print(f"  restarts  {restarts}")


def save_plot(rows: list[Row], settings: Settings, path: Path) -> None:
    """Draws reward and density over steps into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row["step"] for row in rows]
    rewards = [row["reward"] for row in rows]
    window = max(1, len(rows) // 15)
    means = [sum(part) / len(part) for i in range(len(rows)) if (part := rewards[max(0, i + 1 - window) : i + 1])]
    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    top.plot(steps, rewards, ".", color="tab:blue", alpha=0.3, label="each step")
    top.plot(steps, means, color="tab:blue", label=f"mean of {window} steps")
    top.set_ylabel("reward (share of right answers)")
    top.legend(loc="lower right")
    bottom.plot(steps, [100 * row["density"] for row in rows], color="tab:orange")
    bottom.set_ylabel("density: BF16 weights changed (%)")
    bottom.set_xlabel("optimizer step = published version")
    bottom.set_ylim(bottom=0)
    million = rows[-1]["elements"] / 1e6
    figure.suptitle(f"GRPO on addition, {million:.1f} M weights, learning rate {settings.lr:g}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
