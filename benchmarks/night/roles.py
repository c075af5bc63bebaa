"""The trainer, the Python worker and the vLLM of a night, each a process: ``python -m
benchmarks.night.roles trainer FOLDER STORE``."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

STREAM = "policy"
SHAPES = {"embed": (1000, 400), **{f"layers.{n}.w": (1000, 400) for n in range(4)}}
CHANGED = 0.01
#: Of the Qwen2 that is trained where a vLLM follows, 2.2 M weights.
MODEL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


class Log:
    """Lines of JSON in a file that one process appends to."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def say(self, **facts: Any) -> None:
        # The monotonic clock: processes share it, and no step of the clock moves it.
        self._file.write(json.dumps({"at": time.monotonic(), **facts}).encode() + b"\n")


def digest_of(tensors: Mapping[str, bytes | memoryview]) -> str:
    """The oracle's digest of a state: over names and raw bytes, by nothing of the library."""
    running = sha256()
    for name in sorted(tensors):
        running.update(name.encode())
        running.update(tensors[name])
    return running.hexdigest()


def new_model(folder: Path) -> dict[str, np.ndarray]:
    """Writes the model that a vLLM starts with, and returns its bits."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(**MODEL)).to(torch.bfloat16)
    model.save_pretrained(folder / "model.new")
    os.replace(folder / "model.new", folder / "model")
    return {name: t.view(torch.uint16).numpy().copy() for name, t in model.state_dict().items()}


def trainer(folder: Path, store: str, keep: int, *, for_vllm: bool) -> None:
    """Trains from its last checkpoint on, and publishes each step."""
    import pulse_rl

    log, checkpoint = Log(folder / "trainer.jsonl"), folder / "checkpoint.npz"
    rng = np.random.default_rng(time.monotonic_ns())
    if checkpoint.exists():
        with np.load(checkpoint) as saved:
            weights = dict(saved)
    elif for_vllm:
        weights = new_model(folder)
    else:
        weights = {
            name: (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for name, shape in SHAPES.items()
        }
    state = {name: pulse_rl.Bits(bits, "BF16") for name, bits in weights.items()}
    anchor = folder / "anchor"
    with pulse_rl.Publisher(store, stream=STREAM, keep=keep, threads=1) as publisher:
        step = 0
        while True:
            for bits in weights.values():  # in the mantissa: all stay finite
                at = rng.integers(bits.size, size=int(bits.size * CHANGED))
                bits.reshape(-1)[at] ^= rng.integers(1, 8, at.size, np.uint16)
            digest = digest_of({name: bits.data.cast("B") for name, bits in weights.items()})
            log.say(sha=digest)
            wanted = anchor.exists()  # a person has asked for one
            done = publisher.publish(state, anchor=wanted)
            log.say(sha=digest, version=done.version, bytes=done.patch_bytes + done.anchor_bytes)
            anchor.unlink(missing_ok=True) if wanted else None
            if step % 10 == 0:
                new = folder / "checkpoint.new.npz"
                np.savez(new, **weights)
                os.replace(new, checkpoint)
            step += 1
            time.sleep(rng.uniform(0.5, 1.0))


def worker(folder: Path, store: str, cache: str | None) -> None:
    """Follows with live weights of torch, and proves them after each update."""
    import torch

    import pulse_rl
    from pulse_rl.frameworks.torch import apply_, to_torch
    from pulse_rl.metrics import Heartbeat

    log, live = Log(folder / "python.jsonl"), dict[str, torch.Tensor]()
    subscriber = pulse_rl.Subscriber(
        store, stream=STREAM, cache=cache, threads=1, on_event=Heartbeat(store, "python")
    )
    subscriber.allow_recreated = True
    with subscriber:
        for update in subscriber.updates(poll_seconds=1.0):
            if not live:
                live = {n: torch.zeros_like(t) for n, t in to_torch(subscriber.state).items()}
            apply_(live, update)
            proved = pulse_rl.audit(live, subscriber.digest).ok
            raw = {n: t.view(torch.uint8).numpy().data.cast("B") for n, t in live.items()}
            log.say(sha=digest_of(raw), version=update.version, proved=proved)


def vllm(folder: Path, store: str, cache: str | None) -> None:
    """Follows with a live vLLM, and reads from its model what it computes with."""
    while not (folder / "model").exists():
        time.sleep(0.1)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    from pulse_rl.engines.vllm import EngineHandle, connect
    from pulse_rl.errors import PulseError
    from pulse_rl.metrics import Heartbeat

    log, beat = Log(folder / "vllm.jsonl"), Heartbeat(store, "vllm")
    llm = LLM(
        str(folder / "model"),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        weight_transfer_config={"backend": "pulse"},
    )
    handle: EngineHandle | None = None
    while True:
        try:
            handle = handle or connect(
                llm, store=store, stream=STREAM, allow_recreated=True, cache=cache
            )
            moved = handle.sync()
        except PulseError as error:
            print(f"{error} ({error.hint})", flush=True)
            # The engine goes on: it is `pulse follow --engine` that would end and start again.
            if handle is not None and not error.retryable:
                handle.close()
                handle = None
        else:
            beat.beat(STREAM, handle.version)
            if moved is not None:
                (raw,) = llm.apply_model(live_of)
                log.say(sha=digest_of(raw), version=moved.version, proved=not handle.audit())
        time.sleep(1.0)


def live_of(model: Any) -> dict[str, memoryview]:
    """The bytes of a vLLM's parameters by the names of the checkpoint, whose parts are apart."""
    import torch

    head = MODEL["hidden_size"] // MODEL["num_attention_heads"]
    rows = {
        "qkv_proj": {
            "q_proj": MODEL["hidden_size"],
            "k_proj": head * MODEL["num_key_value_heads"],
            "v_proj": head * MODEL["num_key_value_heads"],
        },
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), MODEL["intermediate_size"]),
    }
    found = {}
    for name, parameter in model.named_parameters():
        fused = name.split(".")[-2]
        parts = rows.get(fused, {fused: len(parameter)})
        if fused in ("embed_tokens", "lm_head"):  # padded
            parts = {fused: MODEL["vocab_size"]}
        at = 0
        for part, number in parts.items():
            bits = parameter.detach()[at : at + number].contiguous().view(torch.uint8)
            found[name.replace(fused, part)] = bits.numpy().data.cast("B")
            at += number
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["trainer", "worker", "vllm"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("store")
    parser.add_argument("--keep", type=int, default=40)
    parser.add_argument("--cache")
    parser.add_argument("--for-vllm", action="store_true", help="train a model that vLLM has")
    args = parser.parse_args()
    if args.role == "trainer":
        trainer(args.folder, args.store, args.keep, for_vllm=args.for_vllm)
    else:
        (worker if args.role == "worker" else vllm)(args.folder, args.store, args.cache)


if __name__ == "__main__":
    main()
