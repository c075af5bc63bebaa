"""The shape of the tests: most of them know the library only as its users do, so that its inside
can be rewritten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent
MOST_PRIVATE_SHARE = 0.33
"""Of the files with tests, those that may import a module of `pulse_rl` which is not public: pure
functions of formats and kernels are tested inside. It only ever falls."""

MOST_LINES = 1.56
"""Of Python in tests/ for each in src/, without blank lines, comments and docstrings: what explains
is free. It only ever falls."""

OPEN = ("pulse_rl.errors.", "pulse_rl.events.", "pulse_rl.cli.")
"""Of these all is public."""


@cache
def public_names() -> frozenset[str]:
    """The modules that users import, and what they find there."""
    names = {"pulse_rl.errors", "pulse_rl.events", "pulse_rl.cli", "pulse_rl.PulseError"}
    for line in (TESTS / "public_api.txt").read_text().splitlines():
        name = line.removeprefix("class ").removeprefix("def ").partition("(")[0].strip()
        if name.startswith("pulse_rl."):
            names |= {name, name.rpartition(".")[0]}
    return frozenset(names)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield child
            yield from statements(child)


def imported(file: Path) -> Iterator[str]:
    """Every name of the library that a file imports."""
    for node in statements(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pulse_rl"))
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "pulse_rl"
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_names(file: Path) -> set[str]:
    """What a file imports that users do not: of a public module, what is public elsewhere may be
    had there, too."""
    public = public_names()
    last = {name.rpartition(".")[2] for name in public}
    return {
        name
        for name in imported(file)
        if name not in public
        and not (
            name.rpartition(".")[0] in public
            and (name.rpartition(".")[2] in last or name.startswith(OPEN))
        )
    }


def private_files() -> list[Path]:
    return [file for file in sorted(TESTS.rglob("test_*.py")) if private_names(file)]


def code_lines(file: Path) -> int:
    """Lines that are not blank, no comment, and no part of a docstring, a name's included."""
    text = file.read_text()
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and line.strip()[0] != "#"
    }
    for node in statements(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_most_tests_go_through_public_names() -> None:
    private, all_files = private_files(), list(TESTS.rglob("test_*.py"))
    listed = "\n".join(str(file.relative_to(TESTS)) for file in private)
    share = len(private) / len(all_files)
    assert share <= MOST_PRIVATE_SHARE, (
        f"{len(private)} of {len(all_files)} import private modules:\n{listed}"
    )


def test_the_tests_do_not_grow() -> None:
    lines, own = (
        sum(map(code_lines, folder.rglob("*.py"))) for folder in (TESTS, TESTS.parent / "src")
    )
    assert lines <= MOST_LINES * own, (
        f"{lines} lines test {own}: what repeats itself wants a fixture or a parameter"
    )


def test_only_lines_of_code_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text('''"""A module.

Of two paragraphs."""

LIMIT = 3  # counts
"""The most."""


# Does not count.
def f() -> str:
    """Nor this."""
    text = """
    Data, all of its lines.
    """
    return (
        text
    )
''')
    assert code_lines(file) == len(["LIMIT", "def", *["text"] * 3, "return", "text", ")"])


def test_a_private_import_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        "from pulse_rl import Publisher\nfrom pulse_rl.sync import commit\nimport "
        "pulse_rl.patch.apply\n"
    )
    assert private_names(file) == {"pulse_rl.sync.commit", "pulse_rl.patch.apply"}
