"""The names of a stream's objects: built and parsed only here (docs/format.md, section 6).

Names are zero-padded numbers, SHA-256 digests and checked words, so no name from a store can lead
elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import InputError, StreamError
from ..store.base import NAME_HINT

#: The kinds of payload: a patch, one file of an anchor, and a file next to the weights.
PATCH, SHARD, FILE = "patch", "safetensors", "file"

#: The stored digests of a state: the digests of tensors; or the tensors' specs and leaves.
TENSORS, LEAVES = "tensors", "leaves"

#: The greatest version or epoch.
MOST = 10**12 - 1
# A number this far above the one before is junk: no stream skips a million versions.
_FARTHEST = 1 << 20

# fullmatch on these patterns is the only way from a listed name to an object, so "..", "/" and
# control characters never pass.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NUMBER = re.compile(r"[0-9]{12}")
_VERSION = re.compile(r"([0-9]{12})\.json")
_PAYLOAD = re.compile(r"([0-9a-f]{64})\.([a-z]+)")
_DIGESTS = re.compile(r"([0-9a-f]{64})\.(tensors|leaves)")
_FOLD = re.compile(r"([0-9]{12})-([0-9]{12})-([0-9]{15})-([0-9a-f]{64})")
_WORKER = re.compile(rf"({_WORD.pattern})-(?:([0-9]{{12}})|none)")
_ANCHOR = re.compile(r"([0-9]{12})-anchor-([0-9]{15})")

#: What a heartbeat may have, and of how many workers of a stream they are read.
MAX_BEAT_BYTES, MAX_WORKERS = 4096, 10_000
MAX_FILES = 256
#: The bytes of all files of a version. The largest tokenizers have a third of it.
MAX_FILES_BYTES = 128 << 20
_MAX_NAME = 255
FILE_NAME_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_FILE_NAME = re.compile(rf"{FILE_NAME_PART}(?:/{FILE_NAME_PART}){{0,3}}")
# A loader would take such a file for weights, or execute its content.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
_OURS = "pulse."


class VersionName(NamedTuple):
    """The manifest of a version."""

    version: int


class PayloadName(NamedTuple):
    """A payload by the SHA-256 of its bytes; ``kind`` is `PATCH`, `SHARD` or `FILE`."""

    sha256: str
    kind: str


class DigestsName(NamedTuple):
    """Digests of the state with this ``root``; ``kind`` is `TENSORS` or `LEAVES`."""

    root: str
    kind: str


class FoldName(NamedTuple):
    """The link that lists a fold from ``base`` to ``version``.

    ``nbytes`` is the size of its files in all, ``sha256`` the digest of their list, which the link
    holds.
    """

    version: int
    base: int
    nbytes: int
    sha256: str


class AnchorName(NamedTuple):
    """The link that lists an anchor of ``nbytes`` bytes."""

    version: int
    nbytes: int


class EpochName(NamedTuple):
    """A publisher's claim to the stream."""

    epoch: int


class WorkerName(NamedTuple):
    """The heartbeat of ``worker``, which holds ``version``, or none yet."""

    worker: str
    version: int | None


ObjectName = (
    VersionName | PayloadName | DigestsName | FoldName | AnchorName | EpochName | WorkerName
)


