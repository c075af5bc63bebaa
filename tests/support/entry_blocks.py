"""Random blocks of PULSELoCo's parameters and their entries, for the tests of payloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulse_rl._native import Malformed, decode_entries, encode_entries
from pulse_rl.loco.gate import ROUNDINGS, open_entries
from pulse_rl.loco.messages import Compression
from pulse_rl.loco.parameters import Floats, Positions
from pulse_rl.state.cast import Rounding
from tests.support import entries_oracle as oracle
from tests.support.arrays import both_ways, made_alike

BF16 = ROUNDINGS[torch.bfloat16]
COMPRESSIONS = [Compression("fp32"), Compression("bf16"), Compression("e8m2"), Compression("e8m0")]
every_compression = pytest.mark.parametrize(
    "compression", COMPRESSIONS, ids=[compression.name for compression in COMPRESSIONS]
)


class Block:
    """Random theta, momentum and pseudo-gradient, and the entries that pass the gate, or that top-k
    would choose."""

    def __init__(
        self,
        rng: np.random.Generator,
        rounding: Rounding,
        elements: int,
        share: float | None = None,
    ) -> None:
        self.rounding = rounding
        self.theta, self.momentum = rng.normal(0, 0.02, (2, elements)).astype(np.float32)
        if rng.random() < 0.3:
            anything = (
                rng.integers(0, 1 << 32, (2, elements), dtype=np.uint64)
                .astype(np.uint32)
                .view(np.float32)
            )
            self.theta, self.momentum = np.where(np.isfinite(anything), anything, 0)
        self.momentum *= rng.choice([0, 1e-20, 1e-4], (elements if rng.random() < 0.5 else 1))
        with np.errstate(over="ignore"):
            s = (self.theta * rng.normal(0, 10 ** -rng.uniform(0, 5), elements)).astype(np.float32)
            if rng.random() < 0.7:
                s = self.theta - (self.theta - s)  # as the difference of two weights
        s[~(np.abs(s) < 2.0**63)] = 0  # a BF16 compression rounds up
        self.s = np.empty_like(s)
        with np.errstate(over="ignore"):
            found = open_entries(self.theta, self.theta, s, self.s, rounding)
        assert found is not None
        self.positions = found
        if share is None and rng.random() < 0.3:
            share = float(rng.choice([0.01, 0.3, 1]))
        if share is not None:
            self.positions = np.flatnonzero(rng.random(elements) < share).astype(np.uint32)

    def values(self, compression: Compression) -> Floats:
        return compression.round(self.s[self.positions])

    def entries(self, compression: Compression) -> dict[int, int]:
        return dict(zip(self.positions.tolist(), patterns(self.values(compression)), strict=True))

    @property
    def known(self) -> tuple[list[int], list[int], oracle.Rounding]:
        """What the oracle is given of the block."""
        return patterns(self.theta), patterns(self.momentum), oracle.Rounding(*self.rounding)

    def encode(self, compression: Compression) -> bytes:
        """The payload, which must be the same without vectors."""
        known = (self.theta, self.momentum, self.rounding)
        entries = (self.positions, self.values(compression))
        return made_alike(lambda: encode_entries(*known, *entries, compression.mantissa))

    def decode(self, compression: Compression, *payloads: bytes) -> list[dict[int, int]]:
        """The values by their positions, the same with and without vectors. Raises Malformed either
        way, or neither."""
        views = [np.frombuffer(p, np.uint8) for p in payloads]
        found: list[list[dict[int, int]] | Malformed] = []
        for _ in both_ways():
            try:
                decoded = decode_entries(
                    views, self.theta, self.momentum, self.rounding, compression.mantissa
                )
            except Malformed as error:
                found.append(error)
                continue
            for positions, values in decoded:
                check(positions, values, len(self.theta))
            found.append([dict(zip(p.tolist(), patterns(v), strict=True)) for p, v in decoded])
        without, with_vectors = found
        if isinstance(without, Malformed):
            assert isinstance(with_vectors, Malformed)
            raise without
        assert without == with_vectors
        return without

    def refuses(self, compression: Compression, payload: bytes) -> bool:
        """Whether the payload is refused: exactly those that the oracle refuses; it finds the same
        in the others."""
        try:
            expected, _ = oracle.decode(payload, *self.known, compression.mantissa)
        except oracle.Refused:
            with pytest.raises(Malformed):
                self.decode(compression, payload)
            return True
        assert self.decode(compression, payload) == [expected]
        return False

    def choices(self, rng: np.random.Generator, compression: Compression) -> oracle.Choices:
        """Anything that an encoder may choose for the block's entries. There is one."""
        theta, momentum, rounding = self.known
        d, m = int(rng.integers(100, 130)), int(rng.integers(90, 110))
        if rng.random() < 0.3:
            d, m = rng.integers(0, 256, 2).tolist()
        s = int(rng.integers(1, 31))
        b = int(rng.integers(90, 140) if rng.random() < 0.7 else rng.integers(0, 256 - s))
        c = int(rng.choice([1, 16, 128]))
        top = int(rng.integers(110, 130) if rng.random() < 0.7 else rng.integers(0, 256))
        entries = self.entries(compression)
        classes = {p: oracle.class_of(theta[p], momentum[p], rounding, d, m) for p in entries}
        first = int(rng.integers(0, min(classes.values()) + 1))
        stop = int(rng.integers(max(classes.values()) + 1, 257))
        more = rng.random()
        levels = any_levels(
            rng, range(1, 32), {k - first for k in classes.values()}, stop - first, more
        )
        chosen = oracle.Choices(d, m, first, levels, b, s, c, top, [])
        used: list[set[int]] = [set() for _ in range(c)]
        for p, v in entries.items():
            used[chosen.context(classes[p], theta[p], compression.mantissa)].add(
                oracle.code_of(theta[p], v, rounding, compression.mantissa, b, s).symbol
            )
        some = [more if rng.random() < 0.7 else 0 for _ in range(c)]
        chosen.symbols = [
            any_levels(rng, range(45), u, 2 * s + 2, x) for u, x in zip(used, some, strict=True)
        ]
        return chosen


def any_levels(
    rng: np.random.Generator, levels: range, used: set[int], count: int, more: float
) -> list[int | None]:
    """Levels for those of ``count`` that are used, and for a share of the others."""
    around = int(rng.choice(levels))
    drawn = (
        rng.choice(levels, count)
        if rng.random() < 0.5
        else rng.normal(around, 2, count).astype(int)
    )
    given = np.clip(drawn, levels.start, levels.stop - 1).tolist()
    return [level if i in used or rng.random() < more else None for i, level in enumerate(given)]


def patterns(x: Floats) -> list[int]:
    found: list[int] = x.view(np.uint32).tolist()
    return found


def check(positions: Positions, values: Floats, elements: int) -> None:
    """They ascend within the block, and the values are finite."""
    assert len(positions) == len(values)
    assert (np.diff(positions.astype(np.int64)) > 0).all()
    assert (positions < elements).all()
    assert (np.abs(values) < 2.0**64).all()
