"""What the live parameters hold, read back through the map and hashed; and the whole state written through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from ..._util.threads import ordered_map
from ...errors import PulseError, UnsupportedTensor
from ...state.digest import LEAF_BYTES, StateDigest, leaf_digests
from ...state.tensors import State, TensorSpec
from ..torch import _INTS
from .boxes import Box
from .live import Journal, LiveWeights, as_ints
from .node import Node
from .trace import TensorMap, torch_dtype

_WINDOW_BYTES = 64 * LEAF_BYTES
_TASK_BYTES = 4 * LEAF_BYTES


def differing(node: Node, live: LiveWeights, tensor_map: TensorMap, digest: StateDigest | None) -> list[str]:
    """The checkpoint tensors whose live elements are not those of the version with ``digest``, on any worker.

    Each worker puts its elements into a window that all share; where several hold an element, all must agree. The
    leader, which alone needs ``digest``, hashes the window. Tensors that the model does not hold are passed over.
    Collective.
    """
    specs = node.shared(digest.specs if digest else ())
    held = {name for names in node.on_node(list(tensor_map.boxes)) for name in names}
    window = node.window(_WINDOW_BYTES)
    wrong: set[str] = set()
    failure: Exception | None = None
    for spec, start, stop in _pieces(specs, held):
        here = torch.from_numpy(window[: (stop - start) * spec.dtype.width]).view(_INTS[spec.dtype.width])
        parts = [part for box in tensor_map.boxes.get(spec.name, ()) for part in box.within(start, stop)]
        try:
            for part in parts:
                _in_window(here, part, start).copy_(live.view(part))
        except Exception as error:  # raised below, when the other workers do not wait any more
            failure = failure or error
        node.barrier()
        try:
            shared = node.size > 1 or len(parts) > 1
            if shared and any(not torch.equal(_in_window(here, part, start), live.view(part).cpu()) for part in parts):
                wrong.add(spec.name)
            if digest is not None and node.leader:
                first = start * spec.dtype.width // LEAF_BYTES
                raw = window[: (stop - start) * spec.dtype.width]
                tasks = [raw[at : at + _TASK_BYTES] for at in range(0, len(raw), _TASK_BYTES)]
                found = b"".join(ordered_map(leaf_digests, tasks))
                if found != digest.leaves[spec.name][32 * first :][: len(found)]:
                    wrong.add(spec.name)
        except Exception as error:
            failure = failure or error
        node.barrier()
    raise_first(node, failure)
    return sorted({name for names in node.gathered(sorted(wrong)) for name in names})


def require_whole(specs: tuple[TensorSpec, ...], workers: Sequence[Mapping[str, tuple[Box, ...]]]) -> None:
    """Raises UnsupportedTensor where the ``workers`` of a node, given by their boxes, hold a part of a tensor only: no
    digest of it could be computed there."""
    for spec in specs:
        boxes = {box for boxes in workers for box in boxes.get(spec.name, ())}
        parts = {(box.source, *((axis.size, axis.source) for axis in box.axes)): box.elements for box in boxes}
        if parts and sum(parts.values()) < spec.elements:
            raise UnsupportedTensor(
                f"the workers of this node hold only a part of {spec.name!r}",
                hint="Keep tensor parallelism within a node; pipeline stages and replicas may be on several.",
            )


def write_all(node: Node, journal: Journal, tensor_map: TensorMap, state: State | None) -> None:
    """Writes the leader's ``state`` into the live parameters, where they differ. Collective."""
    broadcast(node, tensor_map.boxes, state, journal.write)


def broadcast(
    node: Node,
    boxes: Mapping[str, tuple[Box, ...]],
    state: State | None,
    write: Callable[[Box, torch.Tensor], None],
) -> None:
    """Calls ``write`` on each worker for all parts of its ``boxes``, by the checkpoint tensor's name, with their bits
    in the leader's ``state`` as integers. Collective."""
    specs = node.shared(state.specs if state is not None else ())
    held = {name for names in node.on_node(list(boxes)) for name in names}
    window = node.window(_WINDOW_BYTES) if node.size > 1 else None
    failure: Exception | None = None
    for spec, start, stop in _pieces(specs, held):
        width = spec.dtype.width
        if window is None:
            assert state is not None
            here = as_ints(state.read(spec.name, start, stop))
        else:
            if state is not None:
                window[: (stop - start) * width] = state.read(spec.name, start, stop).view(np.uint8)
            node.barrier()
            here = torch.from_numpy(window[: (stop - start) * width]).view(_INTS[width])
        try:
            for box in boxes.get(spec.name, ()):
                for part in box.within(start, stop):
                    write(part, _in_window(here, part, start))
        except Exception as error:  # raised below, when the other workers do not wait any more
            failure = failure or error
        node.barrier()
    raise_first(node, failure)


def load_all(
    node: Node,
    journal: Journal,
    model: torch.nn.Module,
    reloading: Callable[[], AbstractContextManager[None]],
    state: State | None,
) -> None:
    """Lets the model load the leader's ``state`` as it would load a checkpoint, within ``reloading``, which does what
    the engine does around that. For live weights that are not those of a known checkpoint. Collective."""
    named = node.shared([(name, state.spec(name)) for name in state] if state is not None else [])
    node.together(journal.keep_all)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in named:
            window = node.window(max(1, spec.nbytes))
            if state is not None:
                window[: spec.nbytes] = state.read(name).view(np.uint8)
            node.barrier()
            yield name, torch.from_numpy(window[: spec.nbytes]).view(torch_dtype(spec)).reshape(spec.shape)
            node.barrier()

    supply, failure = tensors(), None
    with reloading():
        try:
            model.load_weights(supply)  # type: ignore[operator]
        except Exception as error:  # raised below, when the other workers do not wait any more
            failure = error
        finally:
            for _ in supply:
                pass
    raise_first(node, failure)


def _pieces(specs: tuple[TensorSpec, ...], held: set[str]) -> Iterator[tuple[TensorSpec, int, int]]:
    for spec in specs:
        if spec.name in held:
            step = _WINDOW_BYTES // spec.dtype.width
            for start in range(0, spec.elements, step):
                yield spec, start, min(start + step, spec.elements)


def _in_window(window: torch.Tensor, part: Box, start: int) -> torch.Tensor:
    return window.as_strided(part.sizes, part.source_strides, part.source - start)


def raise_first(node: Node, failure: Exception | None) -> None:
    text = f"{type(failure).__name__}: {failure}" if failure is not None else None
    for other in node.gathered(text):
        if other is not None:
            raise PulseError(f"a worker failed to reach its live parameters: {other}") from failure
