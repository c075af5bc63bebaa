"""What those know of the past who come to a version by what a store has (docs/protocol.md, section 12)."""

from __future__ import annotations

from contextlib import suppress

from ..stream.chain import Link
from ..stream.manifest import Manifest
from ..stream.stream import Stream
from ..stream.unreadable import UNREADABLE


def history_available(link: Link, manifest: Manifest, *, before: bool) -> bool:
    """Whether all that ``manifest`` remembers is known to who came to it along ``link``; ``before``: and knew all at
    the link's base."""
    if link.base is None or not manifest.remembers:
        return True
    return manifest.remembers == (link.version - link.base,) if link.is_fold else before


def knows_history(stream: Stream, version: int) -> bool:
    """The same of who came to ``version`` by what there is in ``stream``, which has all that leads there."""
    links: list[Link] | None = None
    with suppress(*UNREADABLE):
        while (manifest := stream.manifest(version)).remembers:
            links = stream.links() if links is None else links
            folds = [link for link in links if link.is_fold and link.version == version]
            if any(history_available(fold, manifest, before=False) for fold in folds):
                return True
            if manifest.patch is None:
                return False
            version = manifest.patch.base
        return True
    return False
