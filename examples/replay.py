"""Train, generate, stop. Later: a rollout of an earlier step, its exact weights in a live vLLM, the
same logprobs.

Runs on a CPU in the environment of `make test-vllm`: ``.venv-vllm/bin/python -m examples.replay``.
The two parts are processes of their own, and share a folder: a store, and a file of rollout records
(docs/replay.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import pulse_rl
from pulse_rl.engines.rollouts import Rollout
from pulse_rl.engines.vllm import connect

STEPS, STEP = 6, 3
PROMPT = [5, 6, 7, 8]
WORDS = 64


def policy() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=WORDS, **sizes, **heads))


def engine(folder: Path) -> Any:
    """vLLM, on the checkpoint that the training began with."""
    from vllm import LLM

    options = {
        "weight_transfer_config": {"backend": "pulse"},
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    return LLM(str(folder / "model"), dtype="bfloat16", max_model_len=64, max_num_seqs=1, **options)


def train(folder: Path) -> None:
    """Each step teaches the policy to count on; its rollout is recorded."""
    model = policy()
    model.bfloat16().save_pretrained(folder / "model")
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = (torch.arange(16)[None] + torch.arange(32)[:, None]) % WORDS
    publisher = pulse_rl.Publisher(str(folder / "store"), stream="policy")
    publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": 0})
    with connect(engine(folder), store=str(folder / "store"), stream="policy") as handle:
        for step in range(1, STEPS + 1):
            model(texts, labels=texts).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model.state_dict(), dtype="BF16", metadata={"step": step})
            handle.sync()
            rollout = handle.generate(
                PROMPT, {"temperature": 1.0, "max_tokens": 8}, metadata={"step": step}
            )
            rollout.append(folder / "rollouts.jsonl")
            print(
                f"step {step}: version {rollout.weights[0].version} has generated "
                f"{list(rollout.token_ids)}"
            )


def again(folder: Path, step: int) -> int:
    """Whether the rollout of ``step`` comes out the same, as an exit status."""
    rollout = next(r for r in Rollout.read(folder / "rollouts.jsonl") if r.metadata["step"] == step)
    with connect(engine(folder), store=str(folder / "store"), stream="policy") as handle:
        handle.sync()
        print(
            f"version {handle.version} is live; the rollout is of version "
            f"{rollout.weights[0].version}"
        )
        replay = handle.replay(rollout)
    print("token  logprob then          logprob now")
    for token, then, now in zip(replay.token_ids, rollout.logprobs, replay.logprobs, strict=True):
        print(f"{token!s:5}  {then!s:20}  {now!s:20}")
    print(
        "the same, to the last bit"
        if replay.same
        else f"tokens {replay.differing} differ. {replay.reason}"
    )
    return 0 if replay.same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", nargs="?", choices=["train", "again"], help="default: both, one after the other"
    )
    parser.add_argument("--folder", type=Path, help="what they share (default: a new one)")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="pulse-replay-"))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if args.part == "train":
        train(folder)
        return 0
    if args.part == "again":
        return again(folder, STEP)
    for part in ("train", "again"):
        subprocess.run(
            [sys.executable, "-m", "examples.replay", part, "--folder", str(folder)], check=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
