"""Plans paths over a stream's links, without I/O.

A link is a way to reach a version: an anchor reaches it from nothing, a patch from the version before, a fold from an
earlier one. What to fetch is the cheapest path by bytes; a gap is an error that says what is missing on which side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import ChainGap
from .manifest import Manifest, Payload

Key = tuple[int | None, int, str]
"""What tells two links apart: base, version, and the digest of the list of payloads, or of the first payload ("" while
it is not known)."""


class Link(NamedTuple):
    """``base`` is None for an anchor. ``payloads`` are the objects to fetch, None while only their size is known or
    guessed: the manifest of ``version`` lists them; or, of a fold in parts, its link, where the list has the SHA-256
    ``parts``."""

    base: int | None
    version: int
    nbytes: int
    payloads: tuple[Payload, ...] | None = None
    parts: str = ""

    @property
    def key(self) -> Key:
        return self.base, self.version, self.parts or (self.payloads[0].sha256 if self.payloads else "")

    def __str__(self) -> str:
        if self.base is None:
            return f"the anchor of version {self.version}"
        return f"the {'patch' if self.version - self.base == 1 else 'fold'} {self.base}->{self.version}"


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


def cheapest_path(links: Iterable[Link], have: int | None, target: int) -> list[Link]:
    """The links to follow, in order, from version ``have`` (None: from nothing) to ``target``; fewest bytes in all.

    Raises ChainGap that names both sides of the gap.
    """
    # Of each version the cheapest way there: bytes in all, and the last link.
    best: dict[int | None, tuple[int, Link | None]] = {None: (0, None)}
    if have is not None:
        best[have] = (0, None)
    # Every link leads to a higher version than its base, so in this order each base is final before it is used.
    for link in sorted(links, key=lambda x: (x.version, x.nbytes)):
        if link.base in best and link.version != have:
            cost = best[link.base][0] + link.nbytes
            if link.version not in best or cost < best[link.version][0]:
                best[link.version] = (cost, link)
    if target not in best:
        reached = max((v for v in best if v is not None and v < target), default=None)
        lower = "nothing below it is reachable" if reached is None else f"the chain reaches version {reached}"
        raise ChainGap(f"no path leads to version {target}: {lower}")
    path: list[Link] = []
    last = best[target][1]
    while last is not None:
        path.append(last)
        last = best[last.base][1]
    return path[::-1]


def _link(base: int | None, version: int, payloads: tuple[Payload, ...]) -> Link:
    return Link(base, version, sum(p.bytes for p in payloads), payloads)
