"""The page's data: for a run, from the events that its processes wrote with
`pulse_rl.metrics.JsonLines`; for a study, the parts of the JSON of ``pulse study`` that it needs,
checked and shortened.

Long series are downsampled to what a chart some hundred pixels wide can show, keeping extremes.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from .. import plan
from .._util.settings import checked_path
from ..errors import InputError
from ..metrics import read_events
from ..plan.model import bandwidth_for

BUCKETS = 400
"""A series of up to twice as many points is drawn as it is."""

FORMAT = "pulse.study.1"
_MAX_TENSORS = 30
_MAX_LAYERS = 40
_MAX_ROWS = 64
_MAX_EXPONENTS = 600
_MAX_DIMENSIONS = 8
_MAX_AGES = 16
_MAX_KINDS = 8
_ROW = ("k", "pairs", "sparsity", "sparsity_min", "sparsity_max")
_ROW_OPTIONAL = (
    "untouched",
    "bytes",
    "bytes_per_changed",
    "bytes_per_changed_zstd",
    "entropy_bound",
    "times_bound",
)
_HISTORY_OPTIONAL = (
    "not_yet",
    "within_8",
    "entropy_bound",
    "entropy_bound_with_history",
    "bytes_per_changed_auto",
    "bytes_per_changed_history",
)
_SUMMARY_OPTIONAL = (
    "bytes_per_sync",
    "bandwidth_for_target",
    "bandwidth_full",
    "target",
    "step_seconds",
)
_MAX_WORKERS = 64
_MAX_FAILURES = 50
_MAX_METRICS = 12
_MAX_TEXT = 300
_MAX_NUMBER = 1e18
_TARGET = 0.9


def thinned(xs: Sequence[float], ys: Sequence[float | None]) -> dict[str, Any]:
    """The points whose y is known, as lists ``xs`` and ``ys``.

    Of a long series they are runs of points, each with its first x, the mean of its ys, and with
    ``lows`` and ``highs`` for its extremes.
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
    """When something was done in ``spans`` of (start, seconds): rows of start, seconds, and the
    share of it.

    Few spans are given as they are, of many the share in equal parts of the time from 0 to
    ``until``.
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
    return [
        [part * width, width, min(1.0, filled[part] / width)]
        for part in range(BUCKETS)
        if filled[part]
    ]


EventRecord = dict[str, Any]
"""One line of a log, as `read_events` yields it."""


def read_run(path: str | os.PathLike[str], *, stream: str | None = None) -> dict[str, Any]:
    """The page's data for the run at ``path``: a folder with ``events*.jsonl`` files, one per
    process, or one such file.

    ``stream`` selects one of several. Raises InputError if there is nothing to show.
    """
    root = checked_path(path)
    files = sorted(root.glob("events*.jsonl")) if root.is_dir() else [root]
    by_process: dict[str, list[EventRecord]] = defaultdict(list)
    for file in files:
        by_process[file.stem.removeprefix("events-")] += (
            e for e in map(_reduced, read_events(file)) if e
        )
    streams = sorted({e["stream"] for events in by_process.values() for e in events})
    if not streams:
        hint = (
            "Pass on_event=pulse_rl.metrics.JsonLines('RUN/events-NAME.jsonl') to the "
            "publisher and the subscribers."
        )
        raise InputError(f"{root} has no events of a publisher or subscriber", hint=hint)
    if stream is None and len(streams) > 1:
        raise InputError(
            f"{root} has events of the streams {', '.join(streams)}",
            hint="Choose one with --stream.",
        )
    if stream is not None and stream not in streams:
        raise InputError(
            f"{root} has no events of the stream {stream!r}", hint=f"It has {', '.join(streams)}."
        )
    chosen = stream or streams[0]
    return _run(
        {name: [e for e in events if e["stream"] == chosen] for name, events in by_process.items()},
        chosen,
    )


PHASES = ("resume", "build", "upload", "commit", "plan", "fetch", "apply", "restore")
"""Of `Published` and `Synced`."""

_NUMBERS = {
    "published": ("version", "elements", "dense_bytes", "patch_bytes", "anchor_bytes", "seconds"),
    "synced": ("version", "fetched_bytes", "seconds", "lag_seconds"),
    "fallback_used": (),
    "density_drift": ("version", "density", "low", "high"),
    "evaluated": ("version",),
}
_FACTS = ("reward", "round", "loco_sent_bytes", "loco_dense_bytes")
"""Of a version's metadata (`Round.metadata` has the last three)."""
_TEXTS = ("kind", "link", "reason")


