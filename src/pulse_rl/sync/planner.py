"""Plans a path of links from one version to another: the fewest bytes, without links that failed
(docs/protocol.md, section 4). `cheapest_path` is the plan, a function of the links; `Planner`
gathers the links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ..errors import ChainGap, FormatError, IntegrityError, NotFound, StateMismatch
from ..stream.manifest import Key, Link, Manifest, links_of, patch_bytes
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE

_MAX_FALSE_LINKS = 16
_FAR = 8  # versions behind, from which on the listed folds and anchors are worth their listing
BROKEN_LINK = (NotFound, FormatError, IntegrityError, StateMismatch, ChainGap)
"""Errors that make a link unusable and another path worth trying; an unavailable store is not among
them."""

_Place = tuple[int | None, bool]


def cheapest_path(
    links: Iterable[Link],
    have: int | None,
    target: int,
    *,
    knows: bool | None = None,
    keeps: Callable[[int, int], bool] = lambda base, version: True,
    needs: Callable[[Link], bool] = lambda patch: True,
) -> list[Link]:
    """The links to follow, in order, from version ``have`` (None: from nothing) to ``target``;
    fewest bytes in all.

    ``knows``: whether the history at ``have`` is known; no patch that ``needs`` it is taken from
    where it is not, and where it is, it is to be known at ``target``, too, if there is such a path.
    ``keeps`` says of a fold whether it is known after it. None: histories do not matter. Raises
    ChainGap that names both sides of the gap.
    """
    # Of each version, with its history and without, the cheapest way there: bytes in all, the last
    # link, its base.
    start: _Place = (None, True)
    best: dict[_Place, tuple[int, Link | None, _Place]] = {start: (0, None, start)}
    if have is not None:
        best[have, knows is not False] = (0, None, start)
    # Every link leads to a higher version than its base, so in this order each base is final before
    # it is used.
    for link in sorted(links, key=lambda x: (x.version, x.nbytes)):
        if link.version == have and knows is not False:
            continue
        for known in (True, False):  # the way on differs, so both are kept
            base: _Place = (link.base, known)
            if base not in best or (link.is_patch and not known and needs(link)):
                continue
            after = (
                knows is None
                or link.base is None
                or (known if link.is_patch else keeps(link.base, link.version))
            )
            place, cost = (link.version, after), best[base][0] + link.nbytes
            if place not in best or cost < best[place][0]:
                best[place] = (cost, link, base)
    ends: list[_Place] = [place for place in ((target, True), (target, False)) if place in best]
    if not ends:
        reached = max((v for v, _ in best if v is not None and v < target), default=None)
        lower = (
            "nothing below it is reachable"
            if reached is None
            else f"the chain reaches version {reached}"
        )
        raise ChainGap(f"no path leads to version {target}: {lower}")
    path: list[Link] = []
    found = best[ends[0] if knows else min(ends, key=lambda end: best[end][0])]
    while found[1] is not None:
        path.append(found[1])
        found = best[found[2]]
    return path[::-1]


class Planner:
    """Plans the path to version ``target`` of a stream, and replans whenever a link fails."""

    def __init__(self, stream: Stream, target: int) -> None:
        self._stream = stream
        self._target = target
        self._avoided: dict[Key, str] = {}
        self._listed: list[Link] | None = None
        self._believes_listings = True
        self._minds_histories = False
        self._forgetful: set[tuple[int, int]] = set()
        self._needing: set[Key] = set()
        self._learnt = 0

    def avoid(self, planned: Link, link: Link, error: Exception) -> None:
        """Excludes a link that failed: as planned, and with the payloads that its manifest
        names."""
        self._avoided[planned.key] = self._avoided[link.key] = f"{link}: {error}"
        # A link in a listing is anybody's word. After some false ones only the manifests are
        # believed.
        if self._listed is not None and len(self._avoided) > _MAX_FALSE_LINKS:
            self._listed, self._believes_listings = [], False

    def lacks_history(self, planned: Link, link: Link) -> bool:
        """A patch could not be decoded for want of a history: from now on paths are planned that
        bring it along. False where nothing new was learnt since the last time."""
        self._minds_histories = True
        self._needing |= {planned.key, link.key}
        learnt = len(self._needing) + len(self._forgetful)
        news, self._learnt = learnt > self._learnt, learnt
        return news

    def followed(self, link: Link, *, knows: bool) -> None:
        """Takes note of whether all is remembered at the end of a fold."""
        if link.is_fold and not knows and link.base is not None:
            self._forgetful.add((link.base, link.version))

    def forgets(self, link: Link, manifest: Manifest) -> bool:
        """Whether a fold leads to where more is remembered than it shows. Says so once: the next
        plan takes it only where there is no other way."""
        if (
            link.base is None
            or not link.is_fold
            or manifest.remembers in ((), (link.version - link.base,))
        ):
            return False
        fold = (link.base, link.version)
        known = fold in self._forgetful
        self._forgetful.add(fold)
        self._minds_histories = True
        return not known

    def plan(self, have: int | None, *, knows: bool = True, tries: bool = True) -> list[Link]:
        """The cheapest path by bytes from version ``have`` (None: from nothing) that is not known
        to be broken. ``knows``: whether all is remembered there that a patch may need. ``tries``:
        where it is not, a patch is taken all the same until `lacks_history` says that it needs it:
        another way may cost a whole state. Who does not decode cannot try, and takes such a path
        where there is no other.

        Raises ChainGap, with the reasons why links were avoided.
        """
        if self._listed is None:
            self._listed = self._from_listings(have)
        reasons: list[str] = []
        known = knows if self._minds_histories else None

        def cheapest(needs: Callable[[Link], bool]) -> list[Link]:
            return cheapest_path(
                usable, have, self._target, knows=known, keeps=self._keeps_history, needs=needs
            )

        # The first set that has a path decides: gathering a larger one costs more than a better
        # path saves. Who lacks what is remembered may have to begin below.
        for links in self._candidates(self._listed, None if known is False else have, reasons):
            usable = [link for link in links if self._usable(link)]
            try:
                return cheapest(self._needs_history if tries else lambda patch: True)
            except ChainGap as error:
                gap = error
        if not tries:
            with suppress(ChainGap):
                return cheapest(self._needs_history)
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
        self._minds_histories = self._minds_histories or bool(manifest.remembers)
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
        if manifest.remembers and have is not None and versions:
            # The first patches after a history began anew are larger than the target's.
            with suppress(*BROKEN_LINK):
                guess = (guess + patch_bytes(self._stream.manifest(versions[0]))) // 2
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

    def _keeps_history(self, base: int, version: int) -> bool:
        """Whether the history is known after a fold: until its manifest was seen, it is believed of
        all."""
        return (base, version) not in self._forgetful

    def _needs_history(self, patch: Link) -> bool:
        return patch.key in self._needing

    def _usable(self, link: Link) -> bool:
        return link.key not in self._avoided
