"""Every example of the README and of the site runs, or is held against the signatures where it
needs a package that is not here; every line of `pulse` in them is one that its parser takes."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pulse_rl
from pulse_rl.cli import main, make_parser
from tests.support.trainers import printed

CHECKOUT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in [CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")]}
#: Pages whose examples are run here, all of a page in one namespace.
RUN = (
    *("README", "own-loop", "stores", "regions", "monitoring", "restart", "mismatch", "integrate"),
    "checkpoints",
)


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", PAGES[page].read_text(), re.DOTALL | re.MULTILINE
    )


def policy() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))


class Alone:
    """A `PulseLoCo` of the examples that have a process group; what is run here is the loop around
    it."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
    ) -> None:
        inspect.signature(importlib.import_module("pulse_rl.loco").PulseLoCo).bind(
            model, optimizer, **settings
        )

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted: a model, a training step, an engine, and a store with two
    versions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pulse_rl.loco.PulseLoCo", Alone)
    model = policy()
    model.to(torch.bfloat16)
    with pulse_rl.Publisher("bucket", stream="policy") as publisher:
        for version in range(3):
            with torch.no_grad():
                model[0].bias += version
            published = publisher.publish(model.state_dict(), metadata={"step": version})
    for adapter in ("adapter-1", "adapter-2", "adapter-3"):
        with pulse_rl.Publisher("bucket", stream=adapter) as publisher:
            publisher.publish(model.state_dict())
    subscriber = pulse_rl.Subscriber("bucket", stream="policy")
    subscriber.sync(target=0)
    subscriber.save("checkpoint.safetensors")
    subscriber.sync()
    return {
        "pulse_rl": pulse_rl,
        "model": model,
        "steps": 2,
        "train_one_step": lambda model: None,
        "pause_generation": lambda: None,
        "resume_generation": lambda version: None,
        "load": lambda stream, update: None,
        "wandb": SimpleNamespace(log=lambda figures, step: None),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [torch.zeros(1, 16, dtype=torch.bfloat16)],
        "loss": lambda model, batch: model(batch).sum(),
        "engine": SimpleNamespace(model=model, pause=int, resume=dict, drop_prefix_cache=int),
        "subscriber": subscriber,
        "published": published,
        "MyStore": pulse_rl.MemoryStore,
    }


def here(code: str) -> str:
    """The example with addresses of this machine, and with loops that end."""
    for there, found in {
        '"s3://bucket/run"': '"bucket"',
        '"s3://home/run"': '"bucket"',
        '"/shared/run"': '"near"',
        '"http://relay:8734"': '"bucket"',
        '"runs/store"': '"bucket"',
        '"checkpoint/"': '"checkpoint.safetensors"',
        "updates()": "updates(timeout_seconds=0.2)",
        "target=400": "target=1",
    }.items():
        code = code.replace(there, found)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_examples_run(page: str, world: dict[str, Any]) -> None:
    found = blocks(page)
    assert found
    for code in found:
        exec(compile(here(code), f"{page}.md", "exec"), world)


@pytest.mark.slow
def test_what_the_examples_do_is_seen(world: dict[str, Any]) -> None:
    """An example of a worker does bring its model to the newest version."""
    newest = world["subscriber"]
    world["model"].load_state_dict(
        load_file("checkpoint.safetensors")
    )  # version 0, from which the example starts
    assert not pulse_rl.audit(world["model"], newest.digest).ok
    exec(compile(here(blocks("own-loop")[1]), "own-loop.md", "exec"), world)
    assert pulse_rl.audit(world["model"], newest.digest).ok


@pytest.mark.slow
def test_the_quick_start_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, worker = blocks("quickstart")
    (tmp_path / "trainer.py").write_text(trainer)
    (tmp_path / "worker.py").write_text(worker.replace("timeout_seconds=20", "timeout_seconds=1"))
    (first,) = printed(tmp_path / "trainer.py")
    assert first[0].startswith("version 0 of policy: the full state of ")
    assert len(first) == 10
    text = PAGES["quickstart"].read_text()
    said, seen = (
        float(re.findall(r"version 7 of policy: ([\d.]+)% ch", found)[0])
        for found in (text, first[7])
    )
    assert seen == pytest.approx(said, rel=0.1)
    ((last,),) = printed(tmp_path / "worker.py")
    assert last.startswith("at version 9, step 9, root ")
    monkeypatch.chdir(tmp_path)
    for line in commands("quickstart"):
        assert main(shlex.split(line.partition(" #")[0])[1:]) == 0, line
    assert list((tmp_path / "weights").iterdir())


@pytest.mark.slow
def test_trainers_of_the_loco_page_print_what_they_save(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("loco-guide")[0])
    text = "\n".join(line for lines in printed(tmp_path / "train.py", size=2) for line in lines)
    rounds = re.findall(
        r"round (\d): 2 trainers, .*% of 65792 .* ([\d.]+) times less than DiLoCo", text
    )
    assert sorted(number for number, _ in rounds) == [*"11223344"]
    assert all(float(times) > 3 for _, times in rounds)


def commands(page: str) -> list[str]:
    """The lines of `pulse` in a page's examples."""
    text = "\n".join(
        re.findall(r"^```(?:bash)?\n(.*?)^```$", PAGES[page].read_text(), re.DOTALL | re.MULTILINE)
    )
    lines = text.replace("\\\n", " ").splitlines()
    return [
        line.strip().removesuffix("&").strip()
        for line in lines
        if line.strip().startswith("pulse ")
    ]


@pytest.mark.parametrize(
    "page", sorted(page for page in PAGES if page != "commands" and commands(page))
)
def test_the_parser_takes_every_command(page: str) -> None:
    for line in commands(page):
        try:
            make_parser().parse_args(shlex.split(line.partition(" #")[0])[1:])
        except SystemExit:
            pytest.fail(f"{page}.md: {line}")


def calls(code: str) -> Iterator[tuple[Callable[..., Any], ast.Call]]:
    """The calls of what an example imports from this library, or names as ``pulse_rl.…``."""
    tree = ast.parse(code)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pulse_rl"):
            for alias in node.names:
                known[alias.asname or alias.name] = getattr(
                    importlib.import_module(str(node.module)), alias.name
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name in known:
                    yield known[name], node
                case ast.Attribute(value=ast.Name(id="pulse_rl"), attr=name):
                    yield getattr(pulse_rl, name), node


@pytest.mark.parametrize("page", sorted(page for page in PAGES if page not in RUN and blocks(page)))
def test_calls_have_the_arguments_that_there_are(page: str) -> None:
    """For examples that need another package, or processes."""
    for code in blocks(page):
        try:
            for function, call in calls(code):
                given = dict.fromkeys(k.arg for k in call.keywords if k.arg)
                inspect.signature(function).bind(*call.args, **given)
        except ModuleNotFoundError as error:
            pytest.skip(f"{error.name} is not installed here; the page's own suite has it")
