"""Tied checkpoints that ship a head, trainers that untie, and engines without a head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen3Config

import pulse_rl
from pulse_rl.engines.vllm import connect
from pulse_rl.errors import StateMismatch

from .engines import answer, engine
from .policy import PROMPT, SMALL, Policy, redraw


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def test_a_redundant_head_is_followed_until_the_trainer_unties_it(tmp_path: Path) -> None:
    """vLLM unties such a checkpoint by its config, and ties it again after loading."""
    policy = Policy(tmp_path)
    file = Path(policy.checkpoint) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})

    def publish() -> None:
        policy.publisher.publish(load_file(Path(policy.save("now")) / "model.safetensors"))

    publish()
    with (
        engine(policy.checkpoint) as llm,
        connect(llm, store=policy.store, stream="policy") as handle,
    ):
        handle.sync()
        redraw(policy.model, 0.05, policy.generator)
        publish()
        handle.sync()
        followed = answer(llm)
        assert handle.audit() == ()
        weights = policy.model.state_dict()
        weights["lm_head.weight"] = weights["lm_head.weight"].clone()
        weights["lm_head.weight"][::7] += 0.25
        policy.publisher.publish(weights)
        with pytest.raises(StateMismatch, match=r"'lm_head\.weight' differs from"):
            handle.sync()
        assert torch.equal(answer(llm)[0], followed[0])
    with engine(policy.save("now")) as llm:
        fresh = answer(llm)
    assert torch.equal(fresh[0], followed[0])
    assert fresh[1] == followed[1]


@pytest.mark.slow
def test_an_engine_of_embeddings_is_followed(tmp_path: Path) -> None:
    model = AutoModel.from_config(Qwen3Config(**SMALL, head_dim=32)).to(torch.bfloat16)
    policy = Policy(tmp_path)  # for its tokenizer
    model.save_pretrained(policy.checkpoint)
    publisher = pulse_rl.Publisher(policy.store, stream="embeddings")

    def embedded(checkpoint: str, *, follow: bool) -> list[float]:
        with engine(checkpoint, runner="pooling") as llm:
            if follow:
                with connect(llm, store=policy.store, stream="embeddings") as handle:
                    for _ in range(2):
                        redraw(model, 0.05, policy.generator)
                        publisher.publish(model.state_dict())
                        handle.sync()
                    assert handle.audit() == ()
            found: list[float] = llm.embed([{"prompt_token_ids": PROMPT}])[0].outputs.embedding
            return found

    followed = embedded(policy.checkpoint, follow=True)
    model.save_pretrained(policy.checkpoint)
    assert followed == embedded(policy.checkpoint, follow=False)
