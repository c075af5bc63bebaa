"""Frozen parameters and buffers among real processes: the same bits everywhere, or an error with
their names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.errors import CorruptMessage, Diverged, NonFinite, StateMismatch
from pulse_rl.loco import DiLoCo, PulseLoCo
from tests.support.loco_reference import group_of, made, pulse_loco, root_of, same
from tests.support.trainers import Trainer, each, together

SIZE = 3


class Model(nn.Module):
    """Linear, BatchNorm, a frozen Linear, and buffers of several kinds."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("table", torch.arange(40_000).float() / 3 + seed, persistent=False)
        self.register_buffer("steep", torch.tensor([1.0, float("inf"), 3.0], dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False, seed > 0]))
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in [*self.named_parameters(), *self.named_buffers()]}


def make(seed: int, kind: Any = PulseLoCo, **settings: Any) -> tuple[Model, Any, Any]:
    if issubclass(kind, PulseLoCo):  # between rounds all models are theta then
        settings.setdefault("lookahead", 0.0)
    model = Model(seed)
    optimizer = torch.optim.SGD([*model.inner.parameters(), *model.norm.parameters()], lr=0.1)
    settings = {"sync_every": 2, "timeout_seconds": 10} | settings
    return model, optimizer, made(kind, model, optimizer, **settings)


def step(model: Model, optimizer: Any, who: int, number: int) -> None:
    data = torch.Generator().manual_seed(100 * who + number)
    optimizer.zero_grad()
    model(torch.randn(8, 6, generator=data) * (1 + who)).square().mean().backward()
    optimizer.step()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[n], b[n]) for n in a)


def all_equal(trainer: Trainer, name: str, model: Model) -> bool:
    trainer.put(name, model.tensors())
    return all(equal(model.tensors(), trainer.get(name, rank)) for rank in range(trainer.size))


def meeting_and_rounds(trainer: Trainer) -> None:
    """Rank 0's at first; then the mean of floats, rank 0's of others; only what changed is sent;
    newcomers get it."""
    for kind in (PulseLoCo, DiLoCo):
        model, optimizer, loop = make(trainer.rank, kind)
        name, zero = kind.__name__, Model(0).tensors()
        with loop:
            assert equal(model.tensors(), zero)
            for number in range(2):
                step(model, optimizer, trainer.rank, 2 * number)
                if trainer.rank == 1:  # an odd one out, in a round of otherwise even steps
                    model.norm(torch.randn(4, 5))
                # What the second step of the round makes of the buffers, before the round.
                before: dict[str, torch.Tensor] = {}
                hook = optimizer.register_step_pre_hook(
                    lambda *_, kept=before, m=model: kept.update(m.tensors())
                )
                step(model, optimizer, trainer.rank, 2 * number + 1)
                hook.remove()
                trainer.put(f"{name}-{number}", before)
                found = [trainer.get(f"{name}-{number}", rank) for rank in range(SIZE)]
                for buffer in ("norm.running_mean", "norm.running_var"):
                    mean = sum(f[buffer].double() for f in found) / SIZE
                    assert same(dict(model.named_buffers())[buffer], mean.float()), buffer
                assert [int(f["norm.num_batches_tracked"]) for f in found] == [
                    2 * number + 2,
                    2 * number + 3,
                    2 * number + 2,
                ]
                assert int(model.norm.num_batches_tracked) == 2 * number + 2
                assert all_equal(trainer, f"{name}-after-{number}", model)
            assert loop.last_round.payload_bytes < 2000, "the table is not sent"
            if kind is PulseLoCo:
                messages = (loop.last_round.sent_bytes - 2 * (40 + 1 + 32) - 2 * (40 + 1)) / 2
                assert loop.last_round.payload_bytes <= messages, "what went around is counted"
                assert loop.last_round.payload_bytes >= 2 * 20 + 8
        assert equal(
            {n: model.tensors()[n] for n in ("table", "steep", "mask", "head.weight", "head.bias")},
            {n: zero[n] for n in ("table", "steep", "mask", "head.weight", "head.bias")},
        )


