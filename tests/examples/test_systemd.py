"""examples/systemd: units that systemd accepts, whose commands pulse takes, without a secret."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pulse_rl.cli import make_parser

UNITS = sorted((Path(__file__).parents[2] / "examples" / "systemd").glob("*.service"))
PLACES = {"${STORE}": "s3://b/run", "${SOURCE}": "s3://b/run", "${STREAM}": "policy",
          "%i": "policy", "${BIND}": "10.0.0.5", "%H": "host"}  # fmt: skip


def settings(unit: Path) -> dict[str, str]:
    lines = [line for line in unit.read_text().splitlines() if "=" in line and line[0] != "#"]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_its_command_is_one_that_pulse_takes(unit: Path) -> None:
    found = settings(unit)
    words = shlex.split(found["ExecStart"])
    assert words.pop(0) == "/opt/pulse/bin/pulse"
    assert "KEY" not in found["ExecStart"]
    assert (found["Restart"], found["NoNewPrivileges"]) == ("always", "yes")
    for place, value in PLACES.items():
        words = [word.replace(place, value) for word in words]
    args = make_parser().parse_args(words)
    assert args.command == unit.stem.removeprefix("pulse-").rstrip("@")
    assert args.metrics_port
    assert len(UNITS) == 3


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_them(tmp_path: Path) -> None:
    copies = []
    for unit in UNITS:
        copies.append(tmp_path / unit.name.replace("@", "@policy"))
        copies[-1].write_text(unit.read_text().replace("/opt/pulse/bin/pulse", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, copies)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
