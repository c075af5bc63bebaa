"""One trainer alone: rounds against the dense algorithm, what may be trained, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.errors import InputError, NonFinite
from pulse_rl.loco import Round
from tests.support.loco_reference import Job, Reference, flat, last_round, pulse_loco, same


def sgd(
    *values: float, lr: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], Any]:
    """A single tensor and an optimizer that takes its gradient off it."""
    w = nn.Parameter(torch.tensor(values, dtype=dtype))
    return {"w": w}, torch.optim.SGD([w], lr=lr)


def move(parameters: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, *by: float) -> None:
    (w,) = parameters.values()
    w.grad = torch.tensor(by, dtype=w.dtype)
    optimizer.step()


@pytest.mark.parametrize("compression", ["fp32", "bf16", "e8m2", "e8m0"])
@pytest.mark.parametrize(
    "gate", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounds_equal_the_dense_algorithm(
    dtype: torch.dtype, gate: torch.dtype, compression: str
) -> None:
    job = Job(dtype=dtype, lr=1e-2 if dtype == torch.bfloat16 else 1e-3)
    loop = pulse_loco(
        job.model, job.optimizer, sync_every=3, gate_dtype=gate, compression=compression, threads=2
    )
    reference = Reference(
        flat(loop.global_state()), gate_dtype=gate, compression=compression, model_dtype=dtype
    )
    selected: list[Any] = []
    job.optimizer.register_step_post_hook(
        lambda *_: selected.append(reference.select(job.weights())) if job.steps % 3 == 0 else None
    )
    with loop:
        for number in range(5):
            for _ in range(3):
                job.step(0)
            s, sent = selected[-1]
            reference.outer_step([sent])
            reference.check(loop)
            assert same(
                s, torch.where(sent == 0, flat(loop.residual()), sent + flat(loop.residual()))
            ), "s is not whole"
            assert (last_round(loop).number, last_round(loop).trainers) == (number + 1, 1)
            assert last_round(loop).sent_bytes == 0
            assert 0 < last_round(loop).entries < last_round(loop).parameters


def test_small_steps_add_up_until_the_gate_opens() -> None:
    """1 moves by 2^-11 a round; its neighbor below is 1 - 2^-8; half of that is a tie, which goes
    to the even 1."""
    parameters, optimizer = sgd(1.0, 1.0)
    rounds: list[Round] = []
    settings = {"sync_every": 1, "outer_lr": 1, "outer_momentum": 0, "lookahead": 0}
    with pulse_loco(parameters, optimizer, on_round=rounds.append, **settings) as loop:
        for k in range(1, 5):
            move(parameters, optimizer, 2.0**-11, 0)
            assert loop.residual()["w"].tolist() == [k * 2.0**-11, 0]
            assert parameters["w"].tolist() == [1, 1]
        move(parameters, optimizer, 2.0**-11, 0)
        assert loop.residual()["w"].tolist() == [0, 0]
        assert (
            parameters["w"].tolist() == loop.global_state()["w"].tolist() == [1 - 5 * 2.0**-11, 1]
        )
    assert [r.entries for r in rounds] == [0, 0, 0, 0, 1]
    assert rounds[0].root == rounds[3].root != rounds[4].root


def test_the_cast_of_theta_is_no_pseudo_gradient() -> None:
    """A BF16 model holds theta as cast. If it did not move it sends nothing, however far theta is
    from its cast."""
    parameters, optimizer = sgd(1.0, -3.0, dtype=torch.bfloat16)
    with pulse_loco(parameters, optimizer, sync_every=1, outer_lr=0.3, outer_momentum=0) as loop:
        move(parameters, optimizer, 2.0**-7, 2.0**-5)
        theta = loop.global_state()["w"].clone()
        assert not same(theta, theta.bfloat16().float())
        for _ in range(3):
            move(parameters, optimizer, 0, 0)
            assert last_round(loop).entries == 0
            assert same(loop.global_state()["w"], theta)
            assert not loop.residual()["w"].any()


# -- what is trained


def test_tied_and_frozen_parameters_and_several_groups() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    frozen = model["c"].weight.detach().clone()
    groups = [
        {"params": [model["a"].weight], "lr": 0.1},
        {"params": [model["b"].bias, model["a"].bias, model["c"].bias]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.2)
    with pulse_loco(model, optimizer, sync_every=1, outer_lr=1, outer_momentum=0) as loop:
        assert list(loop.global_state()) == ["a.bias", "a.weight", "b.bias", "c.bias"]
        x = torch.randn(8, 4)
        sum(model[k](x).square().mean() for k in "abc").backward()
        expected = {
            p: p.detach() - lr * p.grad
            for p, lr in ((model["a"].weight, 0.1), (model["c"].bias, 0.2))
        }
        optimizer.step()
        # theta - (theta - w), which is w but for the rounding of the difference
        for p, value in expected.items():
            torch.testing.assert_close(p.detach(), value)
        assert model["b"].weight is model["a"].weight
        assert same(model["c"].weight, frozen)


def test_masters_are_given_by_name() -> None:
    """An optimizer that trains FP32 copies of a BF16 model."""
    model = nn.Linear(4, 4).bfloat16()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.1)
    with pytest.raises(InputError, match="not parameters of the model") as caught:
        pulse_loco(model, optimizer, sync_every=1)
    assert "mapping" in caught.value.hint
    with pulse_loco(masters, optimizer, sync_every=1, outer_lr=1, outer_momentum=0) as loop:
        for p in masters.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert loop.round == 1
        assert same(masters["bias"], loop.global_state()["bias"])


WRONG: list[dict[str, Any]] = [
    {"sync_every": 0},
    {"outer_lr": 0},
    {"outer_lr": math.nan},
    {"outer_momentum": 1},
    {"gate_dtype": torch.int8},
    {"compression": "int8"},
    {"timeout_seconds": 0},
    {"timeout_seconds": -1},
    {"lookahead": -1.0},
    {"lookahead": math.nan},
    {"lookahead": "much"},
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    job = Job()
    with pytest.raises(InputError, match=next(iter(settings))):
        pulse_loco(job.model, job.optimizer, **({"sync_every": 1} | settings))


@pytest.mark.parametrize(
    ("model", "trained", "match"),
    [
        (lambda m: m.half(), lambda m: m.parameters(), "float16"),
        (lambda m: {}, lambda m: m.parameters(), "not parameters"),
        (lambda m: m, lambda m: [nn.Parameter(torch.ones(1))], "not parameters"),
    ],
)
def test_what_cannot_be_used_is_refused(
    model: Callable[[Any], Any], trained: Callable[[Any], Any], match: str
) -> None:
    given = nn.Linear(2, 2)
    with pytest.raises(InputError, match=match):
        pulse_loco(model(given), torch.optim.SGD(trained(given)), sync_every=1)


def test_several_trainers_need_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = Job()
    with (
        pytest.raises(InputError, match="not initialized"),
        pulse_loco(job.model, job.optimizer, sync_every=1),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_parameters_of_any_layout_are_read_and_written(dtype: torch.dtype) -> None:
    """In the model's own memory; autograd hears of each."""
    whole = torch.arange(1200, dtype=torch.float32).reshape(30, 40).to(dtype)
    expected = whole.t().clone().contiguous()
    named = {
        "t": nn.Parameter(whole.t()),
        "scalar": nn.Parameter(torch.tensor(3.0, dtype=dtype)),
        "none": nn.Parameter(torch.ones(0, 3, dtype=dtype)),
    }
    optimizer = torch.optim.SGD(named.values(), lr=1.0)
    with pulse_loco(
        named, optimizer, sync_every=1, outer_lr=1, outer_momentum=0, lookahead=0
    ) as loop:
        before = {name: p._version for name, p in named.items()}
        for p in named.values():
            p.grad = -p.detach().clone()  # twice the value passes any gate
        optimizer.step()
        assert same(loop.global_state()["t"].to(dtype), 2 * expected)
    assert same(named["t"].detach(), 2 * expected)
    assert named["scalar"].item() == 6
    assert all(named[name]._version > before[name] for name in ("t", "scalar"))


