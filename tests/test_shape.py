"""The size of the house: absolute budgets, and tests that know the library only as its users do.

A feature that does not fit removes something first. The budgets only ever fall. How many files one
call passes through is tested in test_journeys.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent
CHECKOUT = TESTS.parent
LIBRARY = CHECKOUT / "src" / "pulse_rl"

#: The packages that keep the promise, bit for bit; all else is an extra.
CORE = ("state", "codec", "patch", "store", "stream", "sync")

MAX_SRC_LINES, MAX_SRC_FILES = 30_700, 150
MAX_CORE_LINES, MAX_CORE_FILES = 6_200, 40
#: Code lines of Python: without blank lines, comments and docstrings.
MAX_TEST_LINES = 46_000

#: Lines of all files below src/native.
MAX_NATIVE_LINES = 9_400

#: Of the files of tests, helpers included, those that may know a private name of `pulse_rl`: pure
#: functions of formats and kernels are tested inside.
MAX_PRIVATE_SHARE = 0.38

#: Of these all is public.
OPEN = ("pulse_rl.errors.", "pulse_rl.events.", "pulse_rl.cli.")


def code_lines(file: Path) -> int:
    """Lines that are not blank, no comment, and no part of a docstring."""
    text = file.read_text()
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip()[:1] not in ("", "#")}
    for node in ast.walk(ast.parse(text)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def check_budget(name: str, files: Iterable[Path], *, lines: int, most: int | None = None) -> None:
    """Raises AssertionError where Python files have more code lines, or are more, than allowed."""
    sizes = {file: code_lines(file) for file in files}
    largest = sorted(sizes, key=lambda file: -sizes[file])[:12]
    listed = "\n".join(f"{sizes[file]:6} {file}" for file in largest)
    total = sum(sizes.values())
    assert total <= lines, f"{name} has {total} code lines, {lines} at most; the largest:\n{listed}"
    assert most is None or len(sizes) <= most, f"{name} has {len(sizes)} files, {most} at most"


def check_native(files: Iterable[Path], most: int) -> None:
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines <= most, f"src/native has {lines} lines, {most} at most"


def core_files(library: Path) -> list[Path]:
    return [file for package in CORE for file in (library / package).rglob("*.py")]


def test_the_library_fits_its_budget() -> None:
    src = CHECKOUT / "src"
    check_budget("src", src.rglob("*.py"), lines=MAX_SRC_LINES, most=MAX_SRC_FILES)


def test_the_core_fits_its_budget() -> None:
    check_budget("the core", core_files(LIBRARY), lines=MAX_CORE_LINES, most=MAX_CORE_FILES)


def test_the_native_code_fits_its_budget() -> None:
    native = [file for file in (CHECKOUT / "src" / "native").rglob("*") if file.is_file()]
    check_native(native, MAX_NATIVE_LINES)


def test_the_tests_fit_their_budget() -> None:
    check_budget("tests", TESTS.rglob("*.py"), lines=MAX_TEST_LINES)


def test_a_budget_is_enforced(tmp_path: Path) -> None:
    """One line, and one file, above the limit."""
    for package in CORE:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("# a comment\nx = 1\ny = 2\n")
    files = core_files(tmp_path)
    check_budget("the core", files, lines=12, most=6)
    with pytest.raises(AssertionError, match="12 code lines, 11 at most"):
        check_budget("the core", files, lines=11, most=6)
    with pytest.raises(AssertionError, match="6 files, 5 at most"):
        check_budget("the core", files, lines=12, most=5)
    check_native(files, 18)
    with pytest.raises(AssertionError, match="18 lines, 17 at most"):
        check_native(files, 17)


def test_only_lines_of_code_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text('''"""A module.

Of two paragraphs."""

LIMIT = 3  # counts
"""Counts, too: no docstring."""


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
    assert code_lines(file) == len(["LIMIT", "Counts", "def", *["text"] * 3, "return", "text", ")"])


# -- what tests know


@cache
def public_names() -> frozenset[str]:
    """The modules that users import, and what they find there."""
    names = {"pulse_rl.errors", "pulse_rl.events", "pulse_rl.cli", "pulse_rl.PulseError"}
    for line in (TESTS / "public_api.txt").read_text().splitlines():
        name = line.removeprefix("class ").removeprefix("def ").partition("(")[0].strip()
        if name.startswith("pulse_rl."):
            names |= {name, name.rpartition(".")[0]}
    return frozenset(names)


def imported(file: Path) -> Iterator[str]:
    """Every name of the library that a file imports, or names in a string, as `monkeypatch` takes
    it."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("pulse_rl"))
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("pulse_rl."):
            yield from (f"{node.module}.{a.name}" for a in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr" and node.args:
            named = node.args[0]
            if isinstance(named, ast.Constant) and str(named.value).startswith("pulse_rl."):
                yield str(named.value)


def private_names(file: Path) -> set[str]:
    """What a file knows that users do not: of a public module, what is public elsewhere may be had
    there, too."""
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


def test_most_tests_go_through_public_names() -> None:
    files = [file for file in sorted(TESTS.rglob("*.py")) if file.name != "__init__.py"]
    private = [file for file in files if private_names(file)]
    listed = "\n".join(str(file.relative_to(TESTS)) for file in private)
    assert len(private) <= MAX_PRIVATE_SHARE * len(files), (
        f"{len(private)} of {len(files)} files know private names:\n{listed}"
    )


def test_a_private_name_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        "from pulse_rl import Publisher\n"
        "from pulse_rl.sync import commit\n"
        "import pulse_rl.patch.apply\n"
        "def test(monkeypatch):\n"
        "    monkeypatch.setattr('pulse_rl.ops.gc._AGE', 1)\n"
    )
    assert private_names(file) == {
        "pulse_rl.sync.commit",
        "pulse_rl.patch.apply",
        "pulse_rl.ops.gc._AGE",
    }
