"""Layers that compute with what they derive from the checkpoint: a stand-in for an engine's
quantized layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from pulse_rl import PulseError
from pulse_rl.engines import derived_params
from pulse_rl.engines.derived_params import PostLoadLayers
from pulse_rl.engines.live import Scattered, WholeRectangle
from pulse_rl.engines.session import Session
from pulse_rl.errors import StateMismatch, UnsupportedTensor

from .world import Model, World, stage

Tensors = dict[str, torch.Tensor]


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8, transposed; a scale for each row)."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
    return (weight.float() / scale).round().to(torch.int8).t(), scale


class QuantizedModel(Model):
    """Of "fused" there are int8 values and scales once it is loaded."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.derived_as: Any = quantized
        self.loading = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        if self.loading:
            self.loading = False
            values, scale = self.derived_as(self.fused.data)
            self.fused = torch.nn.Parameter(values, requires_grad=False)
            self.scale = torch.nn.Parameter(scale, requires_grad=False)

    def forms(self) -> PostLoadLayers:
        return PostLoadLayers([self])

    def put_loaded(self) -> None:
        self.held = dict(self._parameters)
        del self._parameters["scale"]
        self.fused = torch.nn.Parameter(torch.empty(8, 6, dtype=torch.bfloat16))

    def put_live(self) -> None:
        self._parameters.update(self.held)

    @property
    def loaded(self) -> Tensors:
        return {"fused": torch.empty(8, 6, dtype=torch.bfloat16, device="meta")}

    @property
    def live(self) -> Tensors:
        return {"fused": self.fused, "scale": self.scale}

    def derive(self, loaded: Tensors) -> Tensors:
        return dict(zip(("fused", "scale"), self.derived_as(loaded["fused"]), strict=True))


@pytest.fixture
def model_class() -> type[Model]:
    return QuantizedModel


def prepared(session: Any) -> None:
    """What a handle does before the pause."""
    for _ in range(10):
        session.prepare()
        if not session.left:
            return
    raise AssertionError("something is left")


@pytest.mark.parametrize("early", [True, False], ids=["derived before the pause", "in it"])
def test_updates_write_what_is_derived(
    world: World, early: bool, monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    for number in range(1, 6):
        world.step_staged(session)
        if early:
            prepared(session)
        with monkeypatch.context() as patched:
            if early and number > 1:  # the first update is audited, which derives all
                patched.setattr(derived_params, "_changes", None)
            session.update(None)
        report = session.report
        assert report["version"] == number
        assert (report["previous"], report["full"]) == (number - 1, False)
        assert world.live()
    assert session.audit() == []


def test_few_changes_are_scattered_and_many_are_written_whole(world: World) -> None:
    old = world.model.live
    few, many = ({name: tensor.detach().clone() for name, tensor in old.items()} for _ in range(2))
    few["fused"][3, 5] += 1
    many["fused"][:] += 1
    for new, kind in ((few, Scattered), (many, WholeRectangle)):
        changes = derived_params._difference("fused", old["fused"], new["fused"])
        assert [type(change) for change in changes] == [kind]
    assert derived_params._difference("fused", old["fused"], old["fused"].detach().clone()) == []
    with pytest.raises(UnsupportedTensor, match="derives"):
        derived_params._difference("fused", old["fused"], new["fused"].float())


def test_a_flipped_bit_of_a_derived_parameter_is_found_and_repaired(world: World) -> None:
    session = world.session()
    world.update(session)
    world.model.fused.data[2, 3] += 1
    assert session.audit() == ["gate", "up"]
    world.update(session)
    assert session.report["full"]
    assert world.live()


def test_an_audit_needs_the_host_at_the_live_version(world: World, session: Session) -> None:
    world.update(session)
    world.step_staged(session)
    with pytest.raises(StateMismatch, match="holds version 2 already") as refusal:
        session.audit()
    assert "sync()" in refusal.value.hint
    session.update(None)
    assert session.audit() == []


def test_a_failure_while_deriving_leaves_the_version_before(world: World, session: Session) -> None:
    world.update(session)
    before = [weight.clone() for weight in world.model.parameters()]
    world.step_staged(session)

    def failing(_: torch.Tensor) -> Any:
        raise RuntimeError("the device is lost")

    world.model.derived_as = failing
    with pytest.raises(PulseError, match="the device is lost"):
        session.update(None)
    assert all(torch.equal(a, b) for a, b in zip(before, world.model.parameters(), strict=True))
    assert session.live_version == 1
    world.model.derived_as = quantized
    session.update(None)
    assert world.live()


def test_the_host_state_is_held_while_layers_are_derived(world: World, session: Session) -> None:
    """Or the changes would be those to a version that is not the staged one."""
    session.update(None)
    world.step_staged(session)
    prepared(session)
    world.step()
    session.staging._wake.set()
    assert session.staging._poll(None) is False
    session.update(None)
    assert session.live_version == 1
    stage(session)
    session.update(None)
    assert world.live()
