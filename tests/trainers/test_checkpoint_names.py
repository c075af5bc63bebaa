"""What is published of a model is what its save_pretrained writes: the same names, and the same
bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from pulse_rl import MemoryStore, Publisher, State, Store, Subscriber, state_root
from pulse_rl.errors import StateMismatch
from pulse_rl.events import Event, Hint
from pulse_rl.frameworks.torch import apply_
from pulse_rl.frameworks.transformers import PulseCallback, checkpoint_weights
from tests.trainers.models import EXPERTS, FAMILIES, family
from tests.trainers.support import arguments, sentences


def newest(store: Store) -> tuple[list[str], str]:
    with Subscriber(store, stream="policy") as follower:
        follower.sync()
        return follower.state.names, follower.root


def written(model: Any, folder: Path) -> tuple[list[str], str]:
    model.save_pretrained(folder)
    return State.of(folder).names, state_root(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loop_of_ones_own_publishes_what_save_pretrained_writes(
    name: str, tmp_path: Path
) -> None:
    model, store = family(name), MemoryStore()
    with Publisher(store, stream="policy") as publisher:
        publisher.publish(checkpoint_weights(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::7] *= 1.25
        publisher.publish(checkpoint_weights(torch.compile(model)))
    assert newest(store) == written(model, tmp_path)
    assert newest(store)[0] != sorted(model.state_dict())


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_views_of_the_models_memory(name: str) -> None:
    model = family(name)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    weights = checkpoint_weights(model)
    assert {tensor.untyped_storage().data_ptr() for tensor in weights.values()} == own
    assert all(tensor.is_contiguous() for tensor in weights.values()), (
        "or the publisher would copy it"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_updates_go_through_the_views_into_a_model(name: str) -> None:
    trained, live, store = family(name), family(name), MemoryStore()
    with (
        Publisher(store, stream="policy") as publisher,
        Subscriber(store, stream="policy") as worker,
    ):
        for factor in (1.0, 1.5):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.view(-1)[::5] *= factor
            publisher.publish(checkpoint_weights(trained))
            update = worker.sync()
            assert update is not None
            if name in EXPERTS:
                with pytest.raises(StateMismatch) as refusal:
                    apply_(live, update)
                assert "checkpoint_weights(model)" in (refusal.value.hint or "")
            apply_(checkpoint_weights(live), update)
    assert all(
        torch.equal(tensor, live.state_dict()[key]) for key, tensor in trained.state_dict().items()
    )


def test_a_model_that_was_loaded_is_published_as_it_was_on_disk(tmp_path: Path) -> None:
    written(family("Mixtral"), tmp_path)
    model = type(family("Mixtral")).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert state_root(checkpoint_weights(model)) == state_root(tmp_path)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_plain_state_dict_of_fused_experts_is_noticed(name: str) -> None:
    events: list[Event] = []
    model = family(name)
    with Publisher(MemoryStore(), stream="policy", on_event=events.append) as publisher:
        publisher.publish(checkpoint_weights(model))
        assert not any(isinstance(event, Hint) for event in events)
    with Publisher(MemoryStore(), stream="policy", on_event=events.append) as publisher:
        publisher.publish(model.state_dict())
    (notice,) = [event for event in events if isinstance(event, Hint)]
    assert notice.kind == "fused_names"
    assert "model.layers.0.mlp.experts." in notice.reason


@pytest.mark.parametrize("name", FAMILIES)
def test_the_callback_publishes_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model, store = family(name), MemoryStore()
    callback = PulseCallback(store, stream="policy")
    settings = arguments(tmp_path, max_steps=2, learning_rate=1e-3)
    Trainer(model, settings, train_dataset=sentences(), callbacks=[callback]).train()
    assert callback.published.metadata["step"] == 2
    assert newest(store) == written(model, tmp_path / "saved")


def test_merged_adapters_are_published_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    model = get_peft_model(
        family("Mixtral"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    weights = checkpoint_weights(model)
    merged = copy.deepcopy(model).float().merge_and_unload().to(torch.bfloat16)
    names, root = written(merged, tmp_path)
    assert (sorted(weights), state_root(weights)) == (names, root)
