"""What is true: the committed versions with their bits, and which of them can still be reached from
what is stored.

Nothing here plans as the library does: reachability is a search over all stored manifests and
links.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

from pulse_rl import Bits, PulseError, State, Update, state_root
from pulse_rl.patch.header import PatchHeader, parse_header

from .store import Disk

STREAM = "s"


class _Edge(NamedTuple):
    """``needs``: how many versions its patch must know the changes of."""

    base: int | None
    version: int
    needs: int = 0
    is_fold: bool = False


#: dtype, shape and bytes by name.
Snapshot = dict[str, tuple[str, tuple[int, ...], bytes]]

MUST, MAY, GAP = "must", "may", "gap"
_FOLD = re.compile(r"(\d{12})-(\d{12})-(\d{15})-([0-9a-f]{64})")


class Violation(AssertionError):
    """The library broke a promise."""


def check(held: bool, what: str) -> None:
    if not held:
        raise Violation(what)


def version_name(version: int) -> str:
    return f"{STREAM}/versions/{version:012d}.json"


def snapshot(state: State) -> Snapshot:
    return {s.name: (s.dtype.name, s.shape, state.read(s.name).tobytes()) for s in state.specs}


class Live:
    """A worker's own weights in plain numpy, changed by nothing but the updates that it is given.
    ``torn`` while part of an update is missing."""

    def __init__(self) -> None:
        self.torn = False
        self.version: int | None = None
        self.root = ""
        self.tensors: dict[str, Bits] = {}
        self.aliases: dict[str, str] = {}

    def apply(self, update: Update, tensors: int | None = None) -> None:
        """Scatters an update, or only its first ``tensors``, as one who is interrupted does."""
        if update.full and tensors is None:
            self.tensors = {}
        for tensor in update.tensors[:tensors]:
            name, spec = tensor.spec.name, tensor.spec
            if tensor.indices is None:
                self.tensors[name] = Bits(tensor.values.copy().reshape(spec.shape), spec.dtype.name)
            else:
                check(
                    len(set(tensor.indices.tolist())) == len(tensor.indices),
                    f"{name} has an element twice",
                )
                self.tensors[name].array.reshape(-1)[tensor.indices] = tensor.values
        self.torn = tensors is not None
        if not self.torn:
            self.version, self.root, self.aliases = (
                update.version,
                update.root,
                dict(update.aliases),
            )

    def snapshot(self) -> Snapshot:
        return {
            n: (b.dtype, tuple(b.array.shape), b.array.tobytes()) for n, b in self.tensors.items()
        }


@dataclass(frozen=True, slots=True)
class Committed:
    """A version as it was committed: its manifest's bytes, and what these said."""

    data: bytes
    root: str
    aliases: dict[str, str]
    anchored: bool
    publisher: str
    #: Its digest and length.
    patch: tuple[str, int] | None = None


