"""Quantized states: codes and scales of a state's weights, under the names that checkpoints of each
format have.

Computed on each read, as `cast` does it, in FP32 and with the rounding of the libraries that define
the formats (docs/quantized.md has the rules): nothing is held but the scales of blocks, and one
number a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ..errors import InputError, UnsupportedTensor
from ..state.bits import UIntArray
from ..state.cast import CastTensor, compute_dtype, is_float, to_f32
from ..state.tensors import DTYPES, DType, Readable, State, TensorSpec, stored_tensor
from .formats import (
    FORMATS,
    TILE,
    Computed,
    Format,
    Made,
    OfTensor,
    PowersOfTwo,
    Source,
    gpt_oss_mxfp4,
    modelopt_nvfp4,
)

#: What `Publisher.publish` takes: a format of `FORMATS`, a checkpoint's ``quantization_config``, or
#: a function.
Quantize = str | Mapping[str, Any] | Callable[[str, Any], Mapping[str, Any] | None]

#: Under which a ``quantization_config`` has the modules that are left out.
KEPT_KEYS = ("modules_to_not_convert", "ignore", "exclude_modules")
_MODELOPT = {"NVFP4": "input_scale", "W4A16_NVFP4": ""}
_COMPRESSED = {
    "mxfp8-quantized": "mxfp8",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}
# What no format quantizes unless a configuration says otherwise: what is no linear layer, and the
# routers of experts.
_PACKED = re.compile(r"(?:qweight|weight_packed)$")
_SCALE = re.compile(
    r"(?:^|[._])(?:scales?|absmax|amax|quant_map|SCB|zeros?|zero_point)(?:_[a-z0-9]+)?$"
)
_CUT = re.compile(r"[._](?!bias$)")
_KEPT = ("*lm_head", "*embed*", "*.wte", "*.wpe", "*norm*", "*router*", "*.gate")


class QuantizedState(State):
    """``state`` as a checkpoint of a quantized model, computed on each read. What is not quantized
    stays as it is, or is cast to ``dtype`` where it is a wider float. Tied tensors stay tied.
    ``made``: by each weight's name, what it becomes; ``kept``: the modules with a weight that is
    not quantized. Raises InputError and UnsupportedTensor."""

    def __init__(self, state: State, quantize: Quantize, dtype: DType | None = None) -> None:
        wanted = _chosen(quantize)
        specs: list[TensorSpec] = []
        data: dict[str, Any] = {}
        self.made: dict[str, list[Made]] = {}
        kept: list[str] = []
        uncast = state.uncast | {s.name for s in state.specs if s.name.endswith("_scale")}
        uncast |= exact_names(state.specs)
        for spec in state.specs:
            made = wanted(Source(state, spec))
            if made is None:
                if len(spec.shape) == 2:
                    kept.append(spec.name.removesuffix(".weight"))
                # A scale that came with the state, of a layer's inputs say, is FP32 in all formats.
                target = spec.dtype
                if dtype is not None and spec.name not in uncast:
                    target = compute_dtype(spec, dtype)
                made = [Made(spec.name, target.name, spec.shape, cast_tensor(state, spec, target))]
            self.made[spec.name] = made
            for each in made:
                if each.name in data:
                    raise InputError(f"two tensors would be called {each.name!r}")
                specs.append(TensorSpec(each.name, DTYPES[each.dtype], each.shape))
                data[each.name] = each.data
        aliases = {
            alias + each.name.removeprefix(name): each.name
            for alias, name in state.aliases.items()
            for each in self.made[name]
        }
        super().__init__(tuple(specs), data, aliases)
        whole = {name for name, made in self.made.items() if [each.name for each in made] == [name]}
        self.kept = kept + [
            alias.removesuffix(".weight") for alias, name in state.aliases.items() if name in whole
        ]


def cast_tensor(state: State, spec: TensorSpec, dtype: DType) -> UIntArray | Readable:
    """A tensor of a state, as it is or in another ``dtype``."""
    if dtype == spec.dtype:
        return stored_tensor(state, spec.name)
    return CastTensor(state, spec.name, dtype)


def exact_names(specs: Iterable[TensorSpec]) -> set[str]:
    """The names of scales of quantized weights, which no cast may round."""
    specs = tuple(specs)
    codes = {
        spec.name
        for spec in specs
        if (spec.dtype.width == 1 and spec.dtype.name != "BOOL") or _PACKED.search(spec.name)
    }
    if not codes:
        return set()
    return {
        spec.name
        for spec in specs
        if _SCALE.search(spec.name)
        or any(spec.name[: cut.start()] in codes for cut in _CUT.finditer(spec.name))
    }


def mixed_names(
    specs: Iterable[TensorSpec], dtype: DType, uncast: Collection[str]
) -> tuple[str, ...]:
    """The tensors that a cast to ``dtype`` rounds, if most of the state is that narrow already."""
    floats = [spec for spec in specs if "F" in spec.dtype.name]
    wide = [s for s in floats if s.name not in uncast and compute_dtype(s, dtype) != s.dtype]
    mixed = 2 * sum(s.elements for s in wide) <= sum(s.elements for s in floats)
    return tuple(spec.name for spec in wide) if mixed else ()


def config_of(quantize: Quantize, kept: Collection[str]) -> dict[str, Any] | None:
    """What the config.json of a quantized model says under ``quantization_config``, as the
    libraries that define the formats write it; None of what a function makes. ``kept`` are the
    modules that are left out."""
    if callable(quantize):
        return None
    if not isinstance(quantize, str):
        return dict(quantize)
    name = quantize
    if name == "fp8_block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [TILE, TILE],
            "modules_to_not_convert": sorted(kept),
        }
    (written,) = (written for written, of in _COMPRESSED.items() if of == name)
    whole = name == "nvfp4"
    weights = {
        "num_bits": 8 if name == "mxfp8" else 4,
        "type": "float",
        "symmetric": True,
        "group_size": OfTensor.size if whole else PowersOfTwo.size,
        "strategy": "tensor_group" if whole else "group",
        "dynamic": False,
    }
    weights["scale_dtype"] = weights["zp_dtype"] = "torch.float8_e4m3fn" if whole else "torch.uint8"
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": sorted(kept),
    }


def _chosen(quantize: Quantize) -> Callable[[Source], list[Made] | None]:
    """What a weight becomes, None for those that stay as they are. Raises InputError."""
    if callable(quantize):
        return lambda source: _by_function(quantize, source)
    if not isinstance(quantize, str | Mapping):
        raise InputError(
            "quantize must be a format's name, a quantization_config or a function, not "
            f"{quantize!r}"
        )
    make, inputs, kept = (
        (FORMATS.get(quantize), "", _KEPT) if isinstance(quantize, str) else _configured(quantize)
    )
    if make is None:
        raise InputError(
            f"unknown format {quantize!r}", hint=f"Choose one of: {', '.join(FORMATS)}."
        )
    patterns = [
        re.compile(p.removeprefix("re:") if p.startswith("re:") else translate(p)) for p in kept
    ]

    def choose(source: Source) -> list[Made] | None:
        spec, module = source.spec, source.spec.name.removesuffix(".weight")
        # Linear layers, and experts that are fused into one tensor.
        linear = len(spec.shape) == 2 and spec.name.rpartition(".")[2] == "weight"
        experts = len(spec.shape) == 3 and ".experts." in f".{module}"
        if not is_float(spec.dtype) or not spec.elements or not (linear or experts):
            return None
        if any(pattern.match(module) for pattern in patterns):
            return None
        if inputs and f"{module}.{inputs}" not in source.state.names:
            raise InputError(
                f"the quantization_config has the inputs of {module!r} quantized, and the state "
                f"no {inputs!r} of it",
                hint="Such scales are calibrated: publish those of the checkpoint that is served "
                "with the weights.",
            )
        return make(source)

    return choose


def _configured(config: Mapping[str, Any]) -> tuple[Format, str, Collection[str]]:
    """The format that a ``quantization_config`` names, what it calls the scale of a module's
    inputs, and patterns of what it leaves out. Raises InputError."""
    method = config.get("quant_method")
    kept = next((config[key] for key in KEPT_KEYS if config.get(key)), ())
    # As transformers reads it: a module's whole name, or the start or the end of one.
    parts = [*_KEPT, *(pattern for name in kept for pattern in (name, f"{name}.*", f"*.{name}"))]
    in_tiles = config.get("weight_block_size") == [TILE, TILE]
    if method == "fp8" and in_tiles and not config.get("scale_fmt"):
        return FORMATS["fp8_block"], "", parts
    if method == "mxfp4":
        return gpt_oss_mxfp4, "", parts
    if method == "modelopt" and config.get("quant_algo") in _MODELOPT:
        return modelopt_nvfp4(), _MODELOPT[config["quant_algo"]], parts
    if method == "compressed-tensors" and config.get("format") in _COMPRESSED:
        groups = (config.get("config_groups") or {}).values()
        scaled = any(
            (group.get("input_activations") or {}).get("dynamic") == "local" for group in groups
        )
        inputs = "input_global_scale" if scaled else ""
        return FORMATS[_COMPRESSED[config["format"]]], inputs, [*kept, *_KEPT]
    raise InputError(
        f"a quantization_config of {method!r} "
        f"({config.get('format') or config.get('quant_algo') or 'no format'}) is "
        "none that can be made here",
        hint="fp8 with weight_block_size [128, 128], modelopt with NVFP4, mxfp4, and "
        f"compressed-tensors with {', '.join(_COMPRESSED)}; or give a function.",
    )


def _by_function(
    function: Callable[[str, Any], Mapping[str, Any] | None], source: Source
) -> list[Made] | None:
    """What a function makes of a tensor, given as the numpy array of its numbers (FP32 of BF16)."""
    spec = source.spec
    if not is_float(spec.dtype):
        return None
    made = _call(function, source)
    if made is None:
        return None
    again, found = _Again(function, source, made.specs), list[Made]()
    for s in made.specs:
        # Tensors that are small next to the weight are kept; others are made again when they are
        # read.
        is_small = 16 * s.nbytes <= spec.nbytes
        data = made.read(s.name) if is_small else Computed(partial(again.read, s.name))
        found.append(Made(s.name, s.dtype.name, s.shape, data))
    return found


def _call(function: Callable[[str, Any], Mapping[str, Any] | None], source: Source) -> State | None:
    bits = source.read(0, source.spec.elements)
    wide = to_f32(bits, DTYPES["BF16"]) if bits.itemsize == 2 else bits.view(np.float32)
    made = function(source.spec.name, wide.reshape(source.spec.shape))
    return None if made is None else State.of(made)


@dataclass(slots=True)
class _Again:
    """Calls a function again for what it has made, and keeps the last of that while it is read
    piece by piece."""

    function: Callable[[str, Any], Mapping[str, Any] | None]
    source: Source
    specs: tuple[TensorSpec, ...]
    lock: Lock = field(default_factory=Lock)
    made: State | None = None
    left: int = 0

    def read(self, name: str, start: int, stop: int) -> UIntArray:
        with self.lock:
            if self.made is None:
                self.made = _call(self.function, self.source)
                if self.made is None or self.made.specs != self.specs:
                    raise UnsupportedTensor(
                        f"tensor {self.source.spec.name!r} was quantized to other tensors before"
                    )
                self.left = sum(
                    s.elements for s in self.specs if 16 * s.nbytes > self.source.spec.nbytes
                )
            found = self.made.read(name, start, stop).copy()
            self.left -= stop - start
            if self.left <= 0:
                self.made = None
            return found
