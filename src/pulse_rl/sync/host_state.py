"""A host copy of a state that is only ever left at verified versions: what a subscriber holds, and what a publisher
restores."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .._util.faults import hit
from .._util.serial import shield
from .._util.threads import Stopped
from ..codec import Changes
from ..errors import CorruptPatch, DigestMismatch, FormatError, IntegrityError, StateMismatch, WrongHistory
from ..events import Listener, progress_to
from ..patch import AppliedPatch, Patch, apply_patch
from ..patch.history import History, Window
from ..patch.undo import by_whole_blocks
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..stream.manifest import Link
from .selection import Selection
from .update import Pending, Update


class Watcher(Protocol):
    """Follows a host state from version to version."""

    def advanced(
        self, link: Link, base_root: str, undo: Mapping[int, Changes], state: State, digest: StateDigest
    ) -> None:
        """A patch was applied; ``undo`` holds the old bits by block index, the other arguments are the new state."""

    def replaced(self) -> None:
        """The state was replaced, or changed in a way that ``undo`` does not describe."""


_NOTHING = History()
_LARGEST_SHARE = 8
"""Of the whole state's bytes at most one part in so many is remembered, whatever manifests say: publishers do less."""


@dataclass(frozen=True, slots=True)
class _Position:
    """The version of a host state, and what of it is pending for its owner. Replaced as one, so that an interrupt
    between two assignments can neither lose a change nor deliver one that is not there. ``knows``: whether the history
    is all that the next patch may need.
    """

    version: int
    state: State
    digest: StateDigest
    pending: Pending
    history: History = _NOTHING
    knows: bool = False


class HostState:
    """``poisoned`` is set while the state in memory may be half-way between two versions. With a ``selection`` only
    that part of a state is held."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        listener: Listener | None = None,
        watcher: Watcher | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.poisoned = False
        self.selection = selection
        self.threads = threads
        self.listener = listener
        self._watcher = watcher
        self._at: _Position | None = None
        self._pinned: list[weakref.ref[Update]] = []
        self.followed: list[Link] = []
        """The links that were followed, until somebody clears the list."""

    @property
    def version(self) -> int | None:
        return self._at.version if self._at else None

    @property
    def state(self) -> State:
        return self._position.state

    @property
    def digest(self) -> StateDigest:
        return self._position.digest

    @property
    def history(self) -> History:
        """What changed up to the version, as far as it is known."""
        return self._at.history if self._at else History()

    @property
    def knows(self) -> bool:
        """Whether the next patch can be decoded, whatever history it names."""
        return self._at is not None and self._at.knows

    def adopt(
        self,
        version: int,
        state: State,
        digest: StateDigest,
        *,
        history: History = _NOTHING,
        remembers: Sequence[int] = (),
    ) -> None:
        """Takes over ``state``, in writable host memory, as the given version, which the owner already has, with the
        ``history`` that it has. ``remembers`` is the manifest's."""
        if self._watcher:
            self._watcher.replaced()
        knows = history.spans == tuple(remembers)
        pending = Pending.nothing(version, state)
        self._at = _Position(version, state, digest, pending, history if knows else _NOTHING, knows)
        self.poisoned = False

    def recover(self) -> None:
        """Ends `poisoned`: hashes the state, and drops it unless it is still its version."""
        at = self._at
        if self.poisoned and at and state_digest(at.state, threads=self.threads).leaves != at.digest.leaves:
            self._at = None
        self.poisoned = False

    # -- moves

    def apply(
        self,
        link: Link,
        patch: Patch,
        aliases: Mapping[str, str],
        remembers: Sequence[int] = (),
    ) -> None:
        """Moves along ``link``, whose payload is ``patch``, or stays as it is, to the last bit. ``remembers``: the
        spans of what is remembered at the version it leads to.

        Raises what `apply_patch` raises. A patch that fails where it needed the history may show that this is wrong:
        then it is forgotten, and not known.
        """
        at = self._position
        # Values of an update that is still held are views of the state: they keep it, and the state moves in a copy.
        if any(ref() is not None for ref in self._pinned):
            self._at = at = replace(at, state=at.state.copy())
        self._pinned = []
        # Until `apply_patch` returns or has undone all, an interrupt finds the bits of two versions here.
        self.poisoned = True
        try:
            applied = apply_patch(
                patch,
                at.state,
                at.digest,
                history=at.history,
                max_records=_most_records(patch) if remembers else 0,
                threads=self.threads,
                progress=progress_to(self.listener, "apply", at.state.nbytes),
            )
        except (FormatError, IntegrityError, StateMismatch, Stopped) as error:
            if patch.header.history and isinstance(error, WrongHistory | CorruptPatch | DigestMismatch):
                self._at = replace(at, history=_NOTHING, knows=False)
            self.poisoned = False  # refused, or undone to the last bit
            raise
        # The bits are those of the next version: what says so follows at once, or not at all.
        with shield():
            pending = at.pending.after_patch(applied.changes, link.nbytes, at.state)
            history = self._remembered(link, patch, applied, remembers)
            knows = history.spans == tuple(remembers)
            self._at = _Position(link.version, at.state.with_aliases(aliases), applied.digest, pending, history, knows)
            self.followed.append(link)
            self.poisoned = False
            if self._watcher:
                undo = by_whole_blocks(patch.header, applied.undo)
                self._watcher.advanced(link, at.digest.root, undo, self.state, self.digest)
        hit("apply.after")

    def _remembered(self, link: Link, patch: Patch, applied: AppliedPatch, remembers: Sequence[int]) -> History:
        """The history after a patch that was applied: as far as it can be had, that of these spans."""
        assert link.base is not None
        span = link.version - link.base if link.is_fold else 1
        window = None
        if applied.records is not None:
            window = Window(span, self.digest.root, applied.records, patch.header.cuts)
        return self._position.history.after(window, remembers, _most_records(patch), threads=self.threads)

    def replace(
        self, links: Sequence[Link], state: State, digest: StateDigest, history: History, *, knows: bool = True
    ) -> None:
        """Takes ``state``, which was restored along ``links`` from an anchor and verified, in place of the old one."""
        if self._watcher:
            self._watcher.replaced()
        old = self._at
        nbytes = sum(link.nbytes for link in links)
        pending = old.pending.after_restore(nbytes, old.state, state) if old else Pending(nbytes=nbytes)
        self._at = _Position(links[-1].version, state, digest, pending, history, knows)
        self.followed += links
        self.poisoned = False

    # -- what the owner knows

    @property
    def acknowledged(self) -> bool:
        """Whether the owner knows the state as it is now."""
        return self._at is None or self._at.pending.since == self._at.version

    def pending(self) -> Pending:
        """All that the owner has not acknowledged, each element once."""
        at = self._position
        pending = at.pending.merged(at.state)
        self._at = replace(at, pending=pending)
        return pending

    def acknowledge(self) -> None:
        """The owner knows the state as it is now."""
        at = self._position
        self._at = replace(at, pending=Pending.nothing(at.version, at.state))

    def pin(self, update: Update) -> None:
        """Remembers an update whose values are views of the state: while it is alive, the state moves in a copy."""
        self._pinned = [*(ref for ref in self._pinned if ref() is not None), weakref.ref(update)]

    @property
    def _position(self) -> _Position:
        assert self._at is not None, "no version yet"
        return self._at


def most_remembered(nbytes: int) -> int:
    """The bytes that a reader remembers of a state of ``nbytes``, at most."""
    return nbytes // _LARGEST_SHARE


def _most_records(patch: Patch) -> int:
    return most_remembered(sum(spec.nbytes for spec in patch.header.specs))
