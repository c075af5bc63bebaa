"""What a history costs: it is named only where that makes a patch smaller, and too many records are none."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import Bits, State
from pulse_rl.codec import Changes
from pulse_rl.patch import apply_patch, build_patch, parse_patch
from pulse_rl.patch.history import History, Recorder, Window
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import DTYPES, DType, UIntArray
from tests.support.states import Rng, weights


@pytest.mark.parametrize("recurs", [0.1, 1.0])
def test_a_small_patch_names_a_history_only_where_it_is_smaller(rng: Rng, recurs: float) -> None:
    flat, history = weights(rng, 20_000).array.copy(), History()
    moving, old = rng.choice(flat.size, 100, replace=False), State.of({"w": Bits(flat.copy(), "BF16")})
    named = []
    for _ in range(6):
        keeps = rng.random(100) < recurs
        moving = np.where(keeps, moving, rng.choice(flat.size, 100, replace=False))
        flat[moving] += 1
        new, digest = State.of({"w": Bits(flat.copy(), "BF16")}), state_digest(old)
        built = build_patch(old, new, digest, most_records=1 << 40, history=history)
        assert built.nbytes <= build_patch(old, new, digest).nbytes
        parsed = parse_patch([built.to_bytes()], digest)
        assert parsed.header.history in (None, history.name)
        state, known = old.copy(), state_digest(old)
        assert apply_patch(parsed, state, known, history=history).digest.root == state_digest(new).root
        named.append(built.header.history is not None)
        assert built.records is not None
        history, old = history.then(Window(1, digest.root, built.records)), new
    assert any(named) == (recurs == 1)


def test_a_recorder_keeps_all_or_none() -> None:
    def changes(count: int, dtype: str) -> tuple[DType, Changes, UIntArray]:
        kind = DTYPES[dtype]
        before = np.zeros(count, kind.uint)
        return kind, Changes(np.arange(count, dtype=np.uint32), np.ones(count, kind.uint)), before

    kept = Recorder(40)
    kept.add(0, *changes(6, "BF16"))
    kept.add(1, *changes(50, "F64"))  # of which nothing is remembered
    kept.add(2, *changes(4, "U8"))
    assert kept.records is not None
    assert {index: len(found) for index, found in kept.records.items()} == {0: 24, 2: 16}
    kept.add(3, *changes(1, "F32"))
    assert kept.records is None
    kept.add(4, *changes(1, "F32"))
    assert kept.records is None
