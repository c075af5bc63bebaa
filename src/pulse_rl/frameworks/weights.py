"""What the integrations of trainers share: the weights that an inference engine loads, taken from a
model in training (wrapped, sharded, with adapters), and what the trainer's log says of the
stream."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedTensor
from ..events import BaselineRestored, Event, FallbackUsed, Hint, Listener, Metadata
from ..follow.checkpoint import adapter_names, unwrapped, without_wrappers
from ..state.cast import DTypeLike, compute_dtype_named
from .shards import FlatShard, has_flat_shards, is_fsdp1, named_tensors, zero3_shard
from .torch import _TORCH

T = TypeVar("T")
_SAMPLE = 1 << 16  # elements of a tensor
_MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_DEFAULT = torch.bfloat16
_DENSE = 0.5
_GATHERS = "Use PulseCallback, which gathers."
_ALONE = "Publish the adapter alone: PulseCallback(adapter=True)."
_ALONE_OR_MERGED = f"{_ALONE} Or publish what PEFT's merge_and_unload() returns."
_MERGED = "Publish merged weights: leave adapter=True out."
# PEFT's initializations of LoRA that leave the base as the checkpoint has it.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")


class Weights(dict[str, Any]):
    """Tensors by name, of which those named in ``uncast`` are not cast to a compute dtype."""

    uncast: frozenset[str] = frozenset()


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters are sharded (FSDP, ZeRO-3, tensor parallelism), so that
    `policy_weights` is a collective.

    Also where FSDP2 has made them whole, as it leaves them after an evaluation: taking them makes
    them shards again.
    """
    return (
        any(isinstance(module, _fsdp2()) for module in model.modules())
        or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        or has_flat_shards(model)
    )


def policy_weights(
    model: nn.Module, dtype: DTypeLike | None = None, *, keep: bool = True, gather: bool = True
) -> dict[str, torch.Tensor]:
    """The weights of the policy as a checkpoint of it has them, for `Publisher.publish`.

    ``model`` may be wrapped by DDP, DeepSpeed and torch.compile, sharded by FSDP2, FSDP1 and
    ZeRO-3, and have PEFT adapters, which are merged into copies: the model's own bits stay. Names
    and dtypes are the base model's; those of a Hugging Face model are what its ``save_pretrained``
    writes (`as_saved`). Gathered and merged tensors are cast to the compute dtype ``dtype`` if they
    are wider, and lie in host memory; all others are the model's own, uncast. Where `is_sharded`,
    all ranks call this together, which gathers one tensor at a time. Those that do not ``keep`` the
    result get none, and do nothing where they are not needed. Without ``gather`` a rank gets what
    is its own: DTensors, and a `FlatShard` of each parameter of FSDP1 and ZeRO-3.

    Raises UnsupportedTensor for quantized layers with adapters, adapters that cannot be merged, and
    adapters under FSDP1.
    """
    target = torch_dtype(dtype)
    if not (keep or is_sharded(model)):
        return {}
    core, fsdp1 = base_of(model), any(map(is_fsdp1, model.modules()))
    # 1. Adapters: each adapted layer is merged by itself.
    peft: Any = sys.modules.get("peft")
    if fsdp1 and peft and any(isinstance(module, peft.PeftModel) for module in model.modules()):
        raise UnsupportedTensor(
            "adapters under FSDP1 are not merged",
            hint="Set fsdp_version: 2 in accelerate's config.",
        )
    adapters, is_exact = _Adapters(core), _exact(core, target)
    if adapters.modules and not gather and is_sharded(model):
        raise UnsupportedTensor(
            "adapters over shards are merged on whole tensors",
            hint="Use PulseCallback, which gathers them.",
        )
    taken: dict[str, Any] = {}
    merged: dict[Any, torch.Tensor] = {}
    for path, layer in adapters.modules.items():
        # Tied tensors whose adapters are tied as well have one memory: they stay one tensor, into
        # which the adapter is merged once. PEFT's own LoRA merges both of them.
        base = {id(tensor) for tensor in _tensors_of(layer.get_base_layer())}
        own = frozenset(_place(t) for t in _tensors_of(layer) if id(t) not in base)
        before = layer.get_base_layer().state_dict(keep_vars=True)
        for name, tensor in _merged(path, layer, target, keep).items():
            taken[f"{path}.{name}"] = merged.setdefault((_place(before[name]), own), tensor)
    # 2. All other tensors. The units of FSDP1 know their parameters' names, the outermost one among
    # them.
    known: dict[int, Any] = {}
    exact: set[int] = set()
    for name, tensor in named_tensors(_without_wrappers(model) if fsdp1 else core).items():
        plain = adapters.plain(name)
        if plain is None:
            continue
        if id(tensor) not in known:  # one of several names is taken once, and stays one tensor
            gathered = gather and (hasattr(tensor, "full_tensor") or isinstance(tensor, FlatShard))
            detached = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
            narrow = None if is_exact(plain) else target
            known[id(tensor)] = cast_to_host(tensor, narrow, keep=keep) if gathered else detached
        taken[plain] = known[id(tensor)]
        if is_exact(plain):
            exact.add(_memory(taken[plain]))
    if not keep:
        return {}
    found = Weights(as_saved(core, unwrapped(taken)))
    if exact:
        found.uncast = frozenset(name for name, t in found.items() if _memory(t) in exact)
    _check_names(found)
    return found


