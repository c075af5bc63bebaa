"""The formats of quantized weights: codes and scales of one weight, under the names that
checkpoints of it have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .._native import block_maxima, to_e2m1, to_e4m3
from ..errors import InputError
from ..state.bits import UIntArray
from ..state.cast import to_f32
from ..state.tensors import DeviceTensor, Readable, State, TensorSpec, stored_tensor
from . import device as quantize_device
from .device import ints_there

Floats = npt.NDArray[np.float32]
T = TypeVar("T")

TILE = 128  # rows and columns of a block of fp8_block
_AT_ONCE = 1 << 22  # elements
_E4M3_MOST, _E2M1_MOST = np.float32(448), np.float32(6)
_EPSILON = np.float32(2**-23)  # the scale of a block of zeros
_MX_NAN = 255
_TINY = np.finfo(np.float32).tiny


class Source(NamedTuple):
    """A floating-point tensor of a state, read as FP32 or BF16."""

    state: State
    spec: TensorSpec

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        *leading, rows, columns = self.spec.shape
        return math.prod(leading), rows, columns

    def read(self, start: int, stop: int) -> UIntArray:
        """The bits of elements [``start``, ``stop``)."""
        bits = self.state.read(self.spec.name, start, stop)
        return bits if self._as_stored else to_f32(bits, self.spec.dtype).view(np.uint32)

    def part(self, start: int, stop: int) -> Part:
        """Elements [``start``, ``stop``), where they are."""
        tensor = stored_tensor(self.state, self.spec.name)
        there = None
        if isinstance(tensor, DeviceTensor) and self._as_stored and start < stop:
            there = ints_there(tensor, start, stop)
        return Part(partial(self.read, start, stop), there)

    @property
    def _as_stored(self) -> bool:
        return self.spec.dtype.name in ("F32", "BF16")


@dataclass(slots=True)
class Part:
    """Elements of a weight: what ``read`` returns, or, where they are on a device that can
    quantize, ``there``."""

    read: Callable[[], UIntArray]
    there: Any = None
    _host: UIntArray | None = None

    def columns(self, of: int, low: int, high: int) -> Part:
        """Some columns of the matrix of so many that the elements are."""
        there = None if self.there is None else self.there.view(-1, of)[:, low:high]
        return Part(lambda: self.bits.reshape(-1, of)[:, low:high].ravel(), there)

    @property
    def bits(self) -> UIntArray:
        if self._host is None:
            self._host = self.read()
        return self._host

    def maxima(self, blocks: tuple[int, int, int]) -> Floats:
        return self._made(quantize_device.block_maxima, block_maxima, blocks)

    def to_e4m3(
        self, start: int, blocks: tuple[int, int, int], scales: Floats, out: UIntArray
    ) -> None:
        self._made(quantize_device.to_e4m3, to_e4m3, start, blocks, scales, out)

    def to_e2m1(self, blocks: tuple[int, int, int], scales: Floats, out: UIntArray) -> None:
        self._made(quantize_device.to_e2m1, to_e2m1, blocks, scales, out)

    def _made(self, on_device: Callable[..., T], on_host: Callable[..., T], *arguments: Any) -> T:
        if self.there is not None:
            try:
                return on_device(self.there.reshape(-1), *arguments)
            except RuntimeError:  # no memory there, or no such operation
                self.there = None
        return on_host(self.bits.view(np.uint8), self.bits.itemsize, *arguments)


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor whose elements [start, stop) ``compute`` makes whenever they are read."""

    compute: Callable[[int, int], UIntArray]

    def read(self, start: int, stop: int) -> UIntArray:
        return self.compute(start, stop)


