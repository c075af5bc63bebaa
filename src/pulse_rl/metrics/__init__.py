"""Listeners for long runs: JSON lines, Prometheus, and a watch over density.

::

    with JsonLines("runs/policy/events-trainer.jsonl") as log:
        listener = DriftWatch(fan_out(log, PrometheusMetrics()))
        publisher = Publisher(store, stream="policy", on_event=listener)
        ...

``pulse report runs/policy`` draws the events of a folder. What a listener raises, such as OSError of a full disk,
reaches the caller of ``publish`` or ``sync``; the version is committed by then, and a repeated ``sync`` returns the
same update.
"""

from __future__ import annotations

from ..events import Event, Listener
from .drift import DriftWatch
from .jsonlines import JsonLines, read_events
from .prometheus import PrometheusMetrics

__all__ = ["DriftWatch", "JsonLines", "PrometheusMetrics", "fan_out", "read_events"]


def fan_out(*listeners: Listener) -> Listener:
    """One listener that hands each event to several, in order."""

    def send_to_all(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return send_to_all
