"""A group of tensors of one device and width: what is sent there of their changed elements, and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...patch.changes import TensorChanges
from ...state.device import page_locked
from ...state.memory import LINE

PROGRAM_ELEMENTS = 1024
"""What one program of the kernel writes."""


class Scatter(NamedTuple):
    """``changes`` of a live tensor whose elements are ``flat``, integers of their width [n], all within it."""

    changes: TensorChanges
    flat: torch.Tensor


class Sent(NamedTuple):
    """What is on the device of a group: ``positions`` (int32 or int64) and ``values`` one after another, for each of
    ``tensors`` those from its number in ``firsts`` to the next one's. ``programs``: int64 [n, 3], for each program of
    the kernel the address of a tensor, and the first and the last of what it writes there."""

    tensors: Sequence[torch.Tensor]
    firsts: Sequence[int]
    positions: torch.Tensor
    values: torch.Tensor
    programs: torch.Tensor


Launch = Callable[[Sent], None]


def write(group: Sequence[Scatter], launch: Launch) -> None:
    """Sends a group, of one device and one width, and launches what writes it."""
    flats = [one.flat for one in group]
    firsts = [0, *accumulate(len(one.changes) for one in group)]
    programs = _programs(flats, firsts)
    position = np.dtype(np.int32 if max(map(len, flats)) < 1 << 31 else np.int64)
    value = np.dtype(f"u{flats[0].element_size()}")
    sizes = [programs.nbytes, firsts[-1] * position.itemsize, firsts[-1] * value.itemsize]
    ends = list(accumulate(size + -size % LINE for size in sizes))  # aligned alike, which Triton compiles for
    host = page_locked(ends[-1])
    host[: programs.nbytes].view(np.int64)[:] = programs.reshape(-1)
    indices, values = host[ends[0] : ends[1]].view(position), host[ends[1] :].view(value)
    for one, (first, stop) in zip(group, pairwise(firsts), strict=True):
        one.changes.write_into(indices[first:stop], values[first:stop])
    sent = flats[0].new_empty(len(host), dtype=torch.uint8)
    sent.copy_(torch.from_numpy(host), non_blocking=True)
    launch(
        Sent(
            flats,
            firsts,
            sent[ends[0] : ends[1]].view(torch.from_numpy(indices).dtype),
            sent[ends[1] :].view(flats[0].dtype),
            sent[: programs.nbytes].view(torch.int64).view(-1, 3),
        )
    )
    for flat in flats:
        torch.autograd.graph.increment_version(flat)


def by_indices(sent: Sent) -> None:
    """One launch for each tensor."""
    for flat, (start, stop) in zip(sent.tensors, pairwise(sent.firsts), strict=True):
        flat.index_copy_(0, sent.positions[start:stop].long(), sent.values[start:stop])


def _programs(flats: Sequence[torch.Tensor], firsts: Sequence[int]) -> npt.NDArray[np.int64]:
    parts = []
    for flat, (start, stop) in zip(flats, pairwise(firsts), strict=True):
        begins = np.arange(start, stop, PROGRAM_ELEMENTS, dtype=np.int64)
        ends = np.minimum(begins + PROGRAM_ELEMENTS, stop)
        parts.append(np.stack([np.full_like(begins, flat.data_ptr()), begins, ends], axis=1))
    return np.concatenate(parts)
