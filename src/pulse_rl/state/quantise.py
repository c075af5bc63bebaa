"""Quantised states: codes and scales of a state's weights, under the names that checkpoints of each format have.

Computed on each read, as `cast` does it, in FP32 and with the rounding of the libraries that define the formats
(docs/quantised.md has the rules): nothing is held but the scales of blocks, and one number a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .._native import block_maxima, to_e2m1, to_e4m3
from ..errors import InputError, UnsupportedTensor
from .cast import CastTensor, compute_dtype, is_float, to_f32
from .tensors import DTYPES, DType, Readable, State, TensorSpec, UIntArray, stored_tensor

Floats = npt.NDArray[np.float32]
Quantise = str | Mapping[str, Any] | Callable[[str, Any], Mapping[str, Any] | None]
"""What `Publisher.publish` takes: a format of `FORMATS`, a checkpoint's ``quantization_config``, or a function."""

_TILE = 128  # rows and columns of a block of fp8_block
_AT_ONCE = 1 << 22  # elements
_E4M3_MOST, _E2M1_MOST = np.float32(448), np.float32(6)
_EPSILON = np.float32(2**-23)  # the scale of a block of zeros
_E4M3_EPSILON = np.float32(0.125)
_MX_NAN = 255
_TINY = np.finfo(np.float32).tiny


class _Source(NamedTuple):
    """A floating-point tensor of a state, read as FP32 or BF16."""

    state: State
    spec: TensorSpec

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        *leading, rows, columns = self.spec.shape
        return math.prod(leading), rows, columns

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[np.uint8], int]:
        """The bytes of elements [``start``, ``stop``) and the width of one."""
        bits = self.state.read(self.spec.name, start, stop)
        if self.spec.dtype.name not in ("F32", "BF16"):
            bits = to_f32(bits, self.spec.dtype).view(np.uint32)
        return bits.view(np.uint8), bits.itemsize


