"""Patches in parts, as ranks of a sharded trainer make them, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from pulse_rl import State, Store
from pulse_rl.codec import HISTORY
from pulse_rl.ops.diff import build_patch
from pulse_rl.patch import parse_patch
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.build import encode_verified, entry_of
from pulse_rl.patch.header import PatchHeader
from pulse_rl.patch.header import slices_of as header_slices
from pulse_rl.patch.history import History, Window
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import Segment
from pulse_rl.stream.anchor import in_file_order, sliced_header
from pulse_rl.stream.manifest import FORMAT, AnchorRef, Manifest, PatchRef, Payload
from pulse_rl.stream.names import PATCH, SHARD
from pulse_rl.stream.stream import Stream

Rng = np.random.Generator


def slices_of(state: State, rng: Rng, ranks: int) -> list[tuple[Segment, ...]]:
    """Each tensor cut at random places, a range for each rank; some have none."""
    found: list[list[Segment]] = [[] for _ in range(ranks)]
    for spec in state.specs:
        if not spec.elements:
            found[0].append(Segment(spec, 0, 0))
            continue
        ends = sorted(rng.integers(0, spec.elements, ranks - 1, endpoint=True).tolist())
        for of, start, stop in zip(found, [0, *ends], [*ends, spec.elements], strict=True):
            if start < stop:
                of.append(Segment(spec, start, stop))
    return [tuple(of) for of in found]


def part(
    old: State, new: State, segments: Sequence[Segment], known: History | None = None, **other: str
) -> bytes:
    """The part of the patch from ``old`` to ``new`` that holds ``segments``, coded by the history
    that is ``known``; ``other`` fields of its header."""
    blocks = cut(old.specs, segments)
    known = (known or History()).of(blocks)
    coded = [
        encode_verified(b, b.read(old), b.read(new), known.past(k))[0] for k, b in enumerate(blocks)
    ]
    header = PatchHeader(
        other.get("base_root", state_digest(old).root),
        other.get("target_root", state_digest(new).root),
        header_slices(old.specs, segments),
        tuple(map(entry_of, coded)),
        known.name if any(encoded.codec_id == HISTORY for encoded in coded) else None,
    )
    return header.to_bytes() + b"".join(encoded.payload for encoded in coded)


def shard(state: State, segments: Sequence[Segment]) -> bytes:
    """The shard of an anchor of ``state`` that holds ``segments``."""
    ordered = in_file_order(segments)
    return sliced_header(ordered) + b"".join(
        state.read(*segment.place).tobytes() for segment in ordered
    )


def payload(data: bytes) -> Payload:
    return Payload(sha256(data).hexdigest(), len(data))


def sharded_stream(
    store: Store, name: str, states: Sequence[State], stream_id: str, rng: Rng, ranks: int
) -> None:
    """A stream of ``states``: an anchor in slices, then patches in parts, coded by what changed
    before."""
    stream, known = Stream(store, name), History()
    for version, state in enumerate(states):
        slices, patch, anchor = slices_of(state, rng, ranks), None, None
        if version:
            before = states[version - 1]
            files = [part(before, state, segments, known) for segments in slices]
            built = build_patch(before, state, state_digest(before), max_records=state.nbytes)
            assert built.records is not None
            known = known.then(Window(built.header.base_root, built.records, cut(state.specs)))
            changed = sum(
                entry.changed for entry in parse_patch(files, state_digest(before)).header.blocks
            )
            patch = PatchRef(
                version - 1, state_digest(before).root, changed, tuple(map(payload, files))
            )
        else:
            files = [shard(state, segments) for segments in slices]
            anchor = AnchorRef(tuple(map(payload, files)))
        for data in files:
            stream.put_payload(payload(data), SHARD if anchor else PATCH, data)
        manifest = Manifest(
            format=FORMAT,
            stream=name,
            stream_id=stream_id,
            version=version,
            epoch=1,
            root=state_digest(state).root,
            elements=state.elements,
            dense_bytes=state.nbytes,
            publisher="5" * 16,
            created=1764000000.5,
            remembers=len(known.windows),
            aliases={},
            metadata={"step": version},
            files=(),
            patch=patch,
            anchor=anchor,
            digest="",
            signature=None,
        )
        assert stream.commit(manifest.sealed())
