"""`MegatronWeights` over a stand-in for Megatron-Bridge: tasks and an export as it has them, of one
rank.

The real one, on two ranks, is in tests/trainers/test_ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl import LocalStore, Publisher
from pulse_rl.errors import StateMismatch, UnsupportedTensor
from pulse_rl.frameworks.megatron import MegatronWeights

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    param_name: str
    param_weight: torch.Tensor | None


class Bridge:
    """Exports what ``convert`` makes of the model's parameters."""

    def __init__(self, convert: Callable[[Tensors], Tensors]) -> None:
        self.convert = convert

    def get_conversion_tasks(self, model: list[nn.Module]) -> list[Task | None]:
        here = [Task(name, tensor) for chunk in model for name, tensor in chunk.named_parameters()]
        return [*here, Task("of_another_stage", None), None]

    def export_hf_weights(
        self, model: Any, conversion_tasks: Any = None, **_: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        tasks = self.get_conversion_tasks(model) if conversion_tasks is None else conversion_tasks
        yield from self.convert(
            {task.param_name: task.param_weight for task in tasks if task}
        ).items()


class Model(nn.Module):
    """``qkv``: two groups of two queries, a key and a value of three rows each; a fused ``up``; two
    experts; a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in {
            "qkv": (24, 5),
            "up": (8, 5),
            "e0": (4, 6),
            "e1": (4, 6),
            "norm": (5,),
            "scale": (),
        }.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))


def moved(given: Tensors) -> Tensors:
    """What exports do without computing: interleaved heads, halves, a stack, transposes, padding
    cut off, a copy."""
    groups = given["qkv"].view(2, 4, 3, 5)
    return {
        "q": groups[:, :2].reshape(12, 5),
        "k": groups[:, 2].reshape(6, 5),
        "v": groups[:, 3].reshape(6, 5),
        "gate": given["up"][:4],
        "up": given["up"][4:7],
        "experts": torch.stack([given["e0"], given["e1"]]),
        "down": torch.cat([given["e1"].t(), given["e0"].t()]).contiguous(),
        "uneven": torch.cat([given["qkv"][:3], given["qkv"][7:9], given["qkv"][5:6]]),
        "norm": given["norm"],
        "again": given["norm"].clone(),
        "scale": given["scale"],
    }


@pytest.mark.slow
def test_the_map_of_what_an_export_moves(tmp_path: Path) -> None:
    """After each change the slices make the version that the export makes, without another
    export."""
    from pulse_rl.frameworks.fsdp import ShardedPublisher  # DTensor takes seconds to import

    model, bridge = Model(), Bridge(moved)
    weights = MegatronWeights(bridge, [model])
    stores = [LocalStore(tmp_path / name) for name in ("slices", "gathered")]
    with (
        ShardedPublisher(stores[0], stream="s") as ranks,
        Publisher(stores[1], stream="s") as publisher,
    ):
        for version in range(3):
            expected = publisher.publish(weights.gathered())
            slices = weights.slices()
            bridge.convert = lambda given: pytest.fail("exported again")
            assert ranks.publish(slices).root == expected.root
            assert expected.version == version
            assert (
                slices["up"].local.untyped_storage().data_ptr()
                == model.up.untyped_storage().data_ptr()
            )
            bridge.convert = moved
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape))
    assert weights.gathered(keep=False) == {}
    assert {
        tensor.dtype for tensor in MegatronWeights(bridge, model.float()).gathered("BF16").values()
    } == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "convert"),
    {
        "averages": lambda given: {"up": (given["e0"] + given["e1"]) / 2},
        "scales": lambda given: {"up": given["up"] * 2},
        "shifts": lambda given: {"norm": given["norm"] + 1},
        "negates": lambda given: {"up": -given["up"]},
        "pads": lambda given: {"up": torch.cat([given["up"], torch.zeros_like(given["up"])])},
        "casts": lambda given: {"up": given["up"].float()},
        "scatters": lambda given: {
            "up": given["up"].reshape(-1)[torch.tensor([0, 3, 1, 2] * 10)].view(8, 5)
        },
    }.items(),
)
def test_what_an_export_computes_is_refused(
    name: str, convert: Callable[[Tensors], Tensors]
) -> None:
    weights = MegatronWeights(Bridge(convert), [Model()])
    with pytest.raises(UnsupportedTensor) as refused:
        weights.slices()
    assert "gathered()" in str(refused.value.hint)


def test_a_model_that_is_another_now() -> None:
    model = Model()
    weights = MegatronWeights(Bridge(moved), [model])
    weights.slices()
    model.up = nn.Parameter(torch.zeros(9, 5, dtype=torch.bfloat16))
    with pytest.raises(StateMismatch, match="'up' is not what it was"):
        weights.slices()


def test_adapters_and_computed_weights_are_refused() -> None:
    adapted = nn.ModuleDict({"layer": nn.ModuleDict({"to_wrap": nn.Linear(2, 2)})})
    with pytest.raises(UnsupportedTensor, match="has an adapter"):
        MegatronWeights(Bridge(dict), [adapted]).slices()
    bridge = Bridge(dict)
    bridge.get_conversion_tasks = lambda model: [Task("up", model[0].up * 1)]  # type: ignore[method-assign]
    with pytest.raises(UnsupportedTensor, match="no parameter of the model"):
        MegatronWeights(bridge, [Model()]).slices()
