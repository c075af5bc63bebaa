"""The night of incidents: a short one, and what it counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.night.__main__ import main
from benchmarks.night.roles import digest_of


@pytest.mark.skipif("PULSE_LIVE" not in os.environ, reason="by the clock: make live")
def test_three_incidents_need_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "night.jsonl"
    kinds = ["store down", "killed process", "deleted copy of the relay"]
    options = ["--incidents", "3", "--scale", "0.05", "--seed", "3", "--json", str(found)]
    assert main([*options, "--keep", str(tmp_path / "kept"), "--kinds", *kinds]) == 0
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [row["kind"] for row in rows] == kinds
    assert not any(row["interventions"] or row["wrong"] for row in rows)
    assert "| **all** | 3 |" in capsys.readouterr().out


def test_the_oracle_s_digest_is_of_names_and_bytes() -> None:
    assert digest_of({"b": b"1", "a": b"2"}) == digest_of({"a": b"2", "b": b"1"})
    assert digest_of({"a": b"1"}) != digest_of({"a": b"2"})
    assert digest_of({"a": b"1"}) != digest_of({"b": b"1"})
