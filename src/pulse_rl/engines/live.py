"""The live parameters of one rank as flat bits: gathered from, scattered into, and rolled back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..frameworks.torch import _INTS
from ..state import bits
from ..state.bits import UIntArray
from .loader_map import Indices, LoaderMap, Rectangle

_NATIVE_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class Scattered:
    """``values``, unsigned integers of the element's width, for ``positions`` in the memory of
    ``parameter``."""

    parameter: str
    positions: Indices
    values: UIntArray


class WholeRectangle(NamedTuple):
    """All elements of ``box``, with the bits ``values`` of its checkpoint tensor, of which all are
    given."""

    box: Rectangle
    values: UIntArray


Change = Scattered | WholeRectangle


class LiveWeights:
    """The memory of a model's parameters and buffers, and of ``others``, by name, as flat integers
    of the element's width.

    Positions count from the start of the memory (torch: storage) that a tensor lies in, as those of
    a `Rectangle` do.
    """

    def __init__(
        self, model: torch.nn.Module, others: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.flat: dict[str, torch.Tensor] = {}
        self._host: dict[str, UIntArray] = {}
        for name, tensor in {
            **(others or {}),
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
        }.items():
            if not tensor.numel():
                continue
            flat = self.flat[name] = as_flat(tensor)
            if flat.device.type == "cpu" and len(flat) < _NATIVE_LIMIT:
                self._host[name] = flat.numpy().view(f"<u{flat.element_size()}")

    def view(self, box: Rectangle) -> torch.Tensor:
        """The live elements of ``box``, as integers, in the order of its axes."""
        return self.flat[box.parameter].as_strided(box.sizes, box.target_strides, box.target)

    def take(self, parameter: str, positions: Indices) -> UIntArray:
        """The bits at ``positions``."""
        host = self._host.get(parameter)
        if host is not None:
            return bits.take(host, positions.astype(np.uint32))
        flat = self.flat[parameter]
        taken: UIntArray = flat[torch.from_numpy(positions).to(flat.device)].cpu().numpy()
        return taken.view(f"<u{taken.itemsize}")

    @torch.no_grad()
    def put(self, scatter: Scattered) -> None:
        host = self._host.get(scatter.parameter)
        if host is not None:
            bits.put(host, scatter.positions.astype(np.uint32), scatter.values)
            return
        flat = self.flat[scatter.parameter]
        positions = torch.from_numpy(scatter.positions).to(flat.device)
        flat.index_copy_(0, positions, as_ints(scatter.values).to(flat.device))

    def synchronize(self) -> None:
        """Returns when the device has done what was asked of it."""
        for kind in {flat.device.type for flat in self.flat.values()} - {"cpu"}:
            torch.get_device_module(kind).synchronize()


class Journal:
    """The old bits of what one update writes; `roll_back` restores them."""

    def __init__(self, live: LiveWeights) -> None:
        self._live = live
        self._taken: list[Scattered] = []
        self._copies: list[tuple[Rectangle, torch.Tensor]] = []
        self._whole: dict[str, torch.Tensor] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        """Writes ``changes``, each after its old bits were taken."""
        for change in changes:
            if isinstance(change, WholeRectangle):
                self.write(change.box, as_ints(change.values).as_strided(*_source_view(change.box)))
                continue
            old = self._live.take(change.parameter, change.positions)
            self._taken.append(Scattered(change.parameter, change.positions, old))
            self._live.put(change)

    @torch.no_grad()
    def write(self, box: Rectangle, source: torch.Tensor) -> None:
        """Writes ``source``, integers of the element's width in the order of the box's axes, where
        it differs."""
        view = self._live.view(box)
        value = source.to(view.device)
        if not torch.equal(view, value):
            self._copies.append((box, view.to("cpu", copy=True)))
            view.copy_(value)

    @torch.no_grad()
    def keep_all(self) -> None:
        """Copies all live parameters, to the host: a device has no room for them beside the keys of
        its requests."""
        self._whole = {name: flat.to("cpu", copy=True) for name, flat in self._live.flat.items()}

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restores the bits, latest first."""
        for taken in reversed(self._taken):
            self._live.put(taken)
        for box, old in reversed(self._copies):
            self._live.view(box).copy_(old)
        for name, old in self._whole.items():
            self._live.flat[name].copy_(old)
        self._live.synchronize()


def located(
    loader_map: LoaderMap, name: str, indices: Indices | None, values: UIntArray
) -> Iterable[Change]:
    """Where the elements ``indices``, ascending, of the checkpoint tensor ``name`` go on this rank;
    None: all."""
    for box in loader_map.boxes.get(name, ()):
        if indices is None:
            yield WholeRectangle(box, values)
            continue
        chosen, positions = box.locate(indices)
        if len(positions):
            yield Scattered(box.parameter, positions, np.ascontiguousarray(values[chosen]))


def as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory that ``tensor`` lies in, as integers of its elements' width."""
    width = tensor.element_size()
    return (
        tensor.detach()
        .as_strided((tensor.untyped_storage().nbytes() // width,), (1,), 0)
        .view(_INTS[width])
    )


def as_ints(values: UIntArray) -> torch.Tensor:
    """The same bits in torch's integer type of that width; a copy of read-only memory, of which
    torch would warn."""
    ints = values.view(f"<i{values.itemsize}") if values.itemsize > 1 else values
    return torch.from_numpy(ints if ints.flags.writeable else ints.copy())


def _source_view(box: Rectangle) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return box.sizes, box.source_strides, box.source
