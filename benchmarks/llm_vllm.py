"""SmolLM2-135M in a live vLLM that follows a recorded training run, version by version.

    python -m benchmarks.llm train --lr 3e-6 --store DIR --json FILE
    .venv-vllm/bin/python -m benchmarks.llm_vllm --store DIR --json FILE

Runs on a CPU in the environment of `make test-vllm`. The engine starts from the checkpoint before
training and generates with each version. Then its log-probabilities are compared with those of a
fresh engine that starts from the last version's checkpoint, and the rollouts are generated again
with the weights that they came from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pulse_rl
from examples.llm_grpo import model as smollm
from examples.llm_grpo.task import Additions
from pulse_rl.engines.rollouts import Rollout
from pulse_rl.engines.vllm import connect

STREAM = "policy"
#: Prompts whose log-probabilities are compared.
PROMPTS = 16


@contextmanager
def engine(checkpoint: Path) -> Iterator[Any]:
    from vllm import LLM

    options = {"weight_transfer_config": {"backend": "pulse"}, "enforce_eager": True}
    llm = LLM(str(checkpoint), dtype="bfloat16", max_model_len=128, max_num_seqs=8, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def log_probabilities(llm: Any, task: Additions) -> list[list[float]]:
    """Of the tokens of some held-out problems with their right answers."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": ids} for ids in answered(task)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    return [
        [next(iter(at.values())).logprob for at in found.prompt_logprobs[1:]]
        for found in llm.generate(asked, params, use_tqdm=False)
    ]


def answered(task: Additions) -> list[list[int]]:
    problems = task.test[:PROMPTS]
    prompts = task.prompts(problems).tolist()
    answers = task.tokenizer([str(sum(one)) for one in problems], add_special_tokens=False)
    return [prompt + answer for prompt, answer in zip(prompts, answers.input_ids, strict=True)]


def follow(llm: Any, args: argparse.Namespace, task: Additions, records: Path) -> dict[str, Any]:
    """Moves the engine through the versions, with as many rollouts from each."""
    pauses, fetches = [], []
    with connect(llm, store=str(args.store), stream=STREAM, audit_every=10) as handle:
        handle.sync(0)
        for version in range(1, args.versions + 1):
            moved = handle.sync(version)
            assert moved is not None
            pauses.append(moved.pause_seconds)
            fetches.append(moved.fetch_seconds)
            first, last = (
                number * args.rollouts // args.versions for number in (version - 1, version)
            )
            for problem in range(first, last):
                prompt = task.prompts([task.test[problem % len(task.test)]])[0].tolist()
                sampling = {"temperature": 1.0, "max_tokens": task.answer_tokens}
                handle.generate(prompt, sampling | {"ignore_eos": True}).append(records)
    return {
        "versions": args.versions,
        "pause_ms": round(1e3 * median(pauses), 1),
        "pause_ms_max": round(1e3 * max(pauses), 1),
        "fetch_ms": round(1e3 * median(fetches), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm_vllm", description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="of benchmarks.llm train")
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--model", type=Path, default=smollm.FOLDER)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    task = Additions(smollm.load_tokenizer(smollm.prepare(args.model)))
    with tempfile.TemporaryDirectory() as aside:
        records, fresh = Path(aside) / "rollouts.jsonl", Path(aside) / "fresh"
        started = time.monotonic()
        with engine(args.model) as llm:
            row = follow(llm, args, task, records)
            live = log_probabilities(llm, task)
            made = list(Rollout.read(records))
            with connect(llm, store=str(args.store), stream=STREAM) as handle:
                same = sum(handle.replay(rollout).same for rollout in made)
        pulse = [sys.executable, "-m", "pulse_rl_command"]
        wanted = ["--stream", STREAM, "--version", str(args.versions), "--out", str(fresh)]
        subprocess.run([*pulse, "checkout", str(args.store), *wanted], check=True)
        for file in args.model.iterdir():
            if file.suffix != ".safetensors":
                (fresh / file.name).write_bytes(file.read_bytes())
        with engine(fresh) as llm:
            expected = log_probabilities(llm, task)
    row |= {
        "pulse_rl": pulse_rl.__version__,
        "rollouts": len(made),
        "replayed_equal": same,
        "logprobs": sum(map(len, expected)),
        "logprobs_equal": sum(
            one == other
            for a, b in zip(live, expected, strict=True)
            for one, other in zip(a, b, strict=True)
        ),
        "seconds": round(time.monotonic() - started),
    }
    args.json.write_text(json.dumps(row) + "\n")
    print(json.dumps(row))
    equal = same == len(made) and row["logprobs_equal"] == row["logprobs"]
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
