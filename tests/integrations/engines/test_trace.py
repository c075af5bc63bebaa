"""The map learnt from a loader, on models with the ways of engines': fused, sliced, padded, tied,
transposed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import State
from pulse_rl.engines.live import Journal, LiveWeights, LoaderMap, Rectangle, located, trace_loader
from pulse_rl.engines.node import Node
from pulse_rl.engines.self_check import differing, require_tied, require_whole
from pulse_rl.errors import StateMismatch, UnsupportedTensor
from pulse_rl.state.digest import state_digest

Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """Rank ``rank`` of 2: fused rows and columns of "up" and "gate", a padded "embed", a transposed
    "side"."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.fused = torch.nn.Parameter(torch.full((8, 6), 7, dtype=torch.bfloat16))
        self.down = torch.nn.Parameter(torch.full((6, 4), 7, dtype=torch.bfloat16))
        self.embed = torch.nn.Parameter(torch.full((8, 6), 7, dtype=torch.bfloat16))
        self.side = torch.nn.Parameter(torch.full((3, 5), 7, dtype=torch.bfloat16))
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        first = 4 * self.rank
        loaders: dict[str, Callable[[torch.Tensor], object]] = {
            "gate": lambda w: self.fused.data.narrow(0, 0, 4).copy_(w.narrow(0, first, 4)),
            "up": lambda w: self.fused.data.narrow(0, 4, 4).copy_(w.narrow(0, first, 4)),
            "down": lambda w: self.down.data.copy_(w[:, first : first + 4]),
            "embed": self._load_embed,
            "side": lambda w: self.side.data.copy_(w.t().contiguous()),
            "head": lambda w: None,
        }
        for name, weight in weights:
            loaders[name](weight)

    def _load_embed(self, weight: torch.Tensor) -> None:
        self.embed[: len(weight)].data.copy_(weight)
        self.embed[len(weight) :].data.fill_(0)


