"""Rollouts of many versions, generated again by a live vLLM with the weights that they came from,
bit by bit.

Run it in the environment of `make test-vllm`: ``.venv-vllm/bin/python -m benchmarks.replay``. A
vLLM with a small random Qwen2 follows a stream; each version generates greedily and by sampling
with seeds, one request at a time. In the middle of two rollouts the engine moves on. Then the same
engine goes back to the first version, and on through all of them. Prints one line; fails unless all
is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pulse_rl.engines.rollouts import Rollout
from pulse_rl.engines.vllm import EngineHandle, connect

TOKENS, AFTER = 8, 3


def generate(
    handle: EngineHandle, engine: Any, policy: Any, versions: int, rollouts: int, records: Path
) -> None:
    """Writes ``rollouts`` of ``versions`` versions to ``records``; the last two have a sync in
    their middle."""

    def advance() -> None:
        policy.step()
        handle.sync()

    for number in range(rollouts):
        across = number >= rollouts - 2
        version = number * (versions - 2) // (rollouts - 2)
        while policy.version < version and not across:
            advance()
        if across:
            engine.after, engine.between = AFTER, advance
        temperature = 0 if across else (0, 1.0, 0.7)[number % 3]
        sampling = {
            "temperature": temperature,
            "top_p": 0.9,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
        handle.generate([*range(10, 30), 30 + number % 90], sampling).append(records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument(
        "--folder", type=Path, help="for the store and the records (default: a new one)"
    )
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from tests.engines.engines import Moving, engine
    from tests.engines.policy import Policy

    folder = args.folder or Path(tempfile.mkdtemp(prefix="pulse-replay-"))
    policy, records = Policy(folder), folder / "rollouts.jsonl"
    with engine(policy.checkpoint) as llm:
        moving = Moving(llm)
        with connect(moving, store=policy.store, stream="policy") as handle:
            started = time.monotonic()
            generate(handle, moving, policy, args.versions, args.rollouts, records)
            generated = time.monotonic()
        made = sorted(Rollout.read(records), key=lambda r: [w.version for w in r.weights])
        with connect(llm, store=policy.store, stream="policy") as handle:
            replays = [handle.replay(rollout) for rollout in made]
        replayed = time.monotonic()
    facts = {
        "rollouts": len(made),
        "same": sum(replay.same for replay in replays),
        "tokens": sum(len(rollout.token_ids) for rollout in made),
        "versions": len({weights.version for rollout in made for weights in rollout.weights}),
        "across": [
            [(w.version, w.start) for w in rollout.weights]
            for rollout in made
            if len(rollout.weights) > 1
        ],
        "sampled": sum(rollout.seed is not None for rollout in made),
        "generate_seconds": round(generated - started, 1),
        "replay_seconds": round(replayed - generated, 1),
        "reasons": sorted({replay.reason for replay in replays if replay.reason}),
    }
    print(json.dumps(facts))
    return 0 if facts["same"] == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())
