"""A host copy of a state that rests only at verified versions (docs/protocol.md, section 4).

It moves along a stream's links: fetch ahead, check, apply or restore. A subscriber holds one, and
publishers restore their baseline with one.
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

# Patches that are fetched while one is applied.
_PREFETCH = 4
_NOTHING = History()
# A reader remembers at most one part in this many of the state's bytes, whatever a manifest says.
# Publishers remember a twelfth.
_LARGEST_SHARE = 8


@dataclass(frozen=True, slots=True)
class _Position:
    """The version of a host state, and the changes that its owner has not acknowledged.

    It is replaced as a whole. An interrupt between two assignments could lose a change, or deliver
    one that is not there. ``history`` has the known changes that led to the version.
    """

    version: int
    state: State
    digest: StateDigest
    pending: Pending
    history: History = _NOTHING


class HostState:
    """A state in host memory with its version, digest tree and history.

    ``poisoned`` is set while the memory may be between two versions. With a ``selection`` only that
    part of a state is held; with a ``folder`` the state is a file there.
    """

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
        #: The links that were followed since the list was last cleared.
        self.followed: list[Link] = []

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
        """The known changes that led to the version."""
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
        """Hold ``state``, made by `empty`, as the version of ``manifest`` with this ``history``.

        The owner has the state already unless it ``is_new`` to it.
        """
        pending = Pending() if is_new else Pending.nothing(manifest.version, state)
        history = history.last(manifest.remembers)
        self._at = _Position(manifest.version, state, digest, pending, history)
        self.poisoned = False
        self._keep(manifest)

    def empty(
        self, specs: tuple[TensorSpec, ...], aliases: Mapping[str, str] | None = None
    ) -> State:
        """Allocate memory for a state that this one may become. Raises StoreFull and StoreError."""
        return self.folder.empty(specs, aliases) if self.folder else State.empty(specs, aliases)

    def _keep(self, manifest: Manifest) -> None:
        """Record the state in the folder as the version of ``manifest``, for the next start."""
        if self.folder and self._keeps:
            self.folder.keep(self.state, manifest, self.history)

    def recover(self, *, doubted: bool = False) -> bool:
        """End `poisoned`: hash the state, and drop it unless it is still its version.

        So if it is ``doubted``, as others can change a state in a folder. Returns whether it was
        dropped.
        """
        at = self._at
        # An interrupt stopped an apply or its undo. Only the bits themselves show whether they are
        # a version's.
        if (
            (self.poisoned or (doubted and self.folder))
            and at
            and state_digest(at.state, threads=self.threads).leaves != at.digest.leaves
        ):
            self._at = None
        self.poisoned = False
        return self._at is not at

    def staging_copy(self) -> HostState:
        """An empty host state in which a state is restored that may replace this one.

        Its folder keeps no record of it.
        """
        made = HostState(
            threads=self.threads,
            listener=self.listener,
            selection=self.selection,
            folder=self.folder,
        )
        made._keeps = False
        return made

    # -- moves

    def apply(self, link: Link, patch: Patch, manifest: Manifest) -> None:
        """Move along ``link`` with its ``patch`` to the version of ``manifest``, or stay unchanged.

        Raises what `apply_patch` raises. If a patch fails that needs the history, it raises
        WrongHistory, since the history may be wrong.
        """
        at, remembers = self._position, manifest.remembers
        # The values of an update that is still alive are views of the state. They keep their bits,
        # and a copy of the state moves on.
        if any(ref() is not None for ref in self._pinned):
            self._at = at = replace(at, state=at.state.copy(self.empty))
        self._pinned = []
        # Until `apply_patch` returns or has undone everything, the memory may hold the bits of two
        # versions.
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
            # The payload has the digest in its manifest, so a bit of the history may have flipped
            # in memory or on disk. A restore from an anchor repairs that.
            if patch.header.history and isinstance(error, CorruptPatch | DigestMismatch):
                raise WrongHistory(f"{link} leads astray by the history: {error}") from error
            raise
        # The bits are the next version's. The shield keeps an interrupt from coming between them
        # and the position that says so.
        with shield():
            pending = at.pending.after_patch(applied.changes, link.nbytes, at.state)
            history = _NOTHING  # at a start, or without records
            if remembers and applied.records is not None:
                window = Window(at.digest.root, applied.records, patch.header.cuts)
                history = at.history.after(window, remembers, _most_records(patch))
            held = {spec.name for spec in at.state.specs}
            aliases = {alias: name for alias, name in manifest.aliases.items() if name in held}
            state = at.state.with_aliases(aliases)
            self._at = _Position(link.version, state, applied.digest, pending, history)
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
        """Replace the state by ``state``, restored along ``links`` and verified as ``manifest``'s
        version."""
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
        """Whether the owner has acknowledged the current version."""
        return self._at is None or self._at.pending.since == self._at.version

    def pending(self) -> Pending:
        """The changes that the owner has not acknowledged, each element once."""
        at = self._position
        pending = at.pending.merged(at.state)
        self._at = replace(at, pending=pending)
        return pending

    def acknowledge(self) -> None:
        """Record that the owner has the current version."""
        at = self._position
        self._at = replace(at, pending=Pending.nothing(at.version, at.state))

    def pin(self, update: Update) -> None:
        """Remember an update whose values are views of the state.

        While it is alive, a copy of the state moves on.
        """
        self._pinned = [*(ref for ref in self._pinned if ref() is not None), weakref.ref(update)]

    @property
    def _position(self) -> _Position:
        assert self._at is not None, "no version yet"
        return self._at


def most_remembered(nbytes: int) -> int:
    """The most bytes that a reader remembers for a state of ``nbytes``."""
    return nbytes // _LARGEST_SHARE


def _most_records(patch: Patch) -> int:
    return most_remembered(sum(spec.nbytes for spec in patch.header.specs))


class _Fetched(NamedTuple):
    """A link as it was planned and as its manifest has it, with the bytes of its patch.

    ``payload`` is None for an anchor. ``error``, if any, is raised when it is the link's turn.
    """

    planned: Link
    link: Link
    manifest: Manifest | None = None
    payload: list[bytes] | Patch | None = None
    error: Exception | None = None


def catch_up(host: HostState, stream: Stream, target: int) -> dict[str, float]:
    """Follow the cheapest working path of links to version ``target``.

    A link whose object is missing or damaged is avoided, and the path is planned again. A path from
    an anchor is followed in a second state, which replaces the first at its end: a state never goes
    back.

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
    # `over_anchor`: paths start at an anchor although the host has a state. Links lead forward
    # only, and none leads on from a version or a history that is not the stream's.
    over_anchor = host.version is not None and host.version > target
    # The second state, in which an anchor is restored and followed; None while the host itself
    # moves. The worker keeps its verified state until the second one is at the target.
    staging: HostState | None = None
    # The links that led `staging` to its version. `replace` counts their bytes for the owner.
    passed: list[Link] = []
    while host.version != target:
        # 1. Plan from the state's version, without the links that have failed.
        follower = staging or host
        try:
            path = route.plan(None if over_anchor and not staging else follower.version)
        except ChainGap:
            if staging is None:
                raise
            staging = None  # no path is left from the anchor; there may be one from the state
            continue
        timer.end("plan")
        # An anchor for a host that has a state: restore it in a second one. If the anchor or a
        # patch after it is damaged, the worker still has a version to serve.
        if host.version is not None and path[0].base is None:
            staging, passed = host.staging_copy(), []
            follower = staging
        if host.selection and path[0].base is None:
            path = path[:1]  # the anchor's tensors decide what is needed of the patches
        # 2. Follow link by link while the next patches are fetched. After a failure plan again.
        with closing(_fetch_ahead(stream, path, follower)) as fetched:
            for item in fetched:
                timer.end("fetch")
                try:
                    passed.append(_apply_link(follower, stream, item))
                except BROKEN_LINK as error:
                    # A link from the host's state that fails may be good while the state is wrong.
                    # It is not avoided then: the path over an anchor needs it again.
                    is_first = follower is host and not over_anchor
                    if is_first and host.recover(doubted=True):
                        pass  # the disk has changed the state: the link may be good
                    elif is_first and _base_diverged(host, stream, error):
                        over_anchor = True
                        # The cached manifests have the same numbers as the new ones, but are of the
                        # deleted versions.
                        stream.forget_manifests()
                    elif is_first and isinstance(error, WrongHistory):
                        over_anchor = True
                    else:
                        route.avoid(item.planned, item.link, error)
                    fell_back(host.listener, stream.name, str(item.link), error)
                    break
                finally:
                    timer.end("restore" if item.link.base is None else "apply")
        # 3. The restored state replaces the old one. The owner gets the difference between the two.
        if staging and staging.version == target:
            manifest = stream.manifest(target)
            host.recover(doubted=True)  # the owner gets the difference from what it has
            host.replace(passed, manifest, staging.state, staging.digest, staging.history)
        timer.end("fetch")
    return timer.seconds


