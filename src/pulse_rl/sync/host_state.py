"""A host copy of a state that is only ever left at verified versions, and how it moves along a
stream's links: fetch ahead, check, apply or restore (docs/protocol.md, section 4).

What a subscriber holds, and what a publisher restores.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .._util.serial import shield
from .._util.threads import Stopped, hit, ordered_map
from ..errors import (
    ChainGap,
    CorruptManifest,
    CorruptPatch,
    DigestMismatch,
    FormatError,
    InputError,
    IntegrityError,
    NotFound,
    PulseError,
    StateMismatch,
    WrongBase,
    WrongHistory,
)
from ..events import Listener, PhaseTimer, fell_back, progress_to
from ..patch import Patch, apply_patch, parse_patch
from ..patch.header import MAX_HEADER_BYTES
from ..patch.history import History, Window
from ..state.digest import PartDigest, StateDigest, state_digest
from ..state.tensors import Empty, State, TensorSpec, check_tensor_name
from ..store.base import UNREADABLE
from ..stream import anchor
from ..stream.manifest import Link, Manifest
from ..stream.names import PATCH
from ..stream.stream import Stream
from .planner import BROKEN_LINK, Planner
from .update import Pending, Update

if TYPE_CHECKING:
    from ..follow.selection import Selection
    from ..follow.state_folder import StateFolder

_PREFETCH = 4
_NOTHING = History()
_LARGEST_SHARE = 8
"""Of the whole state's bytes at most one part in so many is remembered, whatever manifests say:
publishers do less."""


@dataclass(frozen=True, slots=True)
class _Position:
    """The version of a host state, and what of it is pending for its owner. Replaced as one, so
    that an interrupt between two assignments can neither lose a change nor deliver one that is not
    there. ``history``: what changed up to the version, as far as it is known."""

    version: int
    state: State
    digest: StateDigest
    pending: Pending
    history: History = _NOTHING


class HostState:
    """``poisoned`` is set while the state in memory may be half-way between two versions. With a
    ``selection`` only that part of a state is held; with a ``folder`` the state is in a file
    there."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        listener: Listener | None = None,
        selection: Selection | None = None,
        folder: StateFolder | None = None,
    ) -> None:
        self.poisoned = False
        self.folder = folder
        self.selection = selection
        self.threads = threads
        self.listener = listener
        self._keeps = True
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

    def adopt(
        self,
        manifest: Manifest,
        state: State,
        digest: StateDigest,
        *,
        history: History = _NOTHING,
        is_new: bool = False,
    ) -> None:
        """Takes over ``state``, made by `empty`, as the version of ``manifest``, with the
        ``history`` that there is. The owner has it already, unless it ``is_new`` to it."""
        pending = Pending() if is_new else Pending.nothing(manifest.version, state)
        history = history.last(manifest.remembers)
        self._at = _Position(manifest.version, state, digest, pending, history)
        self.poisoned = False
        self._keep(manifest)

    def empty(
        self, specs: tuple[TensorSpec, ...], aliases: Mapping[str, str] | None = None
    ) -> State:
        """Memory for a state that this one may become. Raises StoreFull and StoreError."""
        return self.folder.empty(specs, aliases) if self.folder else State.empty(specs, aliases)

    def _keep(self, manifest: Manifest) -> None:
        """Has the state found again in the folder, as the version of ``manifest``."""
        if self.folder and self._keeps:
            self.folder.keep(self.state, manifest, self.history)

    def recover(self) -> None:
        """Ends `poisoned`: hashes the state, and drops it unless it is still its version."""
        at = self._at
        # An interrupt stopped an apply or its undo: only the bits themselves can say whether they
        # are a version's.
        if (
            self.poisoned
            and at
            and state_digest(at.state, threads=self.threads).leaves != at.digest.leaves
        ):
            self._at = None
        self.poisoned = False

    def staging_copy(self) -> HostState:
        """An empty one, in which a state is restored that may take the place of this one's. Its
        folder keeps no record of it."""
        made = HostState(
            threads=self.threads,
            listener=self.listener,
            selection=self.selection,
            folder=self.folder,
        )
        made._keeps = False
        return made

    # -- moves

    def apply(
        self,
        link: Link,
        patch: Patch,
        manifest: Manifest,
    ) -> None:
        """Moves along ``link``, whose payload is ``patch``, to the version of ``manifest``, or
        stays as it is, to the last bit.

        Raises what `apply_patch` raises, and WrongHistory where a patch fails that needed the
        history, since that may be what is wrong.
        """
        at, remembers = self._position, manifest.remembers
        # Values of an update that is still held are views of the state: they keep it, and the state
        # moves in a copy.
        if any(ref() is not None for ref in self._pinned):
            self._at = at = replace(at, state=at.state.copy(self.empty))
        self._pinned = []
        # Until `apply_patch` returns or has undone all, an interrupt finds the bits of two versions
        # here.
        self.poisoned = True
        try:
            applied = apply_patch(
                patch,
                at.state,
                at.digest,
                history=at.history,
                max_records=_most_records(patch) if remembers else 0,
                journal=self.folder.journal(at.state) if self.folder else None,
                threads=self.threads,
                progress=progress_to(self.listener, "apply", at.state.nbytes),
            )
        except (FormatError, IntegrityError, StateMismatch, Stopped) as error:
            self.poisoned = False  # refused, or undone to the last bit
            # The bytes of the payload are its manifest's. So a bit of the history may have flipped
            # in memory or on disk, which a restore from an anchor repairs.
            if patch.header.history and isinstance(error, CorruptPatch | DigestMismatch):
                raise WrongHistory(f"{link} leads astray by the history: {error}") from error
            raise
        # The bits are those of the next version: what says so follows at once, or not at all.
        with shield():
            pending = at.pending.after_patch(applied.changes, link.nbytes, at.state)
            history = _NOTHING  # at the start of a history, and where none is kept
            if remembers and applied.records is not None:
                window = Window(at.digest.root, applied.records, patch.header.cuts)
                history = at.history.after(window, remembers, _most_records(patch))
            held = {spec.name for spec in at.state.specs}
            aliases = {alias: name for alias, name in manifest.aliases.items() if name in held}
            self._at = _Position(
                link.version,
                at.state.with_aliases(aliases),
                applied.digest,
                pending,
                history,
            )
            self.followed.append(link)
            self.poisoned = False
            hit("apply.moved")
            self._keep(manifest)
        hit("apply.after")

    def replace(
        self,
        links: Sequence[Link],
        manifest: Manifest,
        state: State,
        digest: StateDigest,
        history: History,
    ) -> None:
        """Takes ``state``, which was restored along ``links`` from an anchor and verified as the
        version of ``manifest``, in place of the old one."""
        old = self._at
        nbytes = sum(link.nbytes for link in links)
        pending = (
            old.pending.after_restore(nbytes, old.state, state) if old else Pending(nbytes=nbytes)
        )
        self._at = _Position(links[-1].version, state, digest, pending, history)
        self.followed += links
        self.poisoned = False
        self._keep(manifest)

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
        """Remembers an update whose values are views of the state: while it is alive, the state
        moves in a copy."""
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


