"""`pulse plan`: its JSON, its table, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pulse_rl.cli import main
from tests.support.plans import METHODS, STUDY

SEVEN = ["--params", "7B", "--density", "0.0055", "--step-seconds", "50", "--bandwidth", "0.2Gbit"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, float]]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = planned(capsys, *SEVEN)
    for key in (
        "utilization",
        "worker_utilization",
        "sync_seconds",
        "bandwidth_for_target",
        "sync_bytes",
        "phases",
    ):
        assert list(facts[key]) == list(METHODS)
    assert facts["bandwidth_for_target"]["full"] == pytest.approx(20e9, rel=0.01)
    assert facts["utilization"]["zstd"] > 0.9
    assert facts["inputs"]["bandwidth"] == 0.2e9
    assert planned(capsys, *SEVEN, "--target", "0.5")["bandwidth_for_target"][
        "full"
    ] == pytest.approx(2.24e9)


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    links = "--cores 4 --workers 2 --shared-link --upload-bandwidth 1Gbit"
    assert main(["plan", *SEVEN, *links.split()]) == 0
    out = capsys.readouterr().out
    assert "14 GB" in out
    assert "40.3 Gbit/s" in out  # twice the paper's 20, for two workers on one link
    assert "auto, no history" in out
    assert out.endswith("a full sync is faster: on this link, never; at this density, never\n")


def test_where_a_full_sync_wins(capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--params", "7B", "--density", "0.2", "--step-seconds", "50", "--bandwidth", "50Gbit"]
    wins = planned(capsys, *fast)["full_wins"]
    assert main(["plan", *fast]) == 0
    words = f"on this link, above density {wins['density']:.1%}; at this density, above "
    assert words in capsys.readouterr().out
    assert 1e9 < wins["bandwidth"] < 50e9


def test_a_study_in_place_of_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.json"
    file.write_text(json.dumps(STUDY))
    link = ["--step-seconds", "1", "--bandwidth", "10MB/s"]
    facts = planned(capsys, "--study", str(file), *link)
    assert facts["sync_bytes"]["auto"] == 5000
    assert facts["sync_bytes"]["full"] == 2_000_000
    assert (
        planned(capsys, "--study", str(file), "--params", "2M", *link)["sync_bytes"]["auto"]
        == 10_000
    )
    rows = [row | {"bytes_per_changed": 0.1} for row in STUDY["rows"]]
    file.write_text(
        json.dumps(STUDY | {"quantized": STUDY | {"dense_bytes": 1_010_000, "rows": rows}})
    )
    facts = planned(capsys, "--study", str(file), "--quantized", *link)
    assert (facts["sync_bytes"]["auto"], facts["sync_bytes"]["full"]) == (1000, 1_010_000)


@pytest.mark.parametrize(
    ("name", "wanted", "most"), [("fp8_block", 18.8e3, 22.7e6), ("nvfp4", 3.2e3, 12.8e6)]
)  # fmt: skip
def test_a_format_in_place_of_a_study(
    name: str, wanted: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the patches of docs/quantized.md, lr 3e-6."""
    recorded = "--params 22.7M --density 0.00798 --step-seconds 1 --bandwidth 1Gbit"
    found = planned(capsys, *recorded.split(), "--quantized", name)["sync_bytes"]
    assert found["auto"] == pytest.approx(wanted, rel=0.12)
    assert found["full"] == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "7B", "--step-seconds", "1", "--bandwidth", "1Gbit"], "is unknown"),
        ([*SEVEN, "--target", "1"], "target must be above 0"),
        ([*SEVEN, "--bandwidth", "fast"], "'fast' is not a bandwidth"),
        ([*SEVEN, "--density", "much"], "'much' is not a share"),
        ([*SEVEN, "--workers", "0"], "'0' is not a positive number"),
        ([*SEVEN, "--quantized"], "of a study, or of a format"),
        ([*SEVEN, "--quantized", "fp7"], "unknown format 'fp7'"),
        (
            ["--study", "/nowhere.json", "--step-seconds", "1", "--bandwidth", "1Gbit"],
            "cannot read",
        ),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments, "--json"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert json.loads(captured.out)["error"] == "input"
