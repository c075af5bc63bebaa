"""The gate of a scattered round's sums: what passes it, and that the rest is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulse_rl.errors import StateMismatch
from pulse_rl.loco import PulseLoCo, TopK
from pulse_rl.loco.gate import rounding_of
from pulse_rl.loco.parameters import FlatBlock, Parameters
from pulse_rl.loco.shares import Unit
from pulse_rl.loco.sites import Sites
from pulse_rl.loco.sums import SumsGate
from pulse_rl.loco.wire import Wire
from tests.support.loco_reference import Job

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINERS = 5


def block_of(count: int) -> FlatBlock:
    weight = torch.nn.Parameter(torch.zeros(count))
    (block,) = Parameters({"w": weight}, torch.optim.SGD([weight], lr=1.0)).blocks
    return block


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_a_sum_is_sent_or_kept_to_the_last_bit(wire: torch.dtype, scale: float, rng: np.random.Generator) -> None:
    theta = rng.normal(0, 0.02, 3000).astype(np.float32)
    unit = Unit(block_of(3000), 500, 2500)
    places = np.flatnonzero(rng.random(2000) < 0.4).astype(np.uint32)
    sums = rng.normal(0, 2e-4, len(places)).astype(np.float32)
    gate = SumsGate(theta, rounding_of(torch.bfloat16), np.float32(scale), Wire(wire))
    sent_places, sent = gate.pass_on(unit, (places, sums), TRAINERS)

    there = torch.from_numpy(theta[500:2500][places])
    moved = there - torch.tensor(scale) * (torch.from_numpy(sums) / TRAINERS)
    passes = (there.bfloat16() != moved.bfloat16()).numpy()
    assert 0.05 < passes.mean() < 0.95
    np.testing.assert_array_equal(sent_places, places[passes])
    np.testing.assert_array_equal(sent, torch.from_numpy(sums[passes]).to(wire).float().numpy())

    residual = np.zeros_like(theta)
    gate.add_withheld(residual)
    kept = residual[500:2500]
    dense = np.zeros(2000, np.float32)
    dense[places] = sums
    dense[sent_places] -= sent
    np.testing.assert_array_equal(kept, dense)
    assert not residual[:500].any()
    assert not residual[2500:].any()
    assert (kept[sent_places] != 0).any() == (wire == torch.bfloat16)


def test_sums_that_no_message_takes_are_left_as_they_are() -> None:
    gate = SumsGate(np.ones(9, np.float32), rounding_of(torch.bfloat16), np.float32(1), Wire(torch.float32))
    sums = np.array([1e-9, 2.0**65], np.float32)
    places = np.array([1, 2], np.uint32)
    found = gate.pass_on(Unit(block_of(9), 0, 9), (places, sums), 2)
    assert found[1] is sums
    residual = np.zeros(9, np.float32)
    gate.add_withheld(residual)
    assert not residual.any()
    nothing = np.zeros(0, np.uint32), np.zeros(0, np.float32)
    assert gate.pass_on(Unit(block_of(9), 0, 9), nothing, 2) is nothing


def test_sums_are_gated_among_eight_or_several_sites_where_steps_look_ahead() -> None:
    job = Job()

    def gates(kind: type[PulseLoCo] = PulseLoCo, **settings: object) -> list[bool]:
        loop = kind(job.model, job.optimizer, sync_every=2, **settings)  # type: ignore[arg-type]
        return [loop._gates_sums(Sites.of(names)) for names in ("a", "ab", "aaaaaaa", "aaaaaaaa", "a" * 64, "aab")]

    assert gates() == [False, False, False, True, True, True]
    assert gates(gate_sums=True) == [False, True, True, True, True, True]
    assert not any(gates(gate_sums=False) + gates(lookahead=0.0) + gates(TopK, fraction=0.1))


def test_counts_of_another_model_are_refused() -> None:
    job = Job()
    loop = PulseLoCo(job.model, job.optimizer, sync_every=2)
    state = loop.state_dict()
    assert "sums" not in state, "no round yet"
    granules = -(-loop.parameters.count // 256)
    for wrong in (
        [1],
        torch.zeros(granules, dtype=torch.int32),
        torch.zeros(granules + 1, dtype=torch.int64),
        torch.full((granules,), 257),
        torch.full((granules,), -1),
    ):
        with pytest.raises(StateMismatch, match="counts of sums"):
            loop.load_state_dict(state | {"sums": wrong})
    loop.load_state_dict(state | {"sums": torch.full((granules,), 256)})
    assert loop.state_dict()["sums"].tolist() == [256] * granules
