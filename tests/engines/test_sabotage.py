"""Plugins that change what an engine computes with: mapped right, derived again, or refused before
it is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from pulse_rl.engines.vllm import connect
from pulse_rl.errors import UnsupportedTensor

from .engines import answer, engine
from .policy import Policy

Patch = pytest.MonkeyPatch
VICTIM = "model.layers.1.mlp.down_proj"


def after_loading(patch: Patch, change: Callable[[Any], None]) -> None:
    """Changes a layer once vLLM is done with it."""
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def then_change(model: Any, *args: Any) -> None:
        process(model, *args)
        change(model.get_submodule(VICTIM))

    patch.setattr(base_loader, "process_weights_after_loading", then_change)


def in_processing(
    patch: Patch, change: Callable[[Any], None], apply: Callable[..., torch.Tensor]
) -> None:
    """Changes a layer while vLLM processes it, and computes with the result."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as Method

    process, applied = Method.process_weights_after_loading, Method.apply

    def changed(self: Any, layer: Any) -> None:
        process(self, layer)
        if layer.prefix == VICTIM:
            change(layer)

    def other(
        self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return apply(layer, x) if layer.prefix == VICTIM else applied(self, layer, x, bias)

    patch.setattr(Method, "process_weights_after_loading", changed)
    patch.setattr(Method, "apply", other)


def flip(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data.flip(0).clone())


def scale(layer: Any) -> None:
    layer.weight.data.mul_(1.5)


def keep(layer: Any) -> None:
    layer.mine = layer.weight.data.t().contiguous()


def compute_with_a_copy(layer: Any) -> None:
    mine = layer.weight.data.clone()
    layer.forward = lambda x: (linear(x, mine), None)


HANDLED: dict[str, tuple[Any, Any]] = {
    "rows permuted": (flip, lambda layer, x: linear(x, layer.weight).flip(-1)),
    "scaled": (scale, lambda layer, x: linear(x, layer.weight)),
    "a copy": (keep, lambda layer, x: x @ layer.mine),
}
DIFFERS = "does not compute with the checkpoint .* it differs in 1 tensor, " + VICTIM
UNUSED = f"the engine's '{VICTIM}' do not compute with the weights"
REFUSED = {
    "rows permuted": (flip, "auto", DIFFERS),
    "scaled": (scale, "auto", DIFFERS),
    "a copy": (compute_with_a_copy, "auto", UNUSED),
    "rows permuted, dummy": (flip, "dummy", UNUSED),
    "a copy, dummy": (compute_with_a_copy, "dummy", UNUSED),
}


@pytest.fixture
def patch(monkeypatch: Patch) -> Patch:
    monkeypatch.setenv(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # the plugins of this process are the engine's
    return monkeypatch


@pytest.mark.slow
@pytest.mark.parametrize("case", HANDLED)
def test_what_is_done_while_a_layer_is_processed_is_done_again(
    policy: Policy, patch: Patch, case: str
) -> None:
    in_processing(patch, *HANDLED[case])
    with (
        engine(policy.checkpoint) as llm,
        connect(llm, store=policy.store, stream="policy") as handle,
    ):
        for density in (0.02, 0.9, 0.02):
            policy.step(density)
            assert handle.sync() is not None
        assert handle.audit(functional=True) == ()
        followed = answer(llm)
    with engine(policy.save("last")) as llm:
        fresh = answer(llm)
    assert torch.equal(followed[0], fresh[0])


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == "a copy" else pytest.mark.slow) for c in REFUSED]
)
def test_what_is_done_behind_the_processing_is_refused(
    policy: Policy, patch: Patch, case: str
) -> None:
    change, load_format, reason = REFUSED[case]
    after_loading(patch, change)
    policy.step(0.02)
    with engine(policy.checkpoint, load_format=load_format) as llm:
        before = answer(llm)
        for _ in range(2):  # the second finds no session of the first
            with pytest.raises(UnsupportedTensor, match=reason):
                connect(llm, store=policy.store, stream="policy")
        assert torch.equal(answer(llm)[0], before[0])
