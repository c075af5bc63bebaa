"""Memory of many arrays: in the host, page-locked, and of devices, seen through torch, which is
never imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)

LINE = 64
"""Bytes of a cache line."""


Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""Makes memory of so many bytes, uninitialized."""
_PIECE = 1 << 30  # bytes
_INTS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def pageable(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory as the system gives it."""
    return np.empty(nbytes, np.uint8)


class SpareMemory:
    """Memory that is needed for a while, and then by somebody else: of new memory each page costs a
    fault. Threads may share it; it ends with this."""

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []

    @contextmanager
    def borrow(self) -> Iterator[Allocate]:
        """Lends memory until the end of the ``with``."""
        taken: list[npt.NDArray[np.uint8]] = []

        def lend(nbytes: int) -> npt.NDArray[np.uint8]:
            try:
                memory = self._free.pop()
            except IndexError:
                memory = pageable(nbytes)
            if memory.nbytes < nbytes:
                memory = pageable(nbytes)
            taken.append(memory)
            return memory[:nbytes]

        try:
            yield lend
        finally:
            self._free += taken


def contiguous(sizes: Sequence[int], allocate: Allocate = pageable) -> list[npt.NDArray[np.uint8]]:
    """Arrays of so many bytes, uninitialized, each at a cache line of one allocation, which
    ``allocate`` makes.

    The system gives large pages to large allocations (numpy asks for them): tensors of a megabyte
    each would cost a page fault for every 4 KiB. The memory is freed with the last of the arrays.
    """
    places = list(accumulate((size + -size % LINE for size in sizes), initial=0))
    memory = allocate(places[-1] + LINE)
    memory = memory[-memory.ctypes.data % LINE :]
    return [
        memory[start : start + size]
        for (start, _), size in zip(pairwise(places), sizes, strict=True)
    ]


def joined(arrays: Sequence[npt.NDArray[T]]) -> npt.NDArray[T] | None:
    """A view of flat ``arrays`` that lie one behind another in one allocation of `contiguous`; None
    if they do not. It is writable if all of them are."""
    memory = arrays[0].base
    if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8 or memory.ndim != 1:
        return None
    start = at = arrays[0].ctypes.data - memory.ctypes.data
    for array in arrays:
        if array.base is not memory or array.ctypes.data - memory.ctypes.data != at:
            return None
        at += array.nbytes
    view = memory[start:at].view(arrays[0].dtype)
    view.flags.writeable = view.flags.writeable and all(array.flags.writeable for array in arrays)
    return view


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A torch tensor that is not in host memory; slices of it are copied on demand.

    ``flat``: torch.uint8 [elements * width] on its device. ``width``: bytes of an element.
    """

    flat: Any
    width: int

    @property
    def is_cuda(self) -> bool:
        """Whether it is in the memory of a CUDA (or ROCm) device."""
        return bool(self.flat.device.type == "cuda")

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements [``start``, ``stop``) in new host memory, unsigned, once they are there."""
        host: npt.NDArray[np.uint8] = (
            self.flat[start * self.width : stop * self.width].cpu().numpy()
        )
        return host.view(np.dtype(f"<u{self.width}"))

    def ints(self, start: int, stop: int) -> Any:
        """A view of elements [``start``, ``stop``) on the device, in torch's integer type of their
        width."""
        torch: Any = sys.modules["torch"]
        return self.flat[start * self.width : stop * self.width].view(
            getattr(torch, _INTS[self.width])
        )


class DeviceCopies:
    """Copies of CUDA tensors into host memory that are under way on streams of their own.

    A copy begins after all work that the caller's current stream has been given; what that stream
    is given later, such as an optimizer's update in place, waits on the device for the copy's end,
    or, of a copy that is ``staged``, for the end of one within the device. The host waits in `wait`
    alone. Both ends of a copy are kept in memory until then.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Any]] = []

    def start(
        self, tensors: Iterable[tuple[DeviceTensor, npt.NDArray[Any]]], *, staged: bool = False
    ) -> None:
        """Enqueues the copy of each CUDA tensor into the array [elements] beside it, behind those
        that are under way. Returns before they are made if the arrays are page-locked (`pinned`),
        else after. ``staged``: by way of a copy on the device, where there is memory for it."""
        torch: Any = sys.modules["torch"]
        devices: dict[Any, list[tuple[Any, Any]]] = {}
        for tensor, array in tensors:
            host = torch.from_numpy(array.view(np.uint8))
            devices.setdefault(tensor.flat.device, []).append((tensor.flat, host))
        earlier = [(stream, ends) for stream, ends in self._under_way if not stream.query()]
        self._under_way = list(earlier)
        for device, pairs in devices.items():
            current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            copied = copied_on_device([(flat, flat.dtype) for flat, _ in pairs]) if staged else None
            if copied:
                pairs = [(flat, host) for flat, (_, host) in zip(copied, pairs, strict=True)]
            self._under_way.append((side, pairs))
            side.wait_stream(current)
            for stream, _ in earlier:
                side.wait_stream(stream)
            with torch.cuda.stream(side):
                for flat, host in pairs:
                    host.copy_(flat, non_blocking=True)
            if not copied:
                current.wait_stream(side)

    def wait(self) -> None:
        """Returns once all is copied. Raises what the device reports."""
        for stream, _ in self._under_way:
            stream.synchronize()
        self._under_way = []

    def __del__(self) -> None:
        # Whoever lost interest, by an interrupt or a cancelled submission: the device still writes
        # into the memory.
        with suppress(Exception):
            self.wait()


def copied_on_device(tensors: Sequence[tuple[Any, Any]]) -> list[Any] | None:
    """Copies [bytes] of torch tensors on their device, each cast to the dtype beside it, made by
    its current stream; None where they do not fit."""
    torch: Any = sys.modules["torch"]
    try:
        copies = [
            source.new_empty(source.numel() * dtype.itemsize, dtype=torch.uint8)
            for source, dtype in tensors
        ]
    except torch.cuda.OutOfMemoryError:
        return None
    for copy, (source, dtype) in zip(copies, tensors, strict=True):
        copy.view(dtype).copy_(source, non_blocking=True)
    return copies


def pinned(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Arrays of so many bytes, uninitialized, page-locked by torch, so that a device copies into
    them while the host goes on; ordinary memory where none can be locked.

    torch rounds each allocation up to a power of two: arrays share pieces of 1 GiB, only larger
    ones have their own.
    """
    arrays: list[npt.NDArray[np.uint8]] = []
    group: list[int] = []
    filled = LINE
    for size in sizes:
        padded = size + -size % LINE
        if group and filled + padded > _PIECE:
            arrays += contiguous(group, page_locked)
            group, filled = [], LINE
        group.append(size)
        filled += padded
    return arrays + contiguous(group, page_locked)


def page_locked(nbytes: int) -> npt.NDArray[np.uint8]:
    """One array as those of `pinned`."""
    torch: Any = sys.modules["torch"]
    try:
        locked: npt.NDArray[np.uint8] = torch.empty(
            nbytes, dtype=torch.uint8, device="cpu", pin_memory=True
        ).numpy()
    except RuntimeError:  # no device, or the system's limit of locked memory
        return np.empty(nbytes, np.uint8)
    return locked
