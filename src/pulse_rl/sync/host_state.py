"""A host copy of a stream's state that only ever rests at verified versions.

The publisher's baseline and the subscriber's host state are both replicas: restored and advanced by the same code.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from .._util.threads import ordered_map
from ..codec import Changes
from ..errors import (
    ChainGap,
    CorruptCheckpoint,
    CorruptManifest,
    DigestMismatch,
    FormatError,
    InputError,
    IntegrityError,
    NotFound,
    StateMismatch,
    Untrusted,
)
from ..events import Laps, Listener, PathFailed, progress_to
from ..patch import patch
from ..patch.changes import Moves, difference, merged
from ..patch.header import MAX_HEADER_BYTES
from ..patch.patch import BuiltPatch, Patch
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State, check_tensor_name
from ..stream import anchor
from ..stream.chain import Key, Link, cheapest_path, links_of, resolved
from ..stream.manifest import Manifest, Payload
from ..stream.stream import PATCH, SHARD, Stream
from .update import Update

_PREFETCH = 4
_FAR = 8  # versions behind, from which on the listed folds and anchors are worth their listing
_BROKEN_LINK = (NotFound, FormatError, IntegrityError, StateMismatch, ChainGap)
"""What makes one link unusable and another path worth trying; a store that is away is neither."""


@dataclass(frozen=True, slots=True)
class Step:
    """How a replica moved since its owner was last told: from ``previous`` to ``version``.

    ``changes`` holds the bits now, per tensor; it and ``previous`` are None where everything is new. ``renamed`` names
    tensors that have another name since, under which a live model may hold them apart. ``phases``: see `Synced`.
    """

    previous: int | None
    version: int
    links: tuple[Link, ...]
    changes: Moves | None
    renamed: frozenset[str]
    phases: dict[str, float]


class Watcher(Protocol):
    """Follows a replica's moves."""

    def wait(self) -> None:
        """Called before the state moves: returns when the watcher has stopped reading it."""

    def moved(self, link: Link, base_root: str, undo: Mapping[int, Changes], state: State, digest: StateDigest) -> None:
        """The state went along a patch; ``undo`` holds the old bits by block index, the rest is how it is now."""

    def broken(self) -> None:
        """The state was replaced, or moved in a way that ``undo`` does not describe."""


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a replica is, and what its owner has not been told. Replaced as one, so that an interrupt between two
    assignments can neither lose a change nor tell one that is not there."""

    version: int
    state: State
    digest: StateDigest
    told: int | None = None
    told_aliases: Mapping[str, str] | None = None
    passed: tuple[Link, ...] = ()
    untold: tuple[Moves, ...] | None = None


class Replica:
    """``poisoned`` is set while the state in memory may be half-way between two versions."""

    def __init__(self, stream: Stream, *, threads: int | None = None, listener: Listener | None = None) -> None:
        self.stream = stream
        self.poisoned = False
        self.watcher: Watcher | None = None
        self._at: _Position | None = None
        self._lent: list[weakref.ref[Update]] = []
        self._threads = threads
        self._listener = listener

    @property
    def version(self) -> int | None:
        return self._at.version if self._at else None

    @property
    def state(self) -> State:
        assert self._at is not None
        return self._at.state

    @property
    def digest(self) -> StateDigest:
        assert self._at is not None
        return self._at.digest

    @property
    def is_told(self) -> bool:
        """Whether the owner knows of every move."""
        return self._at is None or self._at.told == self._at.version

    def adopt(self, version: int, state: State, digest: StateDigest) -> None:
        """Takes over ``state``, in writable host memory, as the given version, of which the owner knows."""
        if self.watcher:
            self.watcher.broken()
        self._at = _Position(version, state, digest, version, state.aliases, (), ())
        self.poisoned = False

    def tell(self) -> None:
        """The owner has been told of every move so far."""
        assert self._at is not None
        at = self._at
        self._at = _Position(at.version, at.state, at.digest, at.version, at.state.aliases, (), ())

    def lend(self, update: Update) -> None:
        """Remembers an update whose values are views of the state: while it is alive, the state moves in a copy."""
        self._lent = [*(ref for ref in self._lent if ref() is not None), weakref.ref(update)]

    def recover(self) -> None:
        """Leaves `poisoned`: the state is hashed, and given up unless it is the version it was."""
        at = self._at
        if self.poisoned and at and state_digest(at.state, threads=self._threads).root != at.digest.root:
            self._at = None
        self.poisoned = False

    def advance(self, version: int, built: BuiltPatch, aliases: Mapping[str, str]) -> None:
        """Moves to a version whose patch was built from this very state."""
        link, base_root = Link(self.version, version, built.nbytes), self.digest.root
        if self.watcher:
            self.watcher.wait()
        self.poisoned = True
        undo = patch.advance_in_place(built, self.state, threads=self._threads)
        state = self.state.with_aliases(aliases)
        self._at = _Position(version, state, built.target, version, state.aliases, (), ())
        self.poisoned = False
        if self.watcher:
            self.watcher.moved(link, base_root, undo, state, built.target)

    def move_to(self, target: int) -> Step:
        """Follows the cheapest working path of links to ``target`` and says what changed since `tell`.

        A link whose object is missing or damaged is avoided and the path planned again. Raises ChainGap when none is
        left; the replica then rests at the last version it verified. StoreUnavailable passes through.
        """
        self.recover()
        avoid: dict[Key, str] = {}
        listed: list[Link] | None = None
        laps = Laps()
        while self.version != target:
            if listed is None:
                listed = self._listed(target)
            path = self._plan(target, listed, avoid)
            laps.end("plan")
            with closing(self._prefetch(path)) as fetched:
                for planned, link, parts in fetched:
                    laps.end("fetch")
                    try:
                        self._follow(link, parts)
                    except _BROKEN_LINK as error:
                        avoid[planned.key] = avoid[link.key] = f"{link}: {error}"
                        if self._listener:
                            self._listener(PathFailed(self.stream.name, str(link), str(error), error.kind))
                        break
                    finally:
                        laps.end("restore" if link.base is None else "apply")
            laps.end("fetch")
        assert self._at is not None
        at = self._at
        known = at.told_aliases or {}
        renamed = frozenset(name for alias, name in at.state.aliases.items() if known.get(alias) != name)
        if at.untold is None:
            return Step(None, target, at.passed, None, renamed, laps.phases)
        return Step(at.told, target, at.passed, merged(at.untold, at.state), renamed, laps.phases)

    def follow(self, link: Link) -> None:
        """Follows one link, whatever else leads to its version; raises what is wrong with it."""
        with closing(self._prefetch([link])) as fetched:
            for _, found, parts in fetched:
                self._follow(found, parts)

    def _plan(self, target: int, listed: list[Link], avoid: Mapping[Key, str]) -> list[Link]:
        """The path to try: on what is listed; else also on the manifests down to an anchor; else on all of them.

        Raises ChainGap, with what was wrong with the links that are avoided.
        """
        reasons: list[str] = []
        for links in self._sources(target, listed, avoid, reasons):
            try:
                return cheapest_path([link for link in links if link.key not in avoid], self.version, target)
            except ChainGap as error:
                gap = error
        broken = dict.fromkeys([*avoid.values(), *reasons])
        raise ChainGap("; ".join([f"{self.stream.name}: {gap}", *broken]), hint=gap.hint)

    def _sources(
        self, target: int, listed: list[Link], avoid: Collection[Key], reasons: list[str]
    ) -> Iterator[list[Link]]:
        """Ever larger sets of links; what cannot be read goes to ``reasons``."""
        yield listed
        everywhere = [link for link in self.stream.links() if link.version <= target]
        yield [*everywhere, *self._walk_down(target, avoid, reasons)]
        for version in self.stream.versions():
            if version <= target:
                try:
                    everywhere += links_of(self.stream.manifest(version))
                except (NotFound, FormatError, Untrusted) as error:
                    reasons.append(str(error))
        yield everywhere

    def _listed(self, target: int) -> list[Link]:
        """Links as the listings show them. The size of a patch is not listed: the target's stands for all.

        From close by, no listing is needed: the patches in between are the way.
        """
        try:
            manifest = self.stream.manifest(target)
        except _BROKEN_LINK:
            return []
        if manifest.patch is None:
            return links_of(manifest)
        guess = sum(p.bytes for p in manifest.patch.parts)
        if self.version is not None and target - self.version < _FAR:
            return [Link(v - 1, v, guess) for v in range(self.version + 1, target + 1)]
        links = [link for link in self.stream.links(self.version) if link.version <= target]
        starts = [link.version for link in links if link.base is None] if self.version is None else [self.version]
        versions = [v for v in self.stream.versions(min(starts)) if v <= target] if starts else []
        return [*links, *(Link(v - 1, v, guess) for v in versions)]

    def _walk_down(self, target: int, avoid: Collection[Key], reasons: list[str]) -> list[Link]:
        """The links that manifests name, from the target down to the replica's version or to an anchor."""
        links: list[Link] = []
        version = target
        while True:
            try:
                found = [link for link in links_of(self.stream.manifest(version)) if link.key not in avoid]
            except (NotFound, FormatError, Untrusted) as error:
                reasons.append(str(error))
                return links
            links += found
            bases = [link.base for link in found if link.base is not None]
            enough = any(link.base is None for link in found) and (self.version is None or self.version >= version)
            if enough or not bases or version == self.version:
                return links
            version = bases[0]

    def _prefetch(self, path: list[Link]) -> Generator[tuple[Link, Link, list[bytes] | Exception], None, None]:
        """The path's links as planned and as their manifests have them, with the bytes of patches, a few ahead of their
        use; errors are handed over, not raised."""

        def fetch(planned: Link) -> tuple[Link, Link, list[bytes] | Exception]:
            link = planned
            try:
                manifest = self.stream.manifest(planned.version)
                link = resolved(planned, manifest)
                if link.base is None:
                    return planned, link, []
                if link.nbytes > manifest.dense_bytes + MAX_HEADER_BYTES:
                    raise FormatError(f"{link} has {link.nbytes} bytes for a state of {manifest.dense_bytes}")
                return planned, link, [self.stream.fetch(p, PATCH) for p in link.payloads or ()]
            except _BROKEN_LINK as error:
                return planned, link, error

        return ordered_map(fetch, path, _PREFETCH)

    def _follow(self, link: Link, parts: list[bytes] | Exception) -> None:
        if isinstance(parts, Exception):
            raise parts
        manifest = self.stream.manifest(link.version)
        if link.base is None:
            self._restore(link, manifest)
            return
        if len(parts) != 1:
            raise FormatError(f"{link} has {len(parts)} parts", hint="Upgrade pulse-rl to read it.")
        if link.base != self.version:
            raise ChainGap(f"{link} starts from version {link.base}, the state is {self.version}")
        own = Patch.parse(parts[0], self.state.elements)
        if own.header.target_root != manifest.root:
            raise DigestMismatch(f"{link} leads to root {own.header.target_root[:16]}…, not to its manifest's root")
        self._apply(link, own, manifest)

    def _apply(self, link: Link, own: Patch, manifest: Manifest) -> None:
        if self.watcher:
            self.watcher.wait()
        at = self._at
        assert at is not None
        if any(ref() is not None for ref in self._lent):
            self._at = at = replace(at, state=at.state.copy())
        self._lent = []
        _check_aliases(manifest, at.state)
        self.poisoned = True
        try:
            applied = patch.apply_in_place(
                own,
                at.state,
                at.digest,
                threads=self._threads,
                progress=progress_to(self._listener, "apply", at.state.nbytes),
            )
        except (FormatError, IntegrityError, StateMismatch):
            self.poisoned = False  # refused, or undone to the last bit
            raise
        self._at = replace(
            at,
            version=link.version,
            state=at.state.with_aliases(manifest.aliases),
            digest=applied.digest,
            passed=(*at.passed, link),
            untold=None if at.untold is None else (*at.untold, applied.changes),
        )
        self.poisoned = False
        if self.watcher:
            if own.header.block_elements == patch.DEFAULT_BLOCK_ELEMENTS:
                self.watcher.moved(link, at.digest.root, applied.undo, self.state, self.digest)
            else:
                self.watcher.broken()

    def _restore(self, link: Link, manifest: Manifest) -> None:
        """Replaces the state by an anchor, beside the old one."""
        assert manifest.anchor is not None
        fresh = anchor.restore(
            [(p, self._reader(p)) for p in manifest.anchor.shards],
            elements=manifest.elements,
            dense_bytes=manifest.dense_bytes,
            threads=self._threads,
            progress=progress_to(self._listener, "restore", manifest.dense_bytes),
        )
        _check_aliases(manifest, fresh)
        digest = state_digest(fresh, threads=self._threads)
        if digest.root != manifest.root:
            raise DigestMismatch(
                f"the anchor of version {manifest.version} has root {digest.root[:16]}…, not {manifest.root[:16]}…"
            )
        fresh = fresh.with_aliases(manifest.aliases)
        at = self._at
        known = at is not None and at.untold is not None and at.state.specs == fresh.specs
        if self.watcher:
            self.watcher.broken()
        self._at = _Position(
            manifest.version,
            fresh,
            digest,
            told=at.told if at and known else None,
            told_aliases=at.told_aliases if at and known else None,
            passed=(*at.passed, link) if at else (link,),
            untold=(*(at.untold or ()), difference(at.state, fresh)) if at and known else None,
        )
        self.poisoned = False

    def _reader(self, payload: Payload) -> anchor.RangeReader:
        name = self.stream.payload_name(payload, SHARD)
        stored = self.stream.store.head(name).nbytes
        if stored != payload.bytes:
            raise CorruptCheckpoint(f"the anchor's shard {name} has {stored} bytes, its manifest says {payload.bytes}")
        return partial(self.stream.store.get, name)


def _check_aliases(manifest: Manifest, state: State) -> None:
    """Raises CorruptManifest unless the aliases fit the tensors."""
    stored = {spec.name for spec in state.specs}
    for alias, name in manifest.aliases.items():
        try:
            check_tensor_name(alias)
        except InputError as error:
            raise CorruptManifest(f"an alias of version {manifest.version}: {error}") from None
        if alias in stored or name not in stored:
            raise CorruptManifest(f"version {manifest.version} has an alias {alias!r} of {name!r} that fits no tensor")
