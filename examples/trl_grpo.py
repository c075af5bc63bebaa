"""TRL's GRPO with a vLLM server that generates with the trainer's newest weights, on one machine.

    python -m examples.trl_grpo            # GRPOTrainer and pulse_rollout; runs on a CPU
    python -m examples.trl_grpo --async    # AsyncGRPOTrainer and PulseWeightTransfer; its attention
                                           kernel needs a GPU

Needs vLLM, TRL and pulse-rl in one environment. The policy is made on the spot; nothing is
downloaded."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

import pulse_rl
from pulse_rl.frameworks.torch import apply_
from pulse_rl.frameworks.trl import PulseWeightTransfer, pulse_rollout

WORDS = 256
STREAM = "policy"


def save_policy(folder: str) -> PreTrainedTokenizerFast:
    """A Qwen2 of 230,528 weights, and a tokenizer of one word a token."""
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 128}
    config = Qwen2Config(**heads, **sizes, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    special = ["<pad>", "<|im_end|>", "<|im_start|>"]
    words = [*special, *(f"w{n}" for n in range(len(special), WORDS))]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = (
        Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    ).read_text()
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def vllm_server(checkpoint: str, log: Path, port: int) -> Iterator[str]:
    """The URL of a server that is up."""
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        checkpoint,
        "--port",
        str(port),
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--enforce-eager",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "16",
    ]
    command += ["--weight-transfer-config", '{"backend": "pulse"}']
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def distinct_words(completions: list[Any], **_: Any) -> list[float]:
    """The reward."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(set(text.split()))) for text in texts]


def show(event: pulse_rl.events.Event) -> None:
    if isinstance(event, pulse_rl.Published):
        stored = event.patch_bytes or event.anchor_bytes
        print(
            f"version {event.version}: {event.density:.2%} changed, {stored:,} of "
            f"{event.dense_bytes:,} bytes"
        )


def train(
    arguments: argparse.Namespace, folder: Path, url: str, tokenizer: PreTrainedTokenizerFast
) -> Any:
    """Returns the trainer, when the server has its last weights."""
    checkpoint, store = str(folder / "policy"), str(folder / "store")
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": arguments.steps,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
    }
    prompts = [f"w{n + 3} w{n + 4} w{n + 5}" for n in range(100)]
    common: dict[str, Any] = {
        "model": checkpoint,
        "reward_funcs": distinct_words,
        "processing_class": tokenizer,
    }
    if arguments.asynchronous:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        trainer = AsyncGRPOTrainer(
            args=AsyncGRPOConfig(**settings, vllm_server_base_url=url),
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": p}]} for p in prompts]
            ),
            weight_transfer=PulseWeightTransfer(url, store, STREAM, on_event=show),
            **common,
        )
    else:
        trainer = GRPOTrainer(
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
            rollout_func=pulse_rollout(url, store, STREAM, on_event=show),
            **common,
        )
    trainer.train()
    return trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--port", type=int, default=8077)
    parser.add_argument("--async", dest="asynchronous", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = save_policy(str(folder / "policy"))
        with vllm_server(str(folder / "policy"), folder / "server.log", options.port) as url:
            trainer = train(options, folder, url, tokenizer)
        served = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.bfloat16)
        with pulse_rl.Subscriber(str(folder / "store"), stream=STREAM) as worker:
            update = worker.sync()
            assert update is not None
            apply_(served, update)
        held = served.state_dict()
        assert all(
            torch.equal(t.bfloat16(), held[name]) for name, t in trainer.model.state_dict().items()
        )
        print(
            f"after {options.steps} steps a follower holds the trainer's weights in BF16, bit "
            "for bit"
        )


if __name__ == "__main__":
    main()
