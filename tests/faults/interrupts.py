"""Publishes and syncs interrupted at any moment by a timer's signal, and called again at once.

After each round the host state and the live model are compared with what was published, to the last
bit. A round that does not end is shown with the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import signal
import tempfile
from collections import Counter
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
_INTERRUPTS = 1000
_ROUND_SECONDS = 120.0
_DELAYS = (0.00005, 0.0003, 0.001, 0.004, 0.01)


class Timer:
    """Calls a function again and again until it gets through, interrupted at random moments. A
    context manager."""

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
                signal.setitimer(
                    signal.ITIMER_REAL, self._rng.choice(_DELAYS) * self._rng.random() + 1e-6
                )
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
                self.tensors[name] = Bits(
                    values.copy().reshape(specs[name].shape), specs[name].dtype.name
                )
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
    """The state after another training step; the first elements change in each, so that patches
    need a history."""
    following = {}
    for name, bits in state.items():
        array = bits.array.copy()
        at = numbers.choice(array.size, array.size // 100 + 1, replace=False)
        array.reshape(-1)[at] += numbers.integers(1, 4, len(at), array.dtype)
        array.reshape(-1)[: array.size // 100] += np.ones((), array.dtype)
        following[name] = Bits(array, bits.dtype)
    return following


@named_in_small_patches()
def run(store: Store, *, count: int, model: str, seed: int) -> Counter[str]:
    """Rounds of publish and sync until ``count`` calls were interrupted. Raises AssertionError for
    a wrong bit or a lost update; ends the process where a round hangs."""
    numbers, rng = np.random.default_rng(seed), Random(seed)
    half = _ELEMENTS // 2
    state = {
        name: Bits(numbers.integers(0x3C00, 0x4000, (half // 100, 100), np.uint16), "BF16")
        for name in ("embed", "layer")
    }
    live: Any = TorchModel(state) if model == "torch" else NumpyModel()
    rounds = 0
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
            assert (subscriber.status, subscriber.version) == ("ready", head.version), (
                f"{where}: not at the head"
            )
            assert subscriber.root == root == state_root(subscriber.state), (
                f"{where}: a wrong host state"
            )
            assert live.root() == root, f"{where}: a wrong live model"
            rounds += 1
        faulthandler.cancel_dump_traceback_later()
        versions = subscriber.version or 0
    return Counter(interrupts=interrupted.count, rounds=rounds, versions=versions)


def sequence(seed: int) -> Counter[str]:
    """So many interrupts with one kind of store and of model."""
    with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
        store = LocalStore(folder) if seed % 4 < 2 else MemoryStore()
        return run(store, count=_INTERRUPTS, model=("numpy", "torch")[seed % 2], seed=seed)
