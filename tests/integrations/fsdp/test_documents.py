"""The program of docs/sharded.md, run as its readers would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pulse_rl import verify_stream
from tests.support.trainers import printed

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[3]


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", (CHECKOUT / "docs/sharded.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "train.py").write_text(found[1])
    (*versions, last), others = printed(tmp_path / "train.py", "store", size=2)
    assert not others
    assert [line.split(":")[0] for line in versions] == ["version 0", "version 1", "version 2"]
    reports = list(verify_stream(str(tmp_path / "store"), "policy"))
    assert all(report.ok for report in reports)
    assert last == f"a worker has version 2, root {reports[-1].root}"
