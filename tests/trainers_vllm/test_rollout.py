"""TRL's GRPOTrainer with `pulse_rollout` and a real server: rollouts come from the trainer's newest
weights."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from pulse_rl.engines.rollouts import Rollout
from pulse_rl.frameworks.trl import pulse_rollout
from tests.engines.server import START_SECONDS, checksums, free_port, server
from tests.support.programs import ran_on_two_ranks
from tests.trainers.support import Merged, Witness, followed

from .support import STEPS, grpo, untrained, weight_version, written_anew

#: Between vLLM's BF16 and Hugging Face's FP32 arithmetic, in the mean over completions'
#: log-probabilities.
NOISE = 0.01


def log_probabilities(
    model: Any, prompts: list[list[int]], completions: list[list[int]]
) -> torch.Tensor:
    """Of the completions' tokens, as Hugging Face computes them in FP32."""
    found = []
    model.float().eval()
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


def served(model: Any) -> Any:
    """A model with the weights as the server has them. No deepcopy: accelerate's forward is bound
    to the original."""
    made = untrained()
    made.load_state_dict({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
    return made


def test_each_step_s_rollouts_come_from_its_own_weights(
    url: str, checkpoint: str, tmp_path: Path
) -> None:
    """Steps are large enough to tell a policy from the one before by its log-probabilities."""
    store, witness = str(tmp_path / "store"), Witness()
    rollout = pulse_rollout(url, store, "policy")
    errors: list[tuple[float, ...]] = []
    before: list[Any] = []

    def compared(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        found = rollout(prompts, trainer)
        assert weight_version(url) in (str(trainer.state.global_step), "default")
        said = torch.tensor([x for row in found["logprobs"] for x in row])
        models = [served(trainer.model), *before[-1:]]
        ours = [log_probabilities(m, found["prompt_ids"], found["completion_ids"]) for m in models]
        errors.append(tuple(float((said - one).abs().mean()) for one in ours))
        before.append(models[0])
        return found

    trainer = grpo(
        checkpoint, tmp_path, compared, callbacks=[witness], config={"learning_rate": 3e-3}
    )
    trainer.train()
    assert max(new for new, *_ in errors) < NOISE, errors
    assert min(old for _, old in errors[1:]) > 3 * NOISE, errors
    assert followed(store) == witness.roots
    assert sorted(witness.roots) == list(range(STEPS + 1))


def test_trl_s_defaults_are_sparse_and_the_last_weights_are_live(
    url: str, checkpoint: str, tmp_path: Path
) -> None:
    store, witness = str(tmp_path / "store"), Witness()
    rollout = pulse_rollout(url, store, "policy", records=tmp_path / "rollouts.jsonl")
    trainer = grpo(checkpoint, tmp_path, rollout, callbacks=[witness])
    assert str(trainer.model.dtype) == "torch.float32"
    trainer.train()
    assert followed(store) == witness.roots
    assert rollout.published.density < 0.05
    assert (rollout.synced.version, rollout.synced.full) == (STEPS, False)
    assert weight_version(url) == str(STEPS)
    logged = trainer.state.log_history[-2]
    assert logged["step"] == STEPS
    assert logged["pulse/version"] == STEPS - 1
    assert logged["pulse/bytes"] < rollout.published.dense_bytes / 50
    assert 0 < logged["pulse/density"] < 0.05
    assert logged["pulse/pause_seconds"] > 0
    assert checksums(url) == written_anew(url, store)
    found = list(Rollout.read(tmp_path / "rollouts.jsonl"))
    assert {each.metadata["step"] for each in found} == set(range(STEPS))
    for each in found:
        (weights,) = each.weights
        assert (weights.version, weights.root) == (
            each.metadata["step"],
            witness.roots[weights.version],
        )
        assert len(each.token_ids) == len(each.logprobs) > 0
        assert (each.engine, each.sampling["max_tokens"]) == ("vllm", 8)
    assert len({each.seed for each in found}) == len(found)


def test_lora_is_merged_aside(url: str, checkpoint: str, tmp_path: Path) -> None:
    store, witness = str(tmp_path / "store"), Merged()
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    rollout = pulse_rollout(url, store, "policy")
    config = {"learning_rate": 1e-3, "model_init_kwargs": {"dtype": "bfloat16"}}
    trainer = grpo(
        checkpoint, tmp_path, rollout, callbacks=[witness], peft_config=lora, config=config
    )
    base = {n: t.clone() for n, t in trainer.model.state_dict().items() if "lora_" not in n}
    trainer.train()
    assert followed(store) == witness.roots
    assert all(
        torch.equal(trainer.model.state_dict()[name], tensor) for name, tensor in base.items()
    )
    assert checksums(url) == written_anew(url, store)


def test_two_ranks_generate_with_what_the_first_publishes(
    url: str, checkpoint: str, tmp_path: Path
) -> None:
    ran_on_two_ranks("tests.trainers_vllm.ranks", url, checkpoint, tmp_path)


class Replaced(TrainerCallback):
    """Stops a server after the first step, and has another one started at the same address from the
    same checkpoint."""

    def __init__(self, checkpoint: str, folder: Path, servers: ExitStack) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._start = lambda: server(
            checkpoint,
            folder / "server.log",
            port=self.port,
            options=["--served-model-name", checkpoint],
        )
        self._servers = servers
        self._first = ExitStack()
        self._first.enter_context(self._start())
        self.starting: threading.Thread | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._first.close()
            self.starting = threading.Thread(
                target=lambda: self._servers.enter_context(self._start())
            )
            self.starting.start()


@pytest.mark.slow
def test_a_server_that_is_replaced_is_waited_for_and_brought_up_to_date(
    checkpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = str(tmp_path / "store")
    with ExitStack() as servers:
        replaced = Replaced(checkpoint, tmp_path, servers)
        rollout = pulse_rollout(replaced.url, store, "policy", retry_seconds=START_SECONDS)
        witness = Witness()
        trainer = grpo(checkpoint, tmp_path, rollout, callbacks=[witness, replaced])
        trainer.train()
        replaced.starting.join()
        assert trainer.state.global_step == STEPS
        assert followed(store) == witness.roots
        said = [r.message for r in caplog.records if r.name.startswith("pulse_rl")]
        assert any("no answer" in words and "the training waits" in words for words in said)
        assert any("goes on" in words for words in said)
        assert weight_version(replaced.url) == str(STEPS)
        assert checksums(replaced.url) == written_anew(replaced.url, store)
