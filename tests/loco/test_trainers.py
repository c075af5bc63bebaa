"""PULSELoCo among real processes: bit for bit the dense algorithm, on every trainer, whatever each
of them sends; and when rounds are scattered by themselves, which changes nothing but the bytes
sent."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pulse_rl.loco import PulseLoCo, Round
from tests.support.loco_reference import (
    Job,
    Reference,
    all_same,
    cut_blocks,
    flat,
    group_of,
    outer_state,
    pulse_loco,
    same,
)
from tests.support.trainers import Trainer, force_scattered, together

pytestmark = pytest.mark.slow
ROUNDS = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 compression": {"compression": "bf16"},
    "int4 compression": {"compression": "e8m2"},
    "bf16 model": {"model_dtype": torch.bfloat16, "compression": "bf16"},
    "fp16 gate": {"gate_dtype": torch.float16},
    "fp8 gate": {"gate_dtype": torch.float8_e4m3fn},
    "no lookahead": {"lookahead": 0.0},
    "lookahead, bf16 model": {
        "model_dtype": torch.bfloat16,
        "compression": "bf16",
        "lookahead": 1.3,
    },
    "e8m0": {"compression": "e8m0"},
    "nothing is sent": {"rate": 1e-12},
    "everything is sent": {"rate": 0.5},
}


def agree(trainer: Trainer, names: list[str], scattered: bool) -> dict[str, list[Round]]:
    """Rounds against the dense reference; unequal rates, and rounds in which one or all stand
    still. Shares hold parts of blocks, and of several."""
    force_scattered(scattered)
    cut_blocks(1700)
    trainer.connect("start")
    return {name: agreed(trainer, **VARIANTS[name]) for name in names}


def agreed(
    trainer: Trainer,
    *,
    model_dtype: torch.dtype = torch.float32,
    rate: float = 0,
    **settings: Any,
) -> list[Round]:
    dtype = model_dtype
    rate = rate or (1e-2 if dtype == torch.bfloat16 else (1e-4, 3e-4, 1e-5)[trainer.rank % 3])
    job = Job(seed=trainer.rank, dtype=dtype, lr=rate)
    selected: list[tuple[torch.Tensor, torch.Tensor]] = []
    rounds: list[Round] = []
    loop = pulse_loco(
        job.model,
        job.optimizer,
        sync_every=2,
        timeout_seconds=10,
        threads=1 + trainer.rank,
        on_round=rounds.append,
        **settings,
    )
    # Before the loop's own hook: what the trainer is about to send.
    job.optimizer.register_step_post_hook(
        lambda *_: selected.append(reference.select(job.weights())) if job.steps % 2 == 0 else None
    )
    with loop:
        reference = Reference(
            flat(loop.global_state()),
            model_dtype=dtype,
            **settings,
        )
        for number in range(ROUNDS):
            still = (number == 0 and trainer.rank == 1) or number == 3
            for group in job.optimizer.param_groups:
                group["lr"] = 0.0 if still else rate
            job.step(trainer.rank)
            job.step(trainer.rank)
            assert len(rounds) == number + 1
            s, sent = selected[-1]
            received = [torch.empty_like(sent) for _ in range(trainer.size)]
            dist.all_gather(received, sent)
            reference.outer_step(received)
            reference.check(loop)
            assert same(s, sent + flat(loop.residual()))
            assert rounds[-1].entries == int(torch.count_nonzero(sent))
            assert rounds[-1].summed == int(torch.count_nonzero(reference.summed))
    return rounds


FEW = ["bf16 compression", "no lookahead", "e8m0", "fp32"]


@pytest.mark.parametrize("scattered", [False, True], ids=["gathered", "scattered"])
@pytest.mark.parametrize(("size", "names"), [(3, list(VARIANTS)), (4, FEW[-2:]), (5, FEW)])
def test_every_round_equals_the_dense_algorithm(
    size: int, names: list[str], scattered: bool
) -> None:
    found = together(agree, size, names, scattered, seconds=120)
    for name in names:
        each = [rounds[name] for rounds in found]
        for number, seen in enumerate(zip(*each, strict=True)):
            assert len({r.root for r in seen}) == 1
            assert {(r.number, r.trainers, r.parameters) for r in seen} == {
                (number + 1, size, seen[0].parameters)
            }
            ways = {(scattered, seen[0].summed)}
            assert {(r.scattered, r.summed) for r in seen} == ways
            # A ring: heads, padded messages, words that all is read, and roots of all but one leave
            # each process.
            ring = (size - 1) * (40 + max(r.payload_bytes for r in seen) + 1 + 32)
            if not seen[0].scattered:
                assert {r.sent_bytes for r in seen} == {ring}
            elif size == 5 and name == "fp32" and number != 3:
                assert max(r.sent_bytes for r in seen) < ring
            assert {"gate", "exchange", "decode", "update", "verify"} <= seen[0].seconds.keys()
        assert each[1][0].entries == 0, "one trainer sends nothing"
        if name == "nothing is sent":
            assert {r.entries for rounds in each for r in rounds} == {0}
        else:
            assert all(before.root != after.root for before, after in pairwise(each[0]))
            assert each[0][1].entries > 0
    assert len({rounds["fp32"][1].entries for rounds in found}) == size, (
        "payloads of unequal lengths"
    )
    if "everything is sent" in names:
        assert found[0]["everything is sent"][1].density > 0.99
        exact, bf16, int4 = (
            found[0][name][0].payload_bytes
            for name in ("fp32", "bf16 compression", "int4 compression")
        )
        assert int4 < 0.9 * bf16 < 0.9 * 0.8 * exact


def looped(job: Job, rounds: list[Round], **settings: Any) -> PulseLoCo:
    fixed: dict[str, Any] = {"sync_every": 2, "timeout_seconds": 20, "on_round": rounds.append}
    return pulse_loco(job.model, job.optimizer, **(fixed | settings))


def by_itself(trainer: Trainer, settings: dict[str, Any]) -> list[list[tuple[bool, str]]]:
    """(scattered, root) of each round: gathered, and as the rule has it, with a meeting in
    between."""
    found = []
    trainer.connect("start")
    for scattered in (False, None):
        force_scattered(scattered)
        job, rounds = Job(trainer.rank, lr=1e-3), list[Round]()
        with looped(job, rounds, **settings) as loop:
            for _ in range(6):
                job.step(trainer.rank)
            loop.rejoin()
            for _ in range(4):
                job.step(trainer.rank)
        found.append([(r.scattered, r.root) for r in rounds])
    return found


@pytest.mark.parametrize(
    ("size", "settings", "by_default"),
    [
        (2, {}, False),
        (3, {}, False),
        (4, {}, True),
        (4, {"compression": "bf16"}, True),
        (4, {"compression": "e8m2"}, False),
        (7, {"compression": "e8m0"}, False),
        (8, {"compression": "e8m0"}, True),
    ],
)
def test_rounds_are_scattered_where_less_is_sent(
    size: int, settings: dict[str, Any], *, by_default: bool
) -> None:
    for gathered, chosen in together(by_itself, size, settings, seconds=90):
        assert [root for _, root in gathered] == [root for _, root in chosen]
        assert [scattered for scattered, _ in gathered] == [False] * 5
        assert [scattered for scattered, _ in chosen] == [by_default] * 5


def skewed(seed: int) -> Job:
    """Its first layer hardly moves, so that equal shares are not even."""
    job = Job(seed)
    first, *rest = job.model
    groups = [
        {"params": first.parameters(), "lr": 1e-6},
        {"params": nn.Sequential(*rest).parameters(), "lr": 1e-3},
    ]
    job.optimizer = torch.optim.AdamW(groups)
    return job


def resumed(trainer: Trainer, stop: int) -> None:
    """From a checkpoint of all trainers, in mid-round or at a boundary, to the same bits, shares
    included: trainers that meet cut them alike."""
    force_scattered(True)

    def run(job: Job, loop: PulseLoCo, steps: int) -> None:
        with loop:
            for _ in range(steps):
                job.step(trainer.rank)

    trainer.connect("start")
    settings = {"sync_every": 3, "compression": "bf16", "lookahead": 7.0}
    job, rounds = skewed(trainer.rank), list[Round]()
    loop = looped(job, rounds, **settings)
    run(job, loop, 11)
    first = skewed(trainer.rank)
    half = looped(first, rounds, **settings)
    run(first, half, stop)
    saved = copy.deepcopy((first.state_dict(), half.state_dict()))
    again = skewed(trainer.rank + 7)
    other = looped(again, rounds, **settings)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    run(again, other, 11 - stop)
    assert same(job.weights(), again.weights())
    assert all_same(outer_state(loop), outer_state(other))
    assert all(r.scattered for r in rounds)


@pytest.mark.parametrize("stop", [5, 6])
def test_resume_is_exact(stop: int) -> None:
    together(resumed, 3, stop, seconds=60)


def elsewhere(trainer: Trainer) -> None:
    trainer.connect("start")
    job = Job()
    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=5) as loop:
        exchange = group_of(loop)
        with torch.device("meta"):
            arrived = exchange.all_to_all(
                [bytes([trainer.rank, to]) for to in range(2)], max_bytes=[9, 9]
            )
        assert arrived == [bytes([source, trainer.rank]) for source in range(2)]


def test_wherever_the_program_makes_its_tensors_messages_are_the_hosts() -> None:
    together(elsewhere, 2, seconds=60)
