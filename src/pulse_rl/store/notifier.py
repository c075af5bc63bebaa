"""Stores that can be waited for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from .base import Store
from .cached import CachedStore
from .paced import PacedStore
from .patient import PatientStore


@runtime_checkable
class Notifier(Protocol):
    """A store that tells of new objects (`HttpStore`)."""

    def wait_for_new(self, after: Collection[str], seconds: float) -> set[str]:
        """Of the folders of the objects ``after``, those that have an object with a greater name: as soon as one has,
        or after at most ``seconds``, none. Raises StoreError."""


def notifier_of(store: Store) -> Notifier | None:
    """The store itself, or the one that it reads, if it can be waited for."""
    if isinstance(store, CachedStore | PacedStore | PatientStore):
        return notifier_of(store.store)
    return store if isinstance(store, Notifier) else None