def _exact(model: nn.Module, target: torch.dtype | None) -> Callable[[str], bool]:
    """Whether a transformers model keeps the tensor of a name in FP32 when it is loaded in
    ``target``, or in the dtype that it has."""
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if target == torch.float16 or getattr(model, "dtype", None) in (torch.float16, torch.bfloat16):
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    found = re.compile("|".join(sorted(patterns)).replace("*", ".*"))
    return lambda name: bool(patterns) and found.search(name) is not None


def _memory(tensor: Any) -> int:
    """The same number for a tensor and a part of it, on this rank."""
    if not isinstance(tensor, torch.Tensor):
        return id(tensor)
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return int(local.untyped_storage()._cdata)


def _place(tensor: Any) -> tuple[int, int]:
    """The same numbers for tensors of the same memory. All empty ones have the same address."""
    local = getattr(tensor, "_local_tensor", tensor)
    return (local.data_ptr(), local.numel()) if local.numel() else (id(tensor), 0)


def _check_names(tensors: Mapping[str, Any]) -> None:
    """Raises UnsupportedTensor where nothing was found, and for names that no checkpoint has."""
    if left := adapter_names(tensors):
        raise UnsupportedTensor(
            f"{left[0]!r} is a name of a PEFT adapter that was not merged",
            hint="Something wraps the adapted layer: publish the model without the wrapper, or "
            "call PEFT's merge_and_unload() first.",
        )
    if not tensors:
        raise UnsupportedTensor(
            "the model has no tensors to publish",
            hint="Publish the model that a wrapper or an EMA holds, or the PEFT model itself.",
        )


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """`policy_weights` of a model that one process holds whole. Raises UnsupportedTensor for one
    that is sharded: to gather it is a collective."""
    if is_sharded(model):
        raise UnsupportedTensor(
            "the parameters of the module are sharded over ranks",
            hint="Use PulseCallback, or ShardedPublisher on all ranks, which takes the model "
            "itself.",
        )
    return policy_weights(model)


