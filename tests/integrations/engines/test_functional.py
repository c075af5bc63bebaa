"""The proof by a second model: what it finds, and that it says how far it went."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl import State
from pulse_rl.engines import self_check
from pulse_rl.engines.handle import EngineHandle
from pulse_rl.engines.node import Node
from pulse_rl.engines.self_check import Fresh, shortage
from pulse_rl.engines.session import Session
from pulse_rl.engines.transport import InitInfo
from pulse_rl.engines.worker import Worker
from pulse_rl.errors import InputError, UnsupportedTensor
from pulse_rl.follow.checkpoint import save

from .world import Model, World, stage


def another(weights: Iterable[tuple[str, torch.Tensor]]) -> nn.Module:
    model = Model()
    model.load_weights(weights)
    return model


def computed(model: nn.Module) -> torch.Tensor:
    product: torch.Tensor = model.fused @ model.embed.T  # type: ignore[operator, union-attr]
    return product.detach()


def test_connect_refuses_a_model_that_computes_something_else_and_leaves_it_as_it_was(
    world: World,
) -> None:
    world.fresh = Fresh(another, lambda model: computed(model) * (2 if model is world.model else 1))
    world.step()
    worker = Worker(lambda *_: world.session(), lambda: None)
    init, pulse = (
        (lambda info: worker.open(InitInfo(**info))),
        (lambda *asked: [worker.answer(*asked)]),
    )
    engine: Any = SimpleNamespace(init=init, pulse=pulse)
    before = [tensor.detach().clone() for tensor in world.model.parameters()]
    for _ in range(2):  # the second finds no session of the first
        with pytest.raises(UnsupportedTensor, match="do not compute with the weights"):
            EngineHandle._on(engine, InitInfo(world.store, "policy"), "keep", 5.0)
        assert not worker.status()["open"]
    assert all(torch.equal(a, b) for a, b in zip(before, world.model.parameters(), strict=True))


def test_a_model_that_computes_the_same_is_followed(world: World) -> None:
    world.fresh = Fresh(another, computed)
    world.step()
    session = world.session()
    session.update(None)
    assert session.map.proof == "computed"
    assert session.prove() == []
    assert world.live()


def test_a_model_that_does_not_run_is_compared_by_bits_and_that_is_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def run(model: nn.Module) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    world.fresh = Fresh(another, run)
    world.step()
    session = world.session()
    session.update(None)
    assert (
        session.map.proof
        == "bits only: the model does not run by itself (RuntimeError: no such kernel)"
    )
    assert session.map.proof in caplog.text
    assert world.live()


def test_no_second_model_is_made_where_memory_may_not_suffice(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(weights: object) -> nn.Module:
        raise AssertionError("a second model was made")

    world.fresh = Fresh(make, computed)
    monkeypatch.setattr(self_check, "_free_bytes", lambda device: 1 << 20)
    world.step()
    session = world.session()
    session.update(None)
    assert session.map.proof.startswith("left out: no memory for a second model")
    assert session.map.proof in caplog.text
    with pytest.raises(InputError, match="left out: no memory"):
        session.prove()
    assert world.live()


class Scaled(Model):
    """With a scale that its class makes 2, and that vLLM's dummy loader would fill with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))


def dummy_world(world: World, **settings: Any) -> Session:
    """Whose engine was started with dummy weights."""
    world.make, world.model = Scaled, Scaled()
    for tensor in (*world.model.parameters(), *world.model.buffers()):
        tensor.data.fill_(1e-3)
    world.step()
    info, base = InitInfo(world.store, "policy", follow=False), str(world.base)
    session = Session(
        world.model,
        info,
        Node(None),
        world.map,
        base,
        nullcontext,
        world.model.forms(),
        loaded=False,
        **settings,
    )
    world.sessions.append(session)
    stage(session)
    return session


def test_buffers_of_dummy_weights_are_made_as_the_class_makes_them(world: World) -> None:
    session = dummy_world(world, initial_buffers=lambda: dict(Scaled().named_buffers()))
    session.update(None)
    assert world.live()
    assert world.model.get_buffer("scale").tolist() == [2.0] * 3
    assert session.audit() == []
    world.model.get_buffer("scale").fill_(3)
    assert session.audit() == ["scale"]


def test_a_buffer_that_only_a_checkpoint_knows_is_refused_by_name(world: World) -> None:
    save(world.base, State.of(world.tensors | {"scale": torch.ones(3)}))
    session = dummy_world(world, initial_buffers=lambda: dict(Scaled().named_buffers()))
    with pytest.raises(UnsupportedTensor, match="does not fill its buffer 'scale'") as refusal:
        session.update(None)
    assert "named_parameters()" in refusal.value.hint


def test_the_memory_that_a_second_model_takes_is_counted_once_a_storage(tmp_path: Path) -> None:
    small = torch.zeros(1000)
    huge = torch.from_file(str(tmp_path / "weights"), shared=True, size=1 << 40, dtype=torch.uint8)
    assert shortage([small, small[10:]], 1) is None
    assert shortage([small], 1 << 20) is not None
    assert "MiB of cpu are needed" in (shortage([huge], 1) or "")
