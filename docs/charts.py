"""The logs in benchmarks/results, and the pictures that are drawn from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
LOGS = FOLDER.parent / "benchmarks" / "results"
OURS, OTHERS, COLOURS = "#2456a6", "#9aa7b8", ("#2456a6", "#b07a1e", "#6b7280", "#2f855a")
WIDTH, LEFT, RIGHT, ROW = 720, 190, 150, 24


class Log(NamedTuple):
    """How a log was made, and its rows."""

    about: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, name: str) -> Log:
        about, *rows = [
            json.loads(line) for line in (LOGS / f"{name}.jsonl").read_text().splitlines()
        ]
        return cls(about, rows)

    def caption(self) -> str:
        """What stands below a picture."""
        where, a = self.about["machine"], self.about
        if isinstance(where, dict):
            where = f"{where['cores']} cores of {where['cpu']}, {where['memory_gb']} GB"
        return f"`{a['command']}` · {a['date']} · revision {a['revision']} · {where}"


class Bar(NamedTuple):
    """``mark``: what was predicted for it."""

    label: str
    value: float
    text: str
    ours: bool = False
    mark: float | None = None


def save(name: str, title: str, height: float, parts: Iterable[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
    head += 'font-family="system-ui, sans-serif" font-size="13" fill="#1f2937">'
    body = [
        head,
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="#fff"/>',
    ]
    body += [text(16, 24, title, size=15), *parts, "</svg>"]
    (FOLDER / f"evidence-{name}.svg").write_text("\n".join(body) + "\n")


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 13,
    color: str = "#1f2937",
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def line(
    x: float, y: float, to_x: float, to_y: float, color: str = "#e5e7eb", width: float = 1
) -> str:
    return (
        f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{color}" '
        f'stroke-width="{width}"/>'
    )


def ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [10.0**p for p in powers if low <= 10.0**p <= high]
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= 6)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def bars(
    name: str,
    title: str,
    found: Sequence[Bar],
    low: float,
    unit: Callable[[float], str] = "{:g}".format,
) -> None:
    """Horizontal ones, the value behind each; the logarithmic axis begins at ``low``."""
    high = max(max(bar.value, bar.mark or 0) for bar in found)

    def at(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return LEFT + max(0.0, share) * (WIDTH - LEFT - RIGHT)

    bottom = 44 + ROW * len(found)
    parts = []
    for tick in ticks(low, high, True):
        parts += [
            line(at(tick), 40, at(tick), bottom),
            text(at(tick), bottom + 16, unit(tick), anchor="middle", size=11),
        ]
    for number, bar in enumerate(found):
        y = 44 + ROW * number
        size = f'width="{max(1.0, at(bar.value) - LEFT):.1f}" height="{ROW - 8}"'
        parts.append(f'<rect x="{LEFT}" y="{y}" {size} fill="{OURS if bar.ours else OTHERS}"/>')
        parts.append(text(LEFT - 8, y + 12, bar.label, anchor="end"))
        if bar.mark is not None:
            parts.append(line(at(bar.mark), y - 3, at(bar.mark), y + ROW - 5, "#d1461f", 2.5))
        parts.append(text(max(at(bar.value), at(bar.mark or bar.value)) + 6, y + 12, bar.text))
    save(name, title, bottom + 28, parts)


def lines(
    name: str,
    title: str,
    series: dict[str, list[tuple[float, float]]],
    x: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    styles: list[tuple[str, float]] | None = None,
) -> None:
    """Curves by their names; ``x`` says what is below. ``styles``: the color and width of each."""
    points = [point for curve in series.values() for point in curve]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low_y, high_y = (min(ys), max(ys)) if log_y else (min(0.0, 1.05 * min(ys)), 1.05 * max(ys))
    left, right, top, bottom = 60, 225, 44, 300

    def share(value: float, low: float, high: float, log: bool) -> float:
        return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = share(point[0], min(xs), max(xs), log_x)
        return left + across * (WIDTH - left - right), bottom - share(
            point[1], low_y, high_y, log_y
        ) * (bottom - top)

    parts = []
    for tick in ticks(low_y, high_y, log_y):
        y = place((min(xs), tick))[1]
        parts += [
            line(left, y, WIDTH - right, y),
            text(left - 6, y + 4, f"{tick:g}", anchor="end", size=11),
        ]
    for tick in ticks(min(xs), max(xs), log_x):
        parts.append(
            text(place((tick, high_y))[0], bottom + 16, f"{tick:g}", anchor="middle", size=11)
        )
    parts.append(text((left + WIDTH - right) / 2, bottom + 34, x, anchor="middle", size=12))
    ends: list[tuple[float, str, str]] = []
    for number, (label, curve) in enumerate(series.items()):
        color, wide = (COLOURS[number], 2.0) if styles is None else styles[number]
        path = "L".join("{:.1f} {:.1f}".format(*place(point)) for point in curve)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{wide}"/>')
        ends.append((place(curve[-1])[1], label, color))
    below = math.inf
    for y, label, color in sorted(ends, reverse=True):
        below = min(y, below - 15)
        parts.append(text(WIDTH - right + 8, below + 4, label, color=color))
    save(name, title, bottom + 48, parts)
