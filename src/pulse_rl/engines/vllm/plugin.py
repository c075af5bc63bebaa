"""The entry point in ``vllm.general_plugins``: makes the weight-transfer backend ``pulse`` known to
a vLLM process; what vLLM must be for it; and what it does to weights after it has loaded them.

Modules that process their weights are noted before, so that the same is done again aside
(`processed`). Layers that vLLM quantizes when it loads them (``--quantization fp8_per_channel`` and
the like) are loaded in the checkpoint's dtype; their quantization method then replaces the weight
by a quantized one and its scales. For a new version the same method derives both again, from a
layer that is a copy but for its parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...errors import EngineError, UnsupportedTensor
from ..post_load import (
    HOOK,
    Before,
    Group,
    ProcessedLayer,
    group_of,
    like,
    module_names,
    remember,
    tensor_names,
    with_method,
)

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
#: What vLLM 0.26 and 0.27 ask for besides.
_FORMER = frozenset({"trainer_send_weights"})
# Parameters that vLLM neither reloads nor derives.
_KEPT = ("bias",)
_OF_CACHES = ("_scale", "_zero_point")
_HINT = (
    "Start the engine from the BF16 checkpoint with --quantization fp8_per_tensor, "
    "fp8_per_channel or fp8_per_block; or from a quantized checkpoint, and publish such ones."
)
_before: WeakKeyDictionary[nn.Module, dict[int, Before]] = WeakKeyDictionary()


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError:  # a vLLM without weight transfer: there is nothing to register with
        return

    if BACKEND not in Factory._registry:
        engine = "pulse_rl.engines.vllm.engine"
        Factory.register_engine(BACKEND, engine, "PulseWeightTransferEngine")
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
    return nn.functional.linear(x, weight, bias)


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

    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        if for_pulse() and weight.ndim == 2 and not weight.is_meta:
            setattr(layer, _LINEAR, _plain_linear)
        else:
            pack(layer, remove_weight)

    dispatch._pulse = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def require_plain_weights(model: nn.Module) -> None:
    """Raises UnsupportedTensor where a layer computes with a private copy of its weight."""
    for name, layer in model.named_modules():
        linear = getattr(layer, _LINEAR, None)
        if linear is not None and linear not in (_plain_linear, nn.functional.linear):
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
    unknown = [*sorted(asked - _METHODS - _FORMER), *sorted(_METHODS - set(dir(base)))]
    if found != _ARGUMENTS:
        unknown.append(f"{base.__name__}({', '.join(found)})")
    if unknown:
        raise EngineError(
            f"the weight-transfer contract of vLLM {version} is not known: {', '.join(unknown)}",
            hint="Use a vLLM that this version of pulse-rl was tested with (docs/vllm.md).",
        )


def remember_before_processing() -> None:
    """Makes vLLM's loaders note the state of modules before their weights are processed. May be
    called again."""
    from vllm.model_executor.model_loader import base_loader

    process: Any = getattr(base_loader, HOOK, None)
    if process is None or getattr(process, "_pulse", False):
        return

    @wraps(process)
    def noting(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if for_pulse() and model not in _before:
            subjects = [subject for group in _groups(model, None) for subject in group.subjects]
            _before[model] = found = remember(subjects, tensor_names(model))
            for subject in subjects:
                if _scales_caches(getattr(subject, "quant_method", None)):
                    forms = found[id(subject)].forms
                    for key in [key for key in forms if key.endswith(_OF_CACHES)]:
                        del forms[key]
        return process(model, *args, **kwargs)

    noting._pulse = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = noting


def processed_layers(
    model: nn.Module,
    act_dtype: Any,
    context: Callable[[], AbstractContextManager[Any]],
    known: Sequence[nn.Module],
) -> list[ProcessedLayer]:
    """The modules of ``model`` that process their weights, but for ``known`` ones. Raises
    UnsupportedTensor."""
    if hasattr(model, HOOK):
        raise UnsupportedTensor(
            f"{type(model).__name__} processes its weights as a whole, in a way that is not known"
        )
    before, layers = _before.get(model, {}), []
    for group in _groups(model, act_dtype):
        if not any(module is held for module in group.modules.values() for held in known):
            layers.append(ProcessedLayer(model, group, before, context))
        elif len(group.modules) > 1:
            raise UnsupportedTensor(
                f"the engine derives what {group.name!r} computes with from quantized weights"
            )
    return layers


def _deferred() -> Callable[[nn.Module], bool]:
    """Whether vLLM processes a module after all others."""
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
    except ImportError:  # before vLLM 0.28, whose loader has the classes
        from vllm.model_executor.model_loader import utils as loader

        names = ("Attention", "MLAAttention", "AttentionLayerBase", "MMEncoderAttention")
        kinds = tuple(getattr(loader, name) for name in names if hasattr(loader, name))
        return lambda module: isinstance(module, kinds) and hasattr(module, HOOK)
    found: Callable[[nn.Module], bool] = is_deferred_attention_layer
    return found


def _groups(model: nn.Module, act_dtype: Any) -> Iterator[Group]:
    is_deferred, names = _deferred(), module_names(model)
    deferred = [module for module in model.modules() if is_deferred(module)]
    within = {id(inner) for outer in deferred for inner in outer.modules()}
    for module in model.modules():
        if is_deferred(module):

            def at_last(copy_of: Callable[[Any], Any], root: nn.Module = module) -> None:
                copy_of(root).process_weights_after_loading(act_dtype)

            inner = list(module.modules())
            yield group_of(names, inner, [m for m in inner if _processes(m)], at_last)
        elif _processes(module) and id(module) not in within:
            yield group_of(names, with_method(module), [module])


def _processes(module: nn.Module) -> bool:
    """Whether the module's method does something after loading."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    # Its own method: a pooling model's placeholder for a head lends that of a missing layer.
    method = module._modules.get("quant_method") or vars(module).get("quant_method")
    if not isinstance(method, QuantizeMethodBase) or _scales_caches(method):
        return False
    return getattr(type(method), HOOK) is not getattr(QuantizeMethodBase, HOOK)


