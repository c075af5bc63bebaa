"""What vLLM does to weights after it has loaded them: which modules do it, and their state before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...errors import UnsupportedTensor
from ..engines.processed import Before, Group, ProcessedLayer, remember, tensor_names

_HOOK = "process_weights_after_loading"
_before: WeakKeyDictionary[nn.Module, dict[int, Before]] = WeakKeyDictionary()


def remember_before_processing() -> None:
    """Makes vLLM's loaders note the state of modules before their weights are processed. May be called again."""
    from vllm.model_executor.model_loader import base_loader

    process: Any = getattr(base_loader, _HOOK, None)
    if process is None or getattr(process, "_pulse", False):
        return

    @wraps(process)
    def noting(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from .plain import for_pulse

        if for_pulse() and model not in _before:
            names = tensor_names(model)
            subjects = [
                subject for group in _groups(model, None) for subject in (*group.modules.values(), *group.owners)
            ]
            _before[model] = remember(subjects, names)
        return process(model, *args, **kwargs)

    noting._pulse = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = noting


def processed_layers(
    model: nn.Module, act_dtype: Any, context: Callable[[], AbstractContextManager[Any]], known: Sequence[nn.Module]
) -> list[ProcessedLayer]:
    """The modules of ``model`` that process their weights, but for ``known`` ones. Raises UnsupportedTensor."""
    if hasattr(model, _HOOK):
        raise UnsupportedTensor(f"{type(model).__name__} processes its weights as a whole, in a way that is not known")
    before, layers = _before.get(model, {}), []
    for group in _groups(model, act_dtype):
        if not any(module is held for module in group.modules.values() for held in known):
            layers.append(ProcessedLayer(model, group, before, context))
        elif len(group.modules) > 1:
            raise UnsupportedTensor(f"the engine derives what {group.name!r} computes with from quantised weights")
    return layers


def _groups(model: nn.Module, act_dtype: Any) -> Iterator[Group]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer as is_deferred

    names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    within = {id(inner): outer for outer in model.modules() if is_deferred(outer) for inner in outer.modules()}
    for module in model.modules():
        if is_deferred(module):
            yield _group(names, module, list(module.modules()), act_dtype, deferred=True)
        elif _processes(module) and id(module) not in within:
            method = module.quant_method
            inner = [module, *(m for m in module.modules() if m is method)]
            yield _group(names, module, inner, act_dtype, deferred=False)


def _group(
    names: dict[int, str], root: nn.Module, modules: list[nn.Module], act_dtype: Any, *, deferred: bool
) -> Group:
    owners: list[Any] = []
    processing = [module for module in modules if _processes(module)]

    def own(value: Any) -> None:
        known = any(value is held for held in (*owners, *modules))
        if (
            not known
            and not isinstance(value, type)
            and callable(getattr(value, _HOOK, None))
            and hasattr(value, "__dict__")
        ):
            owners.append(value)
            for inner in list(vars(value).values()):
                own(inner)

    for module in modules:
        if module in processing:
            own(module.quant_method)
        for value in list(vars(module).values()):
            own(value)

    def process(copy_of: Callable[[Any], Any]) -> None:
        for module in processing:
            copied = copy_of(module)
            if copied.quant_method is not copy_of(module.quant_method):
                raise UnsupportedTensor(
                    f"the engine's {names[id(module)]!r} has got another method since it was loaded"
                )
            copied.quant_method.process_weights_after_loading(copied)
        if deferred:
            copy_of(root).process_weights_after_loading(act_dtype)

    return Group(names[id(root)], {names[id(module)]: module for module in modules}, owners, process)


def _processes(module: nn.Module) -> bool:
    """Whether the module's method does something after loading."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    return getattr(type(method), _HOOK) is not getattr(QuantizeMethodBase, _HOOK)
