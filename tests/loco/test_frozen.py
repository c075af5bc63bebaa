"""Frozen parameters and buffers among real processes: the same bits everywhere, or an error with
their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.errors import StateMismatch
from pulse_rl.loco import DiLoCo, PulseLoCo
from tests.support.loco_reference import made, pulse_loco, root_of, same
from tests.support.trainers import Trainer, each, together

SIZE = 3


class Model(nn.Module):
    """Linear, one that shares its bias, BatchNorm in eval(), a frozen Linear, and buffers of
    several kinds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.bias = self.inner.bias
        self.register_buffer("table", torch.arange(40_000).float() / 3, persistent=False)
        self.register_buffer("steep", torch.tensor([1.0, float("inf"), 3.0], dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.head.weight.requires_grad_(False)
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.tied(self.inner(x))))


def make(kind: Any = PulseLoCo) -> tuple[Model, Any, Any]:
    model = Model()
    optimizer = torch.optim.SGD(
        [*model.inner.parameters(), model.tied.weight, *model.norm.parameters()], lr=0.1
    )
    return model, optimizer, made(kind, model, optimizer, sync_every=1, timeout_seconds=10)


def step(model: Model, optimizer: Any, who: int, number: int) -> None:
    data = torch.Generator().manual_seed(100 * who + number)
    optimizer.zero_grad()
    model(torch.randn(8, 6, generator=data) * (1 + who)).square().mean().backward()
    optimizer.step()


def unchanged(trainer: Trainer) -> None:
    """Rounds take place, cost a header, and change none of them."""
    for kind in (PulseLoCo, DiLoCo):
        model, optimizer, loop = make(kind)
        with loop:
            for number in range(2):
                step(model, optimizer, trainer.rank, number)
            assert loop.round == 2
            if kind is PulseLoCo:
                # Its messages, their header, the header for frozen tensors, one byte, the root.
                sent = loop.last_round.sent_bytes - 2 * (40 + 40 + 1 + 32)
                assert loop.last_round.payload_bytes <= sent / 2
        fresh = dict(Model().named_buffers())
        assert all(same(b, fresh[name]) for name, b in model.named_buffers())
        assert same(model.head.weight, Model().head.weight)
        assert model.tied.bias is model.inner.bias
        assert "tied.bias" not in loop.global_state()


def refused_everywhere(
    trainer: Trainer, change: Callable[[Model], None], repair: Callable[[Model], None], words: str
) -> None:
    """Trainer 1 changes a tensor: the round fails on all alike, with its name, and nothing has
    changed. As it was again, the round that is due takes place."""
    model, optimizer, loop = make()
    with loop:
        step(model, optimizer, trainer.rank, 0)
        before = root_of(loop)
        if trainer.rank == 1:
            change(model)
        with pytest.raises(StateMismatch, match=rf"trainer 1: .*{words}") as caught:
            step(model, optimizer, trainer.rank, 1)
        assert "optimizers" in caught.value.hint
        assert (loop.round, root_of(loop)) == (1, before)
        if trainer.rank == 1:
            repair(model)
        loop.rejoin()
        assert loop.round == 2


def a_frozen_parameter_that_changes(trainer: Trainer) -> None:
    refused_everywhere(
        trainer,
        lambda model: model.head.bias.data.add_(1),
        lambda model: model.head.load_state_dict(Model().head.state_dict()),
        r"'head\.bias' changed",
    )


def buffers_that_change(trainer: Trainer) -> None:
    refused_everywhere(
        trainer,
        lambda model: model.norm.train()(torch.randn(4, 5)),
        lambda model: model.norm.eval().load_state_dict(Model().norm.state_dict()),
        r"'norm\.running_mean', 'norm\.running_var'.* changed",
    )


def a_buffer_of_another_shape(trainer: Trainer) -> None:
    refused_everywhere(
        trainer,
        lambda model: setattr(model, "table", torch.zeros(7)),
        lambda model: setattr(model, "table", Model().table),
        r"buffer 'table'.*is now torch\.float32 \[7\]",
    )


def others_at_the_start(trainer: Trainer) -> None:
    """Nobody takes another's: the trainers do not meet, and all know why."""
    for name in ("head.weight", "mask"):
        model, _, loop = make()
        if trainer.rank == 2:
            tensor = model.state_dict()[name]
            tensor.copy_(tensor == 0)
        with pytest.raises(StateMismatch, match=rf"'{name}'.* trainers \[2\]"), loop:
            pass


def other_models(trainer: Trainer) -> None:
    model, optimizer, _ = make()
    if trainer.rank == 1:
        model.register_buffer("more", torch.zeros(2))
    with (
        pytest.raises(StateMismatch, match="buffers"),
        pulse_loco(model, optimizer, sync_every=1, timeout_seconds=10),
    ):
        pass


CASES: list[Callable[[Trainer], None]] = [
    unchanged,
    a_frozen_parameter_that_changes,
    buffers_that_change,
    a_buffer_of_another_shape,
    others_at_the_start,
    other_models,
]


def every(trainer: Trainer) -> list[str]:
    return each(trainer, CASES, SIZE)


@pytest.mark.slow
def test_trainers_keep_equal_what_no_optimizer_trains() -> None:
    assert together(every, SIZE, seconds=60) == [[], [], []]


def test_memory_shared_with_trained_parameters_is_theirs() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("view", model.weight.data[1])
    model.tied = nn.Parameter(model.bias.data, requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with pulse_loco(model, optimizer, sync_every=1) as loop:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert loop.round == 1
    assert not loop.frozen