def checkpoint(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (8, 6), "up": (8, 6), "down": (6, 8), "embed": (7, 6), "side": (5, 3)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def changed(old: Tensors, new: Tensors) -> Iterable[tuple[str, np.ndarray, np.ndarray]]:
    before, after = State.of(old), State.of(new)
    for spec in after.specs:
        indices = np.flatnonzero(before.read(spec.name) != after.read(spec.name))
        yield spec.name, indices, after.read(spec.name)[indices]


def bits(model: torch.nn.Module) -> dict[str, list[int]]:
    return {
        name: weight.view(torch.int16).flatten().tolist()
        for name, weight in model.named_parameters()
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_scattered_changes_are_what_the_loader_would_have_loaded(rank: int) -> None:
    model, fresh = Model(rank), Model(rank)
    old, new = checkpoint(), checkpoint(1)
    new["gate"][2:5] = old["gate"][2:5]
    new["side"][1, 1] = float("nan")
    model.load_weights(old.items())
    fresh.load_weights(new.items())
    loader_map = trace_loader(model, State.of(old))
    journal = Journal(LiveWeights(model))
    before = bits(model)
    for name, indices, values in changed(old, new):
        journal.apply(located(loader_map, name, indices, values))
    assert bits(model) == bits(fresh)
    journal.roll_back()
    assert bits(model) == before


class BiasOfOneRank(Model):
    """As GPT-OSS loads the biases of its experts: one rank adds them, on the others they are
    zeros."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def zeroed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.zero_() if self.rank else tensor

        super().load_weights(
            (name, zeroed(tensor) if name == "side" else tensor) for name, tensor in weights
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_the_loader_zeroes_is_a_constant(rank: int) -> None:
    model, fresh = BiasOfOneRank(rank), BiasOfOneRank(rank)
    old, new = checkpoint(), checkpoint(1)
    loader_map = trace_loader(model, State.of(old))
    assert loader_map.padding.get("side") == (frozenset({0.0}) if rank else None)
    model.load_weights((name, tensor.clone()) for name, tensor in old.items())
    fresh.load_weights((name, tensor.clone()) for name, tensor in new.items())
    journal = Journal(LiveWeights(model))
    for name, indices, values in changed(old, new):
        journal.apply(located(loader_map, name, indices, values))
    assert bits(model) == bits(fresh)


@pytest.mark.parametrize(
    "change", [lambda w: w[:2].zero_(), lambda w: w.mul_(2), lambda w: w.clone().zero_()]
)
def test_a_tensor_that_the_loader_changes_is_refused(
    change: Callable[[torch.Tensor], object],
) -> None:
    class Changing(Model):
        def _load_embed(self, weight: torch.Tensor) -> None:
            change(weight)
            super()._load_embed(weight)

    with pytest.raises(UnsupportedTensor, match="changes 'embed' before it is copied"):
        refused(checkpoint(), Changing())


def test_learning_writes_nothing() -> None:
    model = Model()
    loader_map = trace_loader(model, State.of(checkpoint()))
    assert all((weight == 7).all() for weight in model.parameters())
    assert loader_map.padding == {"embed": frozenset({0.0})}
    assert loader_map.unused == ()


def test_a_tied_head_that_the_loader_skips_is_no_tensor_of_its_own() -> None:
    tensors = checkpoint()
    loader_map = trace_loader(Model(), State.of(tensors | {"head": tensors["embed"]}))
    assert {box.parameter for box in loader_map.boxes["embed"]} == {"embed"}


def refused(tensors: Tensors, model: torch.nn.Module | None = None) -> LoaderMap:
    return trace_loader(model or Model(), State.of(tensors))


def test_a_stream_of_another_model_is_refused() -> None:
    tensors = checkpoint()
    with pytest.raises(StateMismatch, match="'other'"):
        refused(tensors | {"other": torch.zeros(3)})
    with pytest.raises(StateMismatch, match="at 'embed'"):
        refused(tensors | {"embed": torch.zeros(7, 5).bfloat16()})


def test_a_stream_that_lacks_a_part_is_refused() -> None:
    tensors = checkpoint()
    del tensors["up"]
    with pytest.raises(StateMismatch, match=r"does not fill .* 'fused' \(24 of 48 elements\)"):
        refused(tensors)


def test_a_stream_of_another_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedTensor, match=r"float32, the engine's .* bfloat16") as refusal:
        refused({name: tensor.float() for name, tensor in checkpoint().items()})
    assert "dtype='BF16'" in refusal.value.hint


def test_hints_are_of_the_two_dtypes() -> None:
    tensors = {name: tensor.half() for name, tensor in checkpoint().items()}
    with pytest.raises(UnsupportedTensor) as refusal:
        refused(tensors)
    assert "--dtype float16" in refusal.value.hint
    with pytest.raises(UnsupportedTensor) as refusal:
        refused(tensors, Model().float())
    assert "Publish this tensor as F32" in refusal.value.hint


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_that_the_engine_keeps_wider_are_followed(rank: int, scattered: bool) -> None:
    """An FP32 parameter of which torch widens BF16, in the loader's own arithmetic."""
    model, fresh = Model(rank).float(), Model(rank).float()
    old, new = checkpoint(), checkpoint(1)
    loader_map = trace_loader(model, State.of(old))
    model.load_weights(old.items())
    if not scattered:  # as an FP32 checkpoint had filled it
        model.fused.data += 2.0**-20
    before = model.fused.detach().clone()
    fresh.load_weights(new.items())
    live = LiveWeights(model)
    journal = Journal(live)
    for name, indices, values in changed(old, new):
        whole = State.of(new).read(name)
        change = (indices, values) if scattered else (None, whole)
        journal.apply(located(loader_map, name, *change))
    for name, weight in fresh.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    digest = state_digest(State.of(new))
    assert not {"side", "embed"} & set(differing(Node(None), live, loader_map, digest))
    model.side.data.view(torch.int16)[0, 0] ^= 1  # in the low half of an element
    assert "side" in differing(Node(None), live, loader_map, digest)
    journal.roll_back()
    assert torch.equal(model.fused, before)


def test_two_tensors_for_one_place_must_be_equal() -> None:
    class Tied(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(
                ("side" if name == "twin" else name, weight) for name, weight in weights
            )

    tensors = checkpoint()
    tensors["twin"] = tensors["side"].clone()
    loader_map = trace_loader(Tied(), State.of(tensors))
    assert loader_map.ties == (("twin", "side"),)
    require_tied(loader_map.ties, state_digest(State.of(tensors)))
    tensors["twin"][0, 0] += 1
    with pytest.raises(StateMismatch, match="'twin' differs from 'side'"):
        require_tied(loader_map.ties, state_digest(State.of(tensors)))


def test_what_a_loader_computes_is_refused() -> None:
    class Scaling(Model):
        def _load_embed(self, weight: torch.Tensor) -> None:
            self.embed.data[:7].copy_(weight * 2)
            self.embed.data[7:].zero_()

    with pytest.raises(UnsupportedTensor, match="'embed' but computes it"):
        refused(checkpoint(), Scaling())


def test_a_loader_that_copies_in_threads_writes_nothing_either() -> None:
    class Threaded(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            with ThreadPoolExecutor() as pool:
                for done in [
                    pool.submit(super(Threaded, self).load_weights, [pair]) for pair in weights
                ]:
                    done.result()

    model = Threaded()
    tensors = checkpoint()
    assert (
        trace_loader(model, State.of(tensors)).boxes
        == trace_loader(Model(), State.of(tensors)).boxes
    )
    assert all((weight == 7).all() for weight in model.parameters())
    model.load_weights(tensors.items())
    assert torch.equal(model.fused[:4], tensors["gate"][:4])


def test_parameters_that_a_loader_replaces_are_put_back() -> None:
    class Replacing(Model):
        def _load_embed(self, weight: torch.Tensor) -> None:
            self.embed.data = torch.zeros(8, 6, dtype=torch.bfloat16)

    model = Replacing()
    with pytest.raises(StateMismatch):
        refused(checkpoint(), model)
    assert (model.embed == 7).all()


def test_a_buffer_that_the_loader_computes_is_refused() -> None:
    """It would be stale after the first update, and no audit reads it."""

    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scaled", torch.zeros(5, 3, dtype=torch.bfloat16))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, weight in weights:
                super().load_weights([(name, weight)])
                if name == "side":
                    self.get_buffer("scaled").copy_(weight * 2)

    with pytest.raises(UnsupportedTensor, match="'scaled' but computes it"):
        trace_loader(Scaled(), State.of(checkpoint()))


def test_a_node_that_holds_a_part_of_a_tensor_is_refused() -> None:
    state = State.of(checkpoint())
    ranks = [trace_loader(Model(rank), state).boxes for rank in range(2)]
    require_whole(state.specs, ranks)
    require_whole(state.specs, [{"embed": ranks[0]["embed"]}])
    with pytest.raises(UnsupportedTensor, match="only a part of 'down'"):
        require_whole(state.specs, ranks[:1])


Array = npt.NDArray[np.int64]


@st.composite
def views(draw: st.DrawFn) -> tuple[Array, Array]:
    """(source, target): two views of one shape, made by slicing and transposing arrays of flat
    positions."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cut = [
        slice(start := draw(st.integers(0, n - 1)), draw(st.integers(start + 1, n))) for n in shape
    ]
    source = np.arange(np.prod(shape)).reshape(shape)[tuple(cut)]
    order = draw(st.permutations(range(len(shape))))
    outer = [n + draw(st.integers(0, 3)) for n in np.transpose(source, order).shape]
    target = np.arange(np.prod(outer)).reshape(outer)
    target = target[
        tuple(
            slice(m - n, m) for m, n in zip(outer, np.transpose(source, order).shape, strict=True)
        )
    ]
    return source, np.transpose(target, np.argsort(order))


def box_of(source: Array, target: Array) -> Rectangle:
    def place(view: Array) -> tuple[int, list[int]]:
        return int(view.flat[0]), [stride // 8 for stride in view.strides]

    return Rectangle.make("weight", source.shape, place(source), place(target))


@given(views(), st.data())
def test_changes_go_where_the_copy_put_their_elements(pair: tuple[Array, Array], data: Any) -> None:
    source, target = pair
    box = box_of(source, target)
    goes = dict(zip(source.flat, target.flat, strict=True))
    elements = int(source.max()) + 4
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, elements), max_size=40))), np.int64)
    chosen, places = box.locate(indices)
    kept = indices[chosen]
    assert kept.tolist() == [i for i in indices.tolist() if i in goes]
    assert places.tolist() == [goes[i] for i in kept.tolist()]
    assert box.elements == source.size


@given(views(), st.data())
def test_the_parts_of_a_range_are_its_elements(pair: tuple[Array, Array], data: Any) -> None:
    source, target = pair
    goes = dict(zip(source.flat, target.flat, strict=True))
    start = data.draw(st.integers(0, int(source.max())))
    stop = data.draw(st.integers(start + 1, int(source.max()) + 2))
    found = {}
    for part in box_of(source, target).within(start, stop):
        for offsets in np.ndindex(part.sizes):
            here = part.source + sum(
                c * s for c, s in zip(offsets, part.source_strides, strict=True)
            )
            assert here not in found
            found[here] = part.target + sum(
                c * s for c, s in zip(offsets, part.target_strides, strict=True)
            )
    assert found == {i: t for i, t in goes.items() if start <= i < stop}


def test_a_whole_slice_of_rows_has_one_axis_and_one_of_columns_two() -> None:
    rows = box_of(np.arange(48).reshape(8, 6)[2:5], np.arange(60).reshape(10, 6)[4:7])
    assert (rows.sizes, rows.source, rows.target) == ((18,), 12, 24)
    columns = box_of(np.arange(48).reshape(8, 6)[:, 3:], np.arange(24).reshape(8, 3))
    assert columns.sizes == (8, 3)


def test_expanded_views_are_refused() -> None:
    with pytest.raises(ValueError, match="share a place"):
        Rectangle.make("weight", (3, 4), (0, (0, 1)), (0, (4, 1)))