def adapter_weights(
    model: nn.Module, dtype: DTypeLike | None = None, *, keep: bool = True
) -> tuple[dict[str, torch.Tensor], str]:
    """(the weights of the model's PEFT adapter by the names that PEFT saves, its config as JSON).

    ``dtype``, ``keep`` and wrappers are those of `policy_weights`; nothing is merged. Raises
    UnsupportedTensor where there is no adapter or more than one in use.
    """
    if not (keep or is_sharded(model)):
        return {}, ""
    core = _without_wrappers(model)
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(core, peft.PeftModel):
        raise UnsupportedTensor(
            "the model has no PEFT adapter", hint="Leave adapter=True out, or give a peft_config."
        )
    if has_flat_shards(core):
        raise UnsupportedTensor(
            "an adapter that FSDP1 or ZeRO-3 cuts is not published by itself",
            hint="Publish it merged, or use FSDP2.",
        )
    active = core.active_adapters
    if len(active) != 1:
        raise UnsupportedTensor(
            f"{len(active)} adapters are in use, {', '.join(active)}: an engine loads one",
            hint=f"Leave one in use with set_adapter(). Or: {_MERGED}",
        )
    config = core.peft_config[active[0]]
    _check_base(core, active[0], config)
    tensors = peft.get_peft_model_state_dict(
        core, _by_modules(core), adapter_name=active[0], save_embedding_layers=False
    )
    tensors = {without_wrappers(name): tensor for name, tensor in tensors.items()}
    _check_whole(core, config, tensors)
    target = torch_dtype(dtype)
    taken = {name: cast_to_host(tensor, target, keep=keep) for name, tensor in tensors.items()}
    settings = config.to_dict() | {"inference_mode": True}
    plain = {
        name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()
    }
    return (taken, json.dumps(plain, indent=2, sort_keys=True)) if keep else ({}, "")


