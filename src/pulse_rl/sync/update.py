"""What a worker scatters into its live model: all that changed since it last acknowledged an
update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from ..events import Metadata, OneLine
from ..patch.apply import StateChanges, TensorChanges, difference, elements, merged
from ..state.bits import UIntArray
from ..state.tensors import State, TensorSpec
from ..stream.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Pending:
    """What the owner of a state has not acknowledged: all ``changes`` since version ``since``, of
    which it knows the ``aliases``, for which ``nbytes`` were fetched. ``changes`` and ``since`` are
    None where everything is new to it.

    ``most`` elements may be pending before they are merged.
    """

    since: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[StateChanges, ...] | None = None
    nbytes: int = 0
    most: int = 0

    @classmethod
    def nothing(cls, version: int, state: State) -> Self:
        """The owner has acknowledged ``version``."""
        return cls(version, state.aliases, ())

    def after_patch(self, changed: StateChanges, nbytes: int, state: State) -> Pending:
        """The same once ``state`` was patched. Elements that change again and again take no more
        memory: they are merged whenever they are twice as many as were left by the last time; where
        they are most of the state, everything is new."""
        more = replace(self, nbytes=self.nbytes + nbytes)
        if self.changes is None:
            return more
        changes = (*self.changes, changed)
        if len(changes) == 1 or sum(map(elements, changes)) <= self.most:
            return replace(more, changes=changes, most=max(self.most, 2 * elements(changed)))
        return more._all_in_one(changes, state)

    def after_restore(self, nbytes: int, old: State, new: State) -> Pending:
        """Pending as changes if ``new`` has the tensors of ``old``, else everything is new."""
        if self.changes is None or old.specs != new.specs:
            return Pending(nbytes=self.nbytes + nbytes)
        return replace(
            self, nbytes=self.nbytes + nbytes, changes=(*self.changes, difference(old, new))
        )

    def merged(self, state: State) -> Pending:
        """The same with each element once, with its bits in ``state``."""
        return (
            self
            if self.changes is None or len(self.changes) < 2
            else self._all_in_one(self.changes, state)
        )

    def _all_in_one(self, changes: tuple[StateChanges, ...], state: State) -> Pending:
        whole = merged(changes, state)
        # Indices take 4 to 8 bytes each: near all of the state, values alone are smaller.
        if 5 * elements(whole) > 4 * state.elements:
            return Pending(nbytes=self.nbytes)
        return replace(self, changes=(whole,), most=2 * elements(whole))


class TensorUpdate:
    """New bits of the tensor ``spec``: ``values`` at ``indices``, or everywhere if these are
    None."""

    __slots__ = ("_changes", "spec")

    def __init__(
        self, spec: TensorSpec, indices: npt.NDArray[np.int64] | None, values: UIntArray
    ) -> None:
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
    """Whether the update to ``version`` was ``acknowledged``. ``source`` stands for the subscriber
    that delivered it, None for an update made elsewhere."""

    __slots__ = ("acknowledged", "source", "version")

    def __init__(self, version: int, source: object = None) -> None:
        self.version = version
        self.source = source
        self.acknowledged = False


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Update(OneLine):
    """All that changed from version ``previous``, the last that was acknowledged (None:
    everything), to ``version``, verified against ``root``.

    Iterating yields (name, flat indices or None, values as unsigned integers of the element's
    width). The next update has all of this one again until this one is acknowledged: `apply_` does
    it, so does iterating to the end, and asking `Subscriber.updates` for the next one; whoever
    reads ``tensors`` in another way calls `acknowledge`. `Subscriber.full_update` gives a model
    that missed an acknowledged one the whole state. Full values are read-only views of the host
    state, which moves on in a copy while the update is alive: let it go after use. ``aliases`` maps
    the other names of tied tensors to the name that the update uses; ``tensors`` without changes
    are left out. ``metadata`` is the publisher's. ``payload_bytes`` were fetched for it, in
    ``seconds`` of wall-clock time.
    """

    version: int
    previous: int | None
    root: str
    tensors: tuple[TensorUpdate, ...] = field(repr=False)
    aliases: dict[str, str] = field(repr=False)
    metadata: Metadata = field(repr=False)
    payload_bytes: int
    seconds: float
    _receipt: Receipt = field(
        init=False, default_factory=lambda: Receipt(-1), repr=False, compare=False
    )

    def __repr__(self) -> str:
        shown = f", changed={self.changed}, full={self.full}, metadata={self.metadata})"
        return f"{OneLine.__repr__(self)[:-1]}{shown}"

    @property
    def full(self) -> bool:
        """Whether the whole state is new to the model."""
        return self.previous is None

    @property
    def acknowledged(self) -> bool:
        """Whether the live model has taken it over."""
        return self._receipt.acknowledged

    @property
    def changed(self) -> int:
        """Elements that the update writes."""
        return sum(tensor.elements for tensor in self.tensors)

    def acknowledge(self) -> None:
        """Says that the live model has taken the update over. May be called from any thread, and
        again."""
        self._receipt.acknowledged = True

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[np.int64] | None, UIntArray]]:
        for tensor in self.tensors:
            yield tensor.spec.name, tensor.indices, tensor.values
        self.acknowledge()


def make_update(
    pending: Pending, state: State, manifest: Manifest, started: float, source: object = None
) -> Update:
    """The update with all that is ``pending``, merged, to the version of ``manifest``, whose
    verified ``state``, or the part of it that the owner wants, is read-only. ``source`` stands for
    who delivers it.
    """
    if pending.changes is None:
        tensors = [TensorUpdate(spec, None, state.read(spec.name)) for spec in state.specs]
    else:
        # A tensor that has another name since is shown whole: a live model may hold the two apart.
        renamed = {
            name for alias, name in state.aliases.items() if pending.aliases.get(alias) != name
        }
        tensors = [
            TensorUpdate._of(state.spec(name), changed)
            for changes in pending.changes
            for name, changed in changes.items()
            if name not in renamed and name in state
        ]
        tensors += [
            TensorUpdate(state.spec(name), None, state.read(name))
            for name in sorted(renamed)
            if name in state
        ]
    update = Update(
        version=manifest.version,
        previous=pending.since,
        root=manifest.root,
        tensors=tuple(tensors),
        aliases=dict(state.aliases),
        metadata=manifest.metadata,
        payload_bytes=pending.nbytes,
        seconds=time.perf_counter() - started,
    )
    object.__setattr__(update, "_receipt", Receipt(manifest.version, source))
    return update
