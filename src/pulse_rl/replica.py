"""A host copy of a stream's state that only ever rests at verified versions.

The publisher's baseline and the subscriber's host state are both replicas: restored and advanced by the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from . import anchor, patch
from ._pool import ordered_map
from .chain import Link, cheapest_path, links_of, resolved
from .codec import Changes
from .digest import StateDigest, state_digest
from .errors import ChainGap, DigestMismatch, FormatError, IntegrityError, NotFound, StateMismatch, Untrusted
from .events import Listener, PathFailed, progress_to
from .manifest import Manifest
from .patch import BuiltPatch, Patch, TensorChanges
from .patch_header import MAX_HEADER_BYTES
from .stream import PATCH, SHARD, Stream
from .tensors import State

_PREFETCH = 4
_FAR = 8  # versions behind, from which on the listed folds and anchors are worth their listing
_BROKEN_LINK = (NotFound, FormatError, IntegrityError, StateMismatch, ChainGap)
"""What makes one link unusable and another path worth trying; a store that is away is neither."""


class Watcher(Protocol):
    """Follows a replica's moves."""

    def wait(self) -> None:
        """Called before the state moves: returns when the watcher has stopped reading it."""

    def moved(self, link: Link, base_root: str, undo: Mapping[int, Changes], state: State, digest: StateDigest) -> None:
        """The state went along a patch; ``undo`` holds the old bits by block index, the rest is how it is now."""

    def broken(self) -> None:
        """The state was replaced."""


@dataclass(frozen=True, slots=True)
class Step:
    """How a replica moved from ``previous`` to ``version``: ``changes`` per tensor with the bits after the move. Both
    are None where everything is new."""

    previous: int | None
    version: int
    links: tuple[Link, ...]
    changes: dict[str, TensorChanges] | None


