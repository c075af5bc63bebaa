"""What is public: listed in one place, public_api.txt, complete, and documented.

After a change of the interface: python -m tests.test_public > tests/public_api.txt, and a line in
the changelog.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pickle
import re
import textwrap
import traceback
import types
import typing
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

import pulse_rl
from tests.support.framework_stubs import BASES, integration

pytestmark = pytest.mark.slow  # it imports all frameworks
LIST = Path(__file__).parent / "public_api.txt"
#: Whatever their ``__all__`` names is public, or without one the classes that they define, and
#: nothing else is.
MODULES = (
    "pulse_rl",
    "pulse_rl.errors",
    "pulse_rl.events",
    "pulse_rl.frameworks.axolotl",
    "pulse_rl.frameworks.fsdp",
    "pulse_rl.frameworks.jax",
    "pulse_rl.frameworks.megatron",
    "pulse_rl.frameworks.nemo_rl",
    "pulse_rl.frameworks.restart",
    "pulse_rl.frameworks.torch",
    "pulse_rl.frameworks.transformers",
    "pulse_rl.frameworks.trl",
    "pulse_rl.frameworks.verl",
    "pulse_rl.engines.vllm",
    "pulse_rl.engines.sglang",
    "pulse_rl.loco",
    "pulse_rl.metrics",
    "pulse_rl.engines.rollouts",
    "pulse_rl.store",
    "pulse_rl.stores.server",
    "pulse_rl.study",
    "pulse_rl.testing",
)

MAX_NAMES, MAX_AT_THE_ROOT = 96, 28
MAX_PARAMETERS, MAX_CONSTRUCTOR_PARAMETERS = 8, 10

#: Types that users receive and never make, and those of keywords: documented in docs/reference, and
#: not exported.
HANDED_OUT = {
    "pulse_rl.engines.handle.EngineSync",
    "pulse_rl.engines.rollouts.Replay",
    "pulse_rl.engines.rollouts.Weights",
    "pulse_rl.engines.handle.Generation",
    "pulse_rl.frameworks.shards.RankSlice",
    "pulse_rl.frameworks.trl.PulseRollout",
    "pulse_rl.state.tensors.DType",
    "pulse_rl.testing.Guarantee",
    "pulse_rl.engines.transport.SubscriberOptions",
    "pulse_rl.engines.updates.UpdateSettings",
    "pulse_rl.ops.verify.AuditReport",
    "pulse_rl.ops.verify.Module",
    "pulse_rl.ops.verify.VersionReport",
    "pulse_rl.loco.store_format.PostedMessage",
    "pulse_rl.state.digest.StateDigest",
    "pulse_rl.ops.checkout.Checkout",
    "pulse_rl.stream.manifest.AnchorRef",
    "pulse_rl.stream.manifest.Manifest",
    "pulse_rl.stream.manifest.PatchRef",
    "pulse_rl.stream.manifest.Payload",
    "pulse_rl.stream.manifest.Signature",
    "pulse_rl.ops.gc.GcPlan",
    "pulse_rl.sync.publisher.PublisherSettings",
    "pulse_rl.state.tensors.TensorSpec",
    "pulse_rl.loco.exchange.Round",
    "pulse_rl.stores.http.HttpStore",
    "pulse_rl.stores.hub.HubStore",
    "pulse_rl.stores.object.ObjectStore",
    "pulse_rl.submit.Submission",
    "pulse_rl.sync.update.TensorUpdate",
}

#: Documented once, by the protocol `Store`.
STORE_CALLS = ("put", "put_new", "get", "head", "list", "delete")

#: Fields that the module docstring of `pulse_rl.events` explains for all events.
SAME_EVERYWHERE = {"stream", "version", "base", "root", "seconds", "reason", "metadata"}


def exported_by(module: types.ModuleType) -> list[str]:
    defined = [
        n
        for n, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    return getattr(module, "__all__", None) or sorted(n for n in defined if not n.startswith("_"))


def public() -> Iterator[tuple[str, Any]]:
    """(dotted name, object) of all that is public, each object once."""
    seen: set[int] = set()
    for module in MODULES:
        framework = module.rpartition(".")[2]
        loaded = integration(framework) if framework in BASES else importlib.import_module(module)
        for name in exported_by(loaded):
            value = getattr(loaded, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                if id(value) in seen:
                    continue
                seen.add(id(value))
            yield f"{module}.{name}", value


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Its methods and properties; a store's calls only of `Store`, and no tests of a suite."""
    is_store = all(hasattr(cls, call) for call in STORE_CALLS) and cls is not pulse_rl.Store
    for name, value in vars(cls).items():
        if name.startswith(("_", "test_")) or (is_store and name in STORE_CALLS):
            continue
        if isinstance(value, staticmethod | classmethod):
            yield name, value.__func__
        elif isinstance(value, cached_property):
            yield name, property(value.func)
        elif inspect.isfunction(value) or isinstance(value, property):
            yield name, value


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (ValueError, TypeError):
        return ""