class _Fetched(NamedTuple):
    """A link as it was planned and as its manifest has it, with the bytes of its patch; None for an
    anchor.

    ``error``, if any, is raised when it is the link's turn.
    """

    planned: Link
    link: Link
    manifest: Manifest | None = None
    payload: list[bytes] | Patch | None = None
    error: Exception | None = None


def catch_up(host: HostState, stream: Stream, target: int) -> dict[str, float]:
    """Follow the cheapest working path of links to version ``target``.

    A link whose object is missing or damaged is avoided and the path planned again. A path from an
    anchor is followed in a second state, which takes the place of the first at its end: a state
    never goes back.

    Args:
        host: The state to move.
        stream: Where the links are read.
        target: The version to reach, which may be older than the state's.
    Returns: Seconds by phase (see `Synced`).
    Raises:
        ChainGap: No path is left. The host state stays at the last verified version.
        StoreUnavailable: The store cannot be reached.
    """
    host.recover()
    timer, route = PhaseTimer(), Planner(stream, target)
    # Whether paths begin with an anchor though the host has a state: links lead forward only, and
    # that of a host whose version or history is not the stream's cannot be followed.
    over_anchor = host.version is not None and host.version > target
    # Where an anchor is restored and followed: until it is at the target, the worker keeps the
    # verified state that it has. None while the host itself moves.
    staging: HostState | None = None
    # The links into `staging`, which become those of the host at the end: events and bytes.
    passed: list[Link] = []
    while host.version != target:
        # 1. Plan, from where the state is, without the links that have failed.
        follower = staging or host
        try:
            path = route.plan(None if over_anchor and not staging else follower.version)
        except ChainGap:
            if staging is None:
                raise
            staging = None  # the way from the anchor is closed; there may be one from the state
            continue
        timer.end("plan")
        if host.version is not None and path[0].base is None:
            staging, passed = host.staging_copy(), []
            follower = staging
        if host.selection and path[0].base is None:
            path = path[:1]  # what is needed of the patches follows from the anchor's tensors
        # 2. Follow link by link; the next ones are fetched meanwhile. Whatever fails plans again.
        with closing(_fetch_ahead(stream, path, follower)) as fetched:
            for item in fetched:
                timer.end("fetch")
                try:
                    passed.append(_apply_link(follower, stream, item))
                except BROKEN_LINK as error:
                    # The link may be good where the state is not what it was made for; from an
                    # anchor it is tried once more.
                    is_first = follower is host and not over_anchor
                    if is_first and _is_astray(host, stream, error):
                        over_anchor = True
                        stream.forget_manifests()
                        break
                    if is_first and isinstance(error, WrongHistory):
                        over_anchor = True
                    else:
                        route.avoid(item.planned, item.link, error)
                    fell_back(host.listener, stream.name, str(item.link), error)
                    break
                finally:
                    timer.end("restore" if item.link.base is None else "apply")
        # 3. The restored state takes the place of the old one, whose difference to it is what the
        # owner lacks.
        if staging and staging.version == target:
            manifest = stream.manifest(target)
            host.replace(passed, manifest, staging.state, staging.digest, staging.history)
        timer.end("fetch")
    return timer.seconds