def _base_diverged(host: HostState, stream: Stream, error: PulseError) -> bool:
    """Whether the store has another state under the host's version.

    This happens if manifests were deleted and a publisher that never saw them used their numbers
    again.
    """
    if not isinstance(error, WrongBase) or isinstance(error, WrongHistory) or host.version is None:
        return False
    with suppress(*UNREADABLE):
        known = stream.manifest(host.version)
        return known.root != host.digest.root or (
            stream.has_version(host.version) and not stream.has_manifest(known)
        )
    return False


def follow_link(host: HostState, stream: Stream, link: Link) -> None:
    """Follow one link only; raise its error."""
    with closing(_fetch_ahead(stream, [link], host)) as fetched:
        for item in fetched:
            _apply_link(host, stream, item)


def _fetch_ahead(
    stream: Stream, path: list[Link], host: HostState
) -> Generator[_Fetched, None, None]:
    """The links of a path with the bytes of their patches, fetched a few links ahead of their
    use."""
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
    """The files of a link's patch, or the selected parts of them; None for an anchor."""
    if link.base is None:
        return None
    # A publisher would have written an anchor instead of such a patch. The limit bounds what a
    # stranger can make a worker fetch.
    if link.nbytes > manifest.dense_bytes + MAX_HEADER_BYTES:
        raise FormatError(
            f"{link} has {link.nbytes} bytes, too many for a state of {manifest.dense_bytes}"
        )
    if selection:
        assert isinstance(held, PartDigest)
        return selection.fetch(stream, link, manifest, held)
    return list(ordered_map(lambda part: stream.fetch(part, PATCH), link.payloads or (), _PREFETCH))


