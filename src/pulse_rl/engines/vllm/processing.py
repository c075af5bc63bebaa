"""What vLLM does to weights after it has loaded them: which modules do it, their state before, and
how the same is done again aside.

Layers that vLLM quantizes when it loads them (``--quantization fp8_per_channel`` and the like) are
loaded in the checkpoint's dtype; their quantization method then replaces the weight by a quantized
one and its scales. For a new version the same method derives both again, from a layer that is a
copy but for its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...errors import UnsupportedTensor
from ..processed import HOOK, Before, Group, ProcessedLayer, group_of, like, remember, tensor_names

_before: WeakKeyDictionary[nn.Module, dict[int, Before]] = WeakKeyDictionary()
_KEPT = ("bias",)
"""Parameters that vLLM neither reloads nor derives."""
_OF_CACHES = ("_scale", "_zero_point")
_HINT = (
    "Start the engine from the BF16 checkpoint with --quantization fp8_per_tensor, "
    "fp8_per_channel or fp8_per_block; "
    "or from a quantized checkpoint, and publish such ones."
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
        from .plugin import for_pulse

        if for_pulse() and model not in _before:
            names = tensor_names(model)
            subjects = [
                subject
                for group in _groups(model, None)
                for subject in (*group.modules.values(), *group.owners)
            ]
            _before[model] = found = remember(subjects, names)
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


def _groups(model: nn.Module, act_dtype: Any) -> Iterator[Group]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer as is_deferred

    names = {
        id(module): name
        for name, module in reversed(list(model.named_modules(remove_duplicate=False)))
    }
    within = {
        id(inner): outer
        for outer in model.modules()
        if is_deferred(outer)
        for inner in outer.modules()
    }
    for module in model.modules():
        if is_deferred(module):

            def at_last(copy_of: Callable[[Any], Any], root: nn.Module = module) -> None:
                copy_of(root).process_weights_after_loading(act_dtype)

            inner = list(module.modules())
            yield group_of(names, inner, [m for m in inner if _processes(m)], at_last)
        elif _processes(module) and id(module) not in within:
            method = module.quant_method
            yield group_of(names, [module, *(m for m in module.modules() if m is method)], [module])


def _processes(module: nn.Module) -> bool:
    """Whether the module's method does something after loading."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or _scales_caches(method):
        return False
    return getattr(type(method), HOOK) is not getattr(QuantizeMethodBase, HOOK)


def _scales_caches(method: object) -> bool:
    """Whether the method makes numbers of a checkpoint's scales of keys and values. It is not run
    again: a session refuses streams that have such scales."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return isinstance(method, BaseKVCacheMethod)


def quantized_layers(
    model: nn.Module,
    quantization: str | None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
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
        if not getattr(
            type(method), "uses_meta_device", False
        ):  # what it loads are the checkpoint's codes
            continue
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
        self._live = dict(module._parameters)

    @property
    def loaded(self) -> dict[str, torch.Tensor]:
        return {self._prefix + key: meta for key, meta in self._metadata.items()}

    @property
    def live(self) -> dict[str, torch.Tensor]:
        return {
            self._prefix + key: tensor
            for key, tensor in self._live.items()
            if tensor is not None and key not in _KEPT
        }

    def put_loaded(self) -> None:
        """Gives the live layer the parameters of the loaded form, for its loader to be watched."""
        self.module._parameters.clear()
        for key, meta in self._metadata.items():
            parameter = like(meta, torch.empty(meta.shape, dtype=meta.dtype))
            loader: Any = getattr(parameter, "weight_loader", None)
            while hasattr(
                loader, "__wrapped__"
            ):  # what counts elements while the model is loaded layer by layer
                loader = loader.__wrapped__
            if loader is not None:
                parameter.weight_loader = loader  # type: ignore[attr-defined]
            self.module._parameters[key] = parameter  # type: ignore[assignment]
        for key in _KEPT:
            if key in self._live:
                self.module._parameters[key] = self._live[key]

    def put_live(self) -> None:
        """Gives the layer its live parameters back."""
        self.module._parameters.clear()
        self.module._parameters.update(self._live)

    def derive(self, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shadow = copy.copy(self.module)
        shadow.__dict__ = dict(self.module.__dict__)
        shadow._parameters = {
            key: like(meta, loaded[self._prefix + key])  # type: ignore[misc]
            for key, meta in self._metadata.items()
        }
        shadow._parameters |= {key: self._live[key] for key in _KEPT if key in self._live}
        shadow.__dict__.pop("_already_called_process_weights_after_loading", None)
        method: Any = self.module.quant_method
        owners = [
            method,
            *(
                part
                for part in vars(method).values()
                if hasattr(part, "process_weights_after_loading")
            ),
        ]
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
        changed += [
            key for key in _changed(vars(shadow), vars(self.module)) if key != "_parameters"
        ]
        if changed:
            raise _unsupported(
                f"the engine's {self._prefix[:-1]!r} keeps what it derived in {', '.join(changed)}"
            )
        return {
            self._prefix + key: tensor.detach()
            for key, tensor in shadow._parameters.items()
            if tensor is not None and key not in _KEPT
        }


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
