"""The entry point in ``vllm.general_plugins``: makes the weight-transfer backend ``pulse`` known to
a vLLM process."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...errors import EngineError, UnsupportedTensor

BACKEND = "pulse"
_LINEAR = "cpu_linear"
_ARGUMENTS = ("config", "vllm_config", "device", "model")
_METHODS = frozenset(
    {
        "init_transfer_engine",
        "start_weight_update",
        "receive_weights",
        "finish_weight_update",
        "shutdown",
    }
)


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once. Imports nothing but vLLM's
    own factory."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError:  # a vLLM without weight transfer: there is nothing to register with
        return
    from .processing import remember_before_processing

    if BACKEND not in Factory._registry:
        Factory.register_engine(
            BACKEND, "pulse_rl.engines.vllm.engine", "PulseWeightTransferEngine"
        )
    register_trainer()
    keep_plain_weights()
    remember_before_processing()


def register_trainer() -> None:
    """Makes the backend known to trainers that speak vLLM's own API. May be called again."""
    from vllm.distributed.weight_transfer import factory

    trainers = getattr(factory, "WeightTransferTrainerFactory", None)  # older ones have none
    if trainers is not None and BACKEND not in trainers._registry:
        trainers.register_engine(BACKEND, "pulse_rl.engines.vllm.trainer", "PulseTrainerEngine")


def _plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def keep_plain_weights() -> None:
    """Makes layers that are loaded for the backend ``pulse`` on a CPU keep their weights. May be
    called again."""
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
                hint="Start the engine with the plugin 'pulse' (see VLLM_PLUGINS) and the "
                "backend 'pulse'.",
            )


def for_pulse() -> bool:
    from vllm.config import get_current_vllm_config

    transfer = get_current_vllm_config().weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def require_fixed_places(config: Any) -> None:
    """Raises EngineError where vLLM moves weights while it runs, or wraps its layers after it has
    loaded them: a map would lead to others."""
    parallel, offload = config.parallel_config, getattr(config, "offload_config", None)
    if getattr(parallel, "enable_eplb", False) or getattr(parallel, "enable_elastic_ep", False):
        does = "moves experts between its workers (--enable-eplb, --enable-elastic-ep)"
    elif offload is not None and (
        offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size
    ):
        does = "moves layers through buffers that they share (--offload-group-size)"
    elif getattr(config, "lora_config", None) is not None:
        does = "wraps its layers for adapters (--enable-lora)"
    else:
        return
    raise EngineError(f"the engine {does}", hint="Start it without. Adapters are published merged.")


def require_caches_that_empty(config: Any) -> None:
    """Raises EngineError where what old weights have computed is kept outside of the engine, by a
    connector that does not drop it when it is asked to."""
    keys, outputs = (getattr(config, f"{kind}_transfer_config", None) for kind in ("kv", "ec"))
    kept = getattr(outputs, "ec_connector", None)
    if keys is not None and keys.kv_connector:
        from vllm.distributed.kv_transfer.kv_connector import factory, v1

        kind = factory.KVConnectorFactory.get_connector_class(keys)
        if kind.reset_cache is v1.KVConnectorBase_V1.reset_cache:
            kept = keys.kv_connector
    if kept:
        raise EngineError(
            f"the engine keeps what it has computed in {kept}, which cannot be emptied",
            hint="Start it without: requests would be answered from the old weights. A connector "
            "needs reset_cache().",
        )


def require_known(base: type, version: str) -> None:
    """Raises EngineError unless vLLM's class ``base`` asks its subclasses for what this package
    implements."""
    found = tuple(inspect.signature(base).parameters)
    asked: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    unknown = [*sorted(asked - _METHODS), *sorted(_METHODS - set(dir(base)))]
    if found != _ARGUMENTS:
        unknown.append(f"{base.__name__}({', '.join(found)})")
    if unknown:
        raise EngineError(
            f"the weight-transfer contract of vLLM {version} is not known: {', '.join(unknown)}",
            hint="Use a vLLM that this version of pulse-rl was tested with (docs/vllm.md).",
        )
