"""Which way of writing a device has, and the groups that it is used for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ...patch.changes import TensorChanges
from .group import PROGRAM_ELEMENTS, Launch, Scatter, by_indices, write

_GROUP_ELEMENTS = 1 << 22
_LAUNCHES: dict[torch.device, Launch] = {}


def scatter(changed: Iterable[Scatter]) -> None:
    """Writes all of it, on the current streams of the tensors' devices. Returns when it is given to these, before they
    have done it."""
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
        from .kernel import by_kernel

        for width in (torch.uint8, torch.int16, torch.int32, torch.int64):
            _try_out(by_kernel, width, device)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, none for this device, no compiler, and what is yet to come
        warnings.warn(
            f"updates are written tensor by tensor on {device}: {type(error).__name__}: {error}", stacklevel=5
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
    if any(not torch.equal(found.cpu(), wanted) for found, wanted in zip(tensors, expected, strict=True)):
        raise AssertionError("the kernel wrote something else")
