"""Plans paths over a stream's links, without I/O.

A link is a way to reach a version: an anchor reaches it from nothing, a patch from the version before, a fold from an
earlier one. What to fetch is the cheapest path by bytes; a gap is an error that says what is missing on which side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import ChainGap
from .manifest import Manifest, Payload

Key = tuple[int | None, int, str]
"""What tells two links apart: base, version, and the digest of a fold's list, or of the first payload ("" while it is
not known)."""


_Place = tuple[int | None, bool]


class Link(NamedTuple):
    """``base`` is None for an anchor. ``payloads`` are the objects to fetch, None while only their size is known or
    guessed: the manifest of ``version`` lists them; or, of a fold, its link, where the list has the SHA-256 ``parts``.
    ``is_fold``: it is not the version's own patch or anchor."""

    base: int | None
    version: int
    nbytes: int
    payloads: tuple[Payload, ...] | None = None
    parts: str = ""
    is_fold: bool = False

    @property
    def key(self) -> Key:
        return self.base, self.version, self.parts or (self.payloads[0].sha256 if self.payloads else "")

    @property
    def is_patch(self) -> bool:
        """Whether it leads from a version to the next that there is."""
        return self.base is not None and not self.is_fold

    def __str__(self) -> str:
        if self.base is None:
            return f"the anchor of version {self.version}"
        return f"the {'patch' if self.is_patch else 'fold'} {self.base}->{self.version}"


def links_of(manifest: Manifest) -> list[Link]:
    """The ways to reach a manifest's version that the manifest itself names."""
    links = []
    if manifest.patch:
        links.append(_link(manifest.patch.base, manifest.version, manifest.patch.parts))
    if manifest.anchor:
        links.append(_link(None, manifest.version, manifest.anchor.shards))
    return links


def named(link: Link, manifest: Manifest) -> Link:
    """``link`` with its payloads; raises ChainGap where the manifest has no such link."""
    for found in links_of(manifest):
        if (found.base, found.version) == (link.base, link.version):
            return found
    raise ChainGap(f"{link} is not in the manifest of version {manifest.version}")


def cheapest_path(
    links: Iterable[Link],
    have: int | None,
    target: int,
    *,
    knows: bool | None = None,
    keeps: Callable[[int, int], bool] = lambda base, version: True,
    needs: Callable[[Link], bool] = lambda patch: True,
) -> list[Link]:
    """The links to follow, in order, from version ``have`` (None: from nothing) to ``target``; fewest bytes in all.

    ``knows``: whether the history at ``have`` is known; no patch that ``needs`` it is taken from where it is not, and
    where it is, it is to be known at ``target``, too, if there is such a path. ``keeps`` says of a fold whether it is
    known after it. None: histories do not matter. Raises ChainGap that names both sides of the gap.
    """
    # Of each version, with its history and without, the cheapest way there: bytes in all, the last link, its base.
    start: _Place = (None, True)
    best: dict[_Place, tuple[int, Link | None, _Place]] = {start: (0, None, start)}
    if have is not None:
        best[have, knows is not False] = (0, None, start)
    # Every link leads to a higher version than its base, so in this order each base is final before it is used.
    for link in sorted(links, key=lambda x: (x.version, x.nbytes)):
        if link.version == have and knows is not False:
            continue
        for known in (True, False):
            base: _Place = (link.base, known)
            if base not in best or (link.is_patch and not known and needs(link)):
                continue
            after = knows is None or link.base is None or (known if link.is_patch else keeps(link.base, link.version))
            place, cost = (link.version, after), best[base][0] + link.nbytes
            if place not in best or cost < best[place][0]:
                best[place] = (cost, link, base)
    ends: list[_Place] = [place for place in ((target, True), (target, False)) if place in best]
    if not ends:
        reached = max((v for v, _ in best if v is not None and v < target), default=None)
        lower = "nothing below it is reachable" if reached is None else f"the chain reaches version {reached}"
        raise ChainGap(f"no path leads to version {target}: {lower}")
    path: list[Link] = []
    found = best[ends[0] if knows else min(ends, key=lambda end: best[end][0])]
    while found[1] is not None:
        path.append(found[1])
        found = best[found[2]]
    return path[::-1]


def _link(base: int | None, version: int, payloads: tuple[Payload, ...]) -> Link:
    return Link(base, version, sum(p.bytes for p in payloads), payloads)
