"""What is published is what the trainer has: mixed dtypes, wrappers, callbacks, checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from pulse_rl import MemoryStore, Publisher, State, Subscriber, state_root, unwrapped
from pulse_rl.errors import InputError, StateMismatch, UnsupportedTensor
from pulse_rl.events import Event, Hint
from pulse_rl.frameworks.torch import apply_, to_torch

pytestmark = pytest.mark.slow  # it imports transformers


def published(source: Any, **settings: Any) -> tuple[dict[str, torch.Tensor], str, list[str]]:
    """What a worker has, its root, and the kinds of the hints."""
    store, events = MemoryStore(), list[Event]()
    with Publisher(store, stream="s", on_event=events.append) as publisher:
        publisher.submit(source, **settings).result()
    with Subscriber(store, stream="s") as worker:
        root = worker.sync().root
        kinds = [event.kind for event in events if isinstance(event, Hint)]
        return to_torch(worker.state), root, kinds


def test_a_router_s_bias_has_the_dtype_that_transformers_gives_it(tmp_path: Path) -> None:
    import transformers

    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    sizes |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"), 8)
    sizes |= {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "n_routed_experts": 8}
    sizes |= {"qk_nope_head_dim": 8, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    sizes |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(7 + torch.rand(buffer.shape))
    model.save_pretrained(tmp_path / "wide")
    narrow = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "wide", dtype=torch.bfloat16
    )
    narrow.save_pretrained(tmp_path / "narrow")
    for trained in (model, narrow):
        _, root, kinds = published(trained, dtype="BF16")
        assert root == state_root(tmp_path / "narrow")
        assert kinds == []


@pytest.mark.parametrize("scale", ["w_scale_inv", "w_scale", "SCB", "w.absmax", "w_s", "k_scale"])
def test_scales_of_quantized_weights_are_not_cast(scale: str) -> None:
    weights = {"w": torch.zeros(8).to(torch.float8_e4m3fn), "w_bias": torch.rand(8)}
    state, _, _ = published(
        weights | {scale: torch.rand(4) + 0.3, "n": torch.rand(4)}, dtype="BF16"
    )
    wide = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert wide == {scale}


def test_what_is_kept_is_not_cast_and_what_is_cast_is_named() -> None:
    narrow = {"w": torch.rand(64).bfloat16(), "a.gate": torch.rand(8), "b.norm": torch.rand(8)}
    state, _, kinds = published(narrow, dtype="BF16")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert kinds == ["mixed_dtypes"]
    state, _, kinds = published(State.of(narrow, keep=["*gate", "b.*"]), dtype="BF16")
    assert all(torch.equal(state[name], narrow[name]) for name in narrow)
    assert kinds == []
    with pytest.raises(InputError, match="keep must be a collection"):
        State.of(narrow, keep="*gate")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 2)


@pytest.mark.parametrize("wrapper", [nn.DataParallel, AveragedModel, checkpoint_wrapper])
def test_a_wrapper_leaves_no_trace(wrapper: Any) -> None:
    names = ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert sorted(published(wrapper(Model()))[0]) == sorted(names)
    assert list(unwrapped(wrapper(Model()).state_dict())) == names


def test_nothing_and_names_of_adapters_are_no_model() -> None:
    with pytest.raises(UnsupportedTensor, match="no tensors"):
        published(nn.Sequential())
    adapted = nn.Sequential()
    adapted.add_module("base_layer", nn.Linear(2, 2))
    with pytest.raises(UnsupportedTensor, match="was not merged"):
        published(nn.ModuleDict({"q_proj": adapted}))
    store, events = MemoryStore(), list[Event]()
    with Publisher(store, stream="s", on_event=events.append) as publisher:
        publisher.publish(
            {"q.base_layer.weight": torch.rand(2), "q.lora_A.default.weight": torch.ones(2)}
        )
    assert [event.kind for event in events if isinstance(event, Hint)] == ["adapter_names"]
    with Subscriber(store, stream="s") as worker, pytest.raises(StateMismatch) as caught:
        apply_({"q.weight": torch.rand(2)}, worker.sync())
    assert "PEFT" in caught.value.hint


@pytest.mark.parametrize("moment", ["on_step_end", "on_train_end"])
@pytest.mark.parametrize("later", [False, True])
def test_what_other_callbacks_change_is_published(moment: str, later: bool) -> None:
    from transformers import TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    from pulse_rl.frameworks.transformers import PulseCallback

    model, store, logs = nn.Linear(64, 64), MemoryStore(), dict[str, float]()

    def prune(*_: Any, **__: Any) -> None:
        with torch.no_grad():
            model.weight[model.weight.abs() < 0.05] = 0

    other, reporter = TrainerCallback(), TrainerCallback()
    setattr(other, moment, prune)
    reporter.on_log = lambda *_, **given: logs.update(given["logs"])  # type: ignore[method-assign]
    ours = PulseCallback(store, stream="s")
    calls = CallbackHandler(
        [reporter, *([ours, other] if later else [other, ours])], model, None, None, None
    )
    args: Any = SimpleNamespace(learning_rate=1e-6)
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    calls.on_train_begin(args, state, control)
    for _ in range(2):
        state.global_step += 1
        with torch.no_grad():
            model.weight += 0.01
        calls.on_step_end(args, state, control)
    calls.on_log(args, state, control, {})
    assert "pulse/version" in logs
    calls.on_train_end(args, state, control)
    wanted = {name: t.bfloat16() for name, t in model.state_dict().items()}
    with Subscriber(store, stream="s") as worker:
        assert worker.sync().root == state_root(wanted)
        assert worker.manifest.metadata["step"] == 2


def checkpoint(folder: Path, step: int, weights: dict[str, torch.Tensor]) -> None:
    from transformers import TrainerState

    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    TrainerState(global_step=step).save_to_json(str(folder / "trainer_state.json"))


@pytest.mark.parametrize(
    "lost", ["trainer_state.json", "scheduler.pt", "model.safetensors", "half"]
)
def test_a_restart_passes_over_what_is_not_whole(tmp_path: Path, lost: str) -> None:
    from pulse_rl.frameworks.transformers import PulseCallback

    store, weights = MemoryStore(), {"w": torch.rand(64)}
    with Publisher(store, stream="s") as publisher:
        publisher.publish(weights, metadata={"step": 4})
    for step in (2, 4):
        checkpoint(tmp_path / f"checkpoint-{step}", step, weights)
    broken = tmp_path / "checkpoint-4"
    if lost == "half":
        whole = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(whole[:-8])
    else:
        (broken / lost).unlink()
    callback = PulseCallback(store, stream="s")
    assert callback.restart(tmp_path) == str(broken)
    assert (broken / "trainer_state.json").is_file()
    assert torch.load(broken / "scheduler.pt") == {"last_epoch": 4}
    assert state_root(broken) == state_root(weights)
    assert len(list(tmp_path.glob("incomplete-checkpoint-4-*"))) == 1, "nothing is deleted"
    for folder in tmp_path.glob("checkpoint-*"):
        (folder / "scheduler.pt").unlink()
    with pytest.raises(InputError, match=r"checkpoint-4: no scheduler\.pt") as caught:
        callback.restart(tmp_path)
    assert "Delete" in caught.value.hint
