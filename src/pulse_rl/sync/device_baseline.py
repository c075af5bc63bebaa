"""The last version on the devices of its tensors: what differs from it is found there, and nothing else crosses the bus
(docs/design/0033).

The host's baseline stays what versions are built from. The device's follows it, and is used while it has its root.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..state import bits
from ..state.device import DeviceTensor, page_locked
from ..state.snapshot import merge, own_tensors, snapshot, split
from ..state.tensors import State, UIntArray
from .host_state import HostState
from .order import Order

_PIECE_ELEMENTS = 1 << 23
_POSITION_BYTES = 4


class Seen(NamedTuple):
    """``state``: what is to be published, read by the host; ``owned`` as in `Order`. ``resident``: its tensors that lie
    on devices, whose memory nobody else has. ``crowded``: whether a device had no memory to look for differences."""

    state: State
    owned: bool
    resident: Mapping[str, DeviceTensor]
    crowded: bool = False


class Difference(NamedTuple):
    """New ``values`` at ``positions``, ascending, of a piece of a tensor; of the whole piece if these are None."""

    positions: bits.Positions | None
    values: UIntArray

    def put(self, elements: UIntArray, start: int) -> None:
        """Writes what belongs there into ``elements``, which begin with the piece's element ``start``."""
        stop = start + len(elements)
        if self.positions is None:
            elements[:] = self.values[start:stop]
            return
        first, last = bits.below(self.positions, (start, stop))
        bits.put(elements, self.positions[first:last], self.values[first:last], start)


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor ``before``, in host memory, and what differs from it, by the pieces in which something does."""

    before: UIntArray
    differences: Mapping[int, Difference]

    def read(self, start: int, stop: int) -> UIntArray:
        """A view of what was before, or, where something may differ, new memory."""
        pieces = [
            (k * _PIECE_ELEMENTS, self.differences[k])
            for k in range(start // _PIECE_ELEMENTS, -(-stop // _PIECE_ELEMENTS))
            if k in self.differences
        ]
        if not pieces:
            return self.before[start:stop]
        elements = self.before[start:stop].copy()
        for begin, difference in pieces:
            low, high = max(begin, start), min(begin + _PIECE_ELEMENTS, stop)
            difference.put(elements[low - start : high - start], low - begin)
        return elements


class DeviceBaseline:
    """For the publisher's thread. What devices are given here runs on streams of its own, and is waited for here."""

    def __init__(self) -> None:
        self._held: Mapping[str, DeviceTensor] = {}
        self._root: str | None = None
        self._streams: dict[Any, Any] = {}

    def look_at(self, order: Order, baseline: HostState) -> Seen:
        """What ``order`` holds: ``baseline`` and what differs from it, if the devices hold that, else a copy of it."""
        source: State = order.source
        torch: Any = sys.modules.get("torch")
        if baseline.version is not None:
            source = source.stored_as({spec.name for spec in baseline.state.specs})
        resident = own_tensors(source)
        state = order._replace(source=source).state
        if not resident:
            return Seen(state, order.owned, {}, order.crowded)
        with self._own_streams(resident.values()):
            if self.follows(baseline) and state.specs == baseline.state.specs and _alike(resident, self._held):
                try:
                    return self._changed(state, resident, baseline.state)
                except torch.cuda.OutOfMemoryError:
                    return self._copied(state, resident)._replace(crowded=True)
            return self._copied(state, resident)

    def follows(self, baseline: HostState) -> bool:
        """Whether the devices hold what they can of ``baseline``."""
        return self._root is not None and baseline.version is not None and self._root == baseline.digest.root

    def follow(self, seen: Seen, baseline: HostState) -> None:
        """``baseline`` has become what was ``seen``."""
        aliases = baseline.state.aliases
        self._held = {aliases.get(name, name): tensor for name, tensor in seen.resident.items()}
        self._root = baseline.digest.root if seen.resident else None

    def forget(self) -> None:
        """Frees the devices' memory."""
        self._held, self._root = {}, None

    def _changed(self, state: State, resident: Mapping[str, DeviceTensor], before: State) -> Seen:
        found = {name: _differences(self._held[name], tensor) for name, tensor in resident.items()}
        on_devices, others = split(state, resident)
        data = {name: ChangedTensor(before.read(name), differences) for name, differences in found.items()}
        return Seen(merge(State(on_devices.specs, data, on_devices.aliases), others), False, resident)

    def _copied(self, state: State, resident: Mapping[str, DeviceTensor]) -> Seen:
        on_devices, others = split(state, resident)
        copied = snapshot(State(on_devices.specs, resident, on_devices.aliases))
        copied.copies.wait()
        return Seen(merge(copied.state, others), not len(others), resident)

    @contextmanager
    def _own_streams(self, tensors: Iterable[DeviceTensor]) -> Iterator[None]:
        """Within it, devices work beside what others give them; at its end they have done it."""
        torch: Any = sys.modules["torch"]
        streams = []
        with ExitStack() as current:
            for device in {tensor.flat.device for tensor in tensors}:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)
                streams.append(self._streams[device])
                current.enter_context(torch.cuda.stream(streams[-1]))
            try:
                yield
            finally:
                for stream in streams:
                    stream.synchronize()


def _alike(one: Mapping[str, DeviceTensor], other: Mapping[str, DeviceTensor]) -> bool:
    """Whether both are tensors of the same names on the same devices."""
    return {n: t.flat.device for n, t in one.items()} == {n: t.flat.device for n, t in other.items()}


def _differences(old: DeviceTensor, new: DeviceTensor) -> dict[int, Difference]:
    """By piece, what differs on the device. The arrays hold it once the current stream is waited for."""
    found = {}
    elements = len(new.flat) // new.width
    for piece, start in enumerate(range(0, elements, _PIECE_ELEMENTS)):
        values = new.ints(start, min(start + _PIECE_ELEMENTS, elements))
        places = (values != old.ints(start, start + len(values))).nonzero().view(-1)
        if len(places) * (_POSITION_BYTES + new.width) >= len(values) * new.width:
            found[piece] = Difference(None, _to_host(values))
        elif len(places):
            found[piece] = Difference(_to_host(places.int()), _to_host(values[places]))
    return found


def _to_host(tensor: Any) -> UIntArray:
    """The bits of an integer tensor [n] in page-locked memory, once the current stream has copied them."""
    torch: Any = sys.modules["torch"]
    width = tensor.element_size()
    host = page_locked(len(tensor) * width)
    torch.from_numpy(host).copy_(tensor.view(torch.uint8), non_blocking=True)
    return host.view(np.dtype(f"<u{width}"))
