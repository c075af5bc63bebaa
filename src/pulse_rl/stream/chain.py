"""The links of a stream: ways to reach a version. An anchor reaches it from nothing, a patch from the version before, a
fold from an earlier one."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ChainGap
from .manifest import Manifest, Payload

Key = tuple[int | None, int, str]
"""What tells two links apart: base, version, and the digest of a fold's list, or of the first payload ("" while it is
not known)."""


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


def _link(base: int | None, version: int, payloads: tuple[Payload, ...]) -> Link:
    return Link(base, version, sum(p.bytes for p in payloads), payloads)
