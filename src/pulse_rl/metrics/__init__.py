"""Listeners for long runs: JSON lines, Prometheus, and a worker's heartbeat.

::

    with JsonLines("runs/policy/events-trainer.jsonl") as log:
        listener = tee_listeners(log, PrometheusMetrics())
        publisher = Publisher(store, stream="policy", on_event=listener)
        ...

``pulse report runs/policy`` shows the events of a folder. An exception from a listener, such as
OSError on a full disk, reaches the caller of ``publish`` or ``sync``; by then the version is
committed, and a repeated ``sync`` returns the same update.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from .._util.files import open_regular
from .._util.serial import Closing
from .._util.settings import checked_path, short_int
from ..errors import FormatError, InputError, IntegrityError, kinds_of
from ..events import (
    CallFailed,
    Event,
    FallbackUsed,
    Folded,
    Listener,
    Progress,
    Published,
    Relayed,
    Served,
    Synced,
)
from ..ops.fleet import Heartbeat

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Heartbeat", "JsonLines", "PrometheusMetrics", "tee_listeners"]

MAX_LINE_BYTES = 1 << 20
INSTALL = "Install it: pip install 'pulse-rl[metrics]'."
_LABELS = ("stream", "role")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def tee_listeners(*listeners: Listener) -> Listener:
    """One listener that passes each event to several, in order."""

    def send_to_all(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return send_to_all


class JsonLines(Closing):
    """Appends each event but `Progress` to the file ``path`` as one line, in a single write.

    A line is the event's fields with ``event``, its name in snake case ("published", "synced" …),
    and ``time``, seconds since 1970 by this machine's clock. Each process needs its own file:
    ``events-worker-0.jsonl`` in the run's folder appears as the worker "worker-0" in its report. A
    partial last line left by a killed process is ended first.

    A context manager that closes the file. Raises InputError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = checked_path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("a+b", buffering=0)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            raise InputError(
                f"cannot write events to {file}: {error}", hint="Check the path."
            ) from None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<JsonLines to {self._file.name}>"

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            return
        # JSON has no NaN, which stands for what is not known.
        known = {name: value for name, value in asdict(event).items() if value == value}
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        line = {"event": kind, "time": round(time.time(), 6), **known}
        with self._lock:
            self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Closes the file; later events raise ValueError."""
        self._file.close()


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of the file ``path`` in order. Lines that are incomplete, too long or not an event
    are skipped.

    Raises InputError if the file cannot be read.
    """
    try:
        with open_regular(checked_path(path)) as file:
            while line := file.readline(MAX_LINE_BYTES):
                try:
                    event = json.loads(line, parse_int=short_int)
                except (ValueError, RecursionError):
                    continue
                known = isinstance(event, dict) and isinstance(event.get("event"), str)
                if known and isinstance(event.get("time"), int | float):
                    yield event
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="Check the path.") from None


PUBLISHER, SUBSCRIBER, RELAY, SERVER = "publisher", "subscriber", "relay", "server"
_ROLES = {"sync": SUBSCRIBER, "relay": RELAY, "heartbeat": RELAY}

# Name, kind, description, and labels in addition to the stream and the role.
_METRICS = (
    ("version", "gauge", "Newest version committed or held"),
    ("density_ratio", "gauge", "Changed elements / all elements of the last patch"),
    ("patch_bytes", "counter", "Bytes stored in patches"),
    ("anchor_bytes", "counter", "Bytes stored in anchors"),
    ("fold_bytes", "counter", "Bytes stored in folds"),
    ("full_sync_bytes", "counter", "Bytes that full syncs would have stored"),
    ("publish_seconds", "histogram", "Time of a publish"),
    ("publish_phase_seconds", "summary", "Time of a publish by phase", "phase"),
    ("fold_failures", "counter", "Folds that could not be made or stored"),
    ("fetched_bytes", "counter", "Bytes of payloads downloaded"),
    ("sync_seconds", "histogram", "Time of a sync that found something new"),
    ("sync_phase_seconds", "summary", "Time of a sync by phase", "phase"),
    ("versions_behind", "gauge", "Versions behind when the last sync polled"),
    ("lag_seconds", "gauge", "Age of the version when the last sync ended"),
    ("call_failures", "counter", "Calls that raised an error", "kind"),
    ("path_failures", "counter", "Paths to a version that failed", "kind"),
    ("verification_failures", "counter", "Failed checks of bytes or states", "kind"),
    ("last_success_seconds", "gauge", "Unix time of the last pass that succeeded"),
    ("relayed_bytes", "counter", "Bytes of payloads that a relay copied"),
    ("served_requests", "counter", "Answers of an HTTP server", "status"),
    ("served_bytes", "counter", "Bytes that an HTTP server's answers announced"),
)


