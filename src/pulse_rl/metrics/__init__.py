"""Listeners for long runs: JSON lines, Prometheus, and a watch over density.

::

    with JsonLines("runs/policy/events-trainer.jsonl") as log:
        listener = DriftWatch(fan_out(log, PrometheusMetrics()))
        publisher = Publisher(store, stream="policy", on_event=listener)
        ...

``pulse report runs/policy`` shows the events of a folder. An exception from a listener, such as OSError on a full disk,
reaches the caller of ``publish`` or ``sync``; by then the version is committed, and a repeated ``sync`` returns the
same update.
"""

from __future__ import annotations

from ..events import Event, Listener
from .listeners import DriftWatch, JsonLines, read_events
from .prometheus import PrometheusMetrics

__all__ = ["DriftWatch", "JsonLines", "PrometheusMetrics", "fan_out", "read_events"]


def fan_out(*listeners: Listener) -> Listener:
    """One listener that passes each event to several, in order."""

    def send_to_all(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return send_to_all
