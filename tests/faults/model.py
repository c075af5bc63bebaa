"""What is true: the committed versions with their bits, and which of them can still be reached from what is stored.

Nothing here plans as the library does: reachability is a search over all stored manifests and links.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256

from pulse_rl import Bits, PulseError, State, Update, state_root
from pulse_rl.patch import Patch

from .store import Disk

STREAM = "s"
Snapshot = dict[str, tuple[str, tuple[int, ...], bytes]]
"""dtype, shape and bytes by name."""

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
    """A worker's own weights in plain numpy, changed by nothing but the updates that it is given."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.tensors: dict[str, Bits] = {}
        self.aliases: dict[str, str] = {}

    def apply(self, update: Update) -> None:
        if update.full:
            self.tensors = {}
        for tensor in update.tensors:
            name, spec = tensor.spec.name, tensor.spec
            if tensor.indices is None:
                self.tensors[name] = Bits(tensor.values.copy().reshape(spec.shape), spec.dtype.name)
            else:
                check(len(set(tensor.indices.tolist())) == len(tensor.indices), f"{name} has an element twice")
                self.tensors[name].array.reshape(-1)[tensor.indices] = tensor.values
        self.version, self.aliases = update.version, dict(update.aliases)

    def snapshot(self) -> Snapshot:
        return {n: (b.dtype, tuple(b.array.shape), b.array.tobytes()) for n, b in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Committed:
    """A version as it was committed: its manifest's bytes, and what these said."""

    data: bytes
    root: str
    aliases: dict[str, str]
    anchored: bool


class Model:
    def __init__(self) -> None:
        self.disk: Disk | None = None
        self.versions: dict[int, Committed] = {}
        self.states: dict[str, Snapshot] = {}
        self._offered: dict[str, list[dict[str, str]]] = {}
        self._ends: dict[str, tuple[str, str] | None] = {}

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
        if not name.startswith(f"{STREAM}/versions/"):
            return
        said = json.loads(data)
        version = said["version"]
        check(name == version_name(version), f"{name} holds version {version}")
        check(version not in self.versions, f"version {version} was used twice")
        check(version == (-1 if self.head is None else self.head) + 1, f"{version} follows {self.head}")
        check(said["aliases"] in self._offered.get(said["root"], []), f"version {version} was never handed over")
        if said["patch"]:
            base = said["patch"]["base"]
            assert self.disk is not None
            passed = [v for v in self.readable(self.disk) if base < v < version]
            check(self.disk.misread or not passed, f"the patch of {version} starts at {base}, not at {passed}")
            check(said["patch"]["base_root"] == self.versions[base].root, f"version {version} has a wrong base")
        self.versions[version] = Committed(data, said["root"], said["aliases"], bool(said["anchor"]))

    def listed(self, disk: Disk) -> list[int]:
        """The versions whose manifests are stored, damaged or not."""
        return [version for version in self.versions if disk.peek(version_name(version)) is not None]

    def readable(self, disk: Disk) -> list[int]:
        """The versions whose manifests are stored as they were committed."""
        return [v for v, committed in self.versions.items() if disk.peek(version_name(v)) == committed.data]

    def bits(self, version: int) -> Snapshot:
        return self.states[self.versions[version].root]

    def reach(self, disk: Disk, start: int | None = None) -> dict[int, str]:
        """Of every committed version whether it MUST, MAY or cannot (GAP) be reached from nothing, or from ``start``.

        MAY: only through manifests that are damaged and may or may not make sense.
        """
        edges: list[tuple[int | None, int, str]] = []
        grade: dict[int, str] = {}
        for version, committed in self.versions.items():
            data = disk.peek(version_name(version))
            if data is None:
                continue
            grade[version] = MUST if data == committed.data else MAY
            try:
                said = json.loads(data)
                if said["anchor"] and all(self._whole(disk, p, "safetensors") for p in said["anchor"]["shards"]):
                    edges.append((None, version, MUST))
                if said["patch"] and all(self._whole(disk, p, "patch") for p in said["patch"]["parts"]):
                    edges.append((said["patch"]["base"], version, MUST))
            except (ValueError, KeyError, TypeError):
                continue
        for name in disk.names(f"{STREAM}/links"):
            match = _FOLD.fullmatch(name.rpartition("/")[2])
            if match and self._folds(disk, int(match[2]), int(match[1]), int(match[3]), match[4]):
                edges.append((int(match[2]), int(match[1]), MUST))
        found: dict[int | None, str] = {None: MUST}
        if start is not None:
            found[start] = MUST
        for base, version, _ in sorted(edges, key=lambda e: e[1]):
            if base in found and version in grade and found.get(version) != MUST:
                both = MUST if found[base] == MUST and grade[version] == MUST else MAY
                found[version] = both
        return {version: found.get(version, GAP) for version in self.versions}

    def broken(self, disk: Disk) -> list[str]:
        """What an error about a gap may name: objects that should be there and are not what they should be."""
        names = []
        for version, committed in self.versions.items():
            if disk.peek(version_name(version)) != committed.data:
                names += [version_name(version), f"version {version} "]
            said = json.loads(committed.data)
            for ref, kind in ((said["patch"], "patch"), (said["anchor"], "safetensors")):
                for payload in (ref["parts"] if kind == "patch" else ref["shards"]) if ref else ():
                    if not self._whole(disk, payload, kind):
                        names.append(payload["sha256"][:16])
        return names

    def _whole(self, disk: Disk, payload: dict[str, object], kind: str) -> bool:
        data = disk.peek(f"{STREAM}/payloads/{payload['sha256']}.{kind}")
        return data is not None and len(data) == payload["bytes"] and sha256(data).hexdigest() == payload["sha256"]

    def _folds(self, disk: Disk, base: int, version: int, nbytes: int, digest: str) -> bool:
        """Whether a stored patch leads from one version's root to the other's."""
        data = disk.peek(f"{STREAM}/payloads/{digest}.patch")
        if data is None or len(data) != nbytes or version - base < 2 or sha256(data).hexdigest() != digest:
            return False
        if digest not in self._ends:
            try:
                header = Patch.parse(data).header
                self._ends[digest] = (header.base_root, header.target_root)
            except PulseError:
                self._ends[digest] = None
        if base not in self.versions or version not in self.versions:
            return False
        return self._ends[digest] == (self.versions[base].root, self.versions[version].root)
