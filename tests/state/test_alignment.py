"""Tensors at addresses that are no multiple of their element's width, where the kernels must not read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulse_rl import Bits, MemoryStore, Publisher, State, Subscriber, state_root
from pulse_rl.state.tensors import DTYPES
from tests.state.test_tensors import NUMPY_DTYPES, TORCH_DTYPES
from tests.support.arrays import misaligned
from tests.support.states import bits

WIDE = {name for name, dtype in DTYPES.items() if dtype.width > 1}
LIBRARIES = [
    *(("torch", name) for name in sorted(WIDE & TORCH_DTYPES.keys())),
    *(("numpy", name) for name in sorted(WIDE & NUMPY_DTYPES.keys())),
    *(("Bits", name) for name in sorted(WIDE)),
]


@pytest.mark.parametrize(("library", "name"), LIBRARIES)
def test_tensors_at_odd_addresses_are_copied(library: str, name: str, rng: np.random.Generator) -> None:
    """`torch.frombuffer` makes them, and the kernels must not read them there. Aligned ones are not copied."""
    given = bits(rng, name, 100).array
    width = given.itemsize
    for offset in (1, width // 2, 0):
        raw = misaligned(given, offset)
        if library == "torch":
            tensor = torch.frombuffer(raw.view(np.uint8), dtype=TORCH_DTYPES[name])
            assert tensor.data_ptr() % width == offset
        else:
            tensor = raw.view(NUMPY_DTYPES[name]) if library == "numpy" else Bits(raw, name)
        state = State.of({"a": tensor, "tied": tensor})
        read = state.read("a")
        assert read.ctypes.data % width == 0
        assert (read.ctypes.data == raw.ctypes.data) == (offset == 0)
        np.testing.assert_array_equal(read, given)
        assert state.aliases == {"tied": "a"}


def test_a_stream_of_tensors_at_odd_addresses(rng: np.random.Generator) -> None:
    """All the way through the kernels of publisher and subscriber."""
    states = []
    for given in (bits(rng, "BF16", 5000), bits(rng, "BF16", 5000)):
        given.array[50:] = 7
        states.append({"w": torch.frombuffer(misaligned(given.array).view(np.uint8), dtype=torch.bfloat16)})
    store = MemoryStore()
    publisher, subscriber = Publisher(store, stream="policy"), Subscriber(store, stream="policy")
    for state in states:
        publisher.publish(state)
        subscriber.sync()
        assert subscriber.root == state_root(state) == state_root({"w": state["w"].clone()})