class _Tiles:
    """The scales of blocks of 128 x 128, by bands of 128 rows as they are asked for."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        count, rows, self.columns = source.shape
        self.rows, self.bands = rows, -(-rows // _TILE)
        self.blocks = self.columns, _TILE, _TILE
        self.across = -(-self.columns // _TILE)
        self.scales = np.empty((count * self.bands, self.across), np.float32)
        self._known = np.zeros(len(self.scales), bool)
        self._elsewhere: dict[int, UIntArray] = {}

    def of(self, first: int, last: int) -> Floats:
        """The scales of the bands [``first``, ``last``), counted through all matrices. Two threads may compute the same
        ones."""
        for band in range(first, last):
            if not self._known[band]:
                most = self._maxima(band)
                if band in self._elsewhere:
                    most = np.maximum(most.view(np.uint32), self._elsewhere[band]).view(np.float32)
                self.scales[band] = _scaled(most, _E4M3_MOST, _EPSILON)
                self._known[band] = True
        return self.scales[first:last]

    def maxima(self, blocks: npt.NDArray[np.int64]) -> UIntArray:
        bands = {band: self._maxima(band) for band in {int(block) // self.across for block in blocks}}
        found = np.array([bands[block // self.across][block % self.across] for block in blocks.tolist()], np.float32)
        return found.view(np.uint32)

    def agree(self, blocks: npt.NDArray[np.int64], maxima: UIntArray) -> None:
        for block, most in zip(blocks.tolist(), maxima.tolist(), strict=True):
            of = self._elsewhere.setdefault(block // self.across, np.zeros(self.across, np.uint32))
            of[block % self.across] = max(of[block % self.across], most)

    def _maxima(self, band: int) -> Floats:
        matrix, row = divmod(band, self.bands)
        start = matrix * self.rows * self.columns + row * _TILE * self.columns
        rows = min(_TILE, self.rows - row * _TILE)
        return block_maxima(*self.source.read(start, start + rows * self.columns), self.blocks)


@dataclass(frozen=True, slots=True)
class _TileScales:
    tiles: _Tiles

    def read(self, start: int, stop: int) -> UIntArray:
        first, last = start // self.tiles.across, -(-stop // self.tiles.across)
        scales = self.tiles.of(first, last).reshape(-1)[start - first * self.tiles.across :][: stop - start]
        return scales.copy().view(np.uint32)


@dataclass(frozen=True, slots=True)
class _TileCodes:
    tiles: _Tiles

    def read(self, start: int, stop: int) -> UIntArray:
        tiles, out = self.tiles, np.empty(stop - start, np.uint8)
        size = tiles.rows * tiles.columns
        for matrix in range(start // size, -(-stop // size)):
            low, high = max(start, matrix * size), min(stop, (matrix + 1) * size)
            if low == high:
                continue
            begin, end = low - matrix * size, high - matrix * size
            band = begin // tiles.columns // _TILE
            last = (end - 1) // tiles.columns // _TILE + 1
            scales = tiles.of(matrix * tiles.bands + band, matrix * tiles.bands + last)
            within = begin - band * _TILE * tiles.columns
            into = out[low - start : high - start]
            to_e4m3(*tiles.source.read(low, high), within, tiles.blocks, scales.reshape(-1), into)
        return out


class _Group(Protocol):
    """A format whose blocks are ``size`` elements of a row."""

    size: int

    def stored(self, most: Floats) -> npt.NDArray[np.uint8]:
        """What a checkpoint has of the scales of groups with these maxima."""

    def divisors(self, stored: npt.NDArray[np.uint8]) -> Floats:
        """What elements are divided by."""


class _PowersOfTwo:
    """The scales of MX formats: E8M0, of the maximum rounded to a power of two (1.75 and more upwards), over the power
    of two in the largest code."""

    size = 32

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def stored(self, most: Floats) -> npt.NDArray[np.uint8]:
        bits = most.view(np.uint32)
        exponents = ((bits + np.uint32(1 << 21)) >> np.uint32(23)).astype(np.int32) - self._offset
        stored = np.clip(exponents, 0, _MX_NAN - 1).astype(np.uint8)
        stored[bits >= 0x7F800000] = _MX_NAN
        return stored

    def divisors(self, stored: npt.NDArray[np.uint8]) -> Floats:
        scales = (stored.astype(np.uint32) << np.uint32(23)).view(np.float32)
        scales[stored == 0] = np.float32(2**-127)
        scales[stored == _MX_NAN] = np.nan
        return scales


class _OfTensor:
    """NVFP4: E4M3 scales, times what brings the tensor's largest one to 448."""

    size = 16

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._lock = Lock()
        self._found: np.float32 | None = None
        self._elsewhere = np.uint32(0)

    def maxima(self, blocks: npt.NDArray[np.int64]) -> UIntArray:
        most = np.uint32(0)
        for start in range(0, self._source.spec.elements, _AT_ONCE):
            stop = min(start + _AT_ONCE, self._source.spec.elements)
            elements, width = self._source.read(start, stop)
            most = max(most, block_maxima(elements, width, (stop - start, 1, stop - start)).view(np.uint32)[0])
        return np.full(len(blocks), most, np.uint32)

    def agree(self, blocks: npt.NDArray[np.int64], maxima: UIntArray) -> None:
        self._elsewhere = max(self._elsewhere, *maxima)

    @property
    def whole(self) -> np.float32:
        """The scale of the tensor."""
        with self._lock:
            if self._found is None:
                most = max(self.maxima(np.zeros(1, np.int64))[0], self._elsewhere).view(np.float32)
                with np.errstate(over="ignore", invalid="ignore"):
                    found = np.float32(1) / np.maximum(most, _TINY) * (_E4M3_MOST * _E2M1_MOST)
                self._found = found if np.isfinite(found) else np.float32(1)
            return self._found

    def stored(self, most: Floats) -> npt.NDArray[np.uint8]:
        with np.errstate(invalid="ignore", over="ignore"):
            wanted = self.whole * (most / _E2M1_MOST)
        codes = np.empty(len(wanted), np.uint8)
        to_e4m3(wanted.view(np.uint8), 4, 0, (max(len(wanted), 1), 1, 1 << 40), np.ones(1, np.float32), codes)
        codes[codes == 0] = 0x20  # 0.125: no scale is 0
        return codes

    def divisors(self, stored: npt.NDArray[np.uint8]) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _E4M3_VALUES[stored] / self.whole


