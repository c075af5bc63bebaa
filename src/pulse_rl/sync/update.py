"""Updates for a live model: the changes since the last acknowledged one."""

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
    """The changes that the owner of a state has not acknowledged.

    ``changes`` lead from version ``since``, of which the owner knows the ``aliases``; both are None
    if everything is new to it. ``nbytes`` were fetched for them. Changes of up to ``most`` elements
    are kept before they are merged.
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
        """Add the changes of a patch that led to ``state``.

        Elements that change again and again must not take more memory each time. So changes are
        merged when they have twice as many elements as the last merge left. If they cover most of
        the state, everything is new.
        """
        more = replace(self, nbytes=self.nbytes + nbytes)
        if self.changes is None:
            return more
        changes = (*self.changes, changed)
        # Merging costs a sort, so it waits until the pending changes have doubled.
        if len(changes) == 1 or sum(map(elements, changes)) <= self.most:
            return replace(more, changes=changes, most=max(self.most, 2 * elements(changed)))
        return more._all_in_one(changes, state)

    def after_restore(self, nbytes: int, old: State, new: State) -> Pending:
        """Add the difference from ``old`` to ``new``; everything is new if their tensors differ."""
        # The two states have nothing in common but their names and shapes, so every element is
        # compared.
        if self.changes is None or old.specs != new.specs:
            return Pending(nbytes=self.nbytes + nbytes)
        return replace(
            self, nbytes=self.nbytes + nbytes, changes=(*self.changes, difference(old, new))
        )

    def merged(self, state: State) -> Pending:
        """The same changes with each element once, with its bits in ``state``."""
        if self.changes is None or len(self.changes) < 2:
            return self
        return self._all_in_one(self.changes, state)

    def _all_in_one(self, changes: tuple[StateChanges, ...], state: State) -> Pending:
        whole = merged(changes, state)
        # An index takes 4 to 8 bytes. If most elements changed, all values without indices are
        # smaller.
        if 5 * elements(whole) > 4 * state.elements:
            return Pending(nbytes=self.nbytes)
        return replace(self, changes=(whole,), most=2 * elements(whole))


class TensorUpdate:
    """Describe the new bits of one tensor in an `Update`.

    Args:
        spec: The tensor's name, dtype and shape.
        indices: Ascending int64 positions [changes] in the flattened tensor. None: all positions.
        values: The new bits, unsigned integers of the element's width: [changes], or [elements]
            without ``indices``.
    """

    __slots__ = ("_changes", "spec")

    def __init__(
        self, spec: TensorSpec, indices: npt.NDArray[np.int64] | None, values: UIntArray
    ) -> None:
        self.spec = spec
        self._changes = values if indices is None else TensorChanges.at(indices, values)

    @classmethod
    def _of(cls, spec: TensorSpec, changes: TensorChanges) -> TensorUpdate:
        """An update whose indices are computed on first use."""
        update = cls.__new__(cls)
        update.spec, update._changes = spec, changes
        return update

    def __repr__(self) -> str:
        return f"TensorUpdate({self.spec}, {self.elements} elements)"

    @property
    def elements(self) -> int:
        """The number of elements that the update writes."""
        return len(self._changes)

    @property
    def whole(self) -> bool:
        """Whether the update writes all elements of the tensor."""
        return not isinstance(self._changes, TensorChanges)

    @property
    def indices(self) -> npt.NDArray[np.int64] | None:
        """Ascending int64 positions [changes] in the flattened tensor; None: all positions."""
        return self._changes.indices if isinstance(self._changes, TensorChanges) else None

    @property
    def values(self) -> UIntArray:
        """The new bits [changes], unsigned integers of the element's width."""
        return self._changes.values if isinstance(self._changes, TensorChanges) else self._changes


def changes_of(update: TensorUpdate) -> TensorChanges | None:
    """The changes of an update, without computing their indices; None if it writes all elements."""
    return update._changes if isinstance(update._changes, TensorChanges) else None


class Receipt:
    """Whether the update to ``version`` was ``acknowledged``.

    ``source`` identifies the subscriber that delivered it; None for an update made elsewhere.
    """

    __slots__ = ("acknowledged", "source", "version")

    def __init__(self, version: int, source: object = None) -> None:
        self.version = version
        self.source = source
        self.acknowledged = False


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Update(OneLine):
    """Hold all changes since the last acknowledged version, verified against ``root``.

    Iteration yields (name, flat indices or None, values as unsigned integers of the element's
    width), and acknowledges the update at its end. `apply_` acknowledges it too, and so does asking
    `Subscriber.updates` for the next one. Other readers of ``tensors`` call `acknowledge`. Until
    then the next update contains all changes of this one again. Values of whole tensors are
    read-only views of the host state, which moves on in a copy while the update is alive: drop it
    after use.

    Args:
        version: The version that the update leads to.
        previous: The version from which it leads, the last one acknowledged. None: everything is
            new.
        root: The root of the state, 64 hexadecimal digits.
        tensors: The new bits by tensor, without unchanged tensors.
        aliases: The other names of tied tensors, each with the name in ``tensors``.
        metadata: The publisher's own data about the version.
        payload_bytes: Bytes that were fetched for the update.
        seconds: Wall-clock seconds of the call that returned it.
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
        """Whether the update writes the whole state."""
        return self.previous is None

    @property
    def acknowledged(self) -> bool:
        """Whether the live model has taken the update."""
        return self._receipt.acknowledged

    @property
    def changed(self) -> int:
        """The number of elements that the update writes."""
        return sum(tensor.elements for tensor in self.tensors)

    def acknowledge(self) -> None:
        """Record that the live model has taken the update.

        Any thread may call this, and repeat it.
        """
        self._receipt.acknowledged = True

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[np.int64] | None, UIntArray]]:
        for tensor in self.tensors:
            yield tensor.spec.name, tensor.indices, tensor.values
        self.acknowledge()


def make_update(
    pending: Pending, state: State, manifest: Manifest, started: float, source: object = None
) -> Update:
    """The update with all ``pending`` changes to the version of ``manifest``.

    ``pending`` is merged. ``state`` is the verified state, read-only, or the part of it that the
    owner wants. ``source`` identifies who delivers the update.
    """
    if pending.changes is None:
        tensors = [TensorUpdate(spec, None, state.read(spec.name)) for spec in state.specs]
    else:
        # A tensor whose stored name has changed is sent whole: a live model may hold the two names
        # apart.
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
    # The receipt is not a parameter of `Update`: users make updates without one.
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
