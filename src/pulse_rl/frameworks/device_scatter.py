"""Changed elements of many tensors on a device: one transfer and, with Triton, one kernel launch
for all of a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..patch.apply import TensorChanges
from ..state.bits import LINE
from ..submit import page_locked

__all__ = ["Scatter", "scatter"]


PROGRAM_ELEMENTS = 1024
"""What one program of the kernel writes."""
_GROUP_ELEMENTS = 1 << 22
_LAUNCHES: dict[torch.device, Launch] = {}


class Scatter(NamedTuple):
    """``changes`` of a live tensor whose elements are ``flat``, integers of their width [n], all
    within it."""

    changes: TensorChanges
    flat: torch.Tensor


class Sent(NamedTuple):
    """What is on the device of a group: ``positions`` (int32 or int64) and ``values`` one after
    another, for each of ``tensors`` those from its number in ``firsts`` to the next one's.
    ``programs``: int64 [n, 3], for each program of the kernel the address of a tensor, and the
    first and the last of what it writes there."""

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
    ends = list(
        accumulate(size + -size % LINE for size in sizes)
    )  # aligned alike, which Triton compiles for
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


def scatter(changed: Iterable[Scatter]) -> None:
    """Writes all of it, on the current streams of the tensors' devices. Returns when it is given to
    these, before they have done it."""
    kinds: dict[tuple[torch.device, int], list[Scatter]] = {}
    for one in changed:
        if len(one.changes):
            kinds.setdefault((one.flat.device, one.flat.element_size()), []).append(one)
    for (device, _), alike in kinds.items():
        launch = _launch_of(device)
        for group in _groups(alike):
            write(group, launch)


def _groups(changed: Iterable[Scatter]) -> Iterator[list[Scatter]]:
    group: list[Scatter] = []
    elements = 0
    for changes, flat in changed:
        for part in changes.cut(_GROUP_ELEMENTS):
            if group and elements + len(part) > _GROUP_ELEMENTS:
                yield group
                group, elements = [], 0
            group.append(Scatter(part, flat))
            elements += len(part)
    if group:
        yield group


def _launch_of(device: torch.device) -> Launch:
    """The kernel where it is there and does what it should, else one launch for each tensor."""
    if device.type != "cuda":
        return by_indices
    if device not in _LAUNCHES:
        try:
            _LAUNCHES[device] = _tried_out(device)
        except torch.cuda.OutOfMemoryError:  # of now
            return by_indices
    return _LAUNCHES[device]


def _tried_out(device: torch.device) -> Launch:
    try:
        from .scatter_kernel import by_kernel

        for width in (torch.uint8, torch.int16, torch.int32, torch.int64):
            _try_out(by_kernel, width, device)
    except torch.cuda.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # no Triton, none for this device, no compiler, or a failure not known yet
        warnings.warn(
            f"updates are written tensor by tensor on {device}: {type(error).__name__}: {error}",
            stacklevel=5,
        )
        return by_indices
    return by_kernel


def _try_out(launch: Launch, dtype: torch.dtype, device: torch.device) -> None:
    """Raises unless ``launch`` writes two tensors of ``dtype`` as it should."""
    size = 3 * PROGRAM_ELEMENTS
    tensors = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
    expected = [torch.zeros(size, dtype=dtype, device="cpu") for _ in range(2)]
    group = []
    for k, step in enumerate((1, 7)):
        indices = np.arange(k, size, step, dtype=np.int64)
        values = (indices % 100 + 1).astype(f"<u{expected[k].element_size()}")
        expected[k][torch.from_numpy(indices)] = torch.from_numpy(indices % 100 + 1).to(dtype)
        group.append(Scatter(TensorChanges.at(indices, values), tensors[k]))
    write(group, launch)
    if any(
        not torch.equal(found.cpu(), wanted)
        for found, wanted in zip(tensors, expected, strict=True)
    ):
        raise AssertionError("the kernel wrote something else")
