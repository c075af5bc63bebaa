"""A vLLM server with the policy, in place of the process that imports this.

It starts from the checkpoint of the run's first version, also when it replaces one that died: what
was published since, the stream brings.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import pulse_rl
from pulse_rl.frameworks.torch import apply_

from . import policy, task
from .run import STREAM, Alarm, RunFolder, run_role, wait_for
from .settings import Settings


def serve(settings: Settings, folder: RunFolder, alarm: Alarm, name: str, port: str) -> None:
    """Waits for the first version, then becomes the server."""
    model = folder.root / name
    if not (model / "config.json").exists():
        save_first_version(settings, folder, model, alarm)
    become_server(model, port, settings.prompts * settings.group, tokens=32)


def become_server(model: Path, port: str, sequences: int, *, tokens: int) -> NoReturn:
    """Replaces this process by a server of the checkpoint ``model``, for as many ``sequences`` at
    once of so many ``tokens``."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    environment.pop("OMP_NUM_THREADS", None)
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "policy",
        "dtype": "bfloat16",
        "max-model-len": tokens,
        "max-num-seqs": sequences,
        "weight-transfer-config": '{"backend": "pulse"}',
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command += ["--enforce-eager", "--disable-uvicorn-access-log"]
    os.execve(sys.executable, command, environment)


def save_first_version(settings: Settings, folder: RunFolder, path: Path, alarm: Alarm) -> None:
    """Writes the newest version of the stream as a Hugging Face checkpoint with the task's
    characters as tokens."""
    subscriber = pulse_rl.Subscriber(folder.store_address, stream=STREAM, threads=1)
    update = wait_for(subscriber.sync, alarm, "the first version from the trainer")
    model = policy.build_model(settings.seed)
    apply_(model, update)
    characters = WordLevel(
        {character: token for token, character in enumerate(task.ALPHABET)}, unk_token=" "
    )
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(characters)).save_pretrained(path)
    model.save_pretrained(path)


if __name__ == "__main__":
    sys.exit(run_role(serve, Settings, "name", "port"))
