"""A host copy of a stream's state that only ever rests at verified versions.

The publisher's baseline and the subscriber's host state are both replicas: restored and advanced by the same code.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from . import anchor, patch
from ._pool import ordered_map
from .chain import Link, cheapest_path, links_of
from .digest import StateDigest, state_digest
from .errors import ChainGap, DigestMismatch, FormatError, IntegrityError, NotFound, StateMismatch
from .events import Listener, PathFailed, progress_to
from .manifest import Manifest
from .patch import BuiltPatch, Patch, TensorChanges
from .stream import PATCH, SHARD, Stream
from .tensors import State

_PREFETCH = 4
_BROKEN_LINK = (NotFound, FormatError, IntegrityError, StateMismatch)
"""What makes one link unusable and another path worth trying; a store that is away is neither."""


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
        self.version, self._state, self._digest, self.poisoned = version, state, digest, False
        self._told, self._passed, self._untold = version, [], []

    def advance(self, version: int, built: BuiltPatch) -> None:
        """Moves to a version whose patch was built from this very state."""
        self.poisoned = True
        patch.advance_in_place(built, self.state, workers=self._workers)
        self.adopt(version, self.state, built.target)

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
        avoid: dict[Link, Exception] = {}
        while self.version != target:
            links, reasons = self._links_down_from(target, set(avoid))
            try:
                path = cheapest_path(links, self.version, target)
            except ChainGap as gap:
                broken = [f"{link}: {error}" for link, error in avoid.items()] + reasons
                raise ChainGap("; ".join([f"{self.stream.name}: {gap}", *broken]), hint=gap.hint) from gap
            with closing(self._prefetch(path)) as fetched:
                for link in path:
                    try:
                        changes = self._follow(link, fetched)
                    except _BROKEN_LINK as error:
                        avoid[link] = error
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
            self._follow(link, fetched)

    def _links_down_from(self, target: int, avoid: set[Link]) -> tuple[list[Link], list[str]]:
        """The usable links from the target down to the replica's version or to an anchor that can be used."""
        links: list[Link] = []
        version = target
        while True:
            try:
                found = [link for link in links_of(self.stream.manifest(version)) if link not in avoid]
            except (NotFound, FormatError) as error:
                return links, [str(error)]
            links += found
            bases = [link.base for link in found if link.base is not None]
            enough = any(link.base is None for link in found) and (self.version is None or self.version >= version)
            if enough or not bases or version == self.version:
                return links, []
            version = bases[0]

    def _prefetch(self, path: list[Link]) -> Generator[list[bytes] | Exception, None, None]:
        """The payloads of the path's patches, a few ahead of their use; errors are handed over, not raised."""

        def fetch(link: Link) -> list[bytes] | Exception:
            try:
                return [self.stream.fetch(p, PATCH) for p in link.payloads]
            except _BROKEN_LINK as error:
                return error

        return ordered_map(fetch, [link for link in path if link.base is not None], _PREFETCH)

    def _follow(self, link: Link, fetched: Iterator[list[bytes] | Exception]) -> dict[str, TensorChanges] | None:
        manifest = self.stream.manifest(link.version)
        if link.base is None:
            return self._restore(manifest)
        parts = next(fetched)
        if isinstance(parts, Exception):
            raise parts
        if len(parts) != 1:
            raise FormatError(f"{link} has {len(parts)} parts", hint="Upgrade pulse-rl to read it.")
        own = Patch.parse(parts[0])
        if own.header.target_root != manifest.root:
            raise DigestMismatch(f"{link} leads to root {own.header.target_root[:16]}…, not to its manifest's root")
        changes = self._apply(own, link.version)
        self.state.aliases = dict(manifest.aliases)
        return changes

    def _apply(self, own: Patch, version: int) -> dict[str, TensorChanges]:
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
        self._digest, self.version, self.poisoned = applied.digest, version, False
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
