"""The last version on the devices of its tensors: what differs from it is found there, and nothing
else crosses the bus (docs/design/0033).

The host's baseline stays what versions are built from. The device's follows it, and is used while
it has its root.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..state import bits
from ..state.memory import DeviceTensor, page_locked
from ..state.snapshot import merge, own_tensors, snapshot, split
from ..state.tensors import State, UIntArray
from .pending import Baseline
from .request import LocalState

_PIECE_ELEMENTS = 1 << 23
_POSITION_BYTES = 4


class Scan(NamedTuple):
    """``state``: what is to be published, read by the host; ``owned`` as in `LocalState`.
    ``resident``: its tensors that lie on devices, whose memory nobody else has. ``out_of_memory``:
    whether a device had no memory to look for differences."""

    state: State
    owned: bool
    resident: Mapping[str, DeviceTensor]
    out_of_memory: bool = False


class Difference(NamedTuple):
    """New ``values`` at ``positions``, ascending, of a piece of a tensor; of the whole piece if
    these are None."""

    positions: bits.Positions | None
    values: UIntArray

    def put(self, elements: UIntArray, start: int) -> None:
        """Writes what belongs there into ``elements``, which begin with the piece's element
        ``start``."""
        stop = start + len(elements)
        if self.positions is None:
            elements[:] = self.values[start:stop]
            return
        first, last = bits.below(self.positions, (start, stop))
        bits.put(elements, self.positions[first:last], self.values[first:last], start)


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor ``before``, in host memory, and what differs from it, by the pieces in which
    something does."""

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


class DeviceDiff:
    """For the publisher's thread. What devices are given here runs on streams of its own, and is
    waited for here."""

    def __init__(self) -> None:
        self._held: Mapping[str, DeviceTensor] = {}
        self._root: str | None = None
        self._streams: dict[Any, Any] = {}

    def scan(self, local: LocalState, baseline: Baseline | None) -> Scan:
        """What ``local`` holds: ``baseline`` and what differs from it, if the devices hold that,
        else a copy of it."""
        if baseline is not None:
            known = {spec.name for spec in baseline.layout.specs}
            local = local._replace(source=local.source.stored_as(known))
        resident = own_tensors(local.source)
        if not resident:  # all is in host memory already, or is read from there
            return Scan(local.state, local.owned, {})
        state, before = local.state, self._before(local.state, resident, baseline)
        with self._own_streams(resident.values()):
            if before is None:
                return self._copied(state, resident)
            try:
                return self._changed(state, resident, before)
            except memory_error():
                return self._copied(state, resident)._replace(out_of_memory=True)

    def follow(self, resident: Mapping[str, DeviceTensor], baseline: Baseline) -> None:
        """``baseline`` has become what has these tensors on devices."""
        aliases = baseline.layout.aliases
        self._held = {aliases.get(name, name): tensor for name, tensor in resident.items()}
        self._root = baseline.root if resident else None

    def forget(self) -> None:
        """Frees the devices' memory."""
        self._held, self._root = {}, None

    def _before(
        self, state: State, resident: Mapping[str, DeviceTensor], baseline: Baseline | None
    ) -> dict[str, UIntArray] | None:
        """What was before, in host memory, of all the ``resident`` tensors, if the devices hold
        that, too."""
        # By the root: a version that was given up, or restored from the store, is not what the
        # devices hold.
        if baseline is None or self._root != baseline.root or not _alike(resident, self._held):
            return None
        own = {
            segment.spec.name: segment
            for segment in baseline.segments
            if segment.spec.name not in baseline.layout.moved
        }
        found = {}
        for name in resident:
            segment, spec = own.get(name), state.spec(name)
            # Ranks may publish less than they hold: what another one publishes is not in this
            # baseline.
            if segment is None or (segment.spec.dtype, segment.elements) != (
                spec.dtype,
                spec.elements,
            ):
                return None
            found[name] = baseline.state.read(*segment.place)
        return found

    def _changed(
        self, state: State, resident: Mapping[str, DeviceTensor], before: Mapping[str, UIntArray]
    ) -> Scan:
        found = {name: _differences(self._held[name], tensor) for name, tensor in resident.items()}
        on_devices, others = split(state, resident)
        data = {
            name: ChangedTensor(before[name], differences) for name, differences in found.items()
        }
        return Scan(
            merge(State(on_devices.specs, data, on_devices.aliases), others), False, resident
        )

    def _copied(self, state: State, resident: Mapping[str, DeviceTensor]) -> Scan:
        on_devices, others = split(state, resident)
        copied = snapshot(State(on_devices.specs, resident, on_devices.aliases))
        copied.copies.wait()
        return Scan(merge(copied.state, others), not len(others), resident)

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


def memory_error() -> type[Exception]:
    """The error of a device that has no memory left."""
    error: type[Exception] = sys.modules["torch"].cuda.OutOfMemoryError
    return error


def _alike(one: Mapping[str, DeviceTensor], other: Mapping[str, DeviceTensor]) -> bool:
    """Whether both are tensors of the same names on the same devices."""
    return {n: t.flat.device for n, t in one.items()} == {
        n: t.flat.device for n, t in other.items()
    }


def _differences(old: DeviceTensor, new: DeviceTensor) -> dict[int, Difference]:
    """By piece, what differs on the device. The arrays hold it once the current stream is waited
    for."""
    found = {}
    elements = len(new.flat) // new.width
    for piece, start in enumerate(range(0, elements, _PIECE_ELEMENTS)):
        values = new.ints(start, min(start + _PIECE_ELEMENTS, elements))
        places = (values != old.ints(start, start + len(values))).nonzero().view(-1)
        # Whichever takes fewer bytes over the bus.
        if len(places) * (_POSITION_BYTES + new.width) >= len(values) * new.width:
            found[piece] = Difference(None, _to_host(values))
        elif len(places):
            found[piece] = Difference(_to_host(places.int()), _to_host(values[places]))
    return found


def _to_host(tensor: Any) -> UIntArray:
    """The bits of an integer tensor [n] in page-locked memory, once the current stream has copied
    them."""
    torch: Any = sys.modules["torch"]
    width = tensor.element_size()
    host = page_locked(len(tensor) * width)
    torch.from_numpy(host).copy_(tensor.view(torch.uint8), non_blocking=True)
    return host.view(np.dtype(f"<u{width}"))
