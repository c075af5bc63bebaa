"""Memory of many arrays: in the host, page-locked, and of devices, seen through torch, which is
never imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
