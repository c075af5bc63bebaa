"""Each row of SECURITY.md's table of what a co-writer can do names the tests that show it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = (
    (ROOT / "SECURITY.md").read_text().partition("### What a co-writer")[2].partition("\n\n[")[0]
)
ROWS = [
    line.split("|")[1:4] for line in TABLE.splitlines() if line.startswith("| ") and "::" in line
]


def test_every_row_is_shown() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(ROWS) >= 12


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip() for row in ROWS])
def test_what_shows_it_exists(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            f"{file} has no {test}"
        )