class _Tiles:
    """A weight [matrices, rows, columns] in blocks of 128 x 128. Its codes have the weight's shape,
    its scales the shape [matrices, rows / 128, columns / 128], rounded up. The scales are computed
    by bands of 128 rows, when they are read: band ``k`` of matrix ``m`` is number
    ``m * bands + k``."""

    def __init__(self, source: Source) -> None:
        self.source, self.name = source, source.spec.name
        count, rows, self.columns = source.shape
        self.rows, self.bands = rows, -(-rows // TILE)
        self.blocks = self.columns, TILE, TILE
        self.across = -(-self.columns // TILE)
        self._scales = np.empty((count * self.bands, self.across), np.float32)
        self._known = np.zeros(len(self._scales), bool)
        self._elsewhere: dict[int, UIntArray] = {}

    def _scales_of(self, first: int, last: int) -> Floats:
        """Those of the bands [``first``, ``last``), counted through all matrices. Two threads may
        compute the same ones."""
        for band in range(first, last):
            if not self._known[band]:
                most = self._maxima(band)
                if band in self._elsewhere:
                    most = np.maximum(most.view(np.uint32), self._elsewhere[band]).view(np.float32)
                with np.errstate(invalid="ignore"):  # of a signalling NaN
                    scales = most / _E4M3_MOST
                scales[scales == 0] = _EPSILON
                self._scales[band] = scales
                self._known[band] = True
        return self._scales[first:last].reshape(-1)

    def maxima(self, blocks: npt.NDArray[np.int64]) -> UIntArray:
        bands = {
            band: self._maxima(band) for band in {int(block) // self.across for block in blocks}
        }
        found = np.array(
            [bands[block // self.across][block % self.across] for block in blocks.tolist()],
            np.float32,
        )
        return found.view(np.uint32)

    def agree(self, blocks: npt.NDArray[np.int64], maxima: UIntArray) -> None:
        for block, most in zip(blocks.tolist(), maxima.tolist(), strict=True):
            of = self._elsewhere.setdefault(block // self.across, np.zeros(self.across, np.uint32))
            of[block % self.across] = max(of[block % self.across], most)

    def _maxima(self, band: int) -> Floats:
        matrix, row = divmod(band, self.bands)
        start = matrix * self.rows * self.columns + row * TILE * self.columns
        rows = min(TILE, self.rows - row * TILE)
        return self.source.part(start, start + rows * self.columns).maxima(self.blocks)

    def scales(self, start: int, stop: int) -> UIntArray:
        """FP32."""
        first, last = start // self.across, -(-stop // self.across)
        scales = self._scales_of(first, last)[start - first * self.across :][: stop - start]
        return scales.copy().view(np.uint32)

    def codes(self, start: int, stop: int) -> UIntArray:
        """E4M3."""
        out = np.empty(stop - start, np.uint8)
        size = self.rows * self.columns
        for matrix in range(start // size, -(-stop // size)):
            low, high = max(start, matrix * size), min(stop, (matrix + 1) * size)
            if low == high:
                continue
            begin, end = low - matrix * size, high - matrix * size
            band = begin // self.columns // TILE
            last = (end - 1) // self.columns // TILE + 1
            scales = self._scales_of(matrix * self.bands + band, matrix * self.bands + last)
            within = begin - band * TILE * self.columns
            into = out[low - start : high - start]
            self.source.part(low, high).to_e4m3(within, self.blocks, scales, into)
        return out


class PowersOfTwo:
    """The scales of MX formats, of groups of ``size`` elements of a row: E8M0, of the maximum
    rounded to a power of two (1.75 and more upwards), over the power of two in the largest code."""

    size = 32

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def stored(self, most: Floats) -> npt.NDArray[np.uint8]:
        """What a checkpoint has of the scales of groups with these maxima."""
        # [groups] FP32 maxima to [groups] bytes. Adding 1 << 21 carries into the exponent from a
        # mantissa of 1.75 on.
        bits = most.view(np.uint32)
        exponents = ((bits + np.uint32(1 << 21)) >> np.uint32(23)).astype(np.int32) - self._offset
        stored = np.clip(exponents, 0, _MX_NAN - 1).astype(np.uint8)
        stored[bits >= 0x7F800000] = _MX_NAN
        return stored

    def divisors(self, stored: npt.NDArray[np.uint8]) -> Floats:
        """What elements are divided by."""
        scales = (stored.astype(np.uint32) << np.uint32(23)).view(np.float32)
        scales[stored == 0] = np.float32(2**-127)
        scales[stored == _MX_NAN] = np.nan
        return scales


class _PowersOfTwoAbove(PowersOfTwo):
    """The least power of two by which the maximum is at most the largest code."""

    def stored(self, most: Floats) -> npt.NDArray[np.uint8]:
        with np.errstate(invalid="ignore"):  # of a signalling NaN
            bits = (most / _E2M1_MOST).view(np.uint32)
        exponents = np.minimum((bits + 0x7FFFFF) >> 23, _MX_NAN)
        stored: npt.NDArray[np.uint8] = exponents.astype(np.uint8)
        return stored


class OfTensor:
    """NVFP4: E4M3 scales, times what brings the largest one to 448 of all tensors that share it:
    the ``sources``."""

    size = 16

    def __init__(self, name: str) -> None:
        self.name, self.sources = name, list[Source]()
        self._lock = Lock()
        self._found: np.float32 | None = None
        self._elsewhere = np.uint32(0)

    def maxima(self, blocks: npt.NDArray[np.int64]) -> UIntArray:
        most = np.uint32(0)
        pieces = (
            (s, at, min(at + _AT_ONCE, s.spec.elements))
            for s in self.sources
            for at in range(0, s.spec.elements, _AT_ONCE)
        )
        for source, start, stop in pieces:
            found = source.part(start, stop).maxima((stop - start, 1, stop - start))
            most = max(most, found.view(np.uint32)[0])
        return np.full(len(blocks), most, np.uint32)

    def agree(self, blocks: npt.NDArray[np.int64], maxima: UIntArray) -> None:
        self._elsewhere = max(self._elsewhere, *maxima)

    @property
    def whole(self) -> np.float32:
        """The scale of the tensors."""
        with self._lock:
            if self._found is None:
                most = max(self.maxima(np.zeros(1, np.int64))[0], self._elsewhere).view(np.float32)
                with np.errstate(over="ignore", invalid="ignore"):
                    self._found = self._whole_of(most)
            return self._found

    def stored_whole(self) -> Computed:
        """`whole`, as a tensor of one element."""
        return Computed(
            lambda start, stop: np.full(1, self.whole, np.float32).view(np.uint32)[start:stop]
        )

    def _whole_of(self, most: np.float32) -> np.float32:
        found = np.float32(1) / np.maximum(most, _TINY) * (_E4M3_MOST * _E2M1_MOST)
        return found if np.isfinite(found) else np.float32(1)

    def stored(self, most: Floats) -> npt.NDArray[np.uint8]:
        with np.errstate(invalid="ignore", over="ignore"):
            wanted = self.whole * (most / _E2M1_MOST)
        codes = _e4m3_codes(wanted)
        codes[codes == 0] = 0x20  # 0.125: no scale is 0
        return codes

    def divisors(self, stored: npt.NDArray[np.uint8]) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _E4M3_VALUES[stored] / self.whole


class _ModelOpt(OfTensor):
    """The same as ModelOpt stores it: the inverse."""

    def _whole_of(self, most: np.float32) -> np.float32:
        return most / (_E4M3_MOST * _E2M1_MOST)

    def stored(self, most: Floats) -> npt.NDArray[np.uint8]:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            wanted = most / (_E2M1_MOST * self.whole)
        wanted[(wanted == 0) | (most == 0)] = 1
        return _e4m3_codes(np.maximum(wanted, np.float32(2**-9)))

    def divisors(self, stored: npt.NDArray[np.uint8]) -> Floats:
        return _E4M3_VALUES[stored] * self.whole


_Group = PowersOfTwo | OfTensor


@dataclass(frozen=True, slots=True)
class _RowGroups:
    """A weight [matrices, rows, columns] in groups of ``size`` neighbors of a row. Scales are
    [matrices, rows, columns / size]. Codes are E4M3 of the weight's shape; if they are ``packed``,
    two codes of four bits a byte, [matrices, rows, columns / 2]. The scales that were ``made`` for
    codes, by the first group, wait until they are read."""

    source: Source
    group: _Group
    packed: bool
    made: dict[int, UIntArray] = field(default_factory=dict)

    def scales(self, start: int, stop: int) -> UIntArray:
        size, parts, at = self.group.size, list[UIntArray](), start
        for first, piece in sorted(self.made.copy().items()):
            if first <= at < first + len(piece) and at < stop:
                parts.append(piece[at - first : stop - first])
                at += len(parts[-1])
                if start <= first and first + len(piece) <= stop:
                    self.made.pop(first, None)
        if at < stop or not parts:
            part = self.source.part(start * size, stop * size)
            return self.group.stored(part.maxima((size, 1, size)))
        return np.concatenate(parts)

    def codes(self, start: int, stop: int) -> UIntArray:
        size, per_byte = self.group.size, 1 + self.packed
        first, last = start * per_byte // size, -(-stop * per_byte // size)
        part = self.source.part(first * size, last * size)
        self.made[first] = stored = self.group.stored(part.maxima((size, 1, size)))
        scales = self.group.divisors(stored)
        out = np.empty((last - first) * size // per_byte, np.uint8)
        if self.packed:
            part.to_e2m1((size, 1, size), scales, out)
        else:
            part.to_e4m3(0, (max(len(out), 1), 1, size), scales, out)
        begin = start - first * size // per_byte
        return out[begin : begin + stop - start]


@dataclass(frozen=True, slots=True)
class _ColumnGroups:
    """Codes of four bits, or scales, of groups along the columns of each matrix. A row of what is
    made is a column."""

    source: Source
    group: _Group
    codes: bool

    def read(self, start: int, stop: int) -> UIntArray:
        (_, rows, columns), size = self.source.shape, self.group.size
        each = size // 2 if self.codes else 1
        length = rows // size * each
        first, last = start // length, -(-stop // length)
        out = np.empty((last - first, rows // size, each), np.uint8)
        for matrix in range(first // columns, -(-last // columns)):
            low, high = max(first - matrix * columns, 0), min(last - matrix * columns, columns)
            into = out[matrix * columns + low - first :][: high - low]
            for at in range(rows // size):
                place = (matrix * rows + at * size) * columns
                part = self.source.part(place, place + size * columns).columns(columns, low, high)
                into[:, at] = self._made(part, high - low).T
        return out.reshape(-1)[start - first * length :][: stop - start]

    def _made(self, part: Part, columns: int) -> UIntArray:
        blocks = columns, self.group.size, 1
        stored = self.group.stored(part.maxima(blocks))
        if not self.codes:
            return stored[None]
        out = np.empty((self.group.size // 2, columns), np.uint8)
        part.to_e2m1(blocks, self.group.divisors(stored), out.reshape(-1))
        return out


#: The scales of weights of which several ranks have a part each, and those may have parts of a
#: block. The ``name`` is the same on all ranks; ``maxima`` are the largest magnitudes in blocks, as
#: bits; ``agree`` takes those that another rank has found, and is called before anything is read.
Shared = _Tiles | OfTensor


class Made(NamedTuple):
    """What becomes of a weight: under its ``name``, a tensor of ``dtype`` and ``shape``. One
    element of it is of ``per`` (rows, columns) of the weight; (0, 0): of its matrices, which are
    transposed; None: of all. ``shared``: who knows its scales."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Readable | UIntArray
    per: tuple[int, int] | None = (1, 1)
    shared: Shared | None = None


def _fp8_block(source: Source) -> list[Made]:
    tiles, name = _Tiles(source), source.spec.name
    shape = (*source.spec.shape[:-2], tiles.bands, tiles.across)
    return [
        Made(name, "F8_E4M3", source.spec.shape, Computed(tiles.codes)),
        Made(f"{name}_scale_inv", "F32", shape, Computed(tiles.scales), (TILE, TILE), tiles),
    ]


def _grouped(source: Source, group: _Group, name: str, *, packed: bool, scales: str) -> list[Made]:
    """Codes called ``name``, and their scales."""
    *leading, columns = source.spec.shape
    _require_filled("rows", columns, source, group)
    groups = _RowGroups(source, group, packed)
    of_codes = Made(name, "F8_E4M3", source.spec.shape, Computed(groups.codes))
    if packed:
        of_codes = of_codes._replace(dtype="U8", shape=(*leading, columns // 2), per=(1, 2))
    shape, made = (*leading, columns // group.size), Computed(groups.scales)
    return [of_codes, Made(f"{source.spec.name}_scale", scales, shape, made, (1, group.size))]


def _require_filled(what: str, elements: int, source: Source, group: _Group) -> None:
    if elements % group.size:
        raise InputError(
            f"tensor {source.spec.name!r} has {what} of {elements} elements, which groups of "
            f"{group.size} do not fill",
            hint="Name its module among those that are not quantized.",
        )


def _mxfp8(source: Source) -> list[Made]:
    return _grouped(source, PowersOfTwo(8), source.spec.name, packed=False, scales="U8")


def _mxfp4(source: Source) -> list[Made]:
    return _grouped(source, PowersOfTwo(2), f"{source.spec.name}_packed", packed=True, scales="U8")


def _nvfp4(source: Source) -> list[Made]:
    group, name = OfTensor(source.spec.name), source.spec.name
    group.sources.append(source)
    made = _grouped(source, group, f"{name}_packed", packed=True, scales="F8_E4M3")
    return [*made, Made(f"{name}_global_scale", "F32", (1,), group.stored_whole(), None, group)]


def modelopt_nvfp4() -> Format:
    """NVFP4 as ModelOpt writes it, where layers that engines fuse share their scales, for the
    weights of one state."""
    groups: dict[str, _ModelOpt] = {}

    def make(source: Source) -> list[Made]:
        name = source.spec.name
        if len(source.spec.shape) != 2:
            raise InputError(
                f"ModelOpt's NVFP4 has no layout for experts that are fused, as in {name!r}",
                hint="Of a model of transformers publish checkpoint_weights(model), which has "
                "them one by one.",
            )
        fused = _FUSED.sub("", name)
        group = groups.setdefault(fused, _ModelOpt(fused))
        group.sources.append(source)
        made = _grouped(source, group, name, packed=True, scales="F8_E4M3")
        return [*made, Made(f"{name}_scale_2", "F32", (), group.stored_whole(), None, group)]

    return make


def gpt_oss_mxfp4(source: Source) -> list[Made] | None:
    """MXFP4 as GPT-OSS has it: of experts that are fused into one tensor, along the inputs, which
    are its rows."""
    if len(source.spec.shape) != 3:
        return None
    name, (experts, rows, columns) = source.spec.name, source.spec.shape
    group = _PowersOfTwoAbove(2)
    _require_filled("columns", rows, source, group)
    shape = (experts, columns, rows // group.size)
    codes = _ColumnGroups(source, group, codes=True)
    return [
        Made(f"{name}_blocks", "U8", (*shape, group.size // 2), codes, (0, 0)),
        Made(f"{name}_scales", "U8", shape, _ColumnGroups(source, group, codes=False), (0, 0)),
    ]


#: What becomes of a weight; None: it stays as it is. Raises InputError.
Format = Callable[[Source], list[Made] | None]
#: The formats that `Publisher.publish` knows by name.
FORMATS: dict[str, Format] = {
    "fp8_block": _fp8_block,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
# What layers are called that have the same input, in the name of their weight.
_FUSED = re.compile(
    r"([qkv]|gate|up|q_a)_proj(?=\.weight$)|kv_a_proj_with_mqa(?=\.weight$)|w[13](?=\.weight$)"
)


def _e4m3_codes(wanted: Floats) -> npt.NDArray[np.uint8]:
    codes = np.empty(len(wanted), np.uint8)
    one_block = max(len(wanted), 1), 1, 1 << 40
    to_e4m3(wanted.view(np.uint8), 4, 0, one_block, np.ones(1, np.float32), codes)
    return codes


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    field_, fraction = (codes >> 3) & 15, (codes & 7) / 8
    values = np.where(field_, np.ldexp(1 + fraction, field_ - 7), np.ldexp(fraction, -6))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