def listing() -> str:
    errors = [
        name
        for name, value in public()
        if inspect.isclass(value) and issubclass(value, BaseException)
    ]
    lines = textwrap.wrap("errors: " + ", ".join(errors), 100)
    for name, value in public():
        if name in errors:
            continue
        if inspect.isclass(value):
            lines.append(f"class {name}{signature(value)}")
            lines += [
                f"    {member}" if isinstance(of, property) else f"    {member}{signature(of)}"
                for member, of in members(value)
            ]
        elif inspect.isfunction(value):
            lines.append(f"def {name}{signature(value)}")
        else:
            lines.append(name)
    lines += sorted(HANDED_OUT)
    return "\n".join(lines) + "\n"


@cache
def classes() -> dict[str, type]:
    return {
        name: value
        for name, value in public()
        if inspect.isclass(value) and not issubclass(value, Exception)
    }


@cache
def functions() -> dict[str, Any]:
    return {name: value for name, value in public() if inspect.isfunction(value)}


@cache
def methods() -> dict[str, Any]:
    return {
        f"{name}.{member}": of for name, value in classes().items() for member, of in members(value)
    }


def test_the_list_is_what_is_public() -> None:
    assert listing() == LIST.read_text(), "see the docstring of this module"


def test_it_is_small() -> None:
    """A name that is added wants another one to go."""
    names = [name for name, _ in public()]
    assert len(names) <= MAX_NAMES
    assert len(pulse_rl.__all__) <= MAX_AT_THE_ROOT


def parameters(value: Any) -> list[str]:
    """Those that a caller may give."""
    taken = inspect.signature(value).parameters if signature(value) else {}
    return [name for name in taken if name not in ("self", "cls")]


def test_calls_have_few_parameters() -> None:
    """Records that the library makes are not counted."""
    received = {"Published", "EngineSync", "Round", "Rollout"}
    for name, value in classes().items():
        if value.__name__ not in received and value.__module__ != "pulse_rl.events":
            assert len(parameters(value)) <= MAX_CONSTRUCTOR_PARAMETERS, name
    for name, value in (functions() | methods()).items():
        if not isinstance(value, property):
            assert len(parameters(value)) <= MAX_PARAMETERS, name


def types_in(annotation: Any) -> Iterator[type]:
    for argument in typing.get_args(annotation):
        yield from types_in(argument)
    origin = typing.get_origin(annotation)
    if inspect.isclass(annotation) and origin is None:
        yield annotation
    elif isinstance(annotation, types.UnionType):
        for argument in annotation.__args__:
            yield from types_in(argument)


def annotated() -> Iterator[tuple[str, Any]]:
    for name, value in classes().items():
        if value.__init__ is not object.__init__ and inspect.isfunction(value.__init__):
            yield name, value.__init__
        if dataclasses.is_dataclass(value):
            yield name, value
    yield from functions().items()
    for name, of in methods().items():
        yield name, of.fget if isinstance(of, property) else of


