"""The root is the SHA-256 tree of docs/format.md, whoever computes it and with however many
threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import Bits, State, state_root
from tests.promises.oracle import root_of
from tests.support.checkpoints import write_checkpoint
from tests.support.states import WIDTHS, all_dtypes, bits, policy

MIB = 1 << 20


def golden_states() -> dict[str, dict[str, Bits]]:
    return {
        "no tensors": {},
        "one scalar": {"w": Bits(np.array(0x3F80, np.uint16), "BF16")},
        "several": {
            "model.embed.weight": Bits(np.arange(6, dtype=np.uint16).reshape(2, 3), "BF16"),
            "model.norm.weight": Bits(np.array([0x3F800000, 0x80000000], np.uint32), "F32"),
            "größe": Bits(np.empty((3, 0), np.uint8), "F8_E4M3"),
        },
        "three leaves": {"w": Bits(np.arange(MIB + 1, dtype=np.uint16), "BF16")},
    }


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("no tensors", "dc4ea09ea7a0099da13c2d398ecc912581bab5bb87b66d650cfab273da249f8b"),
        ("one scalar", "fd9d45becd34f041c5875b592490c20f993cf7899a1da8e817ef9ff97b451078"),
        ("several", "44d63ccb82de88737902b1457d7358a57d446d9c4693c9018f802cd0709329d2"),
        ("three leaves", "3f3438e0adfdb2b4c76f6a6e7de02ce4cdd9581d4225d5eff44a275cfdca2e89"),
    ],
)
def test_golden_roots(name: str, root: str) -> None:
    """These literals never change: streams that exist depend on them."""
    assert state_root(golden_states()[name]) == root
    assert root_of(golden_states()[name]) == root


@given(seed=st.integers(0, 2**32), elements=st.integers(0, 300))
def test_any_state_has_the_oracles_root(seed: int, elements: int) -> None:
    tensors = all_dtypes(np.random.default_rng(seed), 2 * elements)
    assert state_root(tensors, threads=1) == root_of(tensors)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_sizes_around_leaves_and_tasks(dtype: str, extra: int, rng: np.random.Generator) -> None:
    width = WIDTHS[dtype]
    tensors = {
        "one": bits(rng, dtype, MIB // width + extra),
        "two": bits(rng, dtype, 2 * MIB // width + extra),
        "task": bits(rng, dtype, 8 * MIB // width + extra),
    }
    assert state_root(tensors) == root_of(tensors)


def test_any_number_of_threads_gives_one_root(rng: np.random.Generator) -> None:
    tensors = policy(rng) | {"big": bits(rng, "BF16", 9, MIB), "wide": bits(rng, "F64", 1000)}
    assert {state_root(tensors, threads=threads) for threads in (None, 1, 2, 3, 8)} == {
        root_of(tensors)
    }


def test_one_root_for_every_source(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = policy(rng)
    write_checkpoint(tmp_path, tensors)
    expected = root_of(tensors)
    assert state_root(tensors) == state_root(State.of(tensors)) == expected
    assert state_root(tmp_path) == expected
    assert state_root(str(tmp_path / "model.safetensors"), threads=1) == expected
