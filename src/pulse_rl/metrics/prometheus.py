"""Events as Prometheus metrics (extra ``[metrics]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import FormatError, InputError, IntegrityError, PulseError
from ..events import CallFailed, DensityDrift, Event, FallbackUsed, Folded, FoldFailed, Published, Synced

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_INSTALL = "Install it: pip install 'pulse-rl[metrics]'."
_LABELS = ("stream", "role")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PUBLISHER, SUBSCRIBER = "publisher", "subscriber"


class PrometheusMetrics:
    """Counts events in ``registry`` (default: the process's own), under names that start with ``prefix``.

    Raises InputError without prometheus-client. One object serves all publishers and subscribers of a process. Each
    metric has the labels ``stream`` and ``role``: "publisher" for writes to the stream, "subscriber" for reads from it
    (a publisher that restores its own head reads).

    ===================================== ========= ==========================================================
    ``pulse_version``                     gauge     newest version committed, or held
    ``pulse_density_ratio``               gauge     changed elements / all elements, of the last patch
    ``pulse_density_drifts_total``        counter   see `DriftWatch`
    ``pulse_patch_bytes_total``           counter   stored in patches
    ``pulse_anchor_bytes_total``          counter   stored in anchors
    ``pulse_fold_bytes_total``            counter   stored in folds
    ``pulse_full_sync_bytes_total``       counter   what full syncs of the same versions would have stored
    ``pulse_publish_seconds``             histogram one call of publish
    ``pulse_publish_phase_seconds``       summary   by ``phase`` of `Published`
    ``pulse_fold_failures_total``         counter   folds that could not be made or stored
    ``pulse_fetched_bytes_total``         counter   payloads downloaded
    ``pulse_sync_seconds``                histogram one sync that found a new version
    ``pulse_sync_phase_seconds``          summary   by ``phase`` of `Synced`
    ``pulse_versions_behind``             gauge     when the last sync looked
    ``pulse_lag_seconds``                 gauge     from the last commit to its sync (two machines' clocks)
    ``pulse_call_failures_total``         counter   calls of publish or sync that raised, by the error's ``kind``
    ``pulse_path_failures_total``         counter   paths that failed, by the error's ``kind``
    ``pulse_verification_failures_total`` counter   of these, bytes or states that failed a check, by ``kind``
    ===================================== ========= ==========================================================
    """

    def __init__(self, registry: CollectorRegistry | None = None, prefix: str = "pulse") -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Summary
        except ImportError:
            raise InputError("PrometheusMetrics needs the package prometheus-client", hint=_INSTALL) from None
        where = REGISTRY if registry is None else registry

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", what, (*_LABELS, *labels), registry=where)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", what, _LABELS, registry=where)

        def seconds(name: str, what: str) -> Histogram:
            return Histogram(f"{prefix}_{name}_seconds", what, _LABELS, registry=where, buckets=_SECONDS)

        def phases(name: str, what: str) -> Summary:
            return Summary(f"{prefix}_{name}_phase_seconds", what, (*_LABELS, "phase"), registry=where)

        try:
            self._version = gauge("version", "Newest version committed or held")
            self._density = gauge("density_ratio", "Changed elements / all elements of the last patch")
            self._drifts = counter("density_drifts", "Times that density left its band")
            self._patch_bytes = counter("patch_bytes", "Bytes stored in patches")
            self._anchor_bytes = counter("anchor_bytes", "Bytes stored in anchors")
            self._fold_bytes = counter("fold_bytes", "Bytes stored in folds")
            self._full_bytes = counter("full_sync_bytes", "Bytes that full syncs would have stored")
            self._publish = seconds("publish", "Time of a publish")
            self._publish_phases = phases("publish", "Time of a publish by phase")
            self._fold_failures = counter("fold_failures", "Folds that could not be made or stored")
            self._fetched_bytes = counter("fetched_bytes", "Bytes of payloads downloaded")
            self._sync = seconds("sync", "Time of a sync that found something new")
            self._sync_phases = phases("sync", "Time of a sync by phase")
            self._behind = gauge("versions_behind", "Versions behind when the last sync looked")
            self._lag = gauge("lag_seconds", "Age of the version when the last sync ended")
            self._call_failures = counter("call_failures", "Calls that raised an error", "kind")
            self._path_failures = counter("path_failures", "Ways to a version that did not work", "kind")
            self._verification_failures = counter("verification_failures", "Failed checks of bytes or states", "kind")
        except ValueError as error:
            raise InputError(f"cannot register the metrics: {error}", hint="Share one PrometheusMetrics.") from None
        self._checks = _kinds(FormatError) | _kinds(IntegrityError)

    def __call__(self, event: Event) -> None:
        match event:
            case Published():
                self._published(event)
            case Synced():
                self._synced(event)
            case CallFailed():
                role = PUBLISHER if event.call == "publish" else SUBSCRIBER
                self._call_failures.labels(event.stream, role, event.kind).inc()
            case FallbackUsed():
                self._path_failures.labels(event.stream, SUBSCRIBER, event.kind).inc()
                if event.kind in self._checks:
                    self._verification_failures.labels(event.stream, SUBSCRIBER, event.kind).inc()
            case Folded():
                if event.nbytes < event.patch_bytes:
                    self._fold_bytes.labels(event.stream, PUBLISHER).inc(event.nbytes)
            case FoldFailed():
                self._fold_failures.labels(event.stream, PUBLISHER).inc()
            case DensityDrift():
                self._drifts.labels(event.stream, PUBLISHER).inc()

    def _published(self, event: Published) -> None:
        own = (event.stream, PUBLISHER)
        self._version.labels(*own).set(event.version)
        if event.changed is not None:
            self._density.labels(*own).set(event.density)
        self._patch_bytes.labels(*own).inc(event.patch_bytes)
        self._anchor_bytes.labels(*own).inc(event.anchor_bytes)
        self._full_bytes.labels(*own).inc(event.dense_bytes)
        self._publish.labels(*own).observe(event.seconds)
        for phase, seconds in event.phases.items():
            self._publish_phases.labels(*own, phase).observe(seconds)

    def _synced(self, event: Synced) -> None:
        own = (event.stream, SUBSCRIBER)
        self._version.labels(*own).set(event.version)
        self._fetched_bytes.labels(*own).inc(event.fetched_bytes)
        self._sync.labels(*own).observe(event.seconds)
        for phase, seconds in event.phases.items():
            self._sync_phases.labels(*own, phase).observe(seconds)
        if event.versions_behind is not None:
            self._behind.labels(*own).set(event.versions_behind)
        self._lag.labels(*own).set(event.lag_seconds)


def _kinds(error: type[PulseError]) -> set[str]:
    return {error.kind}.union(*(_kinds(kind) for kind in error.__subclasses__()))
