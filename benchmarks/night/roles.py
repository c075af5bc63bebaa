"""The trainer and the Python worker of a night, each a process: ``python -m benchmarks.night.roles
trainer FOLDER STORE``."""

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


def trainer(folder: Path, store: str, keep: int) -> None:
    """Trains from its last checkpoint on, and publishes each step."""
    import pulse_rl

    log, checkpoint = Log(folder / "trainer.jsonl"), folder / "checkpoint.npz"
    rng = np.random.default_rng(time.monotonic_ns())
    if checkpoint.exists():
        with np.load(checkpoint) as saved:
            weights = {name: saved[name] for name in SHAPES}
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["trainer", "worker"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("store")
    parser.add_argument("--keep", type=int, default=40)
    parser.add_argument("--cache")
    args = parser.parse_args()
    if args.role == "trainer":
        trainer(args.folder, args.store, args.keep)
    else:
        worker(args.folder, args.store, args.cache)


if __name__ == "__main__":
    main()