def _reduced(event: EventRecord) -> EventRecord | None:
    """What the page takes of an event, None where it draws no such event or a number is missing.

    Another release may have written it. A long run has millions of events, so nothing else is kept.
    """
    kind, stream = event["event"], event.get("stream")
    if kind not in _NUMBERS or not isinstance(stream, str):
        return None
    kept: EventRecord = {"event": sys.intern(kind), "stream": sys.intern(stream)}
    for name in ("time", *_NUMBERS[kind]):
        if not _is_number(event.get(name)):
            return None
        kept[name] = event[name]
    if kind == "published":
        metadata, changed = event.get("metadata"), event.get("changed")
        facts = metadata if isinstance(metadata, dict) else {}
        kept["density"] = changed / max(event["elements"], 1) if _is_number(changed) else None
        for name in _FACTS:
            kept[name] = facts[name] if _is_number(facts.get(name)) else None
    if kind in ("published", "synced"):
        phases = event.get("phases")
        found = phases if isinstance(phases, dict) else {}
        kept["phases"] = {name: found[name] for name in PHASES if _is_number(found.get(name))}
    if kind == "evaluated":
        said = event.get("metrics")
        metrics = said.items() if isinstance(said, dict) and event.get("status") == 0 else ()
        kept["metrics"] = {
            str(name)[:_MAX_TEXT]: value for name, value in metrics if _is_number(value)
        }
    if kind == "fallback_used":
        kept |= {name: str(event.get(name))[:_MAX_TEXT] for name in _TEXTS}
    return kept


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
    )


def _run(by_process: dict[str, list[EventRecord]], stream: str) -> dict[str, Any]:
    # Evaluations may be made days later: they are no part of the run's time.
    evaluated = [
        event for events in by_process.values() for event in events if event["event"] == "evaluated"
    ]
    everything = [
        (name, e)
        for name, events in by_process.items()
        for e in events
        if e["event"] != "evaluated"
    ]
    start = min((event["time"] - event.get("seconds", 0.0) for _, event in everything), default=0.0)
    published = _by_version(event for _, event in everything if event["event"] == "published")
    commits = {v: e["time"] for v, e in published.items()}
    for _, event in everything:
        if event["event"] == "synced":
            commits.setdefault(event["version"], event["time"] - event["lag_seconds"])
    end = max((event["time"] for _, event in everything), default=0.0)
    names = [
        name for name, events in by_process.items() if any(e["event"] == "synced" for e in events)
    ]
    workers = [
        _worker(name, by_process[name], commits, start, end) for name in names[:_MAX_WORKERS]
    ]
    return {
        "stream": stream,
        "seconds": end - start,
        "versions": len(published),
        "series": _series(list(published.values())),
        "evaluations": _evaluations(evaluated),
        "by_bytes": _by_bytes(list(published.values())),
        "publish_phases": _mean_phases(list(published.values())),
        "workers": workers,
        "more_workers": len(names) - len(workers),
        "drifts": [
            {name: e[name] for name in _NUMBERS["density_drift"]}
            for _, e in everything
            if e["event"] == "density_drift"
        ],
        "failures": _failures(everything),
        "summary": _summary(list(published.values())),
    }


def _by_version(events: Iterable[EventRecord]) -> dict[int, EventRecord]:
    found = {event["version"]: event for event in events}
    return dict(sorted(found.items()))


