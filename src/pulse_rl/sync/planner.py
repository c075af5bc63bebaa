"""Plan a path of links to a version: the fewest bytes, without links that failed.

See docs/protocol.md, section 4. `cheapest_path` plans, as a function of the links; `Planner`
gathers the links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import ChainGap, FormatError, IntegrityError, NotFound, StateMismatch
from ..store.base import UNREADABLE
from ..stream.manifest import Key, Link, links_of, patch_bytes
from ..stream.stream import Stream

_MAX_FALSE_LINKS = 16
_FAR = 8  # versions behind; from here on folds and anchors are worth a listing
#: Errors that make a link unusable, so that another path is worth trying. StoreUnavailable is not
#: among them.
BROKEN_LINK = (NotFound, FormatError, IntegrityError, StateMismatch, ChainGap)


def cheapest_path(links: Iterable[Link], have: int | None, target: int) -> list[Link]:
    """Return the links to follow, in order, from version ``have`` to ``target``: fewest bytes.

    Versions are the nodes of a graph, links its edges with their bytes as lengths. ``None`` is the
    node of a reader without a state, from which the anchors lead. A reader at ``have`` stands at
    both nodes, since it may start over from an anchor::

        None ──anchor──> 0 ─patch─> 1 ─patch─> … ─patch─> 16 ─patch─> 17 …
                         └────────────fold────────────────^
        None ──anchor──────────────────────────> 12

    Args:
        links: The edges, in any order.
        have: The version of the reader; None where it has no state.
        target: The version to reach.
    Raises:
        ChainGap: No path leads to ``target``. The message names both sides of the gap.
    """
    # The shortest paths so far, by node: (bytes in all, last link).
    best: dict[int | None, tuple[int, Link | None]] = {None: (0, None)}
    if have is not None:
        best[have] = (0, None)
    # Every link leads to a higher version than its base. So in this order the best path to a base
    # is final before the first link from it, and one pass over the links suffices (no heap as in
    # Dijkstra's algorithm).
    for link in sorted(links, key=lambda x: (x.version, x.nbytes)):
        # No path leads to the base, or the reader is at the link's version already.
        if link.version == have or link.base not in best:
            continue
        cost = best[link.base][0] + link.nbytes
        if link.version not in best or cost < best[link.version][0]:
            best[link.version] = (cost, link)
    # The message names both sides of the gap: the highest version below it that a path reaches.
    if target not in best:
        reached = max((v for v in best if v is not None and v < target), default=None)
        lower = "nothing below it is reachable"
        if reached is not None:
            lower = f"the chain reaches version {reached}"
        raise ChainGap(f"no path leads to version {target}: {lower}")
    # Back from the target along the last links.
    path: list[Link] = []
    last = best[target][1]
    while last is not None:
        path.append(last)
        last = best[last.base][1]
    return path[::-1]


class Planner:
    """Plans the path to version ``target`` of a stream, and replans whenever a link fails."""

    def __init__(self, stream: Stream, target: int) -> None:
        self._stream = stream
        self._target = target
        self._avoided: dict[Key, str] = {}
        self._listed: list[Link] | None = None
        self._believes_listings = True

    def avoid(self, planned: Link, link: Link, error: Exception) -> None:
        """Exclude a link that failed, as it was planned and with the payloads that its manifest
        names."""
        self._avoided[planned.key] = self._avoided[link.key] = f"{link}: {error}"
        # Names in a listing are not signed. After 16 false ones only manifests are believed.
        if self._listed is not None and len(self._avoided) > _MAX_FALSE_LINKS:
            self._listed, self._believes_listings = [], False

    def plan(self, have: int | None) -> list[Link]:
        """Return the cheapest path from version ``have`` (None: without a state) that is not known
        to fail.

        Raises:
            ChainGap: There is none. The message has the reasons why links were avoided.
        """
        if self._listed is None:
            self._listed = self._from_listings(have)
        reasons: list[str] = []
        # The first set with a path decides: a larger set costs more to gather than a better path
        # saves.
        for links in self._candidates(self._listed, have, reasons):
            try:
                usable = [link for link in links if self._usable(link)]
                return cheapest_path(usable, have, self._target)
            except ChainGap as error:
                gap = error
        broken = dict.fromkeys([*self._avoided.values(), *reasons])
        raise ChainGap("; ".join([f"{self._stream.name}: {gap}", *broken]), hint=gap.hint)

    def _candidates(
        self, listed: list[Link], have: int | None, reasons: list[str]
    ) -> Iterator[list[Link]]:
        """Sets of links, each larger and more expensive to gather than the one before.

        Unreadable manifests are added to ``reasons``.
        """
        # 1. The links as the listings show them, without reading manifests.
        yield listed
        # 2. The listings lead nowhere: read manifests from the target down to the reader's version.
        links = self._stream.links() if self._believes_listings else []
        links = [link for link in links if link.version <= self._target]
        yield [*links, *self._from_manifests(have, reasons)]
        # 3. Every manifest in the store. A gap may have a way around it that no manifest above it
        # names.
        for version in self._stream.versions():
            if version <= self._target:
                links += self._named_by(version, reasons)
        yield links

    def _from_listings(self, have: int | None) -> list[Link]:
        """Links as the listings show them.

        No listing has the sizes of patches, so that of the target's patch stands for all. A reader
        that is fewer than 8 versions behind skips the listing: single patches are its path.
        """
        try:
            manifest = self._stream.manifest(self._target)
        except BROKEN_LINK:
            return []
        if manifest.patch is None:
            return links_of(manifest)
        # One version behind, as in a steady state: no listing at all.
        if manifest.patch.base == have:
            return links_of(manifest)
        guess = patch_bytes(manifest)
        if have is not None and self._target - have < _FAR:
            return [Link(v - 1, v, guess) for v in range(have + 1, self._target + 1)]
        links = [link for link in self._stream.links(have) if link.version <= self._target]
        # Patches from the reader's version, or from the listed anchors.
        starts = (
            [have] if have is not None else [link.version for link in links if link.base is None]
        )
        versions = (
            [v for v in self._stream.versions(min(starts)) if v <= self._target] if starts else []
        )
        return [*links, *(Link(v - 1, v, guess) for v in versions)]

    def _from_manifests(self, have: int | None, reasons: list[str]) -> list[Link]:
        """The links that manifests name, from the target down to version ``have`` or to an
        anchor."""
        links: list[Link] = []
        version: int | None = self._target
        while version is not None:
            found = [link for link in self._named_by(version, reasons) if self._usable(link)]
            links += found
            # An anchor above the reader's version is one way; the patches down to the reader may be
            # cheaper.
            anchored = any(link.base is None for link in found) and (
                have is None or have >= version
            )
            bases = [link.base for link in found if link.base is not None]
            version = bases[0] if bases and not anchored and version != have else None
        return links

    def _named_by(self, version: int, reasons: list[str]) -> list[Link]:
        try:
            return links_of(self._stream.manifest(version))
        except UNREADABLE as error:
            reasons.append(str(error))
            return []

    def _usable(self, link: Link) -> bool:
        return link.key not in self._avoided
