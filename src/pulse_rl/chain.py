"""Planning on a stream's links, without any input or output.

A link is a way to reach a version: an anchor reaches it from nothing, a patch from an earlier version. What to fetch is
the cheapest path by bytes; a gap is an error that says what is missing on which side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .errors import ChainGap
from .manifest import Manifest, Payload


class Link(NamedTuple):
    """``base`` is None for an anchor. ``payloads`` are the objects to fetch."""

    base: int | None
    version: int
    payloads: tuple[Payload, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.bytes for p in self.payloads)

    def __str__(self) -> str:
        if self.base is None:
            return f"the anchor of version {self.version}"
        return f"the patch {self.base}->{self.version}"


def links_of(manifest: Manifest) -> list[Link]:
    """The ways to reach a manifest's version."""
    links = []
    if manifest.patch:
        links.append(Link(manifest.patch.base, manifest.version, manifest.patch.parts))
    if manifest.anchor:
        links.append(Link(None, manifest.version, manifest.anchor.shards))
    return links


def cheapest_path(links: Iterable[Link], have: int | None, target: int) -> list[Link]:
    """The links to follow, in order, from version ``have`` (None: from nothing) to ``target``; fewest bytes in all.

    Raises ChainGap that names both sides of the gap.
    """
    best: dict[int | None, tuple[int, list[Link]]] = {None: (0, [])}
    if have is not None:
        best[have] = (0, [])
    # Every link leads to a higher version than its base, so in this order each base is final before it is used.
    for link in sorted(links, key=lambda x: (x.version, x.nbytes)):
        if link.base in best and link.version != have:
            cost, path = best[link.base]
            if link.version not in best or cost + link.nbytes < best[link.version][0]:
                best[link.version] = (cost + link.nbytes, [*path, link])
    if target not in best:
        reached = max((v for v in best if v is not None and v < target), default=None)
        lower = "nothing below it can be reached" if reached is None else f"the chain reaches version {reached}"
        raise ChainGap(f"no path leads to version {target}: {lower}")
    return best[target][1]
