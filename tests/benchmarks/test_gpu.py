"""The rows of `benchmarks.gpu` on a machine without a GPU, where the CPU stands in for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import Row, main, run


def test_a_row_that_fails_or_hangs_is_reported() -> None:
    def printed(script: str) -> dict[str, object]:
        return run(Row("row", "part", 1, prefix=("sh", "-c", script)), 1.5, [])

    assert printed("echo '=== of a tool'; echo '{\"figures\": {}}'")["status"] == "ok"
    assert printed("sleep 60 & wait")["status"] == "timed out"
    failed = printed("echo broken >&2; exit 3")
    assert (failed["status"], failed["reason"], failed["exit"]) == ("failed", "broken", 3)
    assert printed("true")["status"] == "failed"
    lacking = run(Row("row", "part", 1, prefix=("a-program-of-nobody",)), 1, [])
    assert (lacking["status"], lacking["reason"]) == ("not run", "no a-program-of-nobody")
    assert run(Row("row", "part", 1), 0, [])["reason"] == "no time was left"


@pytest.mark.slow
def test_every_row_is_in_the_file_and_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two of them: all are tried by hand, in the folder that `make gpu-kit` makes."""
    file, names = tmp_path / "results.json", ["roots", "submit"]
    assert main(["--try", "--only", *names, "--out", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["row"], row["status"]) for row in rows] == [(name, "ok") for name in names]
    capsys.readouterr()
    assert main(["--table", str(file)]) == 0
    table = capsys.readouterr().out
    assert "no figure says anything about a GPU" in table
    assert all(f"| {name} (" in table for name in names)