class StreamNames:
    """The names of the objects of ``stream``; raises InputError for a name that could leave its
    folder."""

    def __init__(self, stream: str) -> None:
        check_word(stream, "a stream")
        self.stream = stream
        self.versions = f"{stream}/versions"
        self.payloads = f"{stream}/payloads"
        self.digests = f"{stream}/digests"
        self.links = f"{stream}/links"
        self.epochs = f"{stream}/epochs"
        self.workers = f"{stream}/workers"

    def version(self, version: int) -> str:
        return f"{self.versions}/{version:012d}.json"

    def payload(self, sha256: str, kind: str) -> str:
        return f"{self.payloads}/{sha256}.{kind}"

    def digests_of(self, root: str, kind: str) -> str:
        return f"{self.digests}/{root}.{kind}"

    def fold(self, fold: FoldName) -> str:
        return f"{self.links}/{fold.version:012d}-{fold.base:012d}-{fold.nbytes:015d}-{fold.sha256}"

    def anchor(self, version: int, nbytes: int) -> str:
        return f"{self.links}/{version:012d}-anchor-{nbytes:015d}"

    def worker(self, worker: str, version: int | None) -> str:
        check_word(worker, "a worker")
        return f"{self.workers}/{worker}-{'none' if version is None else f'{version:012d}'}"

    def epoch(self, epoch: int) -> str:
        return f"{self.epochs}/{epoch:012d}"

    def parse(self, name: str) -> ObjectName | None:
        """Parse ``name``; None if it is not spelled as one of these names."""
        folder, _, last = name.rpartition("/")
        if folder == self.versions and (found := _VERSION.fullmatch(last)):
            return VersionName(int(found[1]))
        found = _PAYLOAD.fullmatch(last) if folder == self.payloads else None
        if found and found[2] in (PATCH, SHARD, FILE):
            return PayloadName(found[1], found[2])
        if folder == self.digests and (found := _DIGESTS.fullmatch(last)):
            return DigestsName(found[1], found[2])
        if folder == self.links and (found := _FOLD.fullmatch(last)):
            return FoldName(int(found[1]), int(found[2]), int(found[3]), found[4])
        if folder == self.links and (found := _ANCHOR.fullmatch(last)):
            return AnchorName(int(found[1]), int(found[2]))
        if folder == self.workers and (found := _WORKER.fullmatch(last)):
            return WorkerName(found[1], int(found[2]) if found[2] else None)
        if folder == self.epochs and _NUMBER.fullmatch(last):
            return EpochName(int(last))
        return None


def next_unused(taken: Iterable[int], after: int) -> int:
    """The first number above ``after`` that is not ``taken``; raises StreamError if there is
    none."""
    free = after + 1
    # Numbers in a row push the first free one up; the first gap ends the search.
    for number in sorted(number for number in taken if number > after):
        if number > free:
            break
        free = number + 1
    if free > MOST:
        raise StreamError(f"no number above {after} is free", hint="Begin another stream.")
    return free


def plausible(numbers: Iterable[int], after: int) -> list[int]:
    """The ascending ``numbers`` up to the first implausible jump.

    Only junk can lie a million above the number before, or above ``after``.
    """
    found: list[int] = []
    for number in numbers:
        if number - (found[-1] if found else after) > _FARTHEST:
            break
        found.append(number)
    return found


def check_word(word: object, what: str) -> None:
    """Raise InputError unless ``word`` can be one part of a name."""
    if not isinstance(word, str) or not _WORD.fullmatch(word):
        raise InputError(f"{word!r} is not a valid name for {what}", hint=NAME_HINT)


def flaw_of(files: Iterable[tuple[str, int]]) -> str:
    """Describe a flaw in the names and sizes of a version's files, in name order; "" without
    one."""
    total, names = 0, list[str]()
    for name, nbytes in files:
        if len(name) > _MAX_NAME or not _FILE_NAME.fullmatch(name):
            return f"has a file {name[:_MAX_NAME]!r}, which is no plain relative name"
        if name.lower().endswith(_WEIGHTS) or name.lower().startswith(_OURS):
            return f"has a file {name!r}: such a name is for weights, or for pulse's own files"
        total += max(nbytes, 0)
        names.append(name)
        if nbytes < 0 or total > MAX_FILES_BYTES or len(names) > MAX_FILES:
            return f"has more files than {MAX_FILES}, or more than {MAX_FILES_BYTES} bytes of them"
    if names != sorted(names):
        return "has files that are not in the order of their names"
    # Folders on macOS and Windows ignore case: two such names would be one file there.
    folded = {name.lower() for name in names}
    # A name that is both a file and a folder of others cannot be written to a disk.
    folders = {
        "/".join(name.split("/")[:depth])
        for name in folded
        for depth in range(1, name.count("/") + 1)
    }
    if len(folded) < len(names) or folded & folders:
        return "has two files of one name, apart from capitals, or a file where a folder is"
    return ""


def payload_digest(name: str) -> str | None:
    """The SHA-256 that a payload's bytes must have, in any stream; None for any other object."""
    stream, _, rest = name.partition("/")
    found = (
        _PAYLOAD.fullmatch(rest.removeprefix("payloads/")) if rest.startswith("payloads/") else None
    )
    return found[1] if found and _WORD.fullmatch(stream) else None


def is_heartbeat(name: str) -> bool:
    """Whether an object's name, in any stream, is that of a worker's heartbeat."""
    stream = name.partition("/")[0]
    return _WORD.fullmatch(stream) is not None and isinstance(
        StreamNames(stream).parse(name), WorkerName
    )
