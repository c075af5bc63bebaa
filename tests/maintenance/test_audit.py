"""A live model is held against a version, tensor by tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pulse_rl
from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl.errors import InputError


def tied_model() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    ).bfloat16()
    model[1].weight = model[0].weight
    return model


def followed(state: dict[str, torch.Tensor]) -> Subscriber:
    store = MemoryStore()
    Publisher(store, stream="s").publish(state)
    subscriber = Subscriber(store, stream="s")
    subscriber.sync()
    return subscriber


def test_the_same_weights_pass_under_any_name_of_a_tied_tensor() -> None:
    model = tied_model()
    subscriber = followed(model.state_dict())
    assert pulse_rl.audit(model, subscriber.digest).ok
    assert pulse_rl.audit(model, subscriber.manifest).ok
    assert pulse_rl.audit(model, subscriber.root).ok
    reversed_names = dict(reversed(model.state_dict().items()))
    assert pulse_rl.audit(reversed_names, subscriber.digest).ok


def test_one_bit_is_found_in_its_tensor() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    subscriber = followed(model.state_dict())
    with torch.no_grad():
        model[1].bias.view(torch.int32)[2] ^= 1
    report = pulse_rl.audit(model, subscriber.digest)
    assert report.ok is False
    assert report.differing == ("1.bias",)
    assert report.missing == ()
    assert report.unexpected == ()
    assert report.root != report.expected_root == subscriber.root
    assert not pulse_rl.audit(model, subscriber.root).ok


def test_missing_extra_and_reshaped_tensors_are_told_apart() -> None:
    subscriber = followed({"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)})
    report = pulse_rl.audit(
        {"a": np.ones((2, 2), np.float32), "b": np.ones(4), "d": np.ones(1)}, subscriber.digest
    )
    assert (report.differing, report.missing, report.unexpected) == (("a", "b"), ("c",), ("d",))


def test_something_else_is_no_version() -> None:
    with pytest.raises(InputError):
        pulse_rl.audit({"a": np.ones(1)}, 7)  # type: ignore[arg-type]