def _series(published: list[EventRecord]) -> dict[str, Any]:
    """By version, thinned."""
    versions = [e["version"] for e in published]
    rewards = [e["reward"] for e in published]
    return {
        "reward": thinned(versions, rewards),
        "mean_reward": thinned(versions, running_mean(rewards, max(1, len(rewards) // 15))),
        "density": thinned(versions, [e["density"] for e in published]),
        "patch_bytes": thinned(
            versions, [None if e["density"] is None else e["patch_bytes"] for e in published]
        ),
        "full_bytes": thinned(versions, [e["dense_bytes"] for e in published]),
    }


def _evaluations(evaluated: list[EventRecord]) -> dict[str, Any]:
    """By the name of a metric: its values by version, the last one of each."""
    names = list(dict.fromkeys(name for event in evaluated for name in event["metrics"]))[
        :_MAX_METRICS
    ]
    found = {
        name: _by_version(event for event in evaluated if name in event["metrics"])
        for name in names
    }
    return {
        name: thinned(list(events), [event["metrics"][name] for event in events.values()])
        for name, events in found.items()
    }


def _by_bytes(published: list[EventRecord]) -> dict[str, Any] | None:
    """The running mean of the reward by the bytes that have left a trainer until then, as counted
    and as an all-reduce of the same rounds would have; None unless the versions tell it of two
    rounds and more, of each one."""
    rounds = [e for e in published if None not in (e[name] for name in _FACTS)]
    numbers = [e["round"] for e in rounds]
    if len(rounds) < 2 or numbers != list(range(int(numbers[0]), int(numbers[0]) + len(rounds))):
        return None
    rewards = running_mean([e["reward"] for e in rounds], max(1, len(rounds) // 15))
    sent, dense = (list(accumulate(e[name] for e in rounds)) for name in _FACTS[2:])
    if not sent[-1] > 0:
        return None
    return {
        "sent": thinned(sent, rewards),
        "dense": thinned(dense, rewards),
        "totals": [sent[-1], dense[-1]],
    }


def _mean_phases(events: Sequence[EventRecord]) -> dict[str, float]:
    """Mean seconds a call, by phase, and what no phase names as "other"."""
    if not events:
        return {}
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        for phase, seconds in event["phases"].items():
            totals[phase] += seconds
        totals["other"] += max(0.0, event["seconds"] - sum(event["phases"].values()))
    return {phase: seconds / len(events) for phase, seconds in totals.items()}


def _worker(
    name: str, events: list[EventRecord], commits: dict[int, float], start: float, end: float
) -> dict[str, Any]:
    syncs = [e for e in events if e["event"] == "synced"]
    times, behind = _behind(syncs, commits)
    return {
        "name": name,
        "syncs": len(syncs),
        "behind": thinned([t - start for t in times], behind),
        "busy": busy(
            [(e["time"] - e["seconds"] - start, e["seconds"]) for e in syncs], end - start
        ),
        "lag_seconds": median(e["lag_seconds"] for e in syncs),
        "worst_behind": max(behind),
        "sync_seconds": median(e["seconds"] for e in syncs),
        "fetched_bytes": sum(e["fetched_bytes"] for e in syncs),
        "phases": _mean_phases(syncs),
    }


def _behind(syncs: list[EventRecord], commits: dict[int, float]) -> tuple[list[float], list[float]]:
    """How many versions the worker was behind the newest committed one, after each commit and each
    sync.

    It counts from its first sync on. Clocks of two machines may differ, so a version counts as
    committed at the latest when a worker has it.
    """
    moments = [(time, 0, version) for version, time in commits.items()]
    moments += [(e["time"], 1, e["version"]) for e in syncs]
    newest = held = -1
    times, behind = [], []
    for time, is_sync, version in sorted(moments):
        newest = max(newest, version)
        if is_sync:
            held = version
        if held >= 0:
            times.append(time)
            behind.append(float(newest - held))
    return times, behind


def _failures(everything: list[tuple[str, EventRecord]]) -> dict[str, Any]:
    failed = [(name, event) for name, event in everything if event["event"] == "fallback_used"]
    shown = [
        {"process": name} | {text: event[text] for text in _TEXTS}
        for name, event in failed[-_MAX_FAILURES:]
    ]
    return {"count": len(failed), "newest": shown}


def _summary(published: list[EventRecord]) -> dict[str, Any] | None:
    """The numbers at the top of the page, None where no version has a patch."""
    patched = [e for e in published if e["density"] is not None]
    if not patched:
        return None
    nbytes = fmean(e["patch_bytes"] for e in patched)
    full = patched[-1]["dense_bytes"]
    gaps = [new["time"] - old["time"] - new["seconds"] for old, new in pairwise(published)]
    working = [gap for gap in gaps if gap > 0]
    step = median(working) if working else None
    return {
        "sparsity": 1 - fmean(e["density"] for e in patched),
        "bytes_per_sync": nbytes,
        "full_bytes": full,
        "parameters": patched[-1]["elements"],
        "step_seconds": step,
        "target": _TARGET,
        "bandwidth_for_target": step and bandwidth_for(nbytes, step, _TARGET),
        "bandwidth_full": step and bandwidth_for(full, step, _TARGET),
        "anchors": sum(e["anchor_bytes"] > 0 for e in published),
        "anchor_bytes": sum(e["anchor_bytes"] for e in published),
    }


def study_data(study: Any) -> dict[str, Any]:
    """Raises InputError unless ``study`` is the JSON object that ``pulse study`` makes."""
    try:
        if study["format"] != FORMAT:
            raise ValueError(f"its format is {study['format']!r}, not {FORMAT!r}")
        return _data(study)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"not a study: {error!r}", hint="Give the output of `pulse study --json`."
        ) from None


def _data(study: Mapping[str, Any]) -> dict[str, Any]:
    given = sorted(study["rows"][:_MAX_ROWS], key=lambda row: _number(row, "k"))
    rows = [_picked(row, _ROW, _ROW_OPTIONAL) for row in given]
    k = rows[0]["k"]
    layers = sorted(study["layers"], key=lambda layer: -_number(layer, "changed"))
    named = list(dict.fromkeys(str(layer["layer"]) for layer in layers))[:_MAX_LAYERS]
    tensors = sorted(
        (t for t in study["tensors"] if t["k"] == k), key=lambda t: _number(t, "sparsity")
    )
    pairs = [pair for pair in study["pairs"] if pair["k"] == k]
    gradients = study["gradients"]
    summary = _picked(study["summary"], ("sparsity",), _SUMMARY_OPTIONAL) | {
        "full_bytes": _number(study, "dense_bytes")
    }
    measured = plan.from_study(study)
    return {
        "source": str(study["source"]),
        "dtype": str(study["dtype"]),
        "parameters": _number(study, "parameters"),
        "states": len(study["states"]),
        "lr": _optional(study, "lr"),
        "gradient_density": _optional(study, "gradient_density"),
        "rows": rows,
        "layers": [
            {"layer": str(layer["layer"]), **_picked(layer, ("k", "sparsity"), ())}
            for layer in layers
            if str(layer["layer"]) in named
        ],
        "tensors": [
            {
                **{name: str(tensor[name])[:300] for name in ("name", "layer", "dtype")},
                "shape": [int(n) for n in tensor["shape"][:_MAX_DIMENSIONS]],
                **_picked(tensor, ("k", "sparsity"), ()),
            }
            for tensor in tensors[:_MAX_TENSORS]
        ],
        "over_time": thinned(
            [int(p["new"]) for p in pairs], [1 - _number(p, "sparsity") for p in pairs]
        ),
        "gradients": thinned(list(range(len(gradients))), [_finite(g) for g in gradients]),
        "exponents": [
            _picked(
                e,
                ("exponent", "elements", "density"),
                ("threshold", "predicted_lr", "predicted_10lr"),
            )
            for e in study["exponents"][:_MAX_EXPONENTS]
        ],
        "history": _history(study.get("history")),
        "quantised": None if study.get("quantised") is None else _quantised(study["quantised"]),
        "summary": summary,
        "scenario": {
            "params": measured.params,
            "density": measured.density,
            "param_bytes": measured.param_bytes,
            "bytes_per_changed": dict(measured.bytes_per_changed),
            "step_seconds": summary["step_seconds"] or 50.0,
        },
    }


def _history(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """None for a study without it, and where nothing changed."""
    if given is None or not _number(given, "changed"):
        return None
    ages = [_picked(age, ("from", "share"), ("to",)) for age in given["ages"][:_MAX_AGES]]
    return {"ages": ages, **_picked(given, ("steps",), _HISTORY_OPTIONAL)}


def _quantised(given: Mapping[str, Any]) -> dict[str, Any]:
    """Patches of the same states quantised, and what changes of each kind of their tensors."""
    kinds = given["kinds"][: _MAX_ROWS * _MAX_KINDS]
    return {
        "rows": [_picked(row, ("k",), ("bytes",)) for row in given["rows"][:_MAX_ROWS]],
        "kinds": [
            {"kind": str(each["kind"]), **_picked(each, ("k", "sparsity"), ())} for each in kinds
        ],
    }


def _picked(
    given: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, float | None]:
    return {name: _number(given, name) for name in required} | {
        name: _optional(given, name) for name in optional
    }


def _number(given: Mapping[str, Any], name: str) -> float:
    value = _finite(given[name])
    if value is None:
        raise ValueError(f"{name} is {given[name]!r}")
    return value


def _optional(given: Mapping[str, Any], name: str) -> float | None:
    return _finite(given.get(name))


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value if math.isfinite(value) else None