def _is_astray(host: HostState, stream: Stream, error: PulseError) -> bool:
    """Whether the store has another state under the host's version: somebody has taken manifests
    away, and their numbers were given again by a publisher that has never seen them."""
    if not isinstance(error, WrongBase) or isinstance(error, WrongHistory) or host.version is None:
        return False
    with suppress(*UNREADABLE):
        known = stream.manifest(host.version)
        return known.root != host.digest.root or (
            stream.has_version(host.version) and not stream.has_manifest(known)
        )
    return False


def follow_link(host: HostState, stream: Stream, link: Link) -> None:
    """Follows this one link only; raises its error."""
    with closing(_fetch_ahead(stream, [link], host)) as fetched:
        for item in fetched:
            _apply_link(host, stream, item)


def _fetch_ahead(
    stream: Stream, path: list[Link], host: HostState
) -> Generator[_Fetched, None, None]:
    """The path's links with the bytes of their patches, a few ahead of their use."""
    held = host.digest if host.version is not None else None

    def fetch(planned: Link) -> _Fetched:
        link = planned
        try:
            manifest = stream.manifest(planned.version)
            link = stream.resolved(planned)
            payload = _payload_of(stream, link, manifest, host.selection, held)
            if isinstance(payload, Patch):
                link = link._replace(nbytes=payload.nbytes)
            return _Fetched(planned, link, manifest, payload)
        except BROKEN_LINK as error:
            return _Fetched(planned, link, error=error)

    return ordered_map(fetch, path, _PREFETCH)


