"""Copies of states: of host memory by several threads, of CUDA memory by the device, beside the
host's work."""

from __future__ import annotations

from typing import NamedTuple

from .._util.threads import ordered_map
from .memory import DeviceCopies, pinned
from .tensors import State, TensorSpec, cuda_tensors

_PIECE_ELEMENTS = 1 << 22


class Snapshot(NamedTuple):
    """``state`` is in host memory of its own, and holds its values once ``copies`` were waited
    for."""

    state: State
    copies: DeviceCopies


def snapshot(
    state: State, into: Snapshot | None = None, *, threads: int | None = None, staged: bool = False
) -> Snapshot:
    """``state`` in host memory of its own: that of ``into``, which nobody needs any more, if it has
    the same tensors. What a device still copies into it comes first.

    New memory costs as much again as the copy: the system hands it out page by page. That of a
    state with CUDA tensors is page-locked, so that this returns before they are copied
    (`DeviceCopies`, which has ``staged``).
    """
    cuda = cuda_tensors(state)
    if into is None or into.state.specs != state.specs:
        into = Snapshot(
            _page_locked(state.specs) if cuda else State.empty(state.specs), DeviceCopies()
        )
    elif len(cuda) < len(state.specs):
        into.copies.wait()  # the host writes into it as well
    copied, copies = into.state.with_aliases(state.aliases), into.copies
    if cuda:
        copies.start(((tensor, copied.read(name)) for name, tensor in cuda.items()), staged=staged)
    pieces = [
        (spec.name, start, min(start + _PIECE_ELEMENTS, spec.elements))
        for spec in state.specs
        if spec.name not in cuda
        for start in range(0, spec.elements, _PIECE_ELEMENTS)
    ]

    def copy(piece: tuple[str, int, int]) -> None:
        copied.read(*piece)[:] = state.read(*piece)

    for _ in ordered_map(copy, pieces, threads):
        pass
    return Snapshot(copied, copies)


def _page_locked(specs: tuple[TensorSpec, ...]) -> State:
    arrays = pinned([s.nbytes for s in specs])
    return State(specs, {s.name: a.view(s.dtype.uint) for s, a in zip(specs, arrays, strict=True)})
