"""Engines compute with the parameters that the stream writes to, or are refused.

vLLM's CPU build packs linear weights at load: oneDNN and the AMX kernels read a private copy of each; the parameter is
emptied, or, for the head, goes on to exist without being read. Where the engine's weight-transfer backend is ``pulse``,
linear layers therefore compute with `torch.nn.functional.linear` on the parameter itself. Other engines in the process
are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import EngineError, UnsupportedTensor

BACKEND = "pulse"
_LINEAR = "cpu_linear"


def _plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def keep_plain_weights() -> None:
    """Makes layers that are loaded for the backend ``pulse`` on a CPU keep their weights. May be called again."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    pack = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if pack is None or getattr(pack, "_pulse", False):
        return

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        if for_pulse() and weight.ndim == 2 and not weight.is_meta:
            setattr(layer, _LINEAR, _plain_linear)
        else:
            pack(layer, remove_weight)

    dispatch._pulse = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def require_plain_weights(model: torch.nn.Module) -> None:
    """Raises UnsupportedTensor where a layer computes with a private copy of its weight."""
    for name, layer in model.named_modules():
        linear = getattr(layer, _LINEAR, None)
        if linear is not None and linear not in (_plain_linear, torch.nn.functional.linear):
            raise UnsupportedTensor(
                f"the engine computes {name!r} with a packed copy of its weight",
                hint="Start the engine with the plugin 'pulse' (see VLLM_PLUGINS) and the backend 'pulse'.",
            )


def for_pulse() -> bool:
    from vllm.config import get_current_vllm_config

    transfer = get_current_vllm_config().weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def require_fixed_places(config: Any) -> None:
    """Raises EngineError where vLLM moves experts between ranks while it runs: the map would lead to others."""
    if getattr(config.parallel_config, "enable_eplb", False):
        raise EngineError(
            "the engine moves experts between its workers (--enable-eplb)",
            hint="Start it without: a map is learnt once.",
        )
