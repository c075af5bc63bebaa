"""Moves a host state along a stream's links: fetch ahead, check, apply or restore (docs/protocol.md, section 4)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, suppress
from typing import NamedTuple

from .._util.threads import ordered_map
from ..errors import (
    ChainGap,
    CorruptManifest,
    DigestMismatch,
    FormatError,
    InputError,
    PulseError,
    WrongBase,
    WrongHistory,
)
from ..events import FallbackUsed, PhaseTimer, progress_to
from ..patch import Patch, parse_patch
from ..patch.header import MAX_HEADER_BYTES
from ..patch.history import History
from ..state.digest import PartDigest, StateDigest
from ..state.tensors import State, TensorSpec, check_tensor_name
from ..stream import anchor
from ..stream.manifest import Link, Manifest
from ..stream.names import PATCH
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE
from .host_state import HostState
from .planner import BROKEN_LINK, Planner
from .selection import Selection

_PREFETCH = 4


class _Fetched(NamedTuple):
    """A link as it was planned and as its manifest has it, with the bytes of its patch; None for an anchor.

    ``error``, if any, is raised when it is the link's turn.
    """

    planned: Link
    link: Link
    manifest: Manifest | None = None
    payload: list[bytes] | Patch | None = None
    error: Exception | None = None


def catch_up(host: HostState, stream: Stream, target: int) -> dict[str, float]:
    """Follows the cheapest working path of links to version ``target``; returns seconds by phase (see `Synced`).

    A link whose object is missing or damaged is avoided and the path planned again. A path from an anchor is followed
    beside the state, which it replaces at its end: a state never goes back. Raises ChainGap when no path is left; the
    host state then stays at the last verified version. StoreUnavailable passes through.
    """
    host.recover()
    timer, route = PhaseTimer(), Planner(stream, target)
    beside: HostState | None = None
    passed: list[Link] = []
    astray = False
    while host.version != target:
        # 1. Plan, from where the state is, without the links that have failed.
        try:
            follower = beside or host
            path = route.plan(None if astray and not beside else follower.version, knows=follower.knows)
        except ChainGap:
            if beside is None:
                raise
            beside = None  # the way from the anchor is closed; there may be one from the state
            continue
        timer.end("plan")
        # An anchor is restored beside the state: until it is verified the worker keeps what it has.
        if host.version is not None and path[0].base is None:
            beside, passed = HostState(threads=host.threads, listener=host.listener, selection=host.selection), []
            follower = beside
        if host.selection and path[0].base is None:
            path = path[:1]  # what is needed of the patches follows from the anchor's tensors
        # 2. Follow link by link; the next ones are fetched meanwhile. What goes wrong plans again.
        with closing(_fetch_ahead(stream, path, follower)) as fetched:
            for item in fetched:
                timer.end("fetch")
                if item.manifest and route.forgets(item.link, item.manifest):
                    break
                knew = follower.knows
                try:
                    passed.append(_apply_link(follower, stream, item))
                    route.followed(item.link, knows=follower.knows)
                except BROKEN_LINK as error:
                    if not astray and follower is host and _is_astray(host, stream, error):
                        astray = True  # the link may be good; the next plan begins with an anchor
                        stream.forget_manifests()
                        break
                    # Where the history was wanting, or is forgotten since it may be wrong, the link may be good.
                    wanting = isinstance(error, WrongHistory) or (knew and not follower.knows)
                    if not (wanting and route.lacks_history(item.planned, item.link)):
                        route.avoid(item.planned, item.link, error)
                    if host.listener:
                        host.listener(FallbackUsed(stream.name, str(item.link), str(error), error.kind))
                    break
                finally:
                    timer.end("restore" if item.link.base is None else "apply")
        # 3. The restored state takes the place of the old one, whose difference to it is what the owner lacks.
        if beside and beside.version == target:
            host.replace(passed, beside.state, beside.digest, beside.history, knows=beside.knows)
        timer.end("fetch")
    return timer.seconds


def _is_astray(host: HostState, stream: Stream, error: PulseError) -> bool:
    """Whether the store has another state under the host's version: somebody has taken manifests away, and their
    numbers were given again by a publisher that has never seen them."""
    if not isinstance(error, WrongBase) or isinstance(error, WrongHistory) or host.version is None:
        return False
    with suppress(*UNREADABLE):
        known = stream.manifest(host.version)
        return known.root != host.digest.root or (stream.has_version(host.version) and not stream.has_manifest(known))
    return False


def follow_link(host: HostState, stream: Stream, link: Link) -> None:
    """Follows this one link only; raises its error."""
    with closing(_fetch_ahead(stream, [link], host)) as fetched:
        for item in fetched:
            _apply_link(host, stream, item)


def _fetch_ahead(stream: Stream, path: list[Link], host: HostState) -> Generator[_Fetched, None, None]:
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
    stream: Stream, link: Link, manifest: Manifest, selection: Selection | None, held: StateDigest | None
) -> list[bytes] | Patch | None:
    if link.base is None:
        return None
    # No publisher writes such a patch: it would have been an anchor. It bounds what a stranger makes a worker fetch.
    if link.nbytes > manifest.dense_bytes + MAX_HEADER_BYTES:
        raise FormatError(f"{link} has {link.nbytes} bytes, too many for a state of {manifest.dense_bytes}")
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
    if fetched.payload is None:
        state, digest, nbytes = _restored(host, stream, manifest)
        link = link._replace(nbytes=nbytes)
        host.replace([link], state, digest, History())
        return link
    if link.base != host.version:
        raise ChainGap(f"{link} starts from version {link.base}, but the state is at {host.version}")
    payload = fetched.payload
    patch = payload if isinstance(payload, Patch) else parse_patch(payload, host.digest)
    # The patch is named by its digest, but not by what it leads to: a fold's link is anybody's word.
    if patch.header.target_root != manifest.root:
        raise DigestMismatch(f"{link} leads to root {patch.header.target_root[:16]}…, not to its manifest's root")
    _check_aliases(manifest, patch.header.specs)
    held = {spec.name for spec in host.state.specs}
    aliases = {alias: name for alias, name in manifest.aliases.items() if name in held}
    host.apply(link, patch, aliases, manifest.remembers)
    return link


def _restored(host: HostState, stream: Stream, manifest: Manifest) -> tuple[State, StateDigest, int]:
    """The state of an anchor and its digest tree, verified against the manifest, and the bytes fetched."""
    assert manifest.anchor is not None
    if host.selection:
        part, tree, nbytes = host.selection.restore(stream, manifest, threads=host.threads, listener=host.listener)
        _check_aliases(manifest, tree.whole)
        return part, tree, nbytes
    state, digest = anchor.restore(
        stream.shards(manifest.anchor.shards, host.threads),
        root=manifest.root,
        elements=manifest.elements,
        dense_bytes=manifest.dense_bytes,
        threads=host.threads,
        progress=progress_to(host.listener, "restore", manifest.dense_bytes),
    )
    _check_aliases(manifest, state.specs)
    return state.with_aliases(manifest.aliases), digest, sum(payload.bytes for payload in manifest.anchor.shards)


def _check_aliases(manifest: Manifest, specs: tuple[TensorSpec, ...]) -> None:
    """Raises CorruptManifest unless the aliases fit the tensors."""
    stored = {spec.name for spec in specs}
    for alias, name in manifest.aliases.items():
        try:
            check_tensor_name(alias)
        except InputError as error:
            raise CorruptManifest(f"an alias of version {manifest.version}: {error}") from None
        if alias in stored or name not in stored:
            raise CorruptManifest(f"version {manifest.version} has an alias {alias!r} of {name!r} that fits no tensor")
