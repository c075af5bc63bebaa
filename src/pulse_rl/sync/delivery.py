"""Tracks which changes of a host state its owner has acknowledged, and which are pending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..patch.changes import StateChanges, difference, elements, merged
from ..state.tensors import State
from ..stream.chain import Link


@dataclass(frozen=True, slots=True)
class Step:
    """How a state moved since its owner last acknowledged it: from version ``previous`` to ``version``, along
    ``links``.

    ``changes`` holds the bits now, per tensor; it and ``previous`` are None where everything is new. ``renamed`` names
    tensors that have another name since, under which a live model may hold them apart.
    """

    previous: int | None
    version: int
    links: tuple[Link, ...] = ()
    changes: StateChanges | None = None
    renamed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Delivery:
    """``acknowledged`` is the version that the owner knows, with its ``aliases``; both None if it knows none.

    ``pending`` are the changes since; None: everything is new to the owner. ``links`` were followed since the owner was
    told anything. ``most`` elements may be pending before they are merged.
    """

    acknowledged: int | None = None
    aliases: Mapping[str, str] | None = None
    links: tuple[Link, ...] = ()
    pending: tuple[StateChanges, ...] | None = None
    most: int = 0

    @classmethod
    def complete(cls, version: int, state: State) -> Self:
        """The owner knows all of ``version``."""
        return cls(version, state.aliases, (), ())

    def after_patch(self, link: Link, changes: StateChanges, state: State) -> Delivery:
        """The same once ``state`` was patched. Elements that change again and again take no more memory: they are
        merged whenever they are twice as many as were left by the last time."""
        links = (*self.links, link)
        if self.pending is None:
            return replace(self, links=links)
        pending = (*self.pending, changes)
        if len(pending) == 1 or sum(map(elements, pending)) <= self.most:
            return replace(self, links=links, pending=pending, most=max(self.most, 2 * elements(changes)))
        whole = merged(pending, state)
        return replace(self, links=links, pending=(whole,), most=2 * elements(whole))

    def after_restore(self, restored: Sequence[Link], old: State, new: State) -> Delivery:
        """Pending as changes if ``new`` has the tensors of ``old``, else everything is new."""
        links = (*self.links, *restored)
        if self.pending is None or old.specs != new.specs:
            return Delivery(links=links)
        return replace(self, links=links, pending=(*self.pending, difference(old, new)))

    def told(self, step: Step) -> Delivery:
        """The same once the owner was told ``step``, all that is outstanding, and may not have taken it over."""
        return replace(self, links=(), pending=None if step.changes is None else (step.changes,))

    def outstanding(self, version: int, state: State) -> Step:
        """All pending changes of ``state``, which is at ``version``."""
        known = self.aliases or {}
        renamed = frozenset(name for alias, name in state.aliases.items() if known.get(alias) != name)
        if self.pending is None:
            return Step(None, version, self.links, None, renamed)
        return Step(self.acknowledged, version, self.links, merged(self.pending, state), renamed)
