"""Modules that process their weights after loading, as engines may: none computes with old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_rl.engines.derived_params import PostLoadLayers
from pulse_rl.engines.post_load import Group, ProcessedLayer, remember, tensor_names
from pulse_rl.engines.self_check import require_scales_taken
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.state.tensors import DTYPES, TensorSpec

from .world import Model, World, stage


class Method:
    """Processes a module's weights once, and is a different one then, as vLLM's are."""

    def __init__(self, work: Callable[[Model, Method], None]) -> None:
        self.work = work
        self.kernel: Any = None

    def process(self, module: Model) -> None:
        if self.kernel is None:
            self.work(module, self)
            self.kernel = self.kernel or object


def permute(module: Model, method: Method) -> None:
    module.fused.data.copy_(module.fused.data.flip(0).clone())


def transpose(module: Model, method: Method) -> None:
    module.fused = torch.nn.Parameter(module.fused.data.t().contiguous())


def pad(module: Model, method: Method) -> None:
    module.fused = torch.nn.Parameter(torch.nn.functional.pad(module.fused.data, (0, 2)))


def scale(module: Model, method: Method) -> None:
    module.fused.data.mul_(3)


def copy_in_an_attribute(module: Model, method: Method) -> None:
    module.packed = module.fused.data.clone()


def copy_in_a_kernel(module: Model, method: Method) -> None:
    method.kernel = partial(torch.matmul, module.embed.data.float())


def copy_in_a_closure(module: Model, method: Method) -> None:
    held = {"weight": module.fused.data.t().contiguous()}
    method.kernel = lambda x: x @ held["weight"]


def product(module: Model, method: Method) -> None:
    module.register_buffer("product", module.fused.data.float() @ module.embed.data.float().t())


def nothing(module: Model, method: Method) -> None:
    module.ready = True


def wrap(module: Model, method: Method) -> None:
    """The parameter, but for what loads it: as engines do with codes that their kernel takes as
    they are."""
    module.fused = torch.nn.Parameter(module.fused.data, requires_grad=False)


def once(module: Model, method: Method) -> None:
    if hasattr(method, "done"):
        raise RuntimeError("nothing is left to process")
    method.done = True


def number(module: Model, method: Method) -> None:
    module.largest = float(module.fused.data.float().abs().max())


class Placed(torch.nn.Parameter):
    """A parameter that knows where the parts of it go."""

    def put(self, name: str, weight: torch.Tensor) -> None:
        self.data.narrow(0, {"gate": 0, "up": 4}[name], 4).copy_(weight)


class Processed(Model):
    """A `Model` that processes its weights after its first loading, as ``work`` says."""

    def __init__(self, work: Callable[[Model, Method], None]) -> None:
        super().__init__()
        self.method = Method(work)
        self.before: Any = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        if self.before is None:
            self.before = remember([self, self.method], tensor_names(self))
            self.method.process(self)

    def layer(self) -> ProcessedLayer:
        def process(copy_of: Callable[[Any], Any]) -> None:
            copy = copy_of(self)
            copy.method.process(copy)

        return ProcessedLayer(self, Group("", {"": self}, [self.method], process), self.before)

    def forms(self) -> PostLoadLayers:
        return PostLoadLayers([self.layer()])

    def reachable(self) -> dict[str, torch.Tensor]:
        """All that it computes with."""
        found = {
            **self.state_dict(),
            **{k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)},
        }
        kernel = self.method.kernel
        if isinstance(kernel, partial):
            found["kernel"] = kernel.args[0]
        elif getattr(kernel, "__closure__", None):
            found["kernel"] = kernel.__closure__[0].cell_contents["weight"]
        return found


WORK = [
    permute,
    transpose,
    pad,
    scale,
    copy_in_an_attribute,
    copy_in_a_kernel,
    copy_in_a_closure,
    product,
]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[Any], World]]:
    made: list[World] = []

    def world(work: Callable[[Model, Method], None]) -> World:
        made.append(World(tmp_path, lambda: Processed(work)))
        return made[-1]

    yield world
    for session in made[0].sessions:
        session.close()


@pytest.mark.parametrize("work", WORK)
def test_what_is_processed_is_processed_again(make: Callable[[Any], World], work: Any) -> None:
    world = make(work)
    session = world.session()
    held = {name: tensor.data_ptr() for name, tensor in world.model.reachable().items()}  # type: ignore[attr-defined]
    for version in range(1, 5):
        world.step()
        if version == 3:
            session.live = None  # so that everything is written
        stage(session)
        session.update(None)
        assert session.live_version == version
        fresh: Any = world.make()
        fresh.load_weights(world.tensors.items())
        live: Any = world.model
        expected = fresh.reachable()
        assert expected.keys() == live.reachable().keys()
        for name, tensor in live.reachable().items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.data_ptr() == held[name], (
                "a graph that was captured would read the old place"
            )
    assert session.audit() == []


def test_weights_that_are_left_alone_are_followed_by_the_map(make: Callable[[Any], World]) -> None:
    world = make(nothing)
    assert world.model.layer().plain  # type: ignore[attr-defined]
    assert not world.session().derives


def test_what_lost_its_loader_is_followed_by_the_map(tmp_path: Path) -> None:
    class Loading(Processed):
        def __init__(self) -> None:
            super().__init__(wrap)
            self.fused = Placed(self.fused.data, requires_grad=False)
            self.register_parameter("bias", None)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            rest, fused = dict(weights), self.fused
            for name in ("gate", "up"):
                fused.put(name, rest.pop(name))  # type: ignore[operator]
            super().load_weights(rest.items())

    world = World(tmp_path, Loading)
    session = world.session()
    assert not session.derives
    world.step_staged(session)
    session.prepare()
    session.update(None)
    assert world.live()
    assert session.audit() == []
    session.close()


def test_what_cannot_be_processed_again_is_refused(make: Callable[[Any], World]) -> None:
    world = make(once)
    world.model.before = {}  # type: ignore[attr-defined]
    world.model.method.kernel = None  # type: ignore[attr-defined]
    with pytest.raises(
        UnsupportedTensor, match="cannot process its weights again: RuntimeError: nothing is left"
    ):
        world.session()


@pytest.mark.parametrize(("module", "refused"), [("", True), ("elsewhere.", False)])
def test_scales_that_a_loader_passes_over_are_refused(module: str, refused: bool) -> None:
    specs = tuple(
        TensorSpec(name, DTYPES["F32"], (1,)) for name in ("a.weight", f"{module}a.k_scale")
    )
    unused = [{f"{module}a.k_scale", "a.weight"}, {f"{module}a.k_scale"}]
    message = r"does not take the stream's 'a\.k_scale'"
    with pytest.raises(UnsupportedTensor, match=message) if refused else nullcontext():
        require_scales_taken(specs, unused)


def test_a_number_that_depends_on_weights_is_refused(make: Callable[[Any], World]) -> None:
    world = make(number)
    with pytest.raises(
        UnsupportedTensor, match=r"keeps what it derived from its weights in \.largest"
    ):
        world.session()


def test_weights_that_are_changed_behind_the_processing_are_refused(
    make: Callable[[Any], World],
) -> None:
    world = make(nothing)
    with torch.no_grad():
        world.model.fused[:4] = world.model.fused[:4].flip(0)
    before = world.model.fused.detach().clone()
    session = world.session()
    world.step_staged(session)
    with pytest.raises(
        UnsupportedTensor,
        match=r"does not compute with the checkpoint .* it differs in 1 tensor, gate",
    ):
        session.prepare()
    assert torch.equal(world.model.fused, before)
