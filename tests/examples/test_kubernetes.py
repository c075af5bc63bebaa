"""examples/kubernetes.yaml: accepted by the schemas of Kubernetes, and whole, which no schema can
say."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pulse_rl.cli import make_parser

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))
BY_KIND = {made["kind"]: made for made in OBJECTS}
VERSIONS = ("1.30", "1.37")


def pods() -> dict[str, dict[str, Any]]:
    return {kind: BY_KIND[kind]["spec"]["template"] for kind in ("Job", "Deployment")}


def container(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in pods()[kind]["spec"]["containers"] if c["name"] == name)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", list(BY_KIND))
def test_a_cluster_accepts_it(kind: str, version: str) -> None:
    kubernetes_validate.validate(BY_KIND[kind], version, strict=True)


def test_the_schemas_refuse_a_misspelt_field() -> None:
    wrong = copy.deepcopy(BY_KIND["Deployment"])
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_selectors_select_the_pods_that_they_mean() -> None:
    labels = {kind: template["metadata"]["labels"] for kind, template in pods().items()}
    assert BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"] == labels["Deployment"]
    assert BY_KIND["Service"]["spec"]["selector"] == labels["Deployment"]
    policy = BY_KIND["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels["Deployment"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == labels["Job"]


@pytest.mark.parametrize("kind", ["Job", "Deployment"])
def test_every_name_in_a_pod_leads_somewhere(kind: str) -> None:
    spec = pods()[kind]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    settings = BY_KIND["ConfigMap"]["data"]
    for found in spec["containers"]:
        assert {mount["name"] for mount in found.get("volumeMounts", [])} <= volumes
        assert {"configMapRef": {"name": BY_KIND["ConfigMap"]["metadata"]["name"]}} in found[
            "envFrom"
        ]
        own = {each["name"] for each in found.get("env", [])}
        used = set(re.findall(r"\$\((\w+)\)", " ".join(found["command"] + found["args"])))
        assert used <= settings.keys() | own


def test_the_sidecars_command_is_one_that_pulse_takes() -> None:
    found = container("Deployment", "follow")
    words = found["command"] + found["args"]
    for name, value in {**BY_KIND["ConfigMap"]["data"], "POD_NAME": "rollout-x"}.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert words.pop(0) == "pulse"
    parsed = make_parser().parse_args(words)
    assert parsed.store == ["s3://bucket/run"]
    assert parsed.stream == "policy"
    assert parsed.engine == "http://localhost:8000"
    assert (parsed.name, parsed.metrics_bind) == ("rollout-x", "0.0.0.0")
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    scraped = pods()["Deployment"]["metadata"]["annotations"]["prometheus.io/port"]
    opened = [each["port"] for rule in BY_KIND["NetworkPolicy"]["spec"]["ingress"]
              for each in rule["ports"]]  # fmt: skip
    assert ports["metrics"] == parsed.metrics_port == int(scraped)
    assert parsed.metrics_port in opened
    probes = [found[kind]["httpGet"] for kind in ("readinessProbe", "livenessProbe")]
    assert [probe["path"] for probe in probes] == ["/readyz", "/healthz"]
    assert {probe["port"] for probe in probes} == {"metrics"}
    engine = container("Deployment", "vllm")
    assert parsed.cache in {
        mount["mountPath"] for mount in engine["volumeMounts"]
    }  # vLLM's processes write it
    assert {"secretRef": {"name": "store-credentials"}} in engine["envFrom"]
    assert f"--port={parsed.engine.rpartition(':')[2]}" in engine["args"]