def _scales_caches(method: object) -> bool:
    """Whether the method makes numbers of a checkpoint's scales of keys and values. It is not run
    again: a session refuses streams that have such scales."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return isinstance(method, BaseKVCacheMethod)


def quantized_layers(
    model: nn.Module, quantization: str | None, context: Callable[[], AbstractContextManager[Any]]
) -> list[QuantizedLayer]:
    """The layers of a vLLM model that quantize what they load; ``context`` surrounds what their
    methods do. Raises UnsupportedTensor for a layer whose scheme is not known to derive its weights
    from the checkpoint's alone."""
    if not quantization:
        return []
    try:
        from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    except ImportError:
        raise _unsupported(
            f"this vLLM quantizes ({quantization}) in a way that is not known"
        ) from None

    layers: list[QuantizedLayer] = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not getattr(type(method), "uses_meta_device", False):
            continue  # what it loads are the checkpoint's codes
        if not isinstance(method, OnlineLinearBase) or method.requantization_source is not None:
            raise _unsupported(f"the engine's {name!r} is quantized by {type(method).__name__}")
        parameters, buffers = LAYERWISE_INFO[module].restore_metadata
        layers.append(QuantizedLayer(name, module, {**parameters, **buffers}, context))
    return layers


class QuantizedLayer:
    """``metadata``: the parameters with which vLLM had made ``module``, on the meta device."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        metadata: dict[str, torch.Tensor],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.plain = False
        self._prefix = f"{name}." if name else ""
        self.module, self._context = module, context
        self._metadata = {key: meta for key, meta in metadata.items() if key not in _KEPT}
        self._parameters = dict(module._parameters)
        self._kept = {key: self._parameters[key] for key in _KEPT if key in self._parameters}
        self.loaded = {self._prefix + key: meta for key, meta in self._metadata.items()}
        self.live = self._derived(self._parameters)

    def _derived(self, parameters: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """What of ``parameters`` vLLM derives, by their full names."""
        return {
            self._prefix + key: tensor
            for key, tensor in parameters.items()
            if tensor is not None and key not in _KEPT
        }

    def put_loaded(self) -> None:
        """Gives the live layer the parameters of the loaded form, for its loader to be watched."""
        self.module._parameters.clear()
        for key, meta in self._metadata.items():
            parameter = like(meta, torch.empty(meta.shape, dtype=meta.dtype))
            loader: Any = getattr(parameter, "weight_loader", None)
            # What counts elements while the model is loaded layer by layer.
            while hasattr(loader, "__wrapped__"):
                loader = loader.__wrapped__
            if loader is not None:
                parameter.weight_loader = loader  # type: ignore[attr-defined]
            self.module._parameters[key] = parameter  # type: ignore[assignment]
        self.module._parameters.update(self._kept)

    def put_live(self) -> None:
        """Gives the layer its live parameters back."""
        self.module._parameters.clear()
        self.module._parameters.update(self._parameters)

    def derive(self, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shadow = copy.copy(self.module)
        shadow.__dict__ = dict(self.module.__dict__)
        shadow._parameters = {
            key: like(meta, loaded[self._prefix + key])  # type: ignore[misc]
            for key, meta in self._metadata.items()
        }
        shadow._parameters |= self._kept
        shadow.__dict__.pop("_already_called_process_weights_after_loading", None)
        method: Any = self.module.quant_method
        owners = [method, *(part for part in vars(method).values() if hasattr(part, HOOK))]
        before = [dict(vars(owner)) for owner in owners]
        try:
            with self._context():
                method.process_weights_after_loading(shadow)
            changed = [
                key
                for owner, old in zip(owners, before, strict=True)
                for key in _changed(vars(owner), old)
            ]
        finally:
            for owner, old in zip(owners, before, strict=True):
                vars(owner).clear()
                vars(owner).update(old)
        own = _changed(vars(shadow), vars(self.module))
        changed += [key for key in own if key != "_parameters"]
        if changed:
            raise _unsupported(
                f"the engine's {self._prefix[:-1]!r} keeps what it derived in {', '.join(changed)}"
            )
        made = self._derived(shadow._parameters)
        return {name: tensor.detach() for name, tensor in made.items()}


def _changed(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Attributes with another value, but for plain ones that compare equal."""
    plain = (bool, int, float, str, type(None))
    return [
        key
        for key in now.keys() | before.keys()
        if now.get(key) is not before.get(key)
        and not (isinstance(now.get(key), plain) and now.get(key) == before.get(key))
    ]


def _unsupported(message: str) -> UnsupportedTensor:
    return UnsupportedTensor(message, hint=_HINT)