def _payload_of(
    stream: Stream,
    link: Link,
    manifest: Manifest,
    selection: Selection | None,
    held: StateDigest | None,
) -> list[bytes] | Patch | None:
    if link.base is None:
        return None
    # No publisher writes such a patch: it would have been an anchor. It bounds what a stranger
    # makes a worker fetch.
    if link.nbytes > manifest.dense_bytes + MAX_HEADER_BYTES:
        raise FormatError(
            f"{link} has {link.nbytes} bytes, too many for a state of {manifest.dense_bytes}"
        )
    if selection:
        assert isinstance(held, PartDigest)
        return selection.fetch(stream, link, manifest, held)
    return list(ordered_map(lambda part: stream.fetch(part, PATCH), link.payloads or (), _PREFETCH))


def _apply_link(host: HostState, stream: Stream, fetched: _Fetched) -> Link:
    """Follows a link, and returns it with the number of bytes that were fetched for it."""
    if fetched.error:
        raise fetched.error
    link, manifest = fetched.link, fetched.manifest
    assert manifest is not None
    # An anchor: the whole state is new, and so is what is remembered.
    if fetched.payload is None:
        state, digest, nbytes = _restored(host, stream, manifest)
        link = link._replace(nbytes=nbytes)
        host.replace([link], manifest, state, digest, History())
        return link
    # A patch, once it is seen to fit the state, to lead to its manifest's root, and to keep the
    # ties of tensors.
    if link.base != host.version:
        raise ChainGap(
            f"{link} starts from version {link.base}, but the state is at {host.version}"
        )
    payload = fetched.payload
    patch = payload if isinstance(payload, Patch) else parse_patch(payload, host.digest)
    # The patch is named by its digest, but not by what it leads to: a fold's link is anybody's
    # word.
    if patch.header.target_root != manifest.root:
        raise DigestMismatch(
            f"{link} leads to root {patch.header.target_root[:16]}…, not to its manifest's root"
        )
    _check_aliases(manifest, patch.header.specs)
    host.apply(link, patch, manifest)
    return link


def _restored(
    host: HostState, stream: Stream, manifest: Manifest
) -> tuple[State, StateDigest, int]:
    """The state of an anchor and its digest tree, verified against the manifest, and the bytes
    fetched."""
    assert manifest.anchor is not None
    if host.selection:
        part, tree, nbytes = host.selection.restore(
            stream, manifest, threads=host.threads, listener=host.listener
        )
        _check_aliases(manifest, tree.whole)
        return part, tree, nbytes
    empty: Empty = State.empty
    there: StateDigest | None = None
    if host.folder:
        # Nothing but the version's own leaves says what of an unfinished state is right.
        empty = partial(host.folder.empty, resumes=True)
        with suppress(NotFound, FormatError, IntegrityError):
            there = None
            if host.folder.unfinished:
                from ..follow.digest_trees import read_tree

                there = read_tree(stream, manifest)[0]
    state, digest, nbytes = anchor.restore(
        stream.shards(manifest.anchor.shards, host.threads),
        root=manifest.root,
        elements=manifest.elements,
        dense_bytes=manifest.dense_bytes,
        empty=empty,
        there=there,
        threads=host.threads,
        progress=progress_to(host.listener, "restore", manifest.dense_bytes),
    )
    _check_aliases(manifest, state.specs)
    return state.with_aliases(manifest.aliases), digest, nbytes


def _check_aliases(manifest: Manifest, specs: tuple[TensorSpec, ...]) -> None:
    """Raises CorruptManifest unless the aliases fit the tensors."""
    stored = {spec.name for spec in specs}
    for alias, name in manifest.aliases.items():
        try:
            check_tensor_name(alias)
        except InputError as error:
            raise CorruptManifest(f"an alias of version {manifest.version}: {error}") from None
        if alias in stored or name not in stored:
            raise CorruptManifest(
                f"version {manifest.version} has an alias {alias!r} of {name!r} that fits no tensor"
            )
