"""A trainer: small states of mixed dtypes that change a little, a lot, not at all, back, or in
their set of tensors."""

from __future__ import annotations

from random import Random

import numpy as np

from pulse_rl import Bits, State
from pulse_rl.state.tensors import DTYPES

_DTYPES = ("BF16", "F32", "F16", "I16", "U8", "F8_E4M3", "I64")


class Trainer:
    def __init__(self, rng: Random) -> None:
        self._tensors = {"embed": _random(rng, "BF16", (rng.choice((40, 300)), 8))}
        for k in range(rng.randint(1, 2)):
            self._tensors[f"layer{k}"] = _random(rng, rng.choice(_DTYPES), (rng.randint(1, 60),))
        self._tied: dict[str, str] = {}
        self._moving: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._before: list[dict[str, Bits]] = []

    def step(self, rng: Random) -> State:
        """The next state, in memory of its own."""
        self._before = [*self._before[-4:], dict(self._tensors)]
        kinds = ("little", "momentum", "much", "none", "back", "set", "shape", "tie")
        how = rng.choices(kinds, weights=(20, 40, 8, 6, 6, 4, 3, 6))[0]
        if how == "little":
            self._change(rng, 0.01)
        elif how == "momentum":
            self._go_on(rng)
        elif how == "much":
            self._change(rng, 0.5)
        elif how == "back":
            self._tensors = dict(rng.choice(self._before))
        elif how == "set":
            if "extra" in self._tensors:
                del self._tensors["extra"]
            else:
                self._tensors["extra"] = _random(rng, rng.choice(_DTYPES), (rng.randint(0, 20),))
        elif how == "shape":
            self._tensors["layer0"] = _random(
                rng, rng.choice(_DTYPES), (rng.randint(1, 9), rng.randint(1, 9))
            )
        elif how == "tie":
            self._tied = (
                {}
                if self._tied
                else {"head": "embed"} | ({"z": "layer0"} if rng.random() < 0.5 else {})
            )
        tensors = {
            name: Bits(bits.array.copy(), bits.dtype) for name, bits in self._tensors.items()
        }
        return State.of(tensors | {alias: tensors[name] for alias, name in self._tied.items()})

    def _go_on(self, rng: Random) -> None:
        """Most of what moved last moves on, in the same direction: what a history is good for."""
        numbers = np.random.default_rng(rng.getrandbits(32))
        for name, bits in self._tensors.items():
            array = bits.array.copy()
            flat = array.reshape(-1)
            at, step = self._moving.get(name, (np.empty(0, np.int64), np.empty(0, flat.dtype)))
            stays = (at < flat.size) & (numbers.random(at.size) < 0.9)
            fresh = numbers.choice(
                flat.size, int(numbers.binomial(flat.size, 0.004)), replace=False
            )
            fresh = np.setdiff1d(fresh, at[stays])
            at = np.concatenate([at[stays], fresh])
            up = numbers.integers(0, 2, fresh.size).astype(bool)
            ones = np.where(up, 1, np.iinfo(flat.dtype).max).astype(flat.dtype)
            step = np.concatenate([step[stays].astype(flat.dtype), ones])
            flat[at] += step
            self._moving[name] = (at, step)
            self._tensors[name] = Bits(array, bits.dtype)

    def _change(self, rng: Random, density: float) -> None:
        numbers = np.random.default_rng(rng.getrandbits(32))
        for name, bits in self._tensors.items():
            array = bits.array.copy()
            flat = array.reshape(-1)
            count = int(numbers.binomial(flat.size, density))
            at = numbers.choice(flat.size, count, replace=False)
            flat[at] += numbers.integers(1, 4, count, flat.dtype)
            self._tensors[name] = Bits(array, bits.dtype)


def _random(rng: Random, dtype: str, shape: tuple[int, ...]) -> Bits:
    uint = DTYPES[dtype].uint
    numbers = np.random.default_rng(rng.getrandbits(32))
    if dtype == "BF16":  # the spread of trained weights, so that the codecs have something to find
        floats = numbers.standard_normal(shape, np.float32) * np.float32(0.02)
        return Bits((floats.view(np.uint32) >> 16).astype(uint), dtype)
    return Bits(numbers.integers(0, np.iinfo(uint).max, shape, uint, endpoint=True), dtype)
