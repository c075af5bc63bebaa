"""A manifest with something in every field."""

from __future__ import annotations

from pulse_rl.stream.manifest import FORMAT, AnchorRef, Manifest, PatchRef, Payload

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