def _apply_link(host: HostState, stream: Stream, fetched: _Fetched) -> Link:
    """Follow a link; return it with the number of bytes that were fetched for it."""
    if fetched.error:
        raise fetched.error
    link, manifest = fetched.link, fetched.manifest
    assert manifest is not None
    # An anchor: the whole state is new, and nothing before it is remembered.
    if fetched.payload is None:
        state, digest, nbytes = _restored(host, stream, manifest)
        link = link._replace(nbytes=nbytes)
        host.replace([link], manifest, state, digest, History())
        return link
    # A patch: check that it fits the state, leads to its manifest's root, and keeps the ties of
    # tensors. All of this comes before the first write.
    if link.base != host.version:
        raise ChainGap(
            f"{link} starts from version {link.base}, but the state is at {host.version}"
        )
    payload = fetched.payload
    patch = payload if isinstance(payload, Patch) else parse_patch(payload, host.digest)
    # The name of the patch is its digest, which does not say where it leads: the link of a fold is
    # unverified without signatures.
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
    """The verified state of an anchor, its digest tree, and the bytes that were fetched."""
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
        # Only the version's own leaves show which parts of an unfinished state are right.
        empty = partial(host.folder.empty, resumes=True)
        with suppress(NotFound, FormatError, IntegrityError):
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
    """Raise CorruptManifest unless the aliases of ``manifest`` fit the tensors ``specs``."""
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