class Replica:
    """``version`` is None while there is no state. ``poisoned`` is set while the state may be half-way."""

    def __init__(self, stream: Stream, *, workers: int | None = None, listener: Listener | None = None) -> None:
        self.stream = stream
        self.version: int | None = None
        self.poisoned = False
        self._state: State | None = None
        self._digest: StateDigest | None = None
        self.watcher: Watcher | None = None
        self._workers = workers
        self._listener = listener
        # The moves since the last Step was handed out. They outlive a move that failed on its way, so that the next
        # Step still tells a live model everything that it missed.
        self._told: int | None = None
        self._passed: list[Link] = []
        self._untold: list[dict[str, TensorChanges]] | None = None

    @property
    def state(self) -> State:
        assert self._state is not None
        return self._state

    @property
    def digest(self) -> StateDigest:
        assert self._digest is not None
        return self._digest

    def adopt(self, version: int, state: State, digest: StateDigest) -> None:
        """Takes over ``state``, in writable host memory, as the given version."""
        if self.watcher:
            self.watcher.broken()
        self._set(version, state, digest)

    def _set(self, version: int, state: State, digest: StateDigest) -> None:
        self.version, self._state, self._digest, self.poisoned = version, state, digest, False
        self._told, self._passed, self._untold = version, [], []

    def advance(self, version: int, built: BuiltPatch) -> None:
        """Moves to a version whose patch was built from this very state."""
        link, base_root = Link(self.version, version, built.nbytes), self.digest.root
        if self.watcher:
            self.watcher.wait()
        self.poisoned = True
        undo = patch.advance_in_place(built, self.state, workers=self._workers)
        self._set(version, self.state, built.target)
        if self.watcher:
            self.watcher.moved(link, base_root, undo, self.state, self.digest)

    def recover(self) -> None:
        """Leaves `poisoned`: the state is hashed, and given up unless it is the version it was."""
        if self.poisoned and self._state is not None:
            digest = state_digest(self._state, workers=self._workers)
            if digest.root != self.digest.root:
                self.version = self._state = self._digest = self._untold = None
            self.poisoned = False

    def move_to(self, target: int) -> Step:
        """Follows the cheapest working path of links to ``target``.

        A link whose object is missing or damaged is avoided and the path planned again. Raises ChainGap when none is
        left; the replica then rests at the last version it verified. StoreUnavailable passes through.
        """
        self.recover()
        avoid: dict[tuple[int | None, int], str] = {}
        while self.version != target:
            with closing(self._prefetch(self._plan(target, avoid))) as fetched:
                for link, parts in fetched:
                    try:
                        changes = self._follow(link, parts)
                    except _BROKEN_LINK as error:
                        avoid[link.key] = f"{link}: {error}"
                        if self._listener:
                            self._listener(PathFailed(self.stream.name, str(link), str(error)))
                        break
                    self._passed.append(link)
                    if changes is None:
                        self._untold = None
                    elif self._untold is not None:
                        self._untold.append(changes)
        changes = None if self._untold is None else self._merge(self._untold)
        step = Step(None if changes is None else self._told, target, tuple(self._passed), changes)
        self._told, self._passed, self._untold = target, [], []
        return step

    def follow(self, link: Link) -> None:
        """Follows one link, whatever else leads to its version; raises what is wrong with it."""
        with closing(self._prefetch([link])) as fetched:
            for found, parts in fetched:
                self._follow(found, parts)

    def _plan(self, target: int, avoid: dict[tuple[int | None, int], str]) -> list[Link]:
        """The path to try. Raises ChainGap, with what was wrong with the links that are avoided."""
        try:
            return cheapest_path(self._listed(target, avoid), self.version, target)
        except _BROKEN_LINK:
            links, reasons = self._walk_down(target, set(avoid))
        try:
            return cheapest_path(links, self.version, target)
        except ChainGap as gap:
            raise ChainGap("; ".join([f"{self.stream.name}: {gap}", *avoid.values(), *reasons]), hint=gap.hint) from gap

    def _listed(self, target: int, avoid: Collection[tuple[int | None, int]]) -> list[Link]:
        """Links as the listings show them. The size of a patch is not listed: the target's stands for all.

        From close by, no listing is needed: the patches in between are the way.
        """
        last = self.stream.manifest(target).patch
        guess = sum(p.bytes for p in last.parts) if last else 0
        if self.version is not None and target - self.version < _FAR:
            links, versions = [], list(range(self.version + 1, target + 1))
        else:
            links = [link for link in self.stream.links(self.version) if link.version <= target]
            starts = [link.version for link in links if link.base is None] if self.version is None else [self.version]
            versions = [v for v in self.stream.versions(min(starts)) if v <= target] if starts else []
        links += [Link(v - 1, v, guess) for v in versions]
        return [link for link in links if link.key not in avoid]

    def _walk_down(self, target: int, avoid: set[tuple[int | None, int]]) -> tuple[list[Link], list[str]]:
        """The links that manifests name, from the target down to the replica's version or to an anchor: for streams
        whose listed links are lost or lead nowhere."""
        links: list[Link] = []
        version = target
        while True:
            try:
                found = [link for link in links_of(self.stream.manifest(version)) if link.key not in avoid]
            except (NotFound, FormatError, Untrusted) as error:
                return links, [str(error)]
            links += found
            bases = [link.base for link in found if link.base is not None]
            enough = any(link.base is None for link in found) and (self.version is None or self.version >= version)
            if enough or not bases or version == self.version:
                return links, []
            version = bases[0]

    def _prefetch(self, path: list[Link]) -> Generator[tuple[Link, list[bytes] | Exception], None, None]:
        """The path's links with the bytes of patches, a few ahead of their use; errors are handed over, not raised."""

        def fetch(link: Link) -> tuple[Link, list[bytes] | Exception]:
            try:
                manifest = self.stream.manifest(link.version)
                link = resolved(link, manifest)
                if link.base is None:
                    return link, []
                if link.nbytes > manifest.dense_bytes + MAX_HEADER_BYTES:
                    raise FormatError(f"{link} has {link.nbytes} bytes for a state of {manifest.dense_bytes}")
                return link, [self.stream.fetch(p, PATCH) for p in link.payloads or ()]
            except _BROKEN_LINK as error:
                return link, error

        return ordered_map(fetch, path, _PREFETCH)

    def _follow(self, link: Link, parts: list[bytes] | Exception) -> dict[str, TensorChanges] | None:
        if isinstance(parts, Exception):
            raise parts
        manifest = self.stream.manifest(link.version)
        if link.base is None:
            return self._restore(manifest)
        if len(parts) != 1:
            raise FormatError(f"{link} has {len(parts)} parts", hint="Upgrade pulse-rl to read it.")
        own = Patch.parse(parts[0])
        if own.header.target_root != manifest.root:
            raise DigestMismatch(f"{link} leads to root {own.header.target_root[:16]}…, not to its manifest's root")
        changes = self._apply(own, link)
        self.state.aliases = dict(manifest.aliases)
        return changes

    def _apply(self, own: Patch, link: Link) -> dict[str, TensorChanges]:
        base_root = self.digest.root
        if self.watcher:
            self.watcher.wait()
        self.poisoned = True
        try:
            applied = patch.apply_in_place(
                own,
                self.state,
                self.digest,
                workers=self._workers,
                progress=progress_to(self._listener, "apply", self.state.nbytes),
            )
        except (FormatError, IntegrityError, StateMismatch):
            self.poisoned = False  # refused, or undone to the last bit
            raise
        self._digest, self.version, self.poisoned = applied.digest, link.version, False
        if self.watcher:
            self.watcher.moved(link, base_root, applied.undo, self.state, self.digest)
        return applied.changes

    def _restore(self, manifest: Manifest) -> dict[str, TensorChanges] | None:
        """Replaces the state by an anchor; the difference, where there was a state of the same tensors before."""
        assert manifest.anchor is not None
        store = self.stream.store
        fresh = anchor.restore(
            [(p, partial(store.get, self.stream.payload_name(p, SHARD))) for p in manifest.anchor.shards],
            elements=manifest.elements,
            dense_bytes=manifest.dense_bytes,
            workers=self._workers,
            progress=progress_to(self._listener, "restore", manifest.dense_bytes),
        )
        fresh = State(fresh.specs, {s.name: fresh.read(s.name) for s in fresh.specs}, manifest.aliases)
        digest = state_digest(fresh, workers=self._workers)
        if digest.root != manifest.root:
            raise DigestMismatch(
                f"the anchor of version {manifest.version} has root {digest.root[:16]}…, not {manifest.root[:16]}…"
            )
        if self.watcher:
            self.watcher.broken()
        before = self._state
        self.version, self._state, self._digest = manifest.version, fresh, digest
        return None if before is None or before.specs != fresh.specs else _difference(before, fresh)

    def _merge(self, moves: list[dict[str, TensorChanges]]) -> dict[str, TensorChanges]:
        """One change per element over several moves, with the bits of the state now."""
        if len(moves) == 1:
            return moves[0]
        merged: dict[str, TensorChanges] = {}
        for name in sorted({name for move in moves for name in move}):
            indices = np.unique(np.concatenate([move[name].indices for move in moves if name in move]))
            merged[name] = TensorChanges(indices, self.state.read(name)[indices])
        return merged


def _difference(old: State, new: State) -> dict[str, TensorChanges]:
    changes = {}
    for spec in new.specs:
        indices = np.flatnonzero(old.read(spec.name) != new.read(spec.name))  # a tensor may exceed 32-bit positions
        if len(indices):
            changes[spec.name] = TensorChanges(indices, new.read(spec.name)[indices])
    return changes