class PrometheusMetrics:
    """Counts events in ``registry`` (default: the process's own), under names that start with
    ``prefix``.

    Raises InputError without prometheus-client. One object serves all publishers and subscribers of
    a process. Each metric has the labels ``stream`` and ``role``: "publisher" for writes to the
    stream, "subscriber" for reads from it (a publisher that restores its own head reads), "relay"
    for a relay's copies, and "server", with an empty ``stream``, for an HTTP server.

    ===================================== ========= ================================================
    ``pulse_version``                     gauge     newest version committed, or held
    ``pulse_density_ratio``               gauge     changed elements / all, of the last patch
    ``pulse_patch_bytes_total``           counter   stored in patches
    ``pulse_anchor_bytes_total``          counter   stored in anchors
    ``pulse_fold_bytes_total``            counter   stored in folds
    ``pulse_full_sync_bytes_total``       counter   bytes that full syncs would have stored
    ``pulse_publish_seconds``             histogram one call of publish
    ``pulse_publish_phase_seconds``       summary   by ``phase`` of `Published`
    ``pulse_fold_failures_total``         counter   folds that could not be made or stored
    ``pulse_fetched_bytes_total``         counter   payloads downloaded
    ``pulse_sync_seconds``                histogram one sync that found a new version
    ``pulse_sync_phase_seconds``          summary   by ``phase`` of `Synced`
    ``pulse_versions_behind``             gauge     when the last sync polled the store
    ``pulse_lag_seconds``                 gauge     from a commit to its sync (two machines' clocks)
    ``pulse_call_failures_total``         counter   publishes and syncs that raised, by ``kind``
    ``pulse_path_failures_total``         counter   paths that failed, by the error's ``kind``
    ``pulse_verification_failures_total`` counter   of these, failed checks of bytes, by ``kind``
    ``pulse_last_success_seconds``        gauge     Unix time of the last `succeeded`
    ``pulse_relayed_bytes_total``         counter   payloads that a relay copied
    ``pulse_served_requests_total``       counter   answers of an HTTP server, by ``status``
    ``pulse_served_bytes_total``          counter   bytes that these announced
    ===================================== ========= ================================================
    """

    def __init__(self, registry: CollectorRegistry | None = None, prefix: str = "pulse") -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Summary
        except ImportError:
            raise InputError(
                "PrometheusMetrics needs the package prometheus-client", hint=INSTALL
            ) from None
        where = REGISTRY if registry is None else registry
        self._metrics: dict[str, Any] = {}
        makers: dict[str, Any] = {"gauge": Gauge, "counter": Counter, "summary": Summary}
        makers["histogram"] = partial(Histogram, buckets=_SECONDS)
        try:
            for name, kind, what, *more in _METRICS:
                labels = (*_LABELS, *more)
                make = makers[kind]
                self._metrics[name] = make(f"{prefix}_{name}", what, labels, registry=where)
        except ValueError as error:
            raise InputError(
                f"cannot register the metrics: {error}", hint="Share one PrometheusMetrics."
            ) from None
        self._checks = kinds_of(FormatError) | kinds_of(IntegrityError)
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<PrometheusMetrics {self._prefix}_*>"

    def __call__(self, event: Event) -> None:
        match event:
            case Published():
                self._published(event)
            case Synced():
                self._synced(event)
            case CallFailed(call="fold"):
                self._metrics["fold_failures"].labels(event.stream, PUBLISHER).inc()
            case CallFailed():
                role = _ROLES.get(event.call, PUBLISHER)
                self._metrics["call_failures"].labels(event.stream, role, event.kind).inc()
            case FallbackUsed():
                self._metrics["path_failures"].labels(event.stream, SUBSCRIBER, event.kind).inc()
                if event.kind in self._checks:
                    failures = self._metrics["verification_failures"]
                    failures.labels(event.stream, SUBSCRIBER, event.kind).inc()
            case Folded():
                if event.nbytes < event.patch_bytes:
                    self._metrics["fold_bytes"].labels(event.stream, PUBLISHER).inc(event.nbytes)
            case Relayed():
                self._metrics["version"].labels(event.stream, RELAY).set(event.version)
                self._metrics["relayed_bytes"].labels(event.stream, RELAY).inc(event.nbytes)
                self._metrics["lag_seconds"].labels(event.stream, RELAY).set(event.lag_seconds)
            case Served():
                self._metrics["served_requests"].labels("", SERVER, str(event.status)).inc()
                self._metrics["served_bytes"].labels("", SERVER).inc(event.nbytes)

    def succeeded(self, stream: str, role: str, version: int | None) -> None:
        """Note that a loop polled without an error.

        ``pulse follow``, ``relay`` and ``watch`` call it after each pass.

        Args:
            stream: The stream's name.
            role: "publisher", "subscriber" or "relay".
            version: The version that is held, also by a process that has just started. None: none.
        """
        self._metrics["last_success_seconds"].labels(stream, role).set(time.time())
        if version is not None:
            self._metrics["version"].labels(stream, role).set(version)

    def _published(self, event: Published) -> None:
        own = (event.stream, PUBLISHER)
        self._metrics["version"].labels(*own).set(event.version)
        if event.changed is not None:
            self._metrics["density_ratio"].labels(*own).set(event.density)
        self._metrics["patch_bytes"].labels(*own).inc(event.patch_bytes)
        self._metrics["anchor_bytes"].labels(*own).inc(event.anchor_bytes)
        self._metrics["full_sync_bytes"].labels(*own).inc(event.dense_bytes)
        self._metrics["publish_seconds"].labels(*own).observe(event.seconds)
        for phase, seconds in event.phases.items():
            self._metrics["publish_phase_seconds"].labels(*own, phase).observe(seconds)

    def _synced(self, event: Synced) -> None:
        own = (event.stream, SUBSCRIBER)
        self._metrics["version"].labels(*own).set(event.version)
        self._metrics["fetched_bytes"].labels(*own).inc(event.fetched_bytes)
        self._metrics["sync_seconds"].labels(*own).observe(event.seconds)
        for phase, seconds in event.phases.items():
            self._metrics["sync_phase_seconds"].labels(*own, phase).observe(seconds)
        if event.versions_behind is not None:
            self._metrics["versions_behind"].labels(*own).set(event.versions_behind)
        self._metrics["lag_seconds"].labels(*own).set(event.lag_seconds)
