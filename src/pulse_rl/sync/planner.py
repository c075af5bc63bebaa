"""Plans a path of links from one version to another: the fewest bytes, without links that failed
(docs/protocol.md, section 4). `cheapest_path` is the plan, a function of the links; `Planner`
gathers the links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import ChainGap, FormatError, IntegrityError, NotFound, StateMismatch
from ..store.base import UNREADABLE
from ..stream.manifest import Key, Link, links_of, patch_bytes
from ..stream.stream import Stream

_MAX_FALSE_LINKS = 16
_FAR = 8  # versions behind, from which on the listed folds and anchors are worth their listing
BROKEN_LINK = (NotFound, FormatError, IntegrityError, StateMismatch, ChainGap)
"""Errors that make a link unusable and another path worth trying; an unavailable store is not among
them."""


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
    # The cheapest way to each version: bytes in all, and its last link.
    best: dict[int | None, tuple[int, Link | None]] = {None: (0, None)}
    if have is not None:
        best[have] = (0, None)
    # Every link leads to a higher version than its base, so in this order each base is final before
    # it is used.
    for link in sorted(links, key=lambda x: (x.version, x.nbytes)):
        if link.version == have or link.base not in best:
            continue
        cost = best[link.base][0] + link.nbytes
        if link.version not in best or cost < best[link.version][0]:
            best[link.version] = (cost, link)
    if target not in best:
        reached = max((v for v in best if v is not None and v < target), default=None)
        lower = (
            "nothing below it is reachable"
            if reached is None
            else f"the chain reaches version {reached}"
        )
        raise ChainGap(f"no path leads to version {target}: {lower}")
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
        """Excludes a link that failed: as planned, and with the payloads that its manifest
        names."""
        self._avoided[planned.key] = self._avoided[link.key] = f"{link}: {error}"
        # A link in a listing is anybody's word. After some false ones only the manifests are
        # believed.
        if self._listed is not None and len(self._avoided) > _MAX_FALSE_LINKS:
            self._listed, self._believes_listings = [], False

    def plan(self, have: int | None) -> list[Link]:
        """Return the cheapest path by bytes from version ``have`` (None: from nothing) that is not
        known to be broken.

        Raises:
            ChainGap: There is none. The message has the reasons why links were avoided.
        """
        if self._listed is None:
            self._listed = self._from_listings(have)
        reasons: list[str] = []
        # The first set that has a path decides: gathering a larger one costs more than a better
        # path saves.
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
        """Ever larger sets of links, each more expensive to gather; unreadable ones are added to
        ``reasons``."""
        yield listed
        # Names alone lead nowhere: manifests say what links there are, read from the target
        # downwards.
        links = self._stream.links() if self._believes_listings else []
        links = [link for link in links if link.version <= self._target]
        yield [*links, *self._from_manifests(have, reasons)]
        # At last every manifest there is: a gap below may have a way around that no manifest above
        # it names.
        for version in self._stream.versions():
            if version <= self._target:
                links += self._named_by(version, reasons)
        yield links

    def _from_listings(self, have: int | None) -> list[Link]:
        """Links as the listings show them. The size of a patch is not listed: the target's stands
        for all.

        When few versions behind, skip the listing: the patches in between are the path.
        """
        try:
            manifest = self._stream.manifest(self._target)
        except BROKEN_LINK:
            return []
        if manifest.patch is None:
            return links_of(manifest)
        if manifest.patch.base == have:
            return links_of(manifest)
        guess = patch_bytes(manifest)
        if have is not None and self._target - have < _FAR:
            return [Link(v - 1, v, guess) for v in range(have + 1, self._target + 1)]
        links = [link for link in self._stream.links(have) if link.version <= self._target]
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
