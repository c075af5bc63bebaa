"""SparsityMeter against a recording of every step by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.errors import InputError, UnsupportedTensor
from pulse_rl.study import SparsityMeter, study
from tests.support.checkpoints import write_checkpoint

Snapshot = dict[str, torch.Tensor]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.ReLU(), nn.Linear(30, 5))


def snapshot(parameters: Any, dtype: torch.dtype = torch.bfloat16) -> Snapshot:
    kind = torch.uint8 if dtype.itemsize == 1 else torch.int16
    return {name: p.detach().to(dtype).clone().view(kind) for name, p in parameters}


def by_hand(states: Sequence[Snapshot], k: int) -> list[int]:
    return [
        sum(int((a[n] != b[n]).sum()) for n in a) for a, b in zip(states, states[k:], strict=False)
    ]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after: Callable[[], object]
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        after()


def check(found: dict[str, Any], states: Sequence[Snapshot], ks: Sequence[int]) -> None:
    elements = sum(t.numel() for t in states[0].values())
    assert found["parameters"] == elements
    assert [row["k"] for row in found["rows"]] == [k for k in ks if k < len(states)]
    for row in found["rows"]:
        changed = by_hand(states, row["k"])
        assert [p["changed"] for p in found["pairs"] if p["k"] == row["k"]] == changed
        assert row["sparsity"] == pytest.approx(1 - sum(changed) / len(changed) / elements)
        assert row["sparsity_min"] == 1 - max(changed) / elements
        assert row["sparsity_max"] == 1 - min(changed) / elements
    assert sum(sum(by_hand(states, k)) for k in ks) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_meter_sees_what_a_recording_sees(dtype: torch.dtype, kind: Any) -> None:
    model = build()
    optimizer = kind(model.parameters(), lr=1e-3)
    states = [snapshot(model.named_parameters(), dtype)]
    with SparsityMeter(model, dtype=dtype, ks=(1, 2, 5)) as meter:
        train(model, optimizer, 7, lambda: states.append(snapshot(model.named_parameters(), dtype)))
    found = meter.to_dict()
    check(found, states, (1, 2, 5))
    assert meter.rows() == found["rows"]
    assert found["states"] == [f"step {i}" for i in range(8)]
    assert found["source"] == "live"


def test_groups_and_frozen_parameters() -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    groups = [
        {"params": [model[3].weight], "lr": 1e-2},
        {"params": [model[3].bias, model[0].bias], "lr": 1e-4},
    ]
    optimizer = torch.optim.AdamW(groups)
    trained = [
        ("group0.0", model[3].weight),
        ("group1.0", model[3].bias),
        ("group1.1", model[0].bias),
    ]
    whole, part = [snapshot(model.named_parameters())], [snapshot(trained)]

    def after() -> None:
        whole.append(snapshot(model.named_parameters()))
        part.append(snapshot(trained))

    with (
        SparsityMeter(model, ks=(1, 3)) as of_model,
        SparsityMeter(optimizer, ks=(1, 3)) as of_optimizer,
    ):
        train(model, optimizer, 4, after)
    check(of_model.to_dict(), whole, (1, 3))
    check(of_optimizer.to_dict(), part, (1, 3))
    frozen = [t for t in of_model.to_dict()["tensors"] if t["name"] == "0.weight"]
    assert [t["sparsity"] for t in frozen] == [1.0, 1.0]


def test_named_groups_keep_their_names() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with SparsityMeter(optimizer, ks=(1,)) as meter:
        train(model, optimizer, 1, lambda: None)
    assert {t["name"] for t in meter.to_dict()["tensors"]} == {
        n for n, _ in model.named_parameters()
    }


def test_closures_count_as_one_step() -> None:
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    states = [snapshot(model.named_parameters())]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 40)).pow(2).mean()
        loss.backward()
        return loss

    with SparsityMeter(optimizer, ks=(1, 2)) as meter:
        for _ in range(3):
            optimizer.step(closure)
            states.append(snapshot(model.named_parameters()))
    check(meter.to_dict(), states, (1, 2))


def test_every_other_step() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    states = [snapshot(model.named_parameters())]
    with SparsityMeter(model, ks=(1, 2), every=2) as meter:
        train(model, optimizer, 7, lambda: states.append(snapshot(model.named_parameters())))
    found = meter.to_dict()
    assert found["states"] == ["step 0", "step 2", "step 4", "step 6"]
    check(found, states[::2], (1, 2))


def test_gradient_density_is_the_share_of_entries_that_are_not_zero() -> None:
    model = nn.Linear(10, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with SparsityMeter(optimizer, ks=(1,), every=2) as meter:
        for nonzero in (10, 30, 0, 40):
            model.weight.grad = torch.zeros(4, 10)
            model.weight.grad.view(-1)[:nonzero] = 1.0
            optimizer.step()
    found = meter.to_dict()
    assert found["gradients"] == [None, pytest.approx(0.5), pytest.approx(0.5)]
    assert found["gradient_density"] == pytest.approx(0.5)


def test_sparse_gradients_count_their_values() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=1e-2)
    with SparsityMeter(optimizer, ks=(1,)) as meter:
        embedding(torch.tensor([3, 3, 7])).sum().backward()
        optimizer.step()
    assert meter.to_dict()["gradients"] == [None, 0.2]


def test_of_several_optimizers_the_first_that_steps_the_model_counts() -> None:
    model, other = build(), build()
    first = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    second = torch.optim.AdamW([*model[1].parameters(), *model[3].parameters()], lr=1e-2)
    foreign = torch.optim.SGD(other.parameters(), lr=1e-2)
    states = [snapshot(model.named_parameters())]
    with SparsityMeter(model, ks=(1,)) as meter:
        for _ in range(3):
            for m in (model, other):
                m(torch.ones(2, 40)).pow(2).mean().backward()
            foreign.step()
            first.step()
            states.append(snapshot(model.named_parameters()))
            second.step()
    check(meter.to_dict(), states, (1,))


def test_tied_parameters_are_one_tensor() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    with SparsityMeter(model, ks=(1,)) as meter:
        assert meter.to_dict()["parameters"] == 36


def test_after_close_nothing_is_measured() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    meter = SparsityMeter(model, ks=(1,))
    train(model, optimizer, 2, lambda: None)
    meter.close()
    meter.close()
    train(model, optimizer, 2, lambda: None)
    assert meter.to_dict()["states"] == ["step 0", "step 1", "step 2"]


def test_memory_is_bounded_by_copies_and_small_where_little_changes() -> None:
    model = build()
    copy = 2 * sum(p.numel() for p in model.parameters())
    dense = torch.optim.AdamW(model.parameters(), lr=0.1)
    sparse = torch.optim.SGD(model.parameters(), lr=1e-6)
    with SparsityMeter(model, ks=(4,)) as meter:
        assert meter.memory_bytes == copy
        train(model, dense, 12, lambda: None)
        assert 2 * copy < meter.memory_bytes <= 5 * copy
    with SparsityMeter(model, ks=(4,)) as meter:
        train(model, sparse, 12, lambda: None)
        assert meter.memory_bytes < 2 * copy


def test_live_and_stored_give_one_study(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def save() -> None:
        write_checkpoint(
            tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors", model.state_dict()
        )

    save()
    with SparsityMeter(model, ks=(1, 4)) as meter:
        train(model, optimizer, 4, save)
    live, stored = meter.to_dict(), study(tmp_path, ks=(1, 4))
    assert json.loads(json.dumps(live, allow_nan=False)) == live
    assert live.keys() == stored.keys()
    for name in ("dtypes", "parameters", "dense_bytes", "layers", "tensors", "pairs"):
        assert live[name] == stored[name]
    assert live["rows"][1] == stored["rows"][1]  # of k = 4 both have coded the one pair


def test_bytes_rest_on_the_moments_when_they_were_asked_for() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with SparsityMeter(model, ks=(1,)) as meter:
        assert meter.rows() == []
        train(model, optimizer, 2, lambda: None)
        assert [row["coded_pairs"] for row in (*meter.rows(), *meter.rows())] == [1, 1]
        train(model, optimizer, 1, lambda: None)
        (row,) = meter.rows()
    assert (row["pairs"], row["coded_pairs"]) == (3, 2)
    assert row["bytes_per_changed"] > 0


def test_low_precision_parameters_that_are_not_contiguous() -> None:
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16).t())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with SparsityMeter(optimizer, ks=(1,)) as meter:
        weight.grad = torch.zeros_like(weight)
        weight.grad[1, 2] = 5.0
        optimizer.step()
    assert meter.rows()[0]["changed"] == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": torch.float32}, "is not a compute dtype"),
        ({"ks": ()}, "must be 1 or more"),
        ({"ks": (0,)}, "must be 1 or more"),
        ({"every": 0}, "must be 1 or more"),
    ],
)
def test_arguments_that_make_no_sense(options: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        SparsityMeter(build(), **options)


def test_what_cannot_be_measured() -> None:
    with pytest.raises(InputError, match="neither"):
        SparsityMeter(build().state_dict())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no parameters"):
        SparsityMeter(nn.ReLU())
    with pytest.raises(UnsupportedTensor, match="without plain storage"):
        SparsityMeter(nn.Linear(2, 2, device="meta"))