def coming_back(trainer: Trainer) -> None:
    """A new trainer takes frozen parameters and the last round's buffers, not those of a leader in
    mid-round."""
    model, optimizer, loop = make(trainer.rank)
    if trainer.rank != 2:
        trainer.connect("two", (0, 1))
        loop.__enter__()
        for number in range(3):
            step(model, optimizer, trainer.rank, number)
            if number == 1:
                trainer.put("common", model.tensors())
        locally = model.tensors()
    trainer.barrier("ready", (0, 1, 2))
    trainer.connect("three")
    if trainer.rank == 2:
        loop.__enter__()
        assert equal(model.tensors(), trainer.get("common", 0))
        step(model, optimizer, 2, 2)
    else:
        loop.rejoin()
        assert equal(model.tensors(), locally), "the others' local steps are not lost"
    step(model, optimizer, trainer.rank, 3)
    assert loop.round == 2
    assert all_equal(trainer, "after", model)
    loop.close()


def frozen_that_change(trainer: Trainer) -> None:
    """By an optimizer that PulseLoCo does not know, say. On all alike it is fine, on one it is
    not."""
    model, optimizer, loop = make(trainer.rank, sync_every=1)
    with loop:
        model.head.weight.data.mul_(2)
        step(model, optimizer, trainer.rank, 0)
        assert loop.round == 1
        other = torch.optim.SGD([model.head.bias], lr=0.1)
        other.register_step_pre_hook(lambda *_: None)
        before = root_of(loop)
        model(torch.ones(4, 6) * (1 + trainer.rank)).sum().backward()
        if trainer.rank != 0:
            other.step()
        with pytest.raises(
            Diverged, match=r"round 2: parameter 'head\.bias'.*trainers \[1, 2\]"
        ) as caught:
            step(model, optimizer, trainer.rank, 1)
        assert "optimizers" in caught.value.hint
        assert (loop.round, root_of(loop)) == (1, before)
        loop.rejoin()  # makes them equal, and runs the round that is due
        assert loop.round == 2
        assert all_equal(trainer, "rejoined", model)
        step(model, optimizer, trainer.rank, 2)
        assert loop.round == 3


def buffers_that_are_not_finite(trainer: Trainer) -> None:
    model, optimizer, loop = make(trainer.rank, sync_every=1)
    with loop:
        step(model, optimizer, trainer.rank, 0)
        before = model.tensors()
        if trainer.rank == 1:
            model.norm.running_var[2] = float("nan")
        with pytest.raises(NonFinite, match=r"'norm\.running_var' is not finite on trainers \[1\]"):
            step(model, optimizer, trainer.rank, 1)
        assert loop.round == 1
        loop.rewind()
        assert equal(model.tensors(), before)
        step(model, optimizer, trainer.rank, 2)
        assert all_equal(trainer, "finite", model)


def buffers_that_become_others(trainer: Trainer) -> None:
    model, optimizer, loop = make(trainer.rank, sync_every=1)
    with loop:
        if trainer.rank == 2:
            model.table = torch.zeros(7)
        with pytest.raises(
            StateMismatch, match=r"trainer 2: buffer 'table'.*is now torch\.float32 \[7\]"
        ):
            step(model, optimizer, trainer.rank, 0)
        assert loop.round == 0


def other_models(trainer: Trainer) -> None:
    model, optimizer, _ = make(trainer.rank)
    if trainer.rank == 1:
        model.register_buffer("more", torch.zeros(2))
    with (
        pytest.raises(StateMismatch, match="buffers"),
        pulse_loco(model, optimizer, sync_every=1, timeout_seconds=10),
    ):
        pass


