"""Parameters that an engine derives from checkpoint weights when it loads them: quantized,
transposed, scaled.

The map leads into the form in which such a layer is loaded. For a new version the layer gets that
form aside, from the host state, and is derived again by the engine's own code. What then differs
from the live bits is written.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ..errors import StateMismatch, UnsupportedTensor
from ..frameworks.torch import _INTS
from ..state.tensors import State
from .live import Change, LoaderMap, Rectangle, Scattered, WholeRectangle, as_flat, memory
from .node import Node, Staging
from .self_check import broadcast

#: How much is derived between two steps of the engine, at least one layer.
SLICE_ELEMENTS = 1 << 24
_POSITION_BYTES = 8

Rectangles = dict[str, tuple[Rectangle, ...]]


class DerivedLayer(Protocol):
    """A layer of the engine's model that is processed after loading.

    ``plain``: whether it computes with its weights just as they are loaded. ``loaded``: the form in
    which it is loaded, meta tensors by their full names. ``live``: the parameters that it computes
    with, by their full names.
    """

    plain: bool
    loaded: dict[str, torch.Tensor]
    live: dict[str, torch.Tensor]

    def derive(self, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the engine makes of ``loaded``, by the names of `live`, aside of the live layer. All
        workers of an engine call it for the same layers in the same order. Raises
        UnsupportedTensor."""

    def put_loaded(self) -> None:
        """Gives the live layer parameters of the loaded form, whose memory must not be touched."""

    def put_live(self) -> None:
        """Gives the layer its live parameters back."""


class PostLoadLayers:
    """The layers of a model that are processed after loading: ``layers`` are those that are not
    plain."""

    def __init__(self, processed: Sequence[DerivedLayer] = ()) -> None:
        self._processed = processed
        self.layers = [layer for layer in processed if not layer.plain]
        #: Of all parameters of the loaded form.
        self.names = frozenset(name for layer in self.layers for name in layer.loaded)

    @contextmanager
    def within(self) -> Iterator[None]:
        """All layers can be loaded within."""
        given = []
        try:
            for layer in self._processed:
                given.append(layer)
                layer.put_loaded()
            yield
        finally:
            for layer in reversed(given):
                layer.put_live()


@dataclass(slots=True)
class _Step:
    """From the live version ``before`` to the host's version ``target``: the ``changes`` of the
    layers derived so far, and the layers that are ``left``."""

    target: int
    before: int | None
    left: list[tuple[DerivedLayer, Rectangles]]
    changes: list[Change] = field(default_factory=list)