@dataclass(frozen=True, slots=True)
class _GroupScales:
    source: _Source
    group: _Group

    def read(self, start: int, stop: int) -> UIntArray:
        return self.group.stored(_group_maxima(self.source, self.group.size, start, stop))


@dataclass(frozen=True, slots=True)
class _GroupCodes:
    """``packed``: two codes of four bits a byte; else E4M3."""

    source: _Source
    group: _Group
    packed: bool

    def read(self, start: int, stop: int) -> UIntArray:
        size, per_byte = self.group.size, 1 + self.packed
        first, last = start * per_byte // size, -(-stop * per_byte // size)
        elements, width = self.source.read(first * size, last * size)
        most = block_maxima(elements, width, (size, 1, size))
        scales = self.group.divisors(self.group.stored(most))
        out = np.empty((last - first) * size // per_byte, np.uint8)
        if self.packed:
            to_e2m1(elements, width, size, scales, out)
        else:
            to_e4m3(elements, width, 0, (max(len(out), 1), 1, size), scales, out)
        begin = start - first * size // per_byte
        return out[begin : begin + stop - start]


@dataclass(frozen=True, slots=True)
class _WholeScale:
    group: _OfTensor

    def read(self, start: int, stop: int) -> UIntArray:
        return np.full(1, self.group.whole, np.float32).view(np.uint32)[start:stop]


class Shared(Protocol):
    """The scales of a weight of which several ranks have a part each, and those may have parts of a block."""

    def maxima(self, blocks: npt.NDArray[np.int64]) -> UIntArray:
        """The largest magnitudes in these blocks, as bits."""

    def agree(self, blocks: npt.NDArray[np.int64], maxima: UIntArray) -> None:
        """Takes the maxima that another rank has found of blocks. To be called before anything is read."""


class _Made(NamedTuple):
    """What becomes of a weight: under its ``name``, a tensor of ``dtype`` and ``shape``. One element of it is of
    ``per`` (rows, columns) of the weight; None: of all. ``shared``: who knows its scales."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Readable | UIntArray
    per: tuple[int, int] | None = (1, 1)
    shared: Shared | None = None


def _fp8_block(source: _Source) -> list[_Made]:
    tiles, name = _Tiles(source), source.spec.name
    shape = (*source.spec.shape[:-2], tiles.bands, tiles.across)
    return [
        _Made(name, "F8_E4M3", source.spec.shape, _TileCodes(tiles)),
        _Made(f"{name}_scale_inv", "F32", shape, _TileScales(tiles), (_TILE, _TILE), tiles),
    ]


def _grouped(source: _Source, group: _Group, *, packed: bool, scales: str) -> list[_Made]:
    name, (*leading, columns) = source.spec.name, source.spec.shape
    if columns % group.size:
        raise InputError(
            f"tensor {name!r} has rows of {columns} elements, which groups of {group.size} do not fill",
            hint="Name its module among those that are not quantised.",
        )
    codes = _GroupCodes(source, group, packed)
    return [
        _Made(f"{name}_packed", "U8", (*leading, columns // 2), codes, (1, 2))
        if packed
        else _Made(name, "F8_E4M3", source.spec.shape, codes),
        _Made(f"{name}_scale", scales, (*leading, columns // group.size), _GroupScales(source, group), (1, group.size)),
    ]


def _mxfp8(source: _Source) -> list[_Made]:
    return _grouped(source, _PowersOfTwo(8), packed=False, scales="U8")


def _mxfp4(source: _Source) -> list[_Made]:
    return _grouped(source, _PowersOfTwo(2), packed=True, scales="U8")


def _nvfp4(source: _Source) -> list[_Made]:
    group = _OfTensor(source)
    made = _grouped(source, group, packed=True, scales="F8_E4M3")
    return [*made, _Made(f"{source.spec.name}_global_scale", "F32", (1,), _WholeScale(group), None, group)]


FORMATS: dict[str, Callable[[_Source], list[_Made]]] = {
    "fp8_block": _fp8_block,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
"""The formats by their names."""

_COMPRESSED = {"mxfp8-quantized": "mxfp8", "mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}
# What no format quantises unless a configuration says otherwise: what is no linear layer, and the routers of experts.
_KEPT = ("*lm_head", "*embed*", "*.wte", "*.wpe", "*norm*", "*router*", "*.gate")


class QuantisedState(State):
    """``state`` as a checkpoint of a quantised model, computed on each read. What is not quantised stays as it is, or
    is cast to ``dtype`` where it is a wider float. Tied tensors stay tied. ``made``: by each weight's name, what it
    becomes; ``kept``: the modules with a weight that is not quantised. Raises InputError and UnsupportedTensor."""

    def __init__(self, state: State, quantise: Quantise, dtype: DType | None = None) -> None:
        wanted = _chosen(quantise)
        specs: list[TensorSpec] = []
        data: dict[str, Any] = {}
        self.made: dict[str, list[_Made]] = {}
        kept: list[str] = []
        for spec in state.specs:
            made = wanted(_Source(state, spec))
            if made is None:
                if len(spec.shape) == 2:
                    kept.append(spec.name.removesuffix(".weight"))
                target = spec.dtype if dtype is None else compute_dtype(spec, dtype)
                as_it_is = (
                    stored_tensor(state, spec.name) if target == spec.dtype else CastTensor(state, spec.name, target)
                )
                made = [_Made(spec.name, target.name, spec.shape, as_it_is)]
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
        self.kept = kept + [alias.removesuffix(".weight") for alias, name in state.aliases.items() if name in whole]


def config_of(quantise: Quantise, kept: Collection[str]) -> dict[str, Any] | None:
    """What the config.json of a quantised model says under ``quantization_config``, as the libraries that define the
    formats write it; None of what a function makes. ``kept`` are the modules that are left out."""
    if callable(quantise):
        return None
    if not isinstance(quantise, str):
        return dict(quantise)
    name = quantise
    if name == "fp8_block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_TILE, _TILE],
            "modules_to_not_convert": sorted(kept),
        }
    (written,) = (written for written, of in _COMPRESSED.items() if of == name)
    whole = name == "nvfp4"
    weights = {
        "num_bits": 8 if name == "mxfp8" else 4,
        "type": "float",
        "symmetric": True,
        "group_size": _OfTensor.size if whole else _PowersOfTwo.size,
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


def _chosen(quantise: Quantise) -> Callable[[_Source], list[_Made] | None]:
    """What a weight becomes, None for those that stay as they are. Raises InputError."""
    if callable(quantise):
        return lambda source: _by_function(quantise, source)
    name, kept = (quantise, _KEPT) if isinstance(quantise, str) else _configured(quantise)
    if name not in FORMATS:
        raise InputError(f"unknown format {name!r}", hint=f"Choose one of: {', '.join(FORMATS)}.")
    patterns = [re.compile(p.removeprefix("re:") if p.startswith("re:") else translate(p)) for p in kept]

    def choose(source: _Source) -> list[_Made] | None:
        spec, module = source.spec, source.spec.name.removesuffix(".weight")
        # Linear layers, and experts that are fused into one tensor.
        linear = len(spec.shape) == 2 and spec.name.rpartition(".")[2] == "weight"
        experts = len(spec.shape) == 3 and ".experts." in f".{module}"
        if not is_float(spec.dtype) or not spec.elements or not (linear or experts):
            return None
        if any(pattern.match(module) for pattern in patterns):
            return None
        return FORMATS[name](source)

    return choose


def _configured(config: Mapping[str, Any]) -> tuple[str, Collection[str]]:
    """The format that a ``quantization_config`` names, and patterns of what it leaves out. Raises InputError."""
    method = config.get("quant_method")
    kept = config.get("modules_to_not_convert") or config.get("ignore") or ()
    if method == "fp8" and config.get("weight_block_size") == [_TILE, _TILE] and not config.get("scale_fmt"):
        # As transformers reads it: a module's whole name, or the start or the end of one.
        return "fp8_block", [*_KEPT, *(pattern for name in kept for pattern in (name, f"{name}.*", f"*.{name}"))]
    if method == "compressed-tensors" and config.get("format") in _COMPRESSED:
        return _COMPRESSED[config["format"]], [*kept, *_KEPT]
    raise InputError(
        f"a quantization_config of {method!r} ({config.get('format') or config.get('quant_algo') or 'no format'}) is "
        "none that can be made here",
        hint="fp8 with weight_block_size [128, 128], and compressed-tensors with "
        f"{', '.join(_COMPRESSED)}; or give a function.",
    )


def _by_function(function: Callable[[str, Any], Mapping[str, Any] | None], source: _Source) -> list[_Made] | None:
    """What a function makes of a tensor, given as the numpy array of its numbers (FP32 of BF16)."""
    spec = source.spec
    if not is_float(spec.dtype):
        return None
    made = _call(function, source)
    if made is None:
        return None
    again = _Again(function, source, made.specs)
    return [
        # What is small beside the weight is kept; the rest is made again when it is read.
        _Made(
            s.name, s.dtype.name, s.shape, made.read(s.name) if 16 * s.nbytes <= spec.nbytes else _Part(again, s.name)
        )
        for s in made.specs
    ]


def _call(function: Callable[[str, Any], Mapping[str, Any] | None], source: _Source) -> State | None:
    elements, width = source.read(0, source.spec.elements)
    wide = to_f32(elements.view(f"<u{width}"), DTYPES["BF16"]) if width == 2 else elements.view(np.float32)
    made = function(source.spec.name, wide.reshape(source.spec.shape))
    return None if made is None else State.of(made)


@dataclass(slots=True)
class _Again:
    """Calls a function again for what it has made, and keeps the last of that while it is read piece by piece."""

    function: Callable[[str, Any], Mapping[str, Any] | None]
    source: _Source
    specs: tuple[TensorSpec, ...]
    lock: Lock = field(default_factory=Lock)
    made: State | None = None
    left: int = 0

    def read(self, name: str, start: int, stop: int) -> UIntArray:
        with self.lock:
            if self.made is None:
                self.made = _call(self.function, self.source)
                if self.made is None or self.made.specs != self.specs:
                    raise UnsupportedTensor(f"tensor {self.source.spec.name!r} was quantised to other tensors before")
                self.left = sum(s.elements for s in self.specs if 16 * s.nbytes > self.source.spec.nbytes)
            found = self.made.read(name, start, stop).copy()
            self.left -= stop - start
            if self.left <= 0:
                self.made = None
            return found


@dataclass(frozen=True, slots=True)
class _Part:
    again: _Again
    name: str

    def read(self, start: int, stop: int) -> UIntArray:
        return self.again.read(self.name, start, stop)


def _scaled(most: Floats, largest: np.float32, epsilon: np.float32) -> Floats:
    scales = most / largest
    scales[scales == 0] = epsilon
    return scales


def _group_maxima(source: _Source, size: int, first: int, last: int) -> Floats:
    elements, width = source.read(first * size, last * size)
    return block_maxima(elements, width, (size, 1, size))


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    field_, fraction = (codes >> 3) & 15, (codes & 7) / 8
    values = np.where(field_, np.ldexp(1 + fraction, field_ - 7), np.ldexp(fraction, -6))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
