"""A subscriber's part of a state: which tensors it holds, and how they are fetched
(docs/protocol.md, section 9)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import translate

from .._util.settings import checked_collection
from ..errors import CorruptCheckpoint, DigestMismatch, InputError, StateMismatch
from ..events import Listener, progress_to
from ..patch.apply import Patch
from ..patch.blocks import cut
from ..state.digest import PartDigest, StateDigest, state_digest
from ..state.tensors import Segment, State, TensorSpec
from ..stream.anchor import AnchorFiles
from ..stream.manifest import Link, Manifest
from ..stream.stream import Stream
from .digest_trees import read_digests, read_tree
from .patch_files import PatchFiles

_FIRST_READ_OF_A_PART = 1 << 12


class Selection:
    """The tensors whose name, or other name, is one of ``select`` or matches one as a pattern of
    `fnmatch` (``*``, ``?``, ``[…]``; letter case counts). Raises InputError.

    Held are also the small tensors that share a block with a selected one, since a block is decoded
    as a whole.
    """

    def __init__(self, select: str | Collection[str]) -> None:
        given = [select] if isinstance(select, str) else select
        given = checked_collection("select", given, '["layers.0.*"]')
        if not given or not all(isinstance(pattern, str) and pattern for pattern in given):
            raise InputError(
                f"select must be names or patterns of tensors, not {select!r}",
                hint="None selects all.",
            )
        self._patterns = {pattern: re.compile(translate(pattern)) for pattern in given}

    def held(
        self, specs: tuple[TensorSpec, ...], aliases: Mapping[str, str]
    ) -> tuple[TensorSpec, ...]:
        """The tensors of a state that are held. Raises InputError for a pattern that none of its
        names matches."""
        names = [*(spec.name for spec in specs), *aliases]
        for pattern in self._patterns:
            if not any(self._matches(name, [pattern]) for name in names):
                raise InputError(
                    f"no tensor is called {pattern!r}", hint="Check the names with `pulse inspect`."
                )
        # And the small ones that share a block with one of them: a block is decoded as a whole.
        held = set(self._chosen(names, aliases))
        for block in cut(specs):
            together = {segment.spec.name for segment in block.segments}
            if held & together:
                held |= together
        return tuple(spec for spec in specs if spec.name in held)

    def shown(self, state: State) -> State:
        """What is selected of what is held; the same memory."""
        chosen = self._chosen(state.names, state.aliases)
        specs = tuple(spec for spec in state.specs if spec.name in chosen)
        aliases = {alias: name for alias, name in state.aliases.items() if name in chosen}
        return State(specs, {spec.name: state.read(spec.name) for spec in specs}, aliases)

    def part_of(
        self, state: State, tree: StateDigest, aliases: Mapping[str, str], *, threads: int | None
    ) -> tuple[State, PartDigest]:
        """A copy of what is held of a whole ``state`` with its ``tree``; ``aliases`` are those of
        its version. Raises StateMismatch where the caller has changed the state since it was
        hashed."""
        held = self.held(tree.specs, aliases)
        part = State.empty(held, _of(state.aliases, held))
        digest = _part_of(tree, held)
        if state_digest(part, source=state, threads=threads).leaves != digest.leaves:
            raise StateMismatch("the state was changed while it was copied")
        return part, digest

    def fetch(self, stream: Stream, link: Link, manifest: Manifest, held: PartDigest) -> Patch:
        """The blocks of the link's patch that are needed where ``held`` is, and the digests that
        prove the version with them."""
        files = PatchFiles(stream.parts(link), held.whole)
        names = {spec.name for spec in held.specs}
        blocks = enumerate(files.header.cuts)
        chosen = [k for k, block in blocks if any(s.spec.name in names for s in block.segments)]
        payloads = files.payloads(chosen)
        tensors = read_digests(stream, manifest.root, len(held.whole))
        return Patch(files.header, payloads, tensors, files.nbytes + len(tensors))

    def restore(
        self, stream: Stream, manifest: Manifest, *, threads: int | None, listener: Listener | None
    ) -> tuple[State, PartDigest, int]:
        """What is held of the anchor of a version, its tree, and about how many bytes were
        fetched."""
        assert manifest.anchor is not None
        tree, nbytes = read_tree(stream, manifest)
        held = self.held(tree.specs, manifest.aliases)
        size = sum(spec.nbytes for spec in held)
        # Nothing else is read of the anchor but the shards' headers. The whole state's tree is
        # proved by its root; the tensors' leaves are compared with it.
        shards = stream.shards(manifest.anchor.shards, threads)
        files = AnchorFiles(shards, _FIRST_READ_OF_A_PART, threads=threads)
        if files.specs != tree.specs:
            raise CorruptCheckpoint(
                "the anchor's shards do not hold the tensors of the version's digest tree"
            )
        state, wanted = State.empty(held), [Segment(spec, 0, spec.elements) for spec in held]
        hashed = files.hashed(state, wanted, progress_to(listener, "restore", size))
        for name, found in hashed.items():
            if found != tree.leaves[name]:
                raise DigestMismatch(
                    f"tensor {name!r} of the anchor in {files.holding(name)} is not the version's"
                )
        return state.with_aliases(_of(manifest.aliases, held)), _part_of(tree, held), nbytes + size

    def _chosen(self, names: Iterable[str], aliases: Mapping[str, str]) -> frozenset[str]:
        """The stored names of the selected ones among ``names``."""
        return frozenset(
            aliases.get(name, name) for name in names if self._matches(name, self._patterns)
        )

    def _matches(self, name: str, patterns: Iterable[str]) -> bool:
        return any(
            name == pattern or self._patterns[pattern].fullmatch(name) for pattern in patterns
        )


def _part_of(tree: StateDigest, held: tuple[TensorSpec, ...]) -> PartDigest:
    return PartDigest(
        held, {spec.name: tree.leaves[spec.name] for spec in held}, tree.specs, tree.tensor_digests
    )


def _of(aliases: Mapping[str, str], held: tuple[TensorSpec, ...]) -> dict[str, str]:
    """The aliases of the tensors that are held."""
    names = {spec.name for spec in held}
    return {alias: name for alias, name in aliases.items() if name in names}
