"""The shipped alerts in a real Prometheus over real processes: silent for a fleet that is well,
and each fires for its cause. A minute of the rules is a second here."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.checkpoints import write_checkpoint
from tests.support.running import Running, got, until
from tests.support.states import Rng

pytestmark = pytest.mark.skipif(
    "PULSE_LIVE" not in os.environ or shutil.which("prometheus") is None,
    reason="by the clock, minutes: make live, with a prometheus on the path",
)
EXAMPLES = Path(__file__).parents[2] / "examples"
RULES = (EXAMPLES / "monitoring" / "alerts.yaml").read_text()


def hasty_rules() -> str:
    text = re.sub(r"\b(\d+)m\b", r"\1s", RULES)
    return re.sub(r"< (1800|600)\b", lambda found: f"< {int(found[1]) // 60}", text)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Prometheus:
    """A Prometheus that scrapes each second what is in ``targets``, by name of the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._targets = folder / "targets.json"
        self.targets = dict[str, str]()
        self.scrape()
        (folder / "alerts.yaml").write_text(hasty_rules())
        found = {"files": [str(self._targets)], "refresh_interval": "1s"}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "alerts.yaml")],
            "scrape_configs": [{"job_name": "fleet", "file_sd_configs": [found]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        settings = {"config.file": folder / "prometheus.yaml", "storage.tsdb.path": folder / "data",
                    "web.listen-address": f"127.0.0.1:{port}", "log.level": "error"}  # fmt: skip
        self.process = subprocess.Popen(
            ["prometheus", *(f"--{name}={value}" for name, value in settings.items())]
        )

    def scrape(self) -> None:
        groups = [
            {"targets": [address], "labels": {"process": name}}
            for name, address in self.targets.items()
        ]
        self._targets.write_text(json.dumps(groups))

    def asked(self, what: str) -> Any:
        try:
            return json.loads(got(f"{self._url}/{what}")[1])["data"]
        except OSError:  # it starts
            return {"alerts": [], "result": []}

    def firing(self) -> set[tuple[str, str]]:
        """(alert, process) of what fires."""
        found = [each for each in self.asked("alerts")["alerts"] if each["state"] == "firing"]
        return {(each["labels"]["alertname"], each["labels"]["process"]) for each in found}

    def up(self) -> int:
        """How many processes answer."""
        return sum(int(each["value"][1]) for each in self.asked("query?query=up")["result"])


def sidecar(store: Path, folder: Path, port: int) -> list[str]:
    """The command of examples/kubernetes.yaml that follows into an engine, which is not there."""
    objects = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pods = next(each for each in objects if each["kind"] == "Deployment")["spec"]["template"]
    found = next(c for c in pods["spec"]["containers"] if c["name"] == "follow")
    for_cluster = {
        "$(STORE)": str(store),
        "$(STREAM)": "policy",
        "$(POD_NAME)": "sidecar",
        "http://localhost:8000": "http://127.0.0.1:1",
        "/cache": str(folder / "cache"),
        "=9107": f"={port}",
        "0.0.0.0": "127.0.0.1",
    }
    words = [*found["command"], *found["args"], "--poll=0.2"]
    for there, here in for_cluster.items():
        words = [word.replace(there, here) for word in words]
    return words[1:]


def test_each_alert_fires_for_its_cause_and_none_without(tmp_path: Path, rng: Rng) -> None:
    checkpoints, store, near = (tmp_path / name for name in ("checkpoints", "store", "near"))
    checkpoints.mkdir()
    near.mkdir()
    held = {"w": rng.integers(0, 1 << 14, 20_000).astype(np.uint16)}
    steps = 0

    def step(changed: int) -> None:
        """The trainer writes a checkpoint."""
        nonlocal steps
        steps += 1
        held["w"][(np.arange(changed) * 7 + steps) % 20_000] ^= 1
        folder = checkpoints / f"step_{steps}"
        folder.mkdir()
        write_checkpoint(folder / "model.safetensors", held)
        (folder / "STABLE").touch()

    with ExitStack() as opened:
        prometheus = Prometheus(tmp_path / "prometheus")
        opened.callback(prometheus.process.wait)
        opened.callback(prometheus.process.kill)

        def run(name: str, *words: object) -> Running:
            made = opened.enter_context(Running(tmp_path / f"{name}.log", *words))
            prometheus.targets[name] = made.address.removeprefix("http://")
            return made

        def keep_stepping(changed: int, done: Callable[[], bool]) -> None:
            """A checkpoint after the other, until ``done``."""

            def stepped() -> bool:
                step(changed)
                until(lambda: (trainer.metric("version", 'role="publisher"') or -1) >= steps - 1)
                return done()

            until(stepped, 180)

        at = ("--stream", "policy", "--poll", "0.2", "--metrics-port", "0")
        step(20_000)
        trainer = run("trainer", "watch", checkpoints, store, *at, "--done", "STABLE", "--no-files")
        worker = run("worker", "follow", store, *at, "--out", tmp_path / "a", "--name", "worker")
        relay = run("relay", "relay", store, near, *at)
        far = run("far", "follow", near, *at, "--out", tmp_path / "b", "--name", "far")
        run("server", "serve", near, "--port", "0", "--metrics-port", "0")
        # Scraped before it starts: it fails ever more seldom, and seconds are short.
        prometheus.targets["sidecar"] = f"127.0.0.1:{(port := free_port())}"
        prometheus.scrape()

        # 1. A fleet that is well, for longer than the longest window with its `for`.
        keep_stepping(100, lambda: prometheus.up() == 5)
        ends = time.monotonic() + 45

        def all_is_well() -> bool:
            assert prometheus.firing() == set()
            return time.monotonic() > ends

        keep_stepping(100, all_is_well)
        assert prometheus.up() == 5
        newest = steps - 1
        until(lambda: worker.metric("version", "subscriber") == newest)
        until(lambda: far.metric("version", "subscriber") == newest)

        # 2. A relay dies, and what is behind it is damaged; dense patches; an engine is away.
        relay.process.kill()
        (near / "policy" / "versions" / f"{newest + 1:012d}.json").write_text("{}")
        run("sidecar", *sidecar(store, tmp_path, port))
        expected = {
            ("PulseDown", "relay"),
            ("PulseWorkerBehind", "far"),
            ("PulseDense", "trainer"),
            ("PulseWorkerStuck", "sidecar"),
            ("PulseCallsFail", "sidecar"),
            ("PulseVerificationFailed", "far"),
        }
        seen = set[tuple[str, str]]()

        def all_fired() -> bool:
            seen.update(prometheus.firing())
            return seen >= expected

        keep_stepping(15_000, all_fired)

        # 3. The trainer stops writing.
        expected.add(("PulseNoNewVersion", "trainer"))
        until(all_fired, 120)
        assert seen == expected, "and nothing fired at any other process"
        assert {alert for alert, _ in seen} == set(re.findall(r"alert: (\w+)", RULES))