def damaged(trainer: Trainer) -> None:
    """A message about buffers that trainer 1 alone cannot read is refused by all."""
    model, optimizer, loop = make(trainer.rank, sync_every=1)
    with loop:
        before = model.tensors()
        exchange = group_of(loop)
        all_gather = exchange._all_gather_array

        def flipped(data: Any) -> Any:
            pieces = all_gather(data)
            if len(data) > 100:
                exchange._all_gather_array = all_gather
                pieces[2] = pieces[2].copy()
                pieces[2][60] ^= 1
            return pieces

        if trainer.rank == 1:
            exchange._all_gather_array = flipped
        with pytest.raises(CorruptMessage, match=r"trainers \[1\].*buffers"):
            step(model, optimizer, trainer.rank, 0)
        assert loop.round == 0
        assert equal(
            {n: before[n] for n in ("table", "steep")},
            {n: model.tensors()[n] for n in ("table", "steep")},
        )
        step(model, optimizer, trainer.rank, 1)
        assert all_equal(trainer, "undamaged", model)
        if trainer.rank == 1:
            loop.buffers.common["steep"][0] ^= 1
            loop.buffers._set_common(loop.buffers.common)
        with pytest.raises(Diverged, match="disagree on the buffers"):
            step(model, optimizer, trainer.rank, 2)


CASES: list[Callable[[Trainer], None]] = [
    meeting_and_rounds,
    frozen_that_change,
    buffers_that_are_not_finite,
    buffers_that_become_others,
    other_models,
    damaged,
    coming_back,
]


def every(trainer: Trainer) -> list[str]:
    return each(trainer, CASES, SIZE)


@pytest.mark.slow
def test_trainers_keep_equal_what_no_optimizer_trains() -> None:
    assert together(every, SIZE, seconds=60) == [[], [], []]


# -- one trainer alone


@pytest.mark.parametrize("stop", [3, 4])
def test_a_checkpoint_holds_the_last_rounds_buffers(stop: int) -> None:
    def run(model: Model, optimizer: Any, loop: Any, steps: range) -> None:
        with loop:
            for number in steps:
                step(model, optimizer, 0, number)

    whole = make(0)
    run(*whole, range(7))
    half = make(0)
    run(*half, range(stop))
    saved = copy.deepcopy((half[0].state_dict(), half[1].state_dict(), half[2].state_dict()))
    again = make(0)
    if stop % 2:
        again[0].load_state_dict(saved[0])
    again[1].load_state_dict(saved[1])
    again[2].load_state_dict(saved[2])
    run(*again, range(stop, 7))
    assert equal(whole[0].tensors(), again[0].tensors())
    again[2].rewind()
    whole[2].rewind()
    assert equal(whole[0].tensors(), again[0].tensors())


def test_a_checkpoint_without_buffers_still_loads() -> None:
    model, optimizer, loop = make(0)
    with loop:
        step(model, optimizer, 0, 0)
        step(model, optimizer, 0, 1)
    saved = loop.state_dict()
    assert saved.pop("buffers").keys() == {n for n, _ in model.named_buffers()}
    again, optimizer, resumed = make(5)
    resumed.load_state_dict(saved)
    assert root_of(resumed) == root_of(loop)
    again.norm.running_mean.fill_(4)
    with resumed:
        assert again.norm.running_mean.tolist() == 5 * [4]
        resumed.rewind()
        assert again.norm.running_mean.tolist() == 5 * [4]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b.pop("steep"),
        lambda b: b.update(more=torch.ones(1)),
        lambda b: b.update(steep=torch.ones(3)),
        lambda b: b.update(steep=torch.ones(2, dtype=torch.bfloat16)),
        lambda b: b.update(steep=[1.0]),
    ],
)
def test_other_buffers_in_a_checkpoint_are_refused(spoil: Callable[[dict[str, Any]], Any]) -> None:
    model, _, loop = make(0)
    before, state = model.tensors(), loop.state_dict()
    spoil(state["buffers"])
    with pytest.raises(StateMismatch, match="buffer"):
        loop.load_state_dict(state)
    assert equal(model.tensors(), before)


def test_memory_shared_with_trained_parameters_is_theirs() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("view", model.weight.data[1])
    model.tied = nn.Parameter(model.bias.data, requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with pulse_loco(model, optimizer, sync_every=1) as loop:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert loop.round == 1
    assert not loop.buffers
