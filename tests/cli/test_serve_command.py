"""`pulse serve`, and `pulse follow` with its address."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pulse_rl import LocalStore, Publisher
from tests.support.commands import Pulse
from tests.support.states import Rng, history, roots


@pytest.mark.slow
def test_a_worker_follows_what_is_served(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 2)
    publisher = Publisher(LocalStore(tmp_path / "run"), stream="policy", threads=1)
    publisher.publish(states[0])
    command = [
        str(Path(sys.executable).parent / "pulse"),
        "serve",
        tmp_path / "run",
        "--port",
        "0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            follow = ("follow", url, "--stream", "policy", "--out", tmp_path / "out", "--once")
            for state, root in zip(states, roots(states), strict=True):
                publisher.publish(state)
                assert pulse.json(*follow)["root"] == root
            pulse.refused(
                "publish",
                tmp_path / "out/model.safetensors",
                url,
                "--stream",
                "new",
                kind="store",
                match="for readers",
            )
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 130
        finally:
            server.kill()


def test_refusals(pulse: Pulse, tmp_path: Path) -> None:
    pulse.refused("serve", tmp_path / "nothing", kind="input", match="no folder")
    pulse.refused(
        "serve", tmp_path, "--bind", "", "--port", "0", kind="input", match="empty address"
    )
    for port in ("-1", "65536", "x"):
        with pytest.raises(SystemExit, match="2"):
            pulse("serve", tmp_path, "--port", port)