class DerivedLayers:
    """The derived layers of one session. Its methods but for `left` and `forget` are collective."""

    def __init__(self, forms: PostLoadLayers, node: Node, staging: Staging) -> None:
        self._forms, self._node, self._staging = forms, node, staging
        self._step: _Step | None = None

    def left(self, live: int | None) -> int:
        """Layers to derive before the live version can become that of the host; leader only."""
        held = self._staging.held
        if not self._forms.layers or held is None or held.number == live:
            return 0
        step = self._step_to(held.number, live)
        return len(step.left) if step is not None else len(self._forms.layers)

    def advance(self, loader_map: LoaderMap, live: int | None, most: int = SLICE_ELEMENTS) -> None:
        """Derives layers of about ``most`` elements from the host state, which is held from now on.
        Does nothing while that is still on the move, or is not the same on all nodes."""
        if not self._forms.layers:
            return
        held = self._node.gathered((self._node.leader, self._staging.hold()))
        versions = {version for leader, version in held if leader}
        target = versions.pop()
        if versions or target is None or target == live:
            return
        step = self._step_to(target, live)
        if step is None:
            names = self._node.common(self._changed_names(target, live))
            step = self._step = _Step(target, live, self._touched(loader_map, names))
        state, elements = self._staging.host_state(), 0
        while step.left and elements < most:
            layer, boxes = step.left[0]
            step.changes += _changes(self._node, layer, boxes, state)
            del step.left[0]
            elements += sum(tensor.numel() for tensor in layer.loaded.values())

    def changes(self, loader_map: LoaderMap, live: int | None, target: int) -> list[Change]:
        """What has to be written for the step from the live version to ``target``."""
        if not self._forms.layers:
            return []
        self.advance(loader_map, live, sys.maxsize)
        step = self._step_to(target, live)
        if step is None:
            raise StateMismatch("the engine's nodes hold different versions", hint="Sync again.")
        return step.changes

    def all_changes(self, loader_map: LoaderMap, state: State | None) -> list[Change]:
        """What has to be written for all layers to hold what they derive from the leader's
        ``state``."""
        touched = self._touched(loader_map, None)
        return [
            change
            for layer, boxes in touched
            for change in _changes(self._node, layer, boxes, state)
        ]

    def forget(self) -> None:
        """The step was made."""
        self._step = None

    def differing(self, loader_map: LoaderMap, state: State | None) -> list[str]:
        """The checkpoint tensors of those layers that are not what the engine derives from the
        leader's ``state``, on any worker."""
        wrong: set[str] = set()
        for layer, boxes in self._touched(loader_map, None):
            if any(self._node.gathered(bool(_changes(self._node, layer, boxes, state)))):
                wrong |= boxes.keys()
        return self._node.union(wrong)

    def _step_to(self, target: int, live: int | None) -> _Step | None:
        step = self._step
        return step if step is not None and (step.target, step.before) == (target, live) else None

    def _changed_names(self, target: int, live: int | None) -> list[str] | None:
        """The tensors that differ between the live version and ``target``, None if unknown; leader
        only."""
        staged = self._staging.prepared.staged if self._staging.prepared is not None else None
        if staged is None or live is None or staged.version != target:
            return None
        if staged.previous is None or staged.previous > live:
            return None
        return list(staged.changes)

    def _touched(
        self, loader_map: LoaderMap, names: Collection[str] | None
    ) -> list[tuple[DerivedLayer, Rectangles]]:
        """The layers that hold elements of the tensors ``names``, None: all; and the boxes that
        lead there."""
        owner = {
            name: place for place, layer in enumerate(self._forms.layers) for name in layer.loaded
        }
        found: list[dict[str, list[Rectangle]]] = [{} for _ in self._forms.layers]
        for name, boxes in loader_map.derived.items():
            for box in boxes:
                found[owner[box.parameter]].setdefault(name, []).append(box)
        return [
            (layer, {name: tuple(held) for name, held in boxes.items()})
            for layer, boxes in zip(self._forms.layers, found, strict=True)
            if names is None or not boxes.keys().isdisjoint(names)
        ]


def _changes(
    node: Node, layer: DerivedLayer, boxes: Rectangles, state: State | None
) -> list[Change]:
    """What has to be written for ``layer`` to hold what it derives from the leader's ``state``.
    Collective."""
    loaded = {
        name: torch.zeros_like(meta, device=next(iter(layer.live.values())).device)
        for name, meta in layer.loaded.items()
    }
    flat = {name: as_flat(tensor) for name, tensor in loaded.items()}

    def place(part: Rectangle, source: torch.Tensor) -> None:
        put = memory(flat, part).as_strided(part.sizes, part.target_strides, part.target)
        put.copy_(source)

    broadcast(node, boxes, state, place)

    def compare() -> list[Change]:
        derived, live = layer.derive(loaded), layer.live
        if derived.keys() != live.keys():
            raise UnsupportedTensor(f"a layer has {sorted(live)} and derives {sorted(derived)}")
        return [change for name in live for change in _difference(name, live[name], derived[name])]

    return node.together(compare)


def _difference(name: str, live: torch.Tensor, derived: torch.Tensor) -> list[Change]:
    if (live.shape, live.dtype) != (derived.shape, derived.dtype):
        raise UnsupportedTensor(
            f"the engine derives {tuple(derived.shape)} {derived.dtype} for {name!r}, which is "
            f"{tuple(live.shape)} {live.dtype}"
        )
    width = live.element_size()
    old, new = live.detach().view(_INTS[width]), derived.detach().view(_INTS[width])
    places = (old != new).nonzero()
    if not len(places):
        return []
    if len(places) * (_POSITION_BYTES + width) >= live.numel() * width:
        values = new.contiguous().cpu().numpy().reshape(-1).view(f"<u{width}")
        box = Rectangle.make(
            name,
            tuple(live.shape),
            (0, torch.empty(live.shape, device="meta").stride()),
            (int(live.storage_offset()), live.stride()),
        )
        return [WholeRectangle(box, values)]
    values = new[tuple(places.T)].cpu().numpy().view(f"<u{width}")
    steps = torch.tensor(live.stride(), dtype=torch.int64, device=places.device)
    positions = (places * steps).sum(-1) + int(live.storage_offset())
    return [
        Scattered(name, np.ascontiguousarray(positions.cpu().numpy()), np.ascontiguousarray(values))
    ]
