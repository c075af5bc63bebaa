"""What publishing and applying cost a trainer and an engine whose weights are on a device.

    python -m benchmarks.device [--device cuda] [--shape 0.5b] [--updates 5]
    [--copy-on-device]

A step of the trainer flips one element in 100 in place. ``held up``: how much later than without a
submission the device has ended the next step. ``publish``: from submission to commit, through
memory. ``apply``: `apply_` of the update to a model on the device, until the device has ended.
Medians. Without a GPU it runs on the CPU, where a submission is a copy by the host and nothing is
learnt about devices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.sizes import SHAPES as MODELS
from benchmarks.synthetic import SHAPES
from pulse_rl import MemoryStore, Publisher, Subscriber, state_root
from pulse_rl.frameworks.torch import apply_

Weights = dict[str, torch.Tensor]


NAMES = [*SHAPES, "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"]


def tensors(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a state."""
    return list((SHAPES.get(shape) or MODELS[shape.removeprefix("qwen3-")]).tensors())


def step(weights: Weights, number: int) -> None:
    for tensor in weights.values():
        tensor.view(-1).view(torch.int16)[number % 100 :: 100] ^= 1


def seconds(device: str, work: Callable[[], object]) -> float:
    """Until the device has ended what ``work`` gave it."""
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(device: str, shape: str, updates: int, copy_on_device: bool) -> dict[str, float]:
    """Figures by name; times are medians."""
    made = (
        (name, torch.randn(dims, device=device, dtype=torch.bfloat16))
        for name, dims in tensors(shape)
    )
    trained = {name: weight.mul_(0.02) for name, weight in made}
    live = {name: torch.empty_like(tensor) for name, tensor in trained.items()}
    store = MemoryStore()
    held, published, applied = [], [], []
    with (
        Publisher(store, stream="policy") as publisher,
        Subscriber(store, stream="policy") as worker,
    ):
        publisher.publish(trained)
        first = worker.sync()
        assert first is not None
        apply_(live, first)
        del first
        for number in range(0, 2 * updates, 2):
            alone = seconds(device, partial(step, trained, number))
            began = time.perf_counter()
            submission = publisher.submit(trained, copy_on_device=copy_on_device)
            blocked = time.perf_counter() - began
            held.append(blocked + seconds(device, partial(step, trained, number + 1)) - alone)
            submission.result()
            published.append(time.perf_counter() - began)
            update = worker.sync()
            assert update is not None
            applied.append(seconds(device, partial(apply_, live, update)))
            del update
            assert state_root(live) == worker.root
    return {
        "GB": sum(tensor.nbytes for tensor in trained.values()) / 1e9,
        "held up, s": median(held),
        "publish, s": median(published),
        "apply_, s": median(applied),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=NAMES, default="0.5b")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--copy-on-device", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.device, arguments.shape, arguments.updates, arguments.copy_on_device)
    figures = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    print(
        f"{arguments.device}, {arguments.shape}, copied on the device: "
        f"{arguments.copy_on_device}: {figures}"
    )


if __name__ == "__main__":
    main()