def _by_modules(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The ``state_dict`` of a model by the names of its modules, in which PEFT looks for adapters;
    None where they are those of `state_dict`, as without wrappers that hide there."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if all(without_wrappers(path) == path for path in modules):
        return None
    found: dict[str, torch.Tensor] = {}
    for path, module in modules.items():
        module._save_to_state_dict(found, f"{path}." if path else "", keep_vars=False)
    return found


def _check_base(model: Any, active: str, config: Any) -> None:
    """Raises UnsupportedTensor unless an engine that loads the adapter over the checkpoint has the
    trainer's model."""
    init = getattr(config, "init_lora_weights", True)
    if (init.lower() if isinstance(init, str) else init) not in _KEEPS_BASE:
        raise UnsupportedTensor(
            f"init_lora_weights={init!r} changes the base, so that the adapter does not fit the "
            "checkpoint",
            hint=_MERGED,
        )
    for name, module in model.named_modules():
        if others := set(getattr(module, "merged_adapters", ())) - {active}:
            raise UnsupportedTensor(
                f"the adapter {min(others)!r} is merged into {name!r}, so that {active!r} does not "
                "fit the checkpoint",
                hint=_MERGED,
            )


def _check_whole(model: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedTensor where ``tensors``, a PEFT adapter, lack what has been trained."""
    if not tensors:
        raise UnsupportedTensor("the adapter has no tensors", hint=_MERGED)
    # PEFT names its own parameters by a prefix. All others are trained only if they are listed.
    listed = (getattr(model.base_model, "prefix", ""), "modules_to_save.", "trainable_tokens_")
    saved = {_memory(tensor) for tensor in tensors.values()}
    for name, parameter in model.named_parameters():
        of_adapter = not parameter.requires_grad or any(part in name for part in listed)
        if not of_adapter and _memory(parameter) not in saved:
            raise UnsupportedTensor(f"{name!r} is trained outside of the adapter", hint=_MERGED)
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    kind: Any = type(getattr(model, "config", None))
    before = _vocabulary(kind, config.base_model_name_or_path) if rows else None
    if before not in (None, rows) and _memory(model.get_input_embeddings().weight) not in saved:
        raise UnsupportedTensor(
            f"the vocabulary has {rows} tokens, and {before} in the checkpoint: its new rows are "
            "not in the adapter",
            hint=_MERGED,
        )


@cache
def _vocabulary(config: Any, name: str | None) -> int | None:
    """The size of the vocabulary of a checkpoint on this machine, None where that is not known."""
    try:
        found = config.from_pretrained(name, local_files_only=True).vocab_size if name else None
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def cast_to_host(
    tensor: torch.Tensor | FlatShard, target: torch.dtype | None, *, keep: bool = True
) -> torch.Tensor:
    """The whole tensor in host memory, cast to ``target`` if it is wider; itself if there is
    nothing to do. A collective for shards, of which those that do not ``keep`` the result get an
    empty one."""
    if isinstance(tensor, FlatShard):
        return tensor.to(_computed(tensor.dtype, target)).whole(keep=keep).cpu()
    narrow = tensor.detach().to(_computed(tensor.dtype, target))
    whole = narrow.full_tensor() if hasattr(narrow, "full_tensor") else narrow
    return whole.cpu() if keep else whole.new_empty(0)


def host_copy(tensor: torch.Tensor, target: torch.dtype | None) -> torch.Tensor:
    """A copy in host memory, cast to ``target`` if it is wider, before it leaves the device:
    generators of weights may use their tensors again."""
    return tensor.detach().to(_computed(tensor.dtype, target)).to("cpu", copy=True)


def log_lost(log: logging.Logger, stream: str, step: int, what: str, error: BaseException) -> None:
    """Logs why the last weights of a training are not ``what`` they should be."""
    words = "stream %s: the weights of step %d are not %s: %s. %s"
    log.error(words, stream, step, what, error, getattr(error, "hint", ""))


def step_facts(state: Any) -> Metadata:
    """The step and the epoch of a Trainer's ``state``, as metadata of a version."""
    facts: Metadata = {"step": state.global_step}
    if state.epoch is not None:
        facts["epoch"] = float(state.epoch)
    return facts


def torch_dtype(dtype: DTypeLike | None) -> torch.dtype | None:
    """torch's name of a compute dtype. Raises InputError."""
    return None if dtype is None else _TORCH[compute_dtype_named(dtype).name]


def base_of(model: nn.Module) -> nn.Module:
    """The model inside of DDP, DeepSpeed, FSDP1, torch.compile and PEFT. Raises UnsupportedTensor
    for adapters that have no merged weights, such as prompt learning."""
    model = _without_wrappers(model)
    while is_fsdp1(model):
        inner: Any = model.module
        model = _without_wrappers(inner)
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    # X-LoRA weighs its adapters for each token, though PEFT merges them. Prompt learning and
    # LLaMA-Adapter have no merge.
    by_token = model.peft_type == "XLORA"
    if by_token or not hasattr(model.base_model, "merge_and_unload"):
        raise UnsupportedTensor(
            f"an adapter of type {model.peft_type.value} has no merged weights",
            hint="Use LoRA, which is merged." + ("" if by_token else f" Or: {_ALONE}"),
        )
    base: nn.Module = model.get_base_model()
    return base


def of_first_rank(work: Callable[[bool], T]) -> T:
    """What ``work`` returns or raises on the first rank, on all of them: the others wait for it,
    and must hear of its error. All call it, with whether they are the first."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return work(True)
    outcome: Any
    try:
        outcome = work(distributed.get_rank() == 0)
    except Exception as error:
        outcome = error
    held = [outcome]
    distributed.broadcast_object_list(held)
    if isinstance(held[0], Exception):
        raise held[0]
    found: T = held[0]
    return found


def _without_wrappers(model: nn.Module) -> nn.Module:
    """The model inside of DDP, DeepSpeed and torch.compile."""
    deepspeed: Any = sys.modules.get("deepspeed")
    parallel: tuple[type, ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if deepspeed:
        parallel = (*parallel, deepspeed.DeepSpeedEngine)
    while True:
        inner = "_orig_mod" if hasattr(model, "_orig_mod") else "_checkpoint_wrapped_module"
        # AveragedModel, and averages of other libraries.
        alone = list(model._modules) == ["module"] and not (model._parameters or is_fsdp1(model))
        if isinstance(model, parallel) or (alone and not model._buffers.keys() - {"n_averaged"}):
            inner = "module"
        elif not hasattr(model, inner):
            return model
        model = getattr(model, inner)


def _computed(dtype: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    """``target`` for a float that is wider, anything else as it is."""
    if target is not None and dtype.is_floating_point and dtype.itemsize > target.itemsize:
        return target
    return dtype


# -- transformers: it is looked at only where the program has imported it


def as_saved(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """``tensors``, a ``state_dict`` of ``model``, by the names and in the form in which its
    ``save_pretrained`` writes them: without the other names of tied tensors, and with what
    transformers fuses in memory, such as experts, apart again. By transformers' own conversion; a
    part of a tensor is a view of it. Of DTensors each rank gets what lies in its own shard. What is
    no model of transformers stays as it is.

    Raises UnsupportedTensor for shards that such a part is only half in.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    loading: Any = sys.modules.get("transformers.core_model_loading")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return tensors
    left_out = set(model._keys_to_ignore_on_save or ())
    for alias, name in getattr(model, "all_tied_weights_keys", {}).items():
        if alias in tensors and tensors.get(name) is tensors[alias]:
            left_out.add(alias)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    if not hasattr(loading, "revert_weight_conversion"):  # before transformers 5 nothing was fused
        return tensors
    values = tensors.values()
    if not any(hasattr(each, "full_tensor") or isinstance(each, FlatShard) for each in values):
        return _reverted(model, loading, tensors)
    # What this rank has of its shards: the conversion is watched on empty tensors.
    whole = {
        name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()
    }
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in whole.items()}
    found: dict[str, Any] = {}
    for name, part in _reverted(model, loading, dict(whole)).items():
        source = sources.get(part.untyped_storage()._cdata)
        if source is None:
            raise UnsupportedTensor(
                f"{name!r} is computed from shards when the model is saved", hint=_GATHERS
            )
        tensor = tensors[source]
        if part.shape == tensor.shape and part.is_contiguous():
            found[name] = tensor
            continue
        first = part.storage_offset()
        if isinstance(tensor, FlatShard):
            if not part.is_contiguous():
                raise UnsupportedTensor(
                    f"{name!r} is no range of {source!r}, which is cut over ranks", hint=_GATHERS
                )
            found[name] = tensor.part(first, tuple(part.shape))
            continue
        last = first + sum(
            (size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)
        )
        local, start, stop = _rows_here(source, tensor)
        if start <= first and last < stop:
            found[name] = local.as_strided(
                part.shape, part.stride(), local.storage_offset() + first - start
            )
        elif first < stop and start <= last:
            raise UnsupportedTensor(
                f"this rank has a part only of {name!r}, which is fused into {source!r} in memory",
                hint="Shard fused experts by expert, along their first dimension, or use "
                "PulseCallback, which gathers.",
            )
    return found


def _reverted(model: nn.Module, loading: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    try:
        with _Views():
            found: dict[str, Any] = loading.revert_weight_conversion(model, tensors)
    except RuntimeError:  # an operation that needs its part in one piece
        found = loading.revert_weight_conversion(model, tensors)
    return found


class _Views(TorchFunctionMode):
    """Within it a part of a tensor is not copied into a piece of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _rows_here(name: str, tensor: Any) -> tuple[torch.Tensor, int, int]:
    """(what this rank has of a tensor, the numbers of its first element and of the one behind its
    last)."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.contiguous(), 0, tensor.numel()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as placed

    shape, offset = placed(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if tuple(local.shape) != tuple(shape) or tuple(shape[1:]) != tuple(tensor.shape[1:]):
        raise UnsupportedTensor(
            f"{name!r} holds several tensors of the checkpoint, and is sharded across them: "
            f"{tensor.placements}",
            hint="Shard fused experts by expert, along their first dimension, or use "
            "PulseCallback, which gathers.",
        )
    row = math.prod(tensor.shape[1:])
    return local.contiguous(), offset[0] * row, offset[0] * row + local.numel()


# -- PEFT: it is looked at only where the program has imported it


class _Adapters:
    """Where a model has adapters. ``modules`` are its adapted layers by name."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, Any] = {}
        self._saved: dict[str, str] = {}
        peft: Any = sys.modules.get("peft")
        if peft is None:
            return
        tuned = peft.tuners.tuners_utils.BaseTunerLayer
        for path, module in model.named_modules(remove_duplicate=False):
            name = without_wrappers(path)  # as in the `state_dict`
            if isinstance(module, peft.utils.ModulesToSaveWrapper):
                self._saved[name] = next(iter(module.active_adapters), "")
            elif isinstance(module, peft.utils.other.TrainableTokensWrapper):
                self.modules[name] = module.token_adapter
            elif isinstance(module, peft.utils.AuxiliaryTrainingWrapper):
                raise UnsupportedTensor(
                    f"{name!r} is a {type(module).__name__}, which cannot be merged aside",
                    hint=_ALONE_OR_MERGED,
                )
            elif (
                isinstance(module, tuned)
                and hasattr(module, "base_layer")
                and not any(path in self.modules for path in _prefixes(name + "."))
            ):
                if any(isinstance(inner, tuned) for inner in module.get_base_layer().modules()):
                    raise UnsupportedTensor(
                        f"{name!r} has adapters within what it adapts, which cannot be merged "
                        "aside",
                        hint=_ALONE_OR_MERGED,
                    )
                self.modules[name] = module

    def plain(self, name: str) -> str | None:
        """The base model's name of a tensor; None for one of an adapted layer, and one that the
        forward pass ignores."""
        name = without_wrappers(name)
        for path in _prefixes(name):
            if path in self.modules:
                return None
            if path in self._saved:
                adapter, rest = self._saved[path], name.removeprefix(path + ".")
                used = f"modules_to_save.{adapter}." if adapter else "original_module."
                return f"{path}.{rest.removeprefix(used)}" if rest.startswith(used) else None
        return name


def _prefixes(name: str) -> Iterator[str]:
    """The paths of the modules around the tensor ``name``, the longest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _merged(
    path: str, layer: Any, target: torch.dtype | None, keep: bool
) -> dict[str, torch.Tensor]:
    """The base layer's tensors, by its own names, with the adapters merged in FP32 (FP64 if the
    layer has any).

    PEFT merges into a copy of this one layer: merging in place and back again would let the base
    drift.
    """
    tensors = _tensors_of(layer)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    base = {id(tensor) for tensor in _tensors_of(layer.get_base_layer())}
    copies: dict[int, Any] = {}
    for tensor in tensors:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            if id(tensor) not in base or not tensor.ndim:  # an adapter's indices, a scale
                continue
            raise UnsupportedTensor(
                f"{path!r} has adapters over {tensor.dtype} weights",
                hint=f"Merging needs a base that is not quantized. {_ALONE}",
            )
        if hasattr(tensor, "ds_id"):
            whole = zero3_shard(path, tensor).whole(keep=keep)
        elif hasattr(tensor, "full_tensor"):
            whole = tensor.detach().full_tensor()
        else:
            whole = tensor.detach()
        whole = whole.to(wide, copy=True)
        copies[id(tensor)] = (
            nn.Parameter(whole, requires_grad=False) if isinstance(tensor, nn.Parameter) else whole
        )
    if not keep:
        return {}
    for module in layer.modules():  # views of parameters, which refuse to be copied
        tied = getattr(module, "kwargs", {}).get("tied_adapter") or {}
        copies |= {id(view): view.detach() for view in tied.values()}
    dtypes = {name: tensor.dtype for name, tensor in layer.get_base_layer().state_dict().items()}
    aside = _copied(layer, copies)
    try:
        for module in reversed(list(aside.modules())):
            if hasattr(module, "merge") and hasattr(module, "base_layer"):
                module.merge()
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedTensor(
            f"the adapters of {path!r} cannot be merged: {str(error) or type(error).__name__}",
            hint=_ALONE,
        ) from error
    merged: Mapping[str, torch.Tensor] = aside.get_base_layer().state_dict()
    return {name: t.to(_computed(dtypes[name], target)).cpu() for name, t in merged.items()}


def _tensors_of(module: nn.Module) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _copied(layer: nn.Module, copies: dict[int, Any]) -> Any:
    """A deep copy, in which ``copies`` take the place of tensors by id. What FSDP2 has made of
    modules, whose classes refuse to be copied, are the plain modules again: without its state and
    its hooks."""
    sharded = [module for module in layer.modules() if isinstance(module, _fsdp2())]
    for module in sharded:
        plain = next(cls for cls in type(module).__mro__[1:] if issubclass(cls, nn.Module))
        copies[id(module)] = plain.__new__(plain)
    for module in sharded:
        fresh = {name: value for name, value in nn.Module().__dict__.items() if "_hooks" in name}
        kept = {
            name: value
            for name, value in module.__dict__.items()
            if name not in fresh and not name.startswith("__composable_api")
        }
        copies[id(module)].__dict__.update(copy.deepcopy(kept, copies) | fresh)
    return copy.deepcopy(layer, copies)


def _fsdp2() -> tuple[type, ...]:
    """What modules are instances of that FSDP2 shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (fsdp.FSDPModule,) if fsdp and hasattr(fsdp, "FSDPModule") else ()


def logged(log: logging.Logger, listener: Listener | None) -> Listener:
    """A listener that logs notices as warnings and hands every event on to ``listener``. What is
    fused is so in the checkpoint, too, where `weights.as_saved` has made the names."""

    def hear(event: Event) -> None:
        if isinstance(event, Hint) and event.kind != "fused_names":
            log.warning("stream %s: %s. %s", event.stream, event.reason, event.hint)
        elif isinstance(event, FallbackUsed | BaselineRestored):
            log.info("%s", event)
        if listener:
            listener(event)

    return hear


def advice(model: nn.Module, optimizer: Any, lr: float, dtype: DTypeLike | None) -> list[str]:
    """Why patches of ``model``, published in ``dtype`` (None: as it is), will not be small. ``lr``
    counts where the ``optimizer`` says none."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if dtype is None:
        if any(p.dtype.itemsize > 2 for p in trained):
            return [
                "dtype=None publishes the trained weights in FP32, of which nearly all change at "
                "every step. "
                'Leave dtype at "BF16" unless the workers compute in FP32.'
            ]
        return []
    groups = getattr(optimizer, "param_groups", [])
    peak = max((float(group.get("initial_lr", group["lr"])) for group in groups), default=lr)
    adapted = any(hasattr(module, "base_layer") for module in model.modules())
    density = 0.0 if adapted else expected_density(model, peak)
    if density <= _DENSE:
        return []
    return [
        f"at the learning rate {peak:g} about {density:.0%} of the BF16 weights change in one "
        "step of Adam, so that patches save little. RL uses 1e-6 to 1e-5."
    ]


def expected_density(model: nn.Module, lr: float) -> float:
    """The share of all parameters that one step changes in BF16, if its update of each trained one
    is about ``lr``, as Adam's are.

    Behind wider weights an update crosses a rounding edge with chance lr / ulp; narrow ones absorb
    it below half an ulp. From samples, on this rank's shards alone.
    """
    changed, elements = 0.0, 0
    for parameter in model.parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        elements += local.numel()
        if not (parameter.requires_grad and local.is_floating_point() and local.numel()):
            continue
        sample = local.reshape(-1)[:: -(-local.numel() // _SAMPLE)].float()
        exponents = (torch.frexp(sample).exponent - 1).clamp(min=-126)
        wide = local.dtype.itemsize > _DEFAULT.itemsize
        ulps = torch.exp2((exponents - _MANTISSA_BITS[_DEFAULT if wide else local.dtype]).double())
        chances = (lr / ulps).clamp(max=1.0) if wide else (lr >= ulps / 2).double()
        changed += float(chances.mean()) * local.numel()
    return changed / max(elements, 1)
