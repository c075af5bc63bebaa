"""The runs of `benchmarks.llm` in docs/evidence.md."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, median, stdev
from typing import Any

from .charts import COLOURS, LOGS, Log, lines

_STEPS_SHOWN = 8
#: The task and the optimizer of the runs that are drawn.
_MAIN = ("two terms", "adamw")


def language_model() -> dict[str, str]:
    """The parts of the page by their names."""
    logs = [Log.read(f"llm/{path.stem}") for path in sorted((LOGS / "llm").glob("[0-9]*.jsonl"))]
    shown = [log for log in logs if log.about["pulse"]]
    runs: dict[tuple[str, str, float], list[Log]] = defaultdict(list)
    for log in shown:
        settings = log.about["settings"]
        runs[settings["task"], settings["optimizer"], settings["lr"]].append(log)
    main = {lr: some for (task, how, lr), some in runs.items() if (task, how) == _MAIN}
    _pictures(dict(sorted(main.items())))
    captions = "\n\n".join(dict.fromkeys(log.caption() for log in logs))
    return {
        "llm_table": _table(runs),
        "llm_kinds": _kinds(main),
        "llm_apart": _apart(),
        "llm_logs": captions,
    }


def _apart() -> str:
    """The studies of kept streams: what changes between versions some steps apart."""
    studies = [
        Log.read(f"llm/{path.stem}") for path in sorted((LOGS / "llm").glob("study-*.jsonl"))
    ]
    if not studies:
        return ""
    apart = [row["k"] for row in studies[0].rows]
    found = ["| stream | " + " | ".join(f"{k} apart" for k in apart) + " |"]
    found.append("|---" * (len(apart) + 1) + "|")
    for log in studies:
        cells = [f"{row['density']:.2%}, {row['bytes_each']:.2f}" for row in log.rows]
        found.append(f"| {log.about['stream']} | {' | '.join(cells)} |")
    captions = "\n\n".join(log.caption() for log in studies)
    words = "Share of the weights that differ between two versions, and bytes a changed weight:"
    return "\n\n".join([words, "\n".join(found), captions])


def _rate(lr: float) -> str:
    return f"{lr:g}".replace("e-0", "e-")


def _steps(log: Log) -> list[dict[str, Any]]:
    return [row for row in log.rows if "reward" in row]


def _held_out(log: Log) -> dict[int, float]:
    return {row["step"]: row["held_out"] for row in log.rows if "held_out" in row}


def _pictures(runs: dict[float, list[Log]]) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    styles = []
    for number, (lr, some) in enumerate(runs.items()):
        found = [_held_out(log) for log in some]
        at = sorted(set.intersection(*(set(one) for one in found)))
        seeds = f"{len(some)} seeds" if len(some) > 1 else "1 seed"
        curves[f"{_rate(lr)}, {seeds}"] = [(step, mean(one[step] for one in found)) for step in at]
        styles.append((COLOURS[number], 2.5))
        if len(found) > 1:
            for sign in (-1, 1):
                edge = [
                    (step, mean(values) + sign * _error(values))
                    for step in at
                    if (values := [one[step] for one in found])
                ]
                curves[" " * (2 * number + (sign > 0) + 1)] = edge
                styles.append((COLOURS[number], 0.7))
    title = "Held-out additions answered right, by learning rate; thin: ± one standard error"
    lines("llm-reward", title, curves, "step", styles=styles)

    density: dict[str, list[tuple[float, float]]] = {}
    styles = []
    for number, (lr, some) in enumerate(runs.items()):
        for label, width, zeros in (
            (_rate(lr), 1.8, True),
            (f"{_rate(lr)} without zeros", 0.8, False),
        ):
            density[label] = _by_step(some, lambda log, row, z=zeros: 100 * _share(log, row, z))
            styles.append((COLOURS[number], width))
    lines("llm-density", "Weights that a step changes, %", density, "step", styles=styles)


def _by_step(
    logs: Sequence[Log], value: Callable[[Log, dict[str, Any]], float]
) -> list[tuple[float, float]]:
    """Means over the seeds."""
    rows = zip(*(_steps(log) for log in logs), strict=False)
    return [
        (some[0]["step"], mean(value(log, row) for log, row in zip(logs, some, strict=True)))
        for some in rows
    ]


def _share(log: Log, row: dict[str, Any], zeros: bool) -> float:
    """Changed weights of all weights, or of those alone that are not 0 at the start."""
    if zeros:
        return float(row["changed"] / log.about["elements"])
    nonzero = log.about["elements"] - log.about["zeros"]
    return float((row["changed"] - row["zeros_changed"]) / nonzero)


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean over seeds."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _table(runs: dict[tuple[str, str, float], list[Log]]) -> str:
    head = [
        "task, optimizer, learning rate",
        "seeds, steps",
        "held out: start",
        "end",
        "changed",
        "without zeros",
        "patch",
        "times less",
        "bytes a changed weight",
        "publish, sync, apply",
    ]
    found = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (task, optimizer, lr), some in sorted(runs.items()):
        rows = [(log, row) for log in some for row in _steps(log)]
        dense = 2 * some[0].about["elements"]
        first = [_held_out(log)[0] for log in some]
        last = [_held_out(log)[max(_held_out(log))] for log in some]
        error = f" ± {_error(last):.3f}" if len(some) > 1 else ""
        patch = mean(row["patch_bytes"] for _, row in rows)
        each = sum(row["patch_bytes"] for _, row in rows) / sum(row["changed"] for _, row in rows)
        times = [median(row[key] for _, row in rows) for key in ("publish_s", "sync_s", "apply_s")]
        cells = [
            f"{task}, {optimizer}, {_rate(lr)}",
            f"{len(some)}, {min(len(_steps(log)) for log in some)}",
            f"{mean(first):.3f}",
            f"{mean(last):.3f}{error}",
            f"{mean(_share(log, row, True) for log, row in rows):.2%}",
            f"{mean(_share(log, row, False) for log, row in rows):.2%}",
            f"{patch / 1e3:.0f} kB",
            f"{dense / patch:.0f}",
            f"{each:.2f}",
            ", ".join(f"{value:.2f}" for value in times) + " s",
        ]
        found.append("| " + " | ".join(cells) + " |")
    return "\n".join(found)


def _kinds(runs: dict[float, list[Log]]) -> str:
    """Which layers change."""
    found = ["| learning rate | embedding | attention | MLP | norms | first 8 steps, all weights |"]
    found.append("|---" * 6 + "|")
    for lr, some in sorted(runs.items()):
        rows = [(log, row) for log in some for row in _steps(log)]
        sizes = some[0].about["kinds"]
        cells = [
            f"{mean(row['kinds'][kind] for _, row in rows) / sizes[kind]:.2%}"
            for kind in ("embedding", "attention", "mlp", "norm")
        ]
        early = [
            f"{100 * share:.2f}"
            for _, share in _by_step(some, lambda log, row: _share(log, row, True))[:_STEPS_SHOWN]
        ]
        found.append(f"| {_rate(lr)} | {' | '.join(cells)} | {' '.join(early)}% |")
    return "\n".join(found)
