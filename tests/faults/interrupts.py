"""Publishes and syncs interrupted at any moment by a timer's signal, and called again at once.

    python -m tests.faults interrupts --count 20000 [--store local] [--model torch] [--seed 1]

After each round the host state and the live model are compared with what was published, to the last bit. A round that
does not end is shown with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeVar

import numpy as np

from pulse_rl import Bits, LocalStore, MemoryStore, Store, Subscriber, Update, state_root
from tests.support.histories import named_in_small_patches
from tests.support.interrupts import Boom
from tests.support.publishers import tuned

R = TypeVar("R")
_ELEMENTS = 200_000
_ROUND_SECONDS = 120.0
_DELAYS = (0.00005, 0.0003, 0.001, 0.004, 0.01)


class Timer:
    """Calls a function again and again until it gets through, interrupted at random moments. A context manager."""

    def __init__(self, rng: Random) -> None:
        self.count = 0
        self._rng = rng

    def __enter__(self) -> Timer:
        self._before = signal.signal(signal.SIGALRM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def __call__(self, act: Callable[[], R]) -> R:
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, self._rng.choice(_DELAYS) * self._rng.random() + 1e-6)
                result = act()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Boom:
                self.count += 1
            else:
                return result

    def _handle(self, *_: object) -> None:
        raise Boom


class NumpyModel:
    """Live weights in numpy, which take over an update element by element."""

    def __init__(self) -> None:
        self.tensors: dict[str, Bits] = {}

    def apply(self, update: Update) -> None:
        specs = {tensor.spec.name: tensor.spec for tensor in update.tensors}
        for name, indices, values in update:
            if indices is None:
                self.tensors[name] = Bits(values.copy().reshape(specs[name].shape), specs[name].dtype.name)
            else:
                self.tensors[name].array.reshape(-1)[indices] = values

    def root(self) -> str:
        return state_root(self.tensors)


class TorchModel:
    """A live module, which `apply_` writes to."""

    def __init__(self, example: Mapping[str, Bits]) -> None:
        import torch

        self._module = torch.nn.Module()
        for name, bits in example.items():
            tensor = torch.zeros(bits.array.shape, dtype=torch.bfloat16)
            self._module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def apply(self, update: Update) -> None:
        from pulse_rl.integrations.torch import apply_

        apply_(self._module, update)

    def root(self) -> str:
        return state_root(self._module.state_dict())


def changed(numbers: np.random.Generator, state: Mapping[str, Bits]) -> dict[str, Bits]:
    """The state after another training step; the first elements change in each, so that patches need a history."""
    following = {}
    for name, bits in state.items():
        array = bits.array.copy()
        at = numbers.choice(array.size, array.size // 100 + 1, replace=False)
        array.reshape(-1)[at] += numbers.integers(1, 4, len(at), array.dtype)
        array.reshape(-1)[: array.size // 100] += np.ones((), array.dtype)
        following[name] = Bits(array, bits.dtype)
    return following


@named_in_small_patches()
def run(store: Store, *, count: int, model: str, seed: int, tell: Callable[[str], None] = print) -> dict[str, int]:
    """Rounds of publish and sync until ``count`` calls were interrupted. Raises AssertionError for a wrong bit or a
    lost update; ends the process where a round hangs."""
    numbers, rng = np.random.default_rng(seed), Random(seed)
    half = _ELEMENTS // 2
    state = {
        name: Bits(numbers.integers(0x3C00, 0x4000, (half // 100, 100), np.uint16), "BF16")
        for name in ("embed", "layer")
    }
    live: Any = TorchModel(state) if model == "torch" else NumpyModel()
    rounds, started = 0, time.monotonic()
    with (
        tuned(store, stream="s", history=True, folds=(2, 4), threads=2) as publisher,
        Subscriber(store, stream="s", threads=2) as subscriber,
        Timer(rng) as interrupted,
    ):

        def follow() -> Update | None:
            update = subscriber.sync()
            if update is not None:
                live.apply(update)
            return update

        publisher.publish(state)
        follow()
        while interrupted.count < count:
            faulthandler.dump_traceback_later(_ROUND_SECONDS, exit=True)
            state = changed(numbers, state)
            root = state_root(state)
            interrupted(lambda: publisher.publish(state))  # noqa: B023
            head = interrupted(publisher.head)
            while interrupted(follow) is not None:
                pass
            where = f"round {rounds}, after {interrupted.count} interrupts"
            assert head is not None
            assert head.root == root, f"{where}: the head is not what was published"
            assert (subscriber.status, subscriber.version) == ("ready", head.version), f"{where}: not at the head"
            assert subscriber.root == root == state_root(subscriber.state), f"{where}: a wrong host state"
            assert live.root() == root, f"{where}: a wrong live model"
            rounds += 1
            if rounds % 500 == 0:
                seconds = time.monotonic() - started
                tell(f"{interrupted.count} interrupts, {rounds} rounds, version {head.version}, {seconds:.0f} s")
        faulthandler.cancel_dump_traceback_later()
        versions = subscriber.version or 0
    return {
        "interrupts": interrupted.count,
        "rounds": rounds,
        "versions": versions,
        "threads": threading.active_count(),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults interrupts", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=20_000, help="interrupts")
    parser.add_argument("--store", choices=("memory", "local"), default="memory")
    parser.add_argument("--model", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
        store = LocalStore(folder) if args.store == "local" else MemoryStore()
        result = run(
            store, count=args.count, model=args.model, seed=args.seed, tell=lambda text: print(text, flush=True)
        )
    facts = ", ".join(f"{number} {what}" for what, number in result.items())
    print(f"{facts}: no hang, no wrong bit, no lost update; {time.monotonic() - started:.0f} s")
    return 0
