"""The Prometheus listener: what a scrape sees, and what it says without the package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl.errors import InputError
from pulse_rl.events import FallbackUsed, Published
from pulse_rl.metrics import PrometheusMetrics
from tests.support.events import ONE_OF_EACH, PUBLISHED
from tests.support.states import Rng, history

WRITES = {"stream": "policy", "role": "publisher"}
READS = {"stream": "policy", "role": "subscriber"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_each_event_counts_where_it_belongs(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry)
    for event in ONE_OF_EACH:
        metrics(event)
    metrics(FallbackUsed("policy", "the patch 1->2", "deleted", "not_found"))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"pulse_{name}", labels)

    assert value("version", **WRITES) == 1
    assert value("version", **READS) == 4
    assert value("density_ratio", **WRITES) == 0.01
    assert value("patch_bytes_total", **WRITES) == 50
    assert value("anchor_bytes_total", **WRITES) == 0
    assert value("full_sync_bytes_total", **WRITES) == 2000
    assert value("publish_seconds_sum", **WRITES) == 0.5
    assert value("publish_seconds_bucket", le="0.3", **WRITES) == 0
    assert value("publish_seconds_bucket", le="1.0", **WRITES) == 1
    assert value("publish_phase_seconds_sum", phase="build", **WRITES) == 0.4
    assert value("fold_bytes_total", **WRITES) == 100
    assert value("fold_failures_total", **WRITES) == 1
    assert value("fetched_bytes_total", **READS) == 50
    assert value("sync_seconds_count", **READS) == 1
    assert value("sync_phase_seconds_sum", phase="fetch", **READS) == 0.4
    assert value("versions_behind", **READS) == 3
    assert value("lag_seconds", **READS) == 1.5
    assert value("call_failures_total", kind="chain_gap", **READS) == 1
    relays = {"stream": "policy", "role": "relay"}
    assert value("version", **relays) == 3
    assert value("relayed_bytes_total", **relays) == 60
    assert value("lag_seconds", **relays) == 2.5
    serves = {"stream": "", "role": "server"}
    assert value("served_requests_total", status="200", **serves) == 1
    assert value("served_bytes_total", **serves) == 70
    assert value("path_failures_total", kind="corrupt_patch", **READS) == 1
    assert value("path_failures_total", kind="not_found", **READS) == 1
    assert value("verification_failures_total", kind="corrupt_patch", **READS) == 1
    assert value("verification_failures_total", kind="not_found", **READS) is None


def test_a_version_without_a_patch_leaves_the_density_as_it_was(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Published,
        "density",
        property(lambda e: 1.0 if e.changed is None else e.changed / e.elements),
    )
    metrics = PrometheusMetrics(registry)
    metrics(PUBLISHED)
    metrics(replace(PUBLISHED, version=2, changed=None, patch_bytes=0, anchor_bytes=2000))
    assert registry.get_sample_value("pulse_version", WRITES) == 2
    assert registry.get_sample_value("pulse_density_ratio", WRITES) == 0.01


def test_the_docstring_lists_what_is_registered(registry: CollectorRegistry) -> None:
    PrometheusMetrics(registry)
    listed = dict(
        re.findall(
            r"``(pulse_\w+)``\s+(gauge|counter|histogram|summary)", PrometheusMetrics.__doc__ or ""
        )
    )
    registered = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in registry.collect()
    }
    assert listed == registered


def test_dashboard_and_alerts_name_only_what_is_there(
    rng: Rng, registry: CollectorRegistry
) -> None:
    """After real syncs and all events, which give each family its samples and labels."""
    metrics, store = PrometheusMetrics(registry), MemoryStore()
    with Publisher(store, stream="policy", on_event=metrics) as publisher:
        for state in history(rng, 3):
            publisher.publish(state)
            Subscriber(store, stream="policy", on_event=metrics).sync()
    for event in ONE_OF_EACH:
        metrics(event)
    metrics.succeeded("policy", "relay", 3)
    labels = {
        sample.name: {*sample.labels, "instance", "job"}
        for f in registry.collect()
        for sample in f.samples
    }
    folder = Path(__file__).parents[2] / "examples" / "monitoring"
    panels = [target["expr"] for panel in json.loads((folder / "grafana.json").read_text())["panels"]  # noqa: E501
              for target in panel.get("targets", [])]  # fmt: skip
    rules = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
    alerts = [rule["expr"] for group in rules for rule in group["rules"]]
    assert min(len(panels), len(alerts)) >= 5
    for expression in panels + alerts:
        used = re.findall(r"(pulse_\w+)(?:\{([^}]*)\})?", expression)
        assert used
        for name, chosen in used:
            assert name in labels, expression
            assert {*re.findall(r"(\w+)=", chosen)} <= labels[name], expression


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool of Prometheus on the path"
)
def test_alerts_fire_for_what_they_say_and_for_nothing_usual() -> None:
    subprocess.run(
        ["promtool", "test", "rules", "alerts.yaml"], cwd=Path(__file__).parent, check=True
    )


def test_a_scrape_of_real_syncs_parses_and_names_follow_the_conventions(
    rng: Rng, registry: CollectorRegistry, store: MemoryStore
) -> None:
    metrics = PrometheusMetrics(registry, prefix="rl")
    publisher = Publisher(store, stream="policy", on_event=metrics)
    subscriber = Subscriber(store, stream="policy", on_event=metrics)
    for state in history(rng, 3):
        publisher.publish(state)
        subscriber.sync()
    families = {
        f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())
    }
    assert all(
        re.fullmatch(r"rl_[a-z_]+", name) and family.documentation
        for name, family in families.items()
    )
    samples = {
        s.name: s.value for f in families.values() for s in f.samples if "phase" not in s.labels
    }
    assert samples["rl_version"] == 2
    assert samples["rl_versions_behind"] == 1
    assert samples["rl_patch_bytes_total"] > 0
    assert {s.labels["role"] for f in families.values() for s in f.samples} == {
        "publisher",
        "subscriber",
    }


def test_one_object_serves_a_registry(registry: CollectorRegistry) -> None:
    PrometheusMetrics(registry)
    with pytest.raises(InputError, match="cannot register the metrics") as caught:
        PrometheusMetrics(registry)
    assert "Share" in caught.value.hint


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InputError, match="prometheus-client") as caught:
        PrometheusMetrics()
    assert "pulse-rl[metrics]" in caught.value.hint