class Model:
    def __init__(self) -> None:
        self.disk: Disk | None = None
        self.lies: set[str] = set()  # digests of patches that do not do what they say
        self.by_history = 0  # versions whose patches need one
        self.strict = True  # who commits now has seen every claim
        self._epochs: dict[int, str] = {}
        self._claimed: dict[
            str, int
        ] = {}  # the last epoch of each stream ID that claims were made for
        self.signed = False
        self.versions: dict[int, Committed] = {}
        self.states: dict[str, Snapshot] = {}
        self._offered: dict[str, list[dict[str, str]]] = {}
        self._heads: dict[str, PatchHeader | None] = {}
        self._needs: dict[str, int] = {}
        self._said: dict[bytes, dict[str, Any]] = {}
        self._hashed: dict[str, tuple[bytes, str]] = {}
        self._graph: tuple[int, list[_Edge], dict[int, str]] = (-1, [], {})

    @property
    def head(self) -> int | None:
        return max(self.versions, default=None)

    def offer(self, state: State) -> str:
        """A trainer hands this state to a publisher."""
        root = state_root(state, threads=1)
        taken = snapshot(state)
        check(self.states.setdefault(root, taken) == taken, "two states have one root")
        self._offered.setdefault(root, []).append(state.aliases)
        return root

    def created(self, name: str, data: bytes) -> None:
        """The disk's hook: an object came into being; a manifest is a commit."""
        if name.startswith(f"{STREAM}/epochs/") and self.disk and not self.disk.straggling:
            self._claimed[data.split()[1].decode()] = int(name.rpartition("/")[2])
        if not name.startswith(f"{STREAM}/versions/"):
            return
        said = json.loads(data)
        version = said["version"]
        check(name == version_name(version), f"{name} holds version {version}")
        check(version not in self.versions, f"version {version} was used twice")
        check(
            version == (-1 if self.head is None else self.head) + 1,
            f"{version} follows {self.head}",
        )
        check(
            self._epochs.setdefault(said["epoch"], said["publisher"]) == said["publisher"],
            "two have one epoch",
        )
        if self.strict and self.disk and not self.disk.straggling:
            seen = self._claimed.get(said["stream_id"], 0)
            check(
                said["epoch"] >= seen,
                f"version {version} was committed under epoch {said['epoch']}, after {seen}",
            )
        if self.disk and not self.disk.straggling:
            for ref, kind in ((said["patch"], "patch"), (said["anchor"], "safetensors")):
                for payload in (ref["parts"] if kind == "patch" else ref["shards"]) if ref else ():
                    there = (
                        self.disk.peek(f"{STREAM}/payloads/{payload['sha256']}.{kind}") is not None
                    )
                    check(there, f"version {version} was committed without its {kind}")
        check(
            said["aliases"] in self._offered.get(said["root"], []),
            f"version {version} was never handed over",
        )
        if said["patch"]:
            base = said["patch"]["base"]
            assert self.disk is not None
            passed = [v for v in self.readable(self.disk) if base < v < version]
            check(
                self.disk.misread or not passed,
                f"the patch of {version} starts at {base}, not at {passed}",
            )
            check(
                said["patch"]["base_root"] == self.versions[base].root,
                f"version {version} has a wrong base",
            )
        part = said["patch"] and said["patch"]["parts"][0]
        self.versions[version] = Committed(
            data,
            said["root"],
            said["aliases"],
            bool(said["anchor"]),
            said["publisher"],
            (part["sha256"], part["bytes"]) if part else None,
        )
        # Last: it runs code of the library, in which an interrupt may come.
        self.by_history += bool(said["patch"] and self._needed(self.disk, said["patch"]))

    def listed(self, disk: Disk) -> list[int]:
        """The versions whose manifests are stored, damaged or not."""
        return [
            version for version in self.versions if disk.peek(version_name(version)) is not None
        ]

    def readable(self, disk: Disk) -> list[int]:
        """The versions whose manifests are stored as they were committed."""
        return [
            v
            for v, committed in self.versions.items()
            if disk.peek(version_name(v)) == committed.data
        ]

    def committed(self, version: int, root: str) -> Committed | None:
        """The commit of ``version`` with this root, if there was one."""
        committed = self.versions.get(version)
        return committed if committed and committed.root == root else None

    def was_committed(self, version: int, data: bytes) -> bool:
        """Whether these bytes are a manifest of ``version`` that was committed."""
        return version in self.versions and self.versions[version].data == data

    def stream_id(self, version: int) -> str:
        """The ID of the stream that ``version`` was committed to."""
        return str(self._parsed(self.versions[version].data)["stream_id"])

    def reach(self, disk: Disk, start: int | None = None) -> dict[int, str]:
        """Of every committed version whether it MUST, MAY or cannot (GAP) be reached from nothing,
        or from ``start``.

        MAY: only through manifests that are damaged and may or may not make sense, or by what is
        remembered at ``start``.
        """
        if self._graph[0] != disk.changes:
            self._graph = (disk.changes, *self._links(disk))
        _, edges, grade = self._graph
        # By how many of the last versions are known there.
        found: dict[int | None, dict[int | None, str]] = {None: {0: MUST}}
        if start is not None:
            found[start] = {0: MUST, None: MAY}  # None: whatever is needed
        for base, version, needs, is_fold in edges:
            remembers = self._remembers(version)
            for known, how in list(found.get(base, {}).items()):
                if version not in grade or (known is not None and needs > known):
                    continue
                if is_fold and remembers:
                    continue  # it does not show what the next patch may need
                there = found.setdefault(version, {})
                after = None if known is None else min(known + 1, remembers)
                if there.get(after) != MUST:
                    there[after] = MUST if how == grade[version] == MUST else MAY
        ways = {version: found.get(version, {}).values() for version in self.versions}
        return {
            version: MUST if MUST in there else MAY if there else GAP
            for version, there in ways.items()
        }

    def _remembers(self, version: int) -> int:
        """How many of the last versions the manifest says are remembered."""
        return int(self._parsed(self.versions[version].data).get("remembers", 0))

    def _links(self, disk: Disk) -> tuple[list[_Edge], dict[int, str]]:
        """Every link whose payloads are whole, in the order of the versions that it leads to, and
        how good their manifests are."""
        edges: list[_Edge] = []
        grade: dict[int, str] = {}
        for version, committed in self.versions.items():
            data = disk.peek(version_name(version))
            if data is None:
                continue
            grade[version] = MUST if data == committed.data else MAY
            said = self._parsed(data)
            try:
                if said["anchor"] and all(
                    self._whole(disk, p, "safetensors") for p in said["anchor"]["shards"]
                ):
                    edges.append(_Edge(None, version))
                if said["patch"] and all(
                    self._whole(disk, p, "patch") for p in said["patch"]["parts"]
                ):
                    edges.append(
                        _Edge(said["patch"]["base"], version, self._needed(disk, said["patch"]))
                    )
            except (KeyError, TypeError):
                continue
        for name in disk.names(f"{STREAM}/links"):
            match = _FOLD.fullmatch(name.rpartition("/")[2])
            # Whoever can write may put an unsigned link in the place of a signed one.
            if self.signed and (name in disk.damaged or (disk.peek(name) or b"\n").endswith(b"\n")):
                continue  # nobody has signed what it says now
            if not match:
                continue
            base, version, nbytes = int(match[2]), int(match[1]), int(match[3])
            files = self._listed(disk.peek(name) or b"", match[4], nbytes)
            if files and self._is_whole(
                version, [self._leads(disk, base, version, *file) for file in files]
            ):
                edges.append(_Edge(base, version, is_fold=True))
        return sorted(edges, key=lambda e: e.version), grade

    def _needed(self, disk: Disk | None, patch: Mapping[str, Any]) -> int:
        """The versions in the history that a stored patch names, in any of its parts."""
        return max(self._named(disk, part["sha256"]) for part in patch["parts"])

    def _named(self, disk: Disk | None, digest: str) -> int:
        if digest not in self._needs:
            name = f"{STREAM}/payloads/{digest}.patch"
            try:
                named = parse_header(memoryview((disk and disk.peek(name)) or b"")).header.history
            except PulseError:
                named = None
            self._needs[digest] = named.windows if named else 0
        return self._needs[digest]

    def _parsed(self, data: bytes) -> dict[str, Any]:
        """What a manifest says; nothing where that is no JSON object."""
        if data not in self._said:
            try:
                said = json.loads(data)
            except ValueError:
                said = None
            self._said[data] = said if isinstance(said, dict) else {}
        return self._said[data]

    def _digest(self, name: str, data: bytes) -> str:
        """The SHA-256 of an object, computed once while its bytes stay."""
        known = self._hashed.get(name)
        if known is None or known[0] is not data:
            known = self._hashed[name] = (data, sha256(data).hexdigest())
        return known[1]

    def broken(self, disk: Disk) -> list[str]:
        """What an error about a gap may name: objects that should be there and are not what they
        should be."""
        names = []
        for version, committed in self.versions.items():
            if disk.peek(version_name(version)) != committed.data:
                names += [version_name(version), f"version {version} "]
            said = self._parsed(committed.data)
            for ref, kind in ((said["patch"], "patch"), (said["anchor"], "safetensors")):
                for payload in (ref["parts"] if kind == "patch" else ref["shards"]) if ref else ():
                    if not self._whole(disk, payload, kind):
                        names.append(payload["sha256"][:16])
        return names

    def _whole(self, disk: Disk, payload: dict[str, object], kind: str) -> bool:
        name = f"{STREAM}/payloads/{payload['sha256']}.{kind}"
        data = disk.peek(name)
        return (
            data is not None
            and len(data) == payload["bytes"]
            and self._digest(name, data) == payload["sha256"]
        )

    def _listed(self, data: bytes, digest: str, nbytes: int) -> list[tuple[str, int]]:
        """The parts that the link of a fold lists; none where it is not the list that its name
        promises."""
        lines = data.decode("ascii", "replace").split("\n")[:-1]
        listed = "".join(f"{line}\n" for line in lines).encode()
        files = [
            (line[:64], int(line[65:]))
            for line in lines
            if re.fullmatch(r"[0-9a-f]{64} [0-9]+", line)
        ]
        whole = len(files) == len(lines) > 0 and sum(length for _, length in files) == nbytes
        return files if whole and sha256(listed).hexdigest() == digest else []

    def _leads(
        self, disk: Disk, base: int, version: int, digest: str, nbytes: int
    ) -> PatchHeader | None:
        """What a stored patch, or part of one, says that leads from one version's root to the
        other's; None where it does not."""
        name = f"{STREAM}/payloads/{digest}.patch"
        data = disk.peek(name)
        if (
            data is None
            or len(data) != nbytes
            or version - base < 2
            or self._digest(name, data) != digest
        ):
            return None
        if digest in self.lies or base not in self.versions or version not in self.versions:
            return None
        if digest not in self._heads:
            try:
                self._heads[digest] = parse_header(memoryview(data)).header
            except PulseError:
                self._heads[digest] = None
        said = self._heads[digest]
        roots = (self.versions[base].root, self.versions[version].root)
        return said if said and (said.base_root, said.target_root) == roots else None

    def _is_whole(self, version: int, parts: list[PatchHeader | None]) -> bool:
        """Whether these are one patch to ``version``: with each element of its state in one of
        them."""
        if None in parts:
            return False
        state = self.states[self.versions[version].root]
        slices = sorted(one for part in parts if part for one in part.slices)
        starts, stops = [start for start, _ in slices], [stop for _, stop in slices]
        return [0, *stops] == [*starts, sum(prod(shape) for _, shape, _ in state.values())]