def test_every_type_of_a_public_signature_is_public() -> None:
    exported = {id(value) for _, value in public()}
    hidden = set()
    for name, value in annotated():
        try:
            hints = typing.get_type_hints(value)
        except NameError:  # imported for type checkers alone: another library's
            continue
        for hint in (hint for argument, hint in hints.items() if not argument.startswith("_")):
            for found in types_in(hint):
                full_name = f"{found.__module__}.{found.__name__}"
                if (
                    full_name.startswith("pulse_rl")
                    and id(found) not in exported
                    and full_name not in HANDED_OUT
                ):
                    hidden.add(f"{full_name} in {name}")
    assert not hidden


def inherited(name: str) -> str | None:
    """The docstring of the method that this one overrides."""
    owner, _, member = name.rpartition(".")
    cls = classes().get(owner)
    return inspect.getdoc(getattr(cls, member)) if cls else None


def undocumented(name: str, value: Any) -> str:
    """What its docstring leaves out: every argument, or every field, stands in double backticks, or
    in a list."""
    documented = value.fget if isinstance(value, property) else value
    text = documented.__doc__ or inherited(name) or ""
    if not text:
        return "has no docstring"
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, enum.Enum)):
        return ""
    if inspect.isclass(value) and (
        value.__init__ is object.__init__ or getattr(value, "_is_protocol", False)
    ):
        return ""
    try:
        taken = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):
        return ""
    names = {p.name for p in taken if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - {
        "self",
        "cls",
    }
    if inspect.isclass(value) and value.__module__ == "pulse_rl.events":
        names -= SAME_EVERYWHERE
    if inspect.isclass(value):  # a subclass may leave to its parent what it hands on
        text += "".join(
            parent.__doc__ or ""
            for parent in value.__mro__
            if parent.__module__.startswith("pulse_rl")
        )
    missing = {n for n in names if not re.search(rf"``{n}\b|^ +{n}: ", text, re.MULTILINE)}
    return f"does not say what {sorted(missing)} is" if missing else ""


def test_what_is_public_says_what_it_takes() -> None:
    everything = functions() | methods() | classes()
    found = {name: undocumented(name, value) for name, value in everything.items()}
    assert len(found) > 150
    assert {name: lacks for name, lacks in found.items() if lacks} == {}


def test_what_owns_something_can_be_closed_and_used_with() -> None:
    from pulse_rl.loco import DiLoCo, PulseLoCo
    from pulse_rl.metrics import JsonLines
    from pulse_rl.study import SparsityMeter

    for owner in (
        pulse_rl.Publisher,
        pulse_rl.Subscriber,
        SparsityMeter,
        JsonLines,
        PulseLoCo,
        DiLoCo,
    ):
        for member in ("close", "__enter__", "__exit__"):
            assert callable(getattr(owner, member)), f"{owner.__name__}.{member}"


if __name__ == "__main__":
    print(listing(), end="")


def test_a_traceback_shows_what_to_do() -> None:
    with pytest.raises(pulse_rl.PulseError) as refused:
        pulse_rl.state_root(object())  # type: ignore[arg-type]
    shown = "".join(traceback.format_exception(refused.value))
    assert f"Hint: {refused.value.hint}" in shown
    assert (
        "".join(traceback.format_exception(pickle.loads(pickle.dumps(refused.value)))).count(
            "Hint: "
        )
        == 1
    )


def test_what_needs_torch_is_at_the_root_too() -> None:
    from pulse_rl.loco import PulseLoCo

    assert pulse_rl.PulseLoCo is PulseLoCo
    with pytest.raises(AttributeError, match="no attribute 'PulseLoco'"):
        pulse_rl.PulseLoco  # type: ignore[attr-defined]  # noqa: B018
