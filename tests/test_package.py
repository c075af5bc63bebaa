"""The package as a whole: what importing costs, what it exports, and its tree of errors."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pulse_rl
from pulse_rl import PulseError, errors
from tests.support.framework_stubs import BASES, integration
from tests.support.states import run_python
from tests.test_shape import CORE

#: Imported by an engine's own process only (`make test-vllm`), or where Triton is (`make
#: test-trainers`).
ELSEWHERE = {
    "pulse_rl.engines.vllm.engine",
    "pulse_rl.engines.vllm.trainer",
    "pulse_rl.frameworks.scatter_kernel",
}


def modules() -> Iterator[str]:
    for framework in BASES:
        integration(framework)  # what it imports need not be installed
    for info in pkgutil.walk_packages(pulse_rl.__path__, "pulse_rl."):
        if info.name not in ELSEWHERE:
            yield info.name


def test_the_map_of_the_code_is_true() -> None:
    """docs/architecture.md names each module of the folders that it lists by module, and only files
    that are there."""
    root = Path(__file__).parents[1]
    page = (root / "docs" / "architecture.md").read_text()
    for folder in (*CORE, "_util", "loco", "ops", "follow", "sharding", "stores"):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{folder}/`"))
        files = (root / "src" / "pulse_rl" / folder).glob("*.py")
        assert {file.stem for file in files if f"`{file.stem}`" not in row} == {"__init__"}, folder
    for named in re.findall(r"`([a-z_/]+/[a-z_]+\.(?:py|cpp))`", page):
        places = (root, root / "src" / "pulse_rl", root / "src" / "native")
        assert any((place / named).exists() for place in places), named


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "pulse_rl",
        "pulse_rl.cli",
        "pulse_rl.follow.checkpoint",
        "pulse_rl.ops.verify",
        "pulse_rl.testing",
    ],
)
def test_importing_needs_neither_torch_nor_safetensors(module: str) -> None:
    """In a fresh interpreter: workers without torch, and a command line that starts at once."""
    done = run_python(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint(
        {
            *("torch", "safetensors", "transformers", "matplotlib", "rich", "tqdm", "pytest"),
            *("unittest", "prometheus_client", "obstore"),
        }
    )
    assert {"numpy", "msgspec"} <= loaded


@pytest.mark.slow
def test_all_is_sorted_complete_and_can_be_imported() -> None:
    assert pulse_rl.__all__ == sorted(set(pulse_rl.__all__))
    done = run_python("from pulse_rl import *; print(*sorted(set(dir()) - {'__annotations__'}))")
    assert done.returncode == 0, done.stderr
    assert set(pulse_rl.__all__) <= set(done.stdout.split())
    assert {"Publisher", "Subscriber", "open_store", "state_root", "verify_stream"} <= set(
        pulse_rl.__all__
    )


def test_what_is_exported_has_a_docstring() -> None:
    for name in pulse_rl.__all__:
        value = getattr(pulse_rl, name)
        if inspect.isfunction(value):
            assert value.__doc__, name


@pytest.mark.slow
def test_every_module_can_be_imported_and_says_what_it_is_for() -> None:
    """And none has errors of its own: all are in `pulse_rl.errors`."""
    for name in modules():
        module = importlib.import_module(name)
        if not name.endswith("._kernels"):
            assert module.__doc__, name
    assert {c.__module__ for c in error_classes()} == {"pulse_rl.errors"}


def test_the_version_is_the_distributions() -> None:
    assert pulse_rl.__version__ == importlib.metadata.version("pulse-rl")


def error_classes() -> list[type[PulseError]]:
    found = [PulseError]
    for parent in found:
        found += [
            child for child in parent.__subclasses__() if child.__module__.startswith("pulse_rl")
        ]
    return found


def test_kinds_are_distinct_and_stable() -> None:
    """Programs depend on these words."""
    kinds = {c.__name__: c.kind for c in error_classes()}
    assert len(set(kinds.values())) == len(kinds)
    plain = {
        "PulseError": "error",
        "InputError": "input",
        "FormatError": "format",
        "IntegrityError": "integrity",
    }
    plain |= {"StoreError": "store", "StreamError": "stream", "EngineError": "engine"}
    for name, kind in kinds.items():
        assert kind == plain.get(name, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())


@pytest.mark.parametrize("error", error_classes(), ids=lambda c: c.__name__)
def test_every_error_has_a_hint(error: type[PulseError]) -> None:
    instance = error("what happened")
    assert str(instance) == "what happened"
    assert instance.hint == error.default_hint
    assert re.fullmatch(r"[A-Z`][^\n]{10,120}\.", instance.hint)
    assert error("x", hint="Do this.").hint == "Do this."
    with pytest.raises(PulseError):
        raise instance


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: list[tuple[str, str]] = []
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[│ ]   )*)(?:[├└]── )?([A-Z]\w+)", line)
        if not match or ("─" not in line and match[2] != "PulseError"):
            continue
        depth = len(match[1]) // 4 + ("─" in line)
        del parents[depth:]
        drawn.append((match[2], parents[-1] if parents else ""))
        parents.append(match[2])
    real = [
        (c.__name__, c.__bases__[0].__name__ if c is not PulseError else "")
        for c in error_classes()
    ]
    assert sorted(drawn) == sorted(real)


def test_input_errors_are_value_errors() -> None:
    assert issubclass(pulse_rl.errors.InputError, ValueError)
    assert not issubclass(pulse_rl.errors.FormatError, ValueError)
