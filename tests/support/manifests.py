"""A manifest with something in every field, and what is stored of a stream."""

from __future__ import annotations

from typing import NamedTuple

from pulse_rl import Store
from pulse_rl.stream.manifest import FORMAT, AnchorRef, Manifest, PatchRef, Payload
from pulse_rl.stream.stream import Stream

FULL = Manifest(
    format=FORMAT,
    stream="policy",
    stream_id="5eed" * 8,
    version=7,
    epoch=2,
    root="0123456789abcdef" * 4,
    elements=1000,
    dense_bytes=2000,
    publisher="00ff00ff00ff00ff",
    created=1764000000.125,
    remembers=(),
    aliases={"lm_head.weight": "model.embed_tokens.weight"},
    metadata={"step": 7, "reward": 0.5, "note": "größe", "kept": True},
    patch=PatchRef(6, "a" * 64, 12, (Payload("b" * 64, 99),)),
    anchor=AnchorRef((Payload("c" * 64, 1500), Payload("d" * 64, 700))),
    digest="",
    signature=None,
).sealed()


def manifest_of(store: Store, stream: str, version: int) -> Manifest:
    return Stream(store, stream).manifest(version)


class Fold(NamedTuple):
    """A link over several versions, and the files of its patch."""

    base: int
    version: int
    nbytes: int
    payloads: tuple[Payload, ...]


def folds_of(store: Store, stream: str) -> list[Fold]:
    """The folds that are listed."""
    where = Stream(store, stream)
    listed = [where.resolved(link) for link in where.links() if link.base is not None]
    return [Fold(link.base or 0, link.version, link.nbytes, tuple(link.payloads or ())) for link in listed]
