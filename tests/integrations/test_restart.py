"""Restarts of one's own loop: wherever a trainer dies, it goes on from the exact weights of the
last commit."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl import MemoryStore, Publisher, Subscriber, state_root
from pulse_rl.errors import FormatError, InputError, StateMismatch, StoreFull, StoreUnavailable
from pulse_rl.frameworks.restart import restore_training, save_training
from tests.support.stores import FaultyStore

SETTINGS: dict[str, Any] = {"stream": "policy"}


def training(
    seed: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.randn(16, 32, dtype=dtype)).square().sum().backward()
    optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = optimizer.state_dict()["state"].values()
    return [each[name].clone() for each in found for name in ("exp_avg", "exp_avg_sq")]


def bits(model: nn.Module) -> str:
    """The root of the weights as they are published."""
    return state_root(
        {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    )


def restored(
    file: Path, store: Any, model: nn.Module, **states: Any
) -> tuple[int, int | None] | None:
    with Subscriber(store, **SETTINGS) as subscriber:
        found = restore_training(file, subscriber, model, **states)
        assert subscriber.version is None or bits(model) == subscriber.root
        return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_of_twenty_restarts_are_at_the_exact_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """A trainer dies at a random call to the store, before or after it took effect."""
    store, rng, file = FaultyStore(MemoryStore()), random.Random(0), tmp_path / "training.pt"
    committed: dict[int, str] = {}
    saved: dict[int, list[torch.Tensor]] = {}
    behind = set[int]()
    for life in range(21):
        model, optimizer = training(life, dtype)
        found = restored(file, store, model, optimizer=optimizer)
        assert (found is None) == (life == 0)
        step, at = found or (0, None)
        if life:
            # What has died in its commit may have made it, or not.
            assert step in (max(committed), max(committed) + 1)
            assert committed.setdefault(step, bits(model)) == bits(model)
            assert at == max(saved, default=None)
        if at is not None:
            behind.add(step - at)
            assert all(map(torch.equal, moments(optimizer), saved[at]))
        publisher = Publisher(store, **SETTINGS)
        if life == 0:
            publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": 0})
            committed[0] = bits(model)
        last = step + rng.randrange(1, 9)
        while True:
            step += 1
            train(model, optimizer)
            if step == last:
                store.fail(rng.randrange(4), after=rng.random() < 0.5)
            try:
                publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": step})
            except StoreUnavailable:
                break
            committed[step] = bits(model)
            if step == last:
                break
            if step % 7 == 0:
                save_training(file, model, step=step, optimizer=optimizer)
                saved[step] = moments(optimizer)
        store.heal()
    assert len(behind) > 3, "the states were not older than the weights"


def test_a_weight_that_has_not_changed_keeps_what_bf16_does_not_hold(tmp_path: Path) -> None:
    store, file = MemoryStore(), tmp_path / "training.pt"
    model, _ = training(0)
    with Publisher(store, **SETTINGS) as publisher:
        publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": 3})
        save_training(file, model, step=3)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            model[0].weight[0] *= 1.1  # type: ignore[index]
        publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": 4})
    changed = {
        name: tensor.to(torch.bfloat16).float() for name, tensor in model.state_dict().items()
    }
    fresh, _ = training(1)
    assert restored(file, store, fresh) == (4, 3)
    for name, tensor in fresh.state_dict().items():
        expected = before[name].clone()
        if name == "0.weight":
            expected[0] = changed[name][0]
        assert torch.equal(tensor, expected), name


def test_without_a_file_it_is_the_version_and_a_newer_file_counts_more(tmp_path: Path) -> None:
    store, file = MemoryStore(), tmp_path / "folder" / "training.pt"
    model, optimizer = training(0)
    fresh, other = training(1)
    assert restored(file, store, fresh, optimizer=other) is None
    with Publisher(store, **SETTINGS) as publisher:
        publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": 3})
    assert restored(file, store, fresh, optimizer=other) == (3, None)
    train(model, optimizer)
    save_training(file, model, step=9, optimizer=optimizer)  # six steps came without a store
    with Subscriber(store, **SETTINGS) as subscriber:
        assert restore_training(file, subscriber, fresh, optimizer=other) == (9, 9)
    assert state_root(fresh.state_dict()) == state_root(model.state_dict())


def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    store, file = MemoryStore(), tmp_path / "training.pt"
    model, optimizer = training(0)
    fresh, other = training(1)
    root = state_root(fresh.state_dict())

    def refused(error: type[Exception], match: str, weights: Any = fresh, **states: Any) -> None:
        with Subscriber(store, **SETTINGS) as subscriber, pytest.raises(error, match=match):
            restore_training(file, subscriber, weights, **states)
        assert state_root(fresh.state_dict()) == root

    with Publisher(store, **SETTINGS) as publisher:
        publisher.publish(model.state_dict(), dtype="BF16")
        refused(InputError, "does not say its step")
        publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": 1})
    tensors = fresh.state_dict()
    refused(
        StateMismatch,
        "no tensor '2.weight'",
        {name: tensors[name] for name in tensors if name != "2.weight"},
    )
    refused(StateMismatch, r"is \[3\] here", tensors | {"2.weight": torch.zeros(3)})
    refused(StateMismatch, "does not hold", tensors | {"2.weight": tensors["2.weight"].half()})
    with pytest.raises(InputError, match="whole number"):
        save_training(file, model, step=-1)
    save_training(file, model, step=1, optimizer=optimizer)
    refused(InputError, "no state of scheduler", optimizer=other, scheduler=other)
    file.write_bytes(file.read_bytes()[:-100])
    refused(FormatError, "is not what save_training writes", optimizer=other)


def test_a_full_disk_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "training.pt"
    model, _ = training(0)
    save_training(file, model, step=1)
    before = file.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull):
        save_training(file, model, step=2)
    assert file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["training.pt"]
