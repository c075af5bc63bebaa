"""Several inner optimizers: who trains what, what an inner step is, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.errors import InputError, UnsupportedTensor
from pulse_rl.loco import DiLoCo, PulseLoCo
from tests.support.loco_reference import Job, Reference, flat, last_round, pulse_loco, same


def halves(job: Job, kind: Any = torch.optim.SGD, **settings: Any) -> tuple[Any, Any]:
    """The job's matrices and its vectors, an optimizer for each."""
    matrices = [p for p in job.model.parameters() if p.ndim == 2]
    vectors = [p for p in job.model.parameters() if p.ndim == 1]
    return kind(matrices, **settings), torch.optim.SGD(vectors, lr=0.1)


def step(job: Job, *optimizers: Any) -> None:
    job.backward(0)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("method", [PulseLoCo, DiLoCo])
def test_two_optimizers_are_one_that_trains_all(method: Any) -> None:
    one, two = Job(), Job()
    whole = torch.optim.SGD(one.model.parameters(), lr=0.1)
    parts = halves(two, lr=0.1)
    with (
        method(one.model, whole, sync_every=2) as alone,
        method(two.model, parts, sync_every=2) as loop,
    ):
        for _ in range(6):
            step(one, whole)
            step(two, *parts)
    assert (loop.round, loop.inner_step) == (alone.round, alone.inner_step) == (3, 0)
    assert same(flat(loop.global_state()), flat(alone.global_state()))
    step(two, *parts)
    assert loop.inner_step == 0, "no hook is left behind"
    assert not parts[0]._optimizer_step_pre_hooks


def test_muon_beside_adamw_equals_the_dense_algorithm() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    job = Job()
    muon, _ = halves(job, torch.optim.Muon, lr=1e-3)
    adamw = torch.optim.AdamW([p for p in job.model.parameters() if p.ndim == 1], lr=1e-3)
    loop = pulse_loco(job.model, iter([muon, adamw]), sync_every=2)
    reference, sent = Reference(flat(loop.global_state())), []
    adamw.register_step_post_hook(
        lambda *_: sent.append(reference.select(job.weights())[1]) if loop.inner_step == 1 else None
    )
    with loop:
        assert list(loop.global_state()) == sorted(name for name, _ in job.model.named_parameters())
        for _ in range(3):
            step(job, muon, adamw)
            step(job, muon, adamw)
            reference.outer_step([sent[-1]])
            reference.check(loop)
    assert last_round(loop).entries > 0


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_scaler_that_skips_one_of_two_optimizers(skipped: int) -> None:
    """The last one's steps are counted: a round never falls between two optimizers' steps of one
    batch."""
    job = Job()
    optimizers = halves(job, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    ends: list[tuple[int, int]] = []
    batches = 0
    with pulse_loco(
        job.model,
        optimizers,
        sync_every=2,
        on_round=lambda done: ends.append((done.number, batches)),
    ) as loop:
        for batches in range(6):
            job.backward(0)
            for p in job.model.parameters():
                p.grad = scaler.scale(p.grad)
            if batches == 2:
                next(p for p in job.model.parameters() if p.ndim == 2 - skipped).grad.fill_(
                    float("inf")
                )
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert ends == ([(1, 1), (2, 3), (3, 5)] if skipped == 0 else [(1, 1), (2, 4)])
    assert loop.inner_step == (0 if skipped == 0 else 1)


def test_the_order_of_the_list_is_that_of_the_steps() -> None:
    job = Job()
    first, last = halves(job, lr=0.1)
    with (
        pulse_loco(job.model, [last, first], sync_every=2),
        pytest.raises(InputError, match="steps after") as caught,
    ):
        step(job, first, last)
    assert "order" in caught.value.hint
    with pulse_loco(job.model, [first, last], sync_every=2) as loop:
        for _ in range(4):
            step(job, first, last)
            for p in job.model.parameters():
                p.grad.zero_()  # the same gradients, written
        assert loop.round == 2
        first.step(lambda: job.model(torch.ones(1, 24)).sum())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda m: [torch.optim.SGD(m.parameters()), torch.optim.SGD([m.bias])],
            r"'bias' is trained by optimizer 0.*1",
        ),
        (lambda m: 2 * [torch.optim.SGD(m.parameters())], r"optimizer 1 \(SGD\) is given twice"),
        (lambda m: [], "no optimizer"),
        (lambda m: [torch.optim.SGD(m.parameters()), m], "optimizer 1 is a Linear"),
        (
            lambda m: [
                torch.optim.SGD(m.parameters()),
                torch.optim.Adam([nn.Parameter(torch.ones(3, 5))]),
            ],
            r"optimizer 1 \(Adam\) trains tensors.*number 0 of group 0, float32 \[3, 5\]",
        ),
        (
            lambda m: torch.optim.SGD([("mine", nn.Parameter(torch.ones(2)))]),
            "the optimizer trains.*'mine'",
        ),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(make: Callable[[Any], Any], match: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=match):
        pulse_loco(model, make(model), sync_every=1)


def test_parameters_that_change_in_mid_run_are_named() -> None:
    job = Job()
    with pulse_loco(job.model, job.optimizer, sync_every=1) as loop:
        job.model[0].weight.requires_grad_(False)  # it stands still, and all is well
        job.step(0)
        before = flat(loop.global_state())
        job.model[0].weight.requires_grad_(True)
        job.step(0)
        assert loop.round == 2
        assert not same(flat(loop.global_state()), before)
    job = Job()
    first = torch.optim.SGD([job.model[0].weight], lr=0.1)
    with pulse_loco(job.model, first, sync_every=1):
        first.add_param_group({"params": [job.model[2].bias]})
        with pytest.raises(InputError, match=r"now also '2\.bias'"):
            step(job, first)
    with pulse_loco(job.model, first, sync_every=1):
        del first.param_groups[1:]
        with pytest.raises(InputError, match=r"no longer '2\.bias'"):
            step(job, first)
    with pulse_loco(job.model, first, sync_every=1):
        job.model.add_module("adapter", nn.Linear(7, 7))
        with pytest.raises(
            InputError, match=r"parameters have changed: 'adapter\.bias', 'adapter\.weight'"
        ):
            first.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.ones(1).expand(3),
        lambda: torch.ones(2, dtype=torch.complex128),
        lambda: nn.parameter.UninitializedBuffer(),
    ],
    ids=["sparse", "meta", "expanded", "complex128", "lazy"],
)
def test_what_cannot_be_kept_equal_is_refused_by_name(
    make: Callable[[], torch.Tensor], request: pytest.FixtureRequest
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", make(), persistent=False)
    with pytest.raises(UnsupportedTensor, match="buffer 'odd'"):
        pulse_loco(model, torch.optim.SGD(model.parameters()), sync_every=1)
    if request.node.callspec.id in ("sparse", "meta", "expanded"):
        model = nn.Linear(2, 2)
        model.odd = nn.Parameter(make(), requires_grad=False)
        with pytest.raises(UnsupportedTensor, match="parameter 'odd'"):
            pulse_loco(model, torch.optim.SGD([model.weight]), sync_every=1)
        with pytest.raises(UnsupportedTensor, match="parameter 'odd'"):
            pulse_loco(model, torch.optim.SGD([model.odd]), sync_every=1)
