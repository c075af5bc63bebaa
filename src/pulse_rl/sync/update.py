"""What a worker scatters into its live model: names, flat indices, new bits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..events import Metadata
from ..patch.changes import TensorChanges
from ..state.tensors import State, TensorSpec, UIntArray
from ..stream.manifest import Manifest
from .delivery import Step


class TensorUpdate:
    """New bits of the tensor ``spec``: ``values`` at ``indices``, or everywhere if these are None."""

    __slots__ = ("_changes", "spec")

    def __init__(self, spec: TensorSpec, indices: npt.NDArray[np.int64] | None, values: UIntArray) -> None:
        self.spec = spec
        self._changes = values if indices is None else TensorChanges.at(indices, values)

    @classmethod
    def _of(cls, spec: TensorSpec, changes: TensorChanges) -> TensorUpdate:
        """With indices that are made when they are asked for."""
        update = cls.__new__(cls)
        update.spec, update._changes = spec, changes
        return update

    def __repr__(self) -> str:
        return f"TensorUpdate({self.spec}, {self.elements} elements)"

    @property
    def elements(self) -> int:
        """How many it writes."""
        return len(self._changes)

    @property
    def whole(self) -> bool:
        """Whether it writes all elements."""
        return not isinstance(self._changes, TensorChanges)

    @property
    def indices(self) -> npt.NDArray[np.int64] | None:
        """Where, in the flattened tensor: int64, ascending; None: everywhere."""
        return self._changes.indices if isinstance(self._changes, TensorChanges) else None

    @property
    def values(self) -> UIntArray:
        """The new bits, unsigned integers of the element's width, one for each index."""
        return self._changes.values if isinstance(self._changes, TensorChanges) else self._changes


def changes_of(update: TensorUpdate) -> TensorChanges | None:
    """What it writes, if that is not all. Its indices are not made for this."""
    return update._changes if isinstance(update._changes, TensorChanges) else None


class Receipt:
    """What became of the update to ``version``: whether its owner has ``begun`` to take it over, and ``acknowledged``
    it. ``source`` stands for the subscriber that delivered it, None for an update made elsewhere."""

    __slots__ = ("acknowledged", "begun", "source", "version")

    def __init__(self, version: int, source: object = None) -> None:
        self.version = version
        self.source = source
        self.begun = False
        self.acknowledged = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Update:
    """The step from version ``previous`` (None: from nothing) to ``version``, verified against ``root``.

    Iterating yields (name, flat indices or None, values as unsigned integers of the element's width). Updates are
    applied in order; `Subscriber.full_update` gives a model that missed one the whole state. An update that was not
    acknowledged is part of the next one: `apply_` acknowledges, so does iterating to the end, and `acknowledge` is for
    whoever reads ``tensors`` in another way. Full values are read-only views of the host state, which moves on in a
    copy while the update is alive: let it go after use. ``aliases`` maps the other names of tied tensors to the name
    that the update uses; ``tensors`` without changes are left out. ``metadata`` is the publisher's. ``payload_bytes``
    were fetched for it, in ``seconds`` of wall-clock time.
    """

    version: int
    previous: int | None
    root: str
    tensors: tuple[TensorUpdate, ...] = field(repr=False)
    aliases: dict[str, str] = field(repr=False)
    metadata: Metadata = field(repr=False)
    payload_bytes: int
    seconds: float
    _receipt: Receipt = field(init=False, default_factory=lambda: Receipt(-1), repr=False, compare=False)

    @property
    def full(self) -> bool:
        """Whether the whole state is new to the model."""
        return self.previous is None

    @property
    def changed(self) -> int:
        """Elements that the update writes."""
        return sum(tensor.elements for tensor in self.tensors)

    def acknowledge(self) -> None:
        """Says that the live model has taken the update over. May be called from any thread, and again."""
        self._receipt.acknowledged = True

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[np.int64] | None, UIntArray]]:
        self._receipt.begun = True
        for tensor in self.tensors:
            yield tensor.spec.name, tensor.indices, tensor.values
        self.acknowledge()


def make_update(step: Step, state: State, manifest: Manifest, started: float, source: object = None) -> Update:
    """The update along ``step``, to the version of ``manifest``, whose verified ``state``, or the part of it that the
    owner wants, is read-only. ``source`` stands for who delivers it.
    """
    if step.changes is None:
        tensors = [TensorUpdate(spec, None, state.read(spec.name)) for spec in state.specs]
    else:
        tensors = [
            TensorUpdate._of(state.spec(name), changed)
            for name, changed in step.changes.items()
            if name not in step.renamed and name in state
        ]
        renamed = [name for name in sorted(step.renamed) if name in state]
        tensors += [TensorUpdate(state.spec(name), None, state.read(name)) for name in renamed]
    update = Update(
        version=step.version,
        previous=step.previous,
        root=manifest.root,
        tensors=tuple(tensors),
        aliases=dict(state.aliases),
        metadata=manifest.metadata,
        payload_bytes=sum(link.nbytes for link in step.links),
        seconds=time.perf_counter() - started,
    )
    object.__setattr__(update, "_receipt", Receipt(step.version, source))
    return update
