"""A manifest with something in every field, and what is stored of a stream."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

import msgspec

from pulse_rl import Store
from pulse_rl.patch.header import parse_header
from pulse_rl.stream.manifest import FORMAT, AnchorRef, FileRef, Manifest, PatchRef, Payload
from pulse_rl.stream.stream import Stream
from tests.support.states import present

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
    remembers=0,
    aliases={"lm_head.weight": "model.embed_tokens.weight"},
    metadata={"step": 7, "reward": 0.5, "note": "größe", "kept": True},
    files=(FileRef("config.json", "e" * 64, 31), FileRef("tokenizer/vocab.txt", "f" * 64, 0)),
    patch=PatchRef(6, "a" * 64, 12, (Payload("b" * 64, 99),)),
    anchor=AnchorRef((Payload("c" * 64, 1500), Payload("d" * 64, 700))),
    digest="",
    signature=None,
).sealed()


def manifest_of(store: Store, stream: str, version: int) -> Manifest:
    return Stream(store, stream).manifest(version)


def history_named(store: Store, stream: str, version: int) -> int:
    """The number of versions in the history that the patch of a version names."""
    patch = present(manifest_of(store, stream, version).patch)
    data = store.get(f"{stream}/payloads/{patch.parts[0].sha256}.patch")
    history = parse_header(memoryview(data)).header.history
    return history.windows if history else 0


def show_next(store: Store, stream: str, kind: str, data: bytes, root: str) -> None:
    """Puts a patch or a shard into a stream of one version, as all that leads to the next one,
    which has this root."""
    payload = Payload(sha256(data).hexdigest(), max(len(data), 1))
    store.put(f"{stream}/payloads/{payload.sha256}.{kind}", data)
    zero = manifest_of(store, stream, 0)
    patch = PatchRef(0, zero.root, 1, (payload,)) if kind == "patch" else None
    anchor = AnchorRef((payload,)) if kind == "safetensors" else None
    made = msgspec.structs.replace(zero, version=1, root=root, patch=patch, anchor=anchor).sealed()
    store.put(f"{stream}/versions/000000000001.json", made.to_bytes())


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
    return [
        Fold(link.base or 0, link.version, link.nbytes, tuple(link.payloads or ()))
        for link in listed
    ]