# -- misuse


def test_a_model_loaded_after_construction_is_no_pseudo_gradient() -> None:
    job, other = Job(0), Job(1)
    loop = pulse_loco(job.model, job.optimizer, sync_every=1)
    job.model.load_state_dict(other.model.state_dict())
    with loop:
        assert same(flat(loop.global_state()), other.weights())


def test_a_parameter_that_joins_the_optimizer_later_is_not_overlooked() -> None:
    job = Job()
    with pulse_loco(job.model, job.optimizer, sync_every=1):
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        with pytest.raises(InputError):
            job.step(0)


def test_no_hook_is_left_behind() -> None:
    job = Job()
    loop = pulse_loco(job.model, job.optimizer, sync_every=2)
    with suppress(KeyError), loop:
        job.step(0)
        raise KeyError
    job.step(0)
    assert (loop.round, loop.inner_step) == (0, 1)
    with loop:  # and it goes on
        job.step(0)
    assert loop.round == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**64, -3e38])
@pytest.mark.parametrize("compression", ["fp32", "bf16", "e8m0"])
def test_what_is_not_finite_changes_nothing(value: float, compression: str) -> None:
    parameters, optimizer = sgd(1.0, 2.0, 3.0)
    with pulse_loco(parameters, optimizer, sync_every=1, compression=compression) as loop:
        move(parameters, optimizer, 0.5, 1e-6, 0.1)
        before = loop.state_dict()
        with pytest.raises(NonFinite, match="'w'"):
            move(parameters, optimizer, 0, value, 0)
        with pytest.raises(NonFinite, match="'w'"):
            move(parameters, optimizer, 0, 0, 0)
        after = loop.state_dict()
        assert all(same(before[k]["w"], after[k]["w"]) for k in ("global", "momentum", "residual"))
        loop.rewind()
        move(parameters, optimizer, 0.5, 1e-6, 0.1)
        assert loop.round == 2
        assert torch.isfinite(loop.global_state()["w"]).all()


def test_a_value_that_is_too_large_only_as_rounded_changes_nothing() -> None:
    """The largest number below 2^64 is 2^64 in BF16."""
    parameters, optimizer = sgd(1.0)
    with pulse_loco(parameters, optimizer, sync_every=1, compression="bf16") as loop:
        with pytest.raises(NonFinite, match="'w'"):
            move(parameters, optimizer, 1.8446743e19)
        assert loop.global_state()["w"].item() == 1


def test_the_largest_steps_leave_theta_finite() -> None:
    parameters, optimizer = sgd(1.0, lr=2.0**63)
    with pulse_loco(parameters, optimizer, sync_every=1, outer_lr=1.0) as loop:
        for _ in range(10):
            move(parameters, optimizer, 1.0)
        assert loop.round == 10
        assert torch.isfinite(loop.global_state()["w"]).all()
