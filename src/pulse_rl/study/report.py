"""One page of a run, a study, or both: static SVG in one HTML file, which loads nothing and opens
in any browser. Drawn by matplotlib (the extra ``report``).

``run`` is what `read_run` makes of the events that processes wrote with
`pulse_rl.metrics.JsonLines`, ``study`` the JSON object of ``pulse study``.
"""

from __future__ import annotations

import html
import io
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from .._util import extra
from .._util.settings import checked_path, counted, format_bytes, format_duration, format_percent
from ..errors import InputError
from ..metrics import read_events
from .tally import FORMAT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (9.0, 2.8)  # inches, of one chart
_MAX_POINTS = 2000
_MAX_CHARTS = 8  # of evaluations, and of workers
_MAX_TEXT = 300
# Tol's bright scheme: told apart by color-blind readers, on white and on black.
_COLORS = ("#4477aa", "#cc6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")

# The events that are drawn, and the numbers without which they are left out: another release may
# have written them.
_NUMBERS = {
    "published": ("time", "version", "elements", "dense_bytes", "patch_bytes", "anchor_bytes"),
    "synced": ("time", "version", "fetched_bytes", "seconds", "lag_seconds"),
    "evaluated": ("time", "version"),
    "fallback_used": ("time",),
}

Run = dict[str, Any]
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="generator" content="pulse-rl report">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
svg {{ max-width: 100%; height: auto }} figure {{ margin: 1.5rem 0 }}
table {{ border-collapse: collapse }} td, th {{ padding: .2rem .8rem; text-align: right }}
td:first-child, th:first-child {{ text-align: left }} tr {{ border-bottom: 1px solid #8888 }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def read_run(path: str | os.PathLike[str], *, stream: str | None = None) -> Run:
    """Read the events of a run, those of one stream.

    Args:
        path: A folder with ``events*.jsonl`` files, one per process, or one such file.
        stream: The stream's name. None: the only one.

    Returns:
        The events by process, for `render`.

    Raises:
        InputError: There is nothing to show, or there are several streams.
    """
    root = checked_path(path)
    files = sorted(root.glob("events*.jsonl")) if root.is_dir() else [root]
    events: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        name = file.stem.removeprefix("events-")
        events.setdefault(name, []).extend(e for e in read_events(file) if _is_drawn(e))
    streams = sorted({event["stream"] for of in events.values() for event in of})
    if not streams:
        raise InputError(
            f"{root} has no events of a publisher or subscriber",
            hint="Pass on_event=pulse_rl.metrics.JsonLines('RUN/events-NAME.jsonl') to the "
            "publisher and the subscribers.",
        )
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
    return {
        "stream": chosen,
        "events": {name: [e for e in of if e["stream"] == chosen] for name, of in events.items()},
    }


def render(*, run: Run | None = None, study: Any = None, title: str = "Pulse report") -> str:
    """Draw a run, a study, or both as one HTML page.

    Args:
        run: What `read_run` returned.
        study: The JSON object of ``pulse study``, format "pulse.study.1".
        title: The page's heading.

    Returns:
        The page.

    Raises:
        InputError: There is nothing to draw, or ``study`` is no study.
        ModuleNotFoundError: matplotlib is not installed.
    """
    parts: list[str] = []
    if run is not None:
        parts += _run_parts(run)
    if study is not None:
        try:
            if study["format"] != FORMAT:
                raise ValueError(f"its format is {study['format']!r}, not {FORMAT!r}")
            parts += _study_parts(study)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise InputError(
                f"not a study: {error!r}", hint="Give the output of `pulse study --json`."
            ) from None
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _run_parts(run: Run) -> list[str]:
    """What is drawn of a run: what each version cost, and how far its workers were behind."""
    everything = [event for of in run["events"].values() for event in of]
    # The last event of each version, ascending.
    newest = {e["version"]: e for e in everything if e["event"] == "published"}
    published = [newest[version] for version in sorted(newest)]
    patched = [e for e in published if _finite(e.get("changed"))]
    versions = [e["version"] for e in patched]
    parts = [f"<h2>Stream {html.escape(run['stream'])}</h2>"]
    # 1. What a version costs.
    if patched:
        nbytes, full = fmean(e["patch_bytes"] for e in patched), patched[-1]["dense_bytes"]
        density = fmean(e["changed"] / max(e["elements"], 1) for e in patched)
        row = [str(len(published)), format_percent(density), format_bytes(nbytes)]
        row += [format_bytes(full), f"{full / max(nbytes, 1):.0f}"]
        head = ["versions", "changed", "a patch", "a full sync", "times smaller"]
        parts.append(_table(head, [row]))
        shares = [100 * e["changed"] / max(e["elements"], 1) for e in patched]
        parts.append(_chart("Changed elements, %", [("", versions, shares)]))
        sizes = [e["patch_bytes"] / 1e6 for e in patched]
        parts.append(_chart("Bytes of a patch, MB", [("", versions, sizes)]))
        for name in ("seconds", "reward"):
            found = [e.get(name, (e.get("metadata") or {}).get(name)) for e in patched]
            if any(map(_finite, found)):
                label = "Seconds of a publish" if name == "seconds" else "Reward"
                parts.append(_chart(label, [("", versions, found)]))
    # 2. The workers.
    workers = {
        name: [e for e in of if e["event"] == "synced"] for name, of in run["events"].items()
    }
    workers = {name: of for name, of in workers.items() if of}
    if workers:
        lags = [
            (name, [e["version"] for e in of], [e["lag_seconds"] for e in of])
            for name, of in list(workers.items())[:_MAX_CHARTS]
        ]
        parts.append(_chart("Seconds from a version's commit to its sync", lags))
        rows = []
        for name, of in workers.items():
            lag = format_duration(median(e["lag_seconds"] for e in of))
            took = format_duration(median(e["seconds"] for e in of))
            fetched = format_bytes(sum(e["fetched_bytes"] for e in of))
            rows.append([name, str(len(of)), lag, took, fetched])
        parts.append(_table(["worker", "syncs", "lag", "a sync", "fetched"], rows))
    # 3. Evaluations, and what went wrong.
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for event in everything:
        if event["event"] == "evaluated" and event.get("status") == 0:
            for name, value in (event.get("metrics") or {}).items():
                if _finite(value):
                    scores[str(name)[:_MAX_TEXT]][event["version"]] = value
    for name, scored in list(scores.items())[:_MAX_CHARTS]:
        parts.append(_chart(name, [("", sorted(scored), [scored[v] for v in sorted(scored)])]))
    failed = [
        [name, *(str(e.get(text, ""))[:_MAX_TEXT] for text in ("kind", "link", "reason"))]
        for name, of in run["events"].items()
        for e in of
        if e["event"] == "fallback_used"
    ]
    if failed:
        parts.append(f"<h2>Paths that did not work: {len(failed)}, the newest first</h2>")
        parts.append(_table(["process", "kind", "path", "reason"], failed[::-1][:50]))
    return parts


def _study_parts(study: Mapping[str, Any]) -> list[str]:
    """What is drawn of a study: sparsity by distance, by layer and over time."""
    rows = sorted(study["rows"], key=lambda row: float(row["k"]))

    def changed(of: Mapping[str, Any]) -> float:
        return 100 * (1 - float(of["sparsity"]))

    table = []
    for row in rows:
        shares = [f"{float(row[n]):.3%}" for n in ("sparsity", "sparsity_min", "sparsity_max")]
        nbytes, each = row.get("bytes"), row.get("bytes_per_changed")
        costs = [format_bytes(nbytes) if _finite(nbytes) else ""]
        costs += [f"{each:.3f}" if _finite(each) else ""]
        table.append([str(row["k"]), *shares, *costs])
    head = ["states apart", "unchanged", "lowest", "highest", "a patch", "bytes a change"]
    by_distance = [("", [row["k"] for row in rows], [changed(row) for row in rows])]
    parts = [
        f"<h2>Study of {html.escape(str(study['source'])[:_MAX_TEXT])}: "
        f"{counted(int(study['parameters']), 'parameter')}, "
        f"{html.escape(str(study['dtype']))}</h2>",
        _table(head, table),
        _chart("Changed elements by states apart, %", by_distance, xlabel="states apart"),
    ]
    first = rows[0]["k"]
    layers = [layer for layer in study["layers"] if layer["k"] == first]
    bars = [(str(layer["layer"])[:40], changed(layer)) for layer in layers]
    parts.append(_bars("Changed elements by kind of layer, %", bars))
    pairs = [pair for pair in study["pairs"] if pair["k"] == first]
    over_time = [("", [pair["new"] for pair in pairs], [changed(pair) for pair in pairs])]
    parts.append(_chart("Changed elements over time, %", over_time, xlabel="state"))
    return parts


def _chart(
    title: str,
    series: Sequence[tuple[str, Sequence[float], Sequence[float | None]]],
    *,
    xlabel: str = "version",
) -> str:
    """Lines of (label, xs, ys) on linear axes."""

    def draw(axes: Axes) -> None:
        for (label, xs, ys), color in zip(series, _COLORS * 2, strict=False):
            points = [(x, y) for x, y in zip(xs, ys, strict=True) if _finite(y)]
            points = points[:: -(-len(points) // _MAX_POINTS) or 1]
            style = "o-" if len(points) < 40 else "-"
            axes.plot(*zip(*points, strict=True) if points else ([], []), style, color=color,
                      markersize=3, linewidth=1.2, label=label)  # fmt: skip
        axes.set_xlabel(xlabel)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        if any(label for label, *_ in series):
            axes.legend(frameon=False, fontsize=8)

    return _figure(title, draw)


def _bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    def draw(axes: Axes) -> None:
        axes.barh([name for name, _ in rows], [value for _, value in rows], color=_COLORS[0])
        axes.invert_yaxis()

    return _figure(title, draw)


def _figure(title: str, draw: Callable[[Axes], None]) -> str:
    """A chart as SVG, the same bytes each time; its ink is the page's text color."""
    with extra("report"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = svg.replace('<text style="', '<text fill="currentColor" style="')
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"


def _is_drawn(event: Mapping[str, Any]) -> bool:
    needed, named = _NUMBERS.get(event["event"]), isinstance(event.get("stream"), str)
    return named and needed is not None and all(_finite(event.get(name)) for name in needed)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
