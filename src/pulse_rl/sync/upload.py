"""Stores the payloads of a version before its commit (docs/protocol.md, section 3, "Upload")."""

from __future__ import annotations

from contextlib import closing
from hashlib import sha256
from typing import NamedTuple

from ..events import Listener, progress_to
from ..state.checkpoint import file_bytes, serialize
from ..stream import anchor
from ..stream.digest_trees import put_digests
from ..stream.manifest import AnchorRef, PatchRef, Payload
from ..stream.names import PATCH, SHARD
from ..stream.stream import Stream
from .draft import Draft, FullDraft, PatchDraft


class Uploaded(NamedTuple):
    """What a manifest says of the payloads of its version; at least one of the two is there."""

    patch: PatchRef | None
    anchor: AnchorRef | None


def upload(
    stream: Stream,
    draft: Draft,
    *,
    with_anchor: bool,
    shard_bytes: int,
    threads: int | None = None,
    listener: Listener | None = None,
) -> Uploaded:
    """Stores the draft's patch, if it has one; its anchor, if it has no patch or is to be stored ``with_anchor``; and
    its digests.

    Raises IntegrityError if the draft's state no longer matches its digest tree, and StoreError.
    """
    patch = _upload_patch(stream, draft) if isinstance(draft, PatchDraft) else None
    put_digests(stream, draft.target, leaves=patch is None or with_anchor)
    if patch and not with_anchor:
        return Uploaded(patch, None)
    return Uploaded(patch, _upload_anchor(stream, draft, shard_bytes, threads, listener))


def _upload_patch(stream: Stream, draft: PatchDraft) -> PatchRef:
    digest = sha256()
    for chunk in draft.built.chunks:
        digest.update(chunk)
    payload = Payload(digest.hexdigest(), draft.built.nbytes)
    stream.put_payload(payload, PATCH, draft.built.chunks)
    header = draft.built.header
    return PatchRef(draft.base, header.base_root, header.changed, (payload,))


def _upload_anchor(
    stream: Stream, draft: Draft, shard_bytes: int, threads: int | None, listener: Listener | None
) -> AnchorRef:
    own = isinstance(draft, FullDraft)  # a copy that nobody else writes to was hashed for good when it was made
    groups = anchor.cut_shards(draft.state.specs, shard_bytes)
    progress = progress_to(listener, "upload", sum(map(file_bytes, groups)))
    payloads = []
    with closing(anchor.hashed_shards(draft.state, draft.target, groups, threads, own=own)) as shards:
        for shard in shards:
            chunks = serialize(draft.state, shard.specs) if own else anchor.verified_chunks(draft.state, shard)
            stream.put_payload(shard.payload, SHARD, chunks)
            payloads.append(shard.payload)
            if progress:
                progress(shard.payload.bytes)
    return AnchorRef(tuple(payloads))
