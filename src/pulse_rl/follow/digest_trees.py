"""Digests of each version in the store, for subscribers that hold some tensors only
(docs/format.md, section 7).

The objects are named by the root that they prove, so that nothing has to vouch for them.
"""

from __future__ import annotations

from ..errors import (
    CorruptCheckpoint,
    DigestMismatch,
    FormatError,
    IntegrityError,
    NotFound,
    PulseError,
    StoreError,
    StoreUnavailable,
)
from ..state.digest import LEAF_BYTES, StateDigest, root_of
from ..state.header import MAX_HEADER_BYTES, header_length, parse_header
from ..state.tensors import MAX_DIMS, MAX_TENSORS
from ..store.base import Store
from ..stream.manifest import Manifest
from ..stream.names import LEAVES, TENSORS
from ..stream.stream import Stream

_TRIES = 2
#: More than the tensors of any real model take in a header, which is parsed before it is proved.
_MIN_HEADER, _ENTRY_BYTES = 1 << 16, 1 << 10
_MAX_COMPARED = 32 << 20
_ENTRY_VALUES = 8 + MAX_DIMS
_HINT = "Publish a version with an anchor."


def read_digests(stream: Stream, root: str, count: int) -> bytes:
    """The digests of the ``count`` tensors of the state with this root. Raises NotFound and
    DigestMismatch."""
    name = stream.names.digests_of(root, TENSORS)
    for _ in range(_TRIES):
        data = _at_most(stream.store, name, 32 * count)
        if root_of(data) == root:
            return data
    raise DigestMismatch(
        f"{name} does not hold the digests of {count} tensors with the root in its name"
    )


def read_tree(stream: Stream, manifest: Manifest) -> tuple[StateDigest, int]:
    """The whole digest tree of a version, proved by its root, and its length in bytes. Raises
    NotFound, CorruptCheckpoint and DigestMismatch."""
    name = stream.names.digests_of(manifest.root, LEAVES)
    # How many tensors there are is proved by the root before anything as long as the tree is read.
    count = _count(stream, manifest.root)
    header_most = min(MAX_HEADER_BYTES, _MIN_HEADER + _ENTRY_BYTES * count)
    most = 8 + header_most + 32 * (manifest.dense_bytes // LEAF_BYTES + count)
    for again in reversed(range(_TRIES)):
        try:
            nbytes = _length(stream.store, name)
            if nbytes > most:
                raise CorruptCheckpoint(f"{name} has {nbytes} bytes, more than {most}")
            data = _at_most(stream.store, name, nbytes)
            header_end = 8 + int.from_bytes(data[:8], "little")
            if header_end > 8 + header_most:
                raise CorruptCheckpoint(
                    f"{name} has a header that is longer than any of {count} tensors"
                )
            # Each value of the JSON becomes an object of some hundred bytes.
            if sum(
                data.count(mark, 8, header_end) for mark in (b",", b"[", b"{")
            ) > _ENTRY_VALUES * (count + 1):
                raise CorruptCheckpoint(
                    f"{name} has a header with more values than that of any {count} tensors"
                )
            return _parsed(data, manifest, name), nbytes
        except (CorruptCheckpoint, DigestMismatch):
            if not again:
                raise
    raise AssertionError


def _count(stream: Stream, root: str) -> int:
    """The number of tensors of the state with this root, which proves it. Raises NotFound and
    DigestMismatch."""
    count = _listed(stream, stream.names.digests_of(root, TENSORS))
    return len(read_digests(stream, root, count)) // 32


def _listed(stream: Stream, name: str) -> int:
    count = _length(stream.store, name) // 32
    if count > MAX_TENSORS:
        raise DigestMismatch(f"{name} lists more than {MAX_TENSORS} tensors")
    return count


def has_digests(stream: Stream, manifest: Manifest, *, leaves: bool) -> bool:
    """Whether the store has a version's digests, with ``leaves`` also its leaves, and they are
    right."""
    try:
        if leaves:
            read_tree(stream, manifest)
        else:
            _count(stream, manifest.root)
    except (NotFound, FormatError, IntegrityError):
        return False
    return True


def copy_digests(
    source: Stream, target: Stream, manifest: Manifest, *, leaves: bool
) -> PulseError | None:
    """Stores in ``target`` what ``source`` has of a version's digests, if it is right; nothing
    depends on it but subscribers that select. Returns the error where the source shows wrong ones.
    Raises StoreError, but not NotFound; StoreUnavailable where they are damaged on their way, in
    another manner each time."""
    name = source.names.digests_of(manifest.root, TENSORS)
    names = [name, source.names.digests_of(manifest.root, LEAVES)] if leaves else [name]

    def copy() -> None:
        if leaves:
            target.put_digests(read_tree(source, manifest)[0], leaves=True)
            return
        target.store.put(name, read_digests(source, manifest.root, _listed(source, name)))

    try:
        try:
            copy()
        except (FormatError, IntegrityError):
            # What is only damaged on its way must not be left out: later polls come back to it, but
            # ever more rarely.
            for each in names:
                _require_same_twice(source.store, each)
            copy()
    except NotFound:
        return None
    except (FormatError, IntegrityError) as error:
        return error
    return None


def _require_same_twice(store: Store, name: str) -> None:
    """Raises StoreUnavailable where an object does not arrive alike twice; and NotFound,
    DigestMismatch."""
    nbytes = min(_length(store, name), _MAX_COMPARED)
    if _at_most(store, name, nbytes) != _at_most(store, name, nbytes):
        raise StoreUnavailable(
            f"{name} is damaged on its way, in another manner each time",
            hint="Something between here and the store changes bytes. Try again.",
        )


def _parsed(data: bytes, manifest: Manifest, name: str) -> StateDigest:
    try:
        file_bytes = 8 + int.from_bytes(data[:8], "little") + manifest.dense_bytes
        end = 8 + header_length(data, min(file_bytes, len(data)))
        placed, _, _ = parse_header(data, file_bytes)
    except StoreError:
        raise
    except PulseError as error:
        raise CorruptCheckpoint(f"{name}: {error}") from error
    specs = tuple(sorted((spec for spec, _ in placed), key=lambda s: s.name.encode()))
    leaves, at = {}, end
    for spec in specs:
        length = 32 * -(-spec.nbytes // LEAF_BYTES)
        leaves[spec.name] = data[at : at + length]
        at += length
    tree = StateDigest(specs, leaves)
    if at != len(data) or tree.root != manifest.root:
        raise DigestMismatch(f"{name} is not the digest tree with the root in its name")
    return tree


def _length(store: Store, name: str) -> int:
    try:
        return store.head(name).nbytes
    except NotFound as error:
        raise NotFound(str(error), hint=_HINT) from None


def _at_most(store: Store, name: str, nbytes: int) -> bytes:
    try:
        return store.get(name, 0, nbytes)
    except NotFound as error:
        raise NotFound(str(error), hint=_HINT) from None
    except StoreUnavailable:
        raise
    except StoreError as error:  # it is shorter
        raise DigestMismatch(f"{name}: {error}") from None
