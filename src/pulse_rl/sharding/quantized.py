"""Quantized states of which each rank has a part: codes and scales of its own elements, once the
ranks have agreed on the largest magnitudes of the blocks that cross them.

A rank's part of a weight is seen as the whole weight, whose other elements are 0: they change no
magnitude, and what is made of them is not published. A scale is of the rank that has the first
element of its block.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import numpy.typing as npt

from .._util.collective import RankGroup
from ..errors import InputError
from ..quantize.formats import Computed, Shared
from ..quantize.states import KEPT_KEYS, QuantizedState, cast_tensor, config_of
from ..state.bits import UIntArray
from ..state.tensors import Readable, State, TensorSpec, stored_tensor
from ..sync.request import LocalState
from .layout import Assembled, Runs, SliceSpec

Blocks = npt.NDArray[np.int64]


def quantized(local: LocalState) -> tuple[LocalState, dict[str, tuple[Shared, Blocks]]]:
    """What ``local`` becomes, and by their names the scales to agree on, with the blocks of which
    it has some elements but not all. Raises InputError, for boxes too that cut a group whose codes
    share bytes or a scale."""
    assert local.quantize is not None
    if callable(local.quantize):
        raise InputError(
            "a sharded publisher does not quantize by a function: it would be given parts of "
            "weights",
            hint="Name a format, or gather and use a Publisher.",
        )
    source, boxes = local.source, local.boxes
    specs = tuple(
        TensorSpec(s.name, s.dtype, boxes[s.name].shape) if s.name in boxes else s
        for s in source.specs
    )
    seen = {
        s.name: Assembled(s.dtype, [(boxes[s.name], partial(source.read, s.name))])
        if s.name in boxes
        else stored_tensor(source, s.name)
        for s in specs
    }
    made = QuantizedState(State(specs, seen, source.aliases), local.quantize, local.dtype)
    shared: dict[str, tuple[Shared, Blocks]] = {}
    parts: dict[str, SliceSpec] = {}
    data: dict[str, Readable | UIntArray] = {}
    for name, become in made.made.items():
        box = boxes.get(name)
        for each in become:
            if box is None or each.per is None:
                data[each.name] = stored_tensor(made, each.name)
            elif len(become) == 1:  # it stays as it is
                parts[each.name] = box
                data[each.name] = cast_tensor(source, source.spec(name), made.spec(name).dtype)
            else:
                part = parts[each.name] = _scaled_down(box, name, each.per, each.shape)
                data[each.name] = Computed(partial(part.take, partial(made.read, each.name)))
            scales = each.shared
            if scales is not None and each.per is None:
                if scales.name not in shared or not len(shared[scales.name][1]):
                    some = 1 if box is None else min(1, box.elements)
                    shared[scales.name] = scales, np.zeros(some, np.int64)
            elif scales is not None and box is not None and each.per is not None:
                shared[scales.name] = scales, _crossing(box, each.per)
    parts |= {alias: parts[name] for alias, name in made.aliases.items() if name in parts}
    held = tuple(
        TensorSpec(s.name, s.dtype, parts[s.name].local_shape) if s.name in parts else s
        for s in made.specs
    )
    found = local._replace(
        source=State(held, data, made.aliases), boxes=parts, dtype=None, owned=False, quantize=None
    )
    return found._replace(config=config_of(local.quantize, made.kept)), shared


def agree(
    local: LocalState, shared: dict[str, tuple[Shared, Blocks]], ranks: RankGroup
) -> LocalState:
    """Tells the other ranks the maxima of the ``shared`` blocks, and takes theirs. Returns
    ``local`` with the configuration of what all ranks have. Collective."""

    def said() -> bytes:
        entries, arrays = [], []
        for name, (scales, blocks) in shared.items():
            entries.append((name, len(blocks)))
            arrays += [
                blocks.astype("<i8").tobytes(),
                scales.maxima(blocks).astype("<u4").tobytes(),
            ]
        header = json.dumps([entries, local.config]).encode()
        return len(header).to_bytes(8, "little") + header + b"".join(arrays)

    config = dict(local.config or {})
    for message in ranks.each(said, bytes, bytes):
        at = 8 + int.from_bytes(message[:8], "little")
        entries, theirs = json.loads(message[8:at])
        for key in KEPT_KEYS:
            if key in config and key in theirs:
                config[key] = sorted({*config[key], *theirs[key]})
        for name, count in entries:
            blocks = np.frombuffer(message, "<i8", count, at)
            maxima = np.frombuffer(message, "<u4", count, at + 8 * count)
            at += 12 * count
            if name in shared and count:
                shared[name][0].agree(blocks, maxima)
    return local._replace(config=config)


def _scaled_down(
    box: SliceSpec, name: str, per: tuple[int, int], shape: tuple[int, ...]
) -> SliceSpec:
    """Which elements of a tensor of ``shape`` a rank has that has ``box`` of the weight: those
    whose block of ``per`` rows and columns begins in it. Raises InputError where a group of a row
    is cut."""
    rows, columns = per
    if per == (1, 1):
        return box
    if per == (0, 0):
        matrices = SliceSpec.whole(box.shape).of[-2:]
        if box.of[-2:] != matrices or len(box.of) != len(box.shape):
            raise InputError(
                f"a rank has a part of a matrix of {name!r}, which is stored transposed",
                hint="Cut between experts only, or gather and use a Publisher.",
            )
        return SliceSpec((*box.of[:-2], *SliceSpec.whole(shape).of[len(box.of) - 2 :]), shape)
    if len(box.of) == len(box.shape):
        cut = rows == 1 and any(low % columns or high % columns for low, high in box.of[-1])
        of = (*box.of[:-2], _fewer(box.of[-2], rows), _fewer(box.of[-1], columns))
        found = SliceSpec(of, shape)
    else:
        ((low, high),) = box.of[0] or ((0, 0),)
        cut = rows == 1 and bool(low % columns or high % columns)
        found = SliceSpec.range(_begun(low, box.shape, per), _begun(high, box.shape, per), shape)
    if cut:
        raise InputError(
            f"a rank has a part of a group of {columns} elements of {name!r}",
            hint=f"Cut rows at multiples of {columns}, use fp8_block, or leave its module out.",
        )
    return found


def _fewer(runs: Runs, step: int) -> Runs:
    """The blocks of ``step`` indices whose first is in ``runs``."""
    found = ((-(-low // step), -(-high // step)) for low, high in runs)
    return tuple((low, high) for low, high in found if low < high)


def _begun(place: int, shape: tuple[int, ...], per: tuple[int, int]) -> int:
    """How many blocks begin before ``place`` in the flattened weight of ``shape``."""
    (rows, columns), (step_rows, step_columns) = shape[-2:], per
    matrix, rest = divmod(place, rows * columns)
    row, column = divmod(rest, columns)
    across, bands = -(-columns // step_columns), -(-rows // step_rows)
    within = across * -(-row // step_rows) + (0 if row % step_rows else -(-column // step_columns))
    return matrix * bands * across + within


def _crossing(box: SliceSpec, per: tuple[int, int]) -> Blocks:
    """The blocks of a weight of which ``box`` has some elements, but perhaps not all."""
    *leading, rows, columns = box.shape
    bands, across = -(-rows // per[0]), -(-columns // per[1])
    if len(box.of) == len(box.shape):
        outer = SliceSpec(box.of[:-2], tuple(leading))
        matrices: Blocks = outer.take(np.arange, 0, outer.elements)
        (high, cut_high), (wide, cut_wide) = (
            _blocks(runs, size, step)
            for runs, size, step in zip(box.of[-2:], (rows, columns), per, strict=True)
        )
        some = cut_high[high][:, None] | cut_wide[wide]
        inner = (high[:, None] * across + wide)[some]
        found: Blocks = (matrices[:, None] * (bands * across) + inner).reshape(-1)
        return found
    ends = [] if not box.elements else [box.of[0][0][0], box.of[0][0][1] - 1]
    cut = {place // (rows * columns) * bands + place // columns % rows // per[0] for place in ends}
    return np.concatenate(
        [np.arange(band * across, (band + 1) * across) for band in sorted(cut)]
        or [np.zeros(0, int)]
    )


def _blocks(runs: Runs, size: int, step: int) -> tuple[Blocks, npt.NDArray[np.bool_]]:
    """The blocks of one dimension that ``runs`` touch; and of all, whether they lie there in part
    only."""
    here = np.zeros(-(-size // step), np.int64)
    for low, high in runs:
        for block in range(low // step, -(-high // step)):
            here[block] += min(high, (block + 1) * step) - max(low, block * step)
    whole = np.minimum(step, size - step * np.arange(len(here)))
    return np.flatnonzero(here), (here > 0) & (here < whole)
