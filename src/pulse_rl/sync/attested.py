"""The attestation of an anchor (docs/attestations.md), stored before the manifest that names it."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import NamedTuple

from ..errors import DigestMismatch
from ..state.digest import LEAF_BYTES, StateDigest, leaves_of
from ..state.tensors import Segment, SlicedState, State, TensorSpec, UIntArray
from ..stream.anchor import AnchorFiles
from ..stream.attestation import AttestationKey, statement_of
from ..stream.manifest import AnchorRef, Manifest, Payload
from ..stream.names import FILE
from ..stream.signing import Signer
from ..stream.stream import Stream


class WholeState(NamedTuple):
    """Of the next version, on rank 0: its digest ``tree``, and its ``state`` if this rank has all
    of it."""

    tree: StateDigest
    state: State | None


def store_attestation(
    stream: Stream, signer: Signer, manifest: Manifest, whole: WholeState
) -> Payload:
    """Stores the attestation of the anchor of a version that is about to be committed. What this
    rank does not have is read from the anchor's shards, 64 MiB at a time, and must have its leaves.
    Raises StoreError and IntegrityError."""
    assert manifest.anchor is not None
    state = whole.state or _stored_state(stream, manifest.anchor, whole.tree)
    statement = statement_of(manifest, state, whole.tree, key=signer.public_key)
    data = json.dumps(AttestationKey.of(signer).bundle(statement)).encode()
    payload = Payload(sha256(data).hexdigest(), len(data))
    stream.put_payload(payload, FILE, data)
    return payload


class _StoredTensor(NamedTuple):
    """A tensor of an anchor in the store, as a state has it."""

    files: AnchorFiles
    tree: StateDigest
    spec: TensorSpec

    def read(self, start: int, stop: int) -> UIntArray:
        wanted = Segment(self.spec, start, stop)
        held = SlicedState.allocate([wanted])
        self.files.read(held, [wanted])
        elements = held.read(*wanted.place)
        first = start * self.spec.dtype.width // LEAF_BYTES
        leaves = b"".join(leaves_of([elements]))
        if leaves != self.tree.leaves[self.spec.name][32 * first :][: len(leaves)]:
            raise DigestMismatch(
                f"tensor {self.spec.name!r} came back from the store with other bits"
            )
        return elements


def _stored_state(stream: Stream, anchor: AnchorRef, tree: StateDigest) -> State:
    files = AnchorFiles(stream.shards(anchor.shards))
    return State(tree.specs, {spec.name: _StoredTensor(files, tree, spec) for spec in tree.specs})
