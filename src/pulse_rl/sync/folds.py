"""Folds: patches over several versions, so that workers far behind fetch the logarithm of what was
published.

A fold of span s leads from version k·s to (k+1)·s. It is stored only if it is smaller than the
patches that it spans. Each rank codes and stores its own slices (docs/protocol.md, sections 3 and
10).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from .. import codec as codecs
from .._util.collective import RankGroup
from .._util.serial import shield
from .._util.settings import checked_collection
from .._util.threads import ordered_map
from ..codec import Changes
from ..errors import InputError
from ..events import CallFailed, Event, Folded, kind_of
from ..patch.build import encode_proved
from ..patch.undo import UndoLog
from ..stream.manifest import Payload
from ..stream.stream import Stream
from .payloads import store_patch
from .pending import Baseline

DEFAULT_FOLDS = (8, 64)
"""The spans of folds, in versions."""


def checked_folds(folds: Collection[int]) -> list[int]:
    """The spans in ascending order, each once. Raises InputError unless each is a whole number of
    at least 2."""
    spans = checked_collection("folds", folds, "(8, 64)")
    if any(isinstance(span, bool) or not isinstance(span, int) or span < 2 for span in spans):
        raise InputError(f"folds span whole numbers of versions, 2 or more, not {list(folds)}")
    return sorted(set(folds))


class _Due(NamedTuple):
    """A fold that is to be made, and the bytes of the patches that it spans."""

    log: UndoLog
    patch_bytes: int


class FoldMaker:
    """Keeps the old bits of what this rank publishes, and makes its parts of the folds that are
    due.

    ``folds`` are the spans in versions. What is due follows from the versions that the ranks have
    published together, and is the same on all. A fold whose span these ranks have not published
    with these slices (a restart, a version without a patch) is left out, and so are those of
    ``skip``, as (base, version). ``tell`` gets `Folded` and `CallFailed`. It keeps the old bits of
    what changed since the last multiple of each span: about 6 bytes for every BF16 weight that
    changed at least once in that time. Raises InputError.
    """

    def __init__(
        self,
        stream: Stream,
        ranks: RankGroup,
        folds: Collection[int],
        *,
        codec: str,
        threads: int | None,
        tell: Callable[[Event], None],
        skip: Collection[tuple[int | None, int]] = (),
    ) -> None:
        self._stream = stream
        self._ranks = ranks
        self._spans = checked_folds(folds)
        self._codec = codec
        self._threads = threads
        self._tell = tell
        self._skip = skip
        self._logs: dict[int, _Due] = {}
        self._due: list[_Due] = []
        self._at: Baseline | None = None
        self.stored: list[tuple[int, int]] = []
        """The folds that were stored, as (base, version)."""

    @property
    def wanted(self) -> bool:
        """Whether `advanced` needs the old bits."""
        return bool(self._spans)

    def advanced(
        self,
        base: Baseline | None,
        patch_bytes: int,
        undo: Mapping[int, Changes],
        baseline: Baseline,
    ) -> None:
        """Takes note of the old bits of a version, by block of this rank's part, and of the folds
        that are due. The version is ``patch_bytes`` of patch after ``base``; None: there is
        none."""
        if (
            base is None
            or self._at is None
            or base.version != self._at.version
            or base.blocks is not self._at.blocks
        ):
            self._logs.clear()  # the old bits do not lead back from here
        self._at, self._due = baseline, []
        if base is None:
            return
        for span in self._spans:
            # A span begins at its multiples only, so that every publisher of the stream makes the
            # same folds.
            if base.version % span == 0:
                self._logs[span] = _Due(UndoLog(base.version, base.root), 0)
            if (kept := self._logs.get(span)) is None:
                continue
            kept.log.record(undo)
            self._logs[span] = kept._replace(patch_bytes=kept.patch_bytes + patch_bytes)
            # Numbers may be passed over: then no version ends the span.
            if baseline.version >= kept.log.base + span:
                due = self._logs.pop(span)
                fold = (kept.log.base, baseline.version)
                ends_at_start = not baseline.history.windows  # its readers know no history
                if (
                    baseline.version == kept.log.base + span
                    and ends_at_start
                    and fold not in self._skip
                ):
                    self._due.append(due)

    def make(self) -> None:
        """Makes what is due, of the version at which the ranks are: a collective, and nothing where
        nothing is. Raises nothing: without folds readers take the patches."""
        due, self._due = self._due, []
        for log, patch_bytes in due:
            assert self._at is not None
            with shield():  # the other ranks are at it, too
                self._tell(self._made(log, patch_bytes, self._at))

    def forget(self) -> None:
        """Lets the old bits go, and what is due."""
        self._logs.clear()
        self._due, self._at = [], None

    def _made(self, log: UndoLog, patch_bytes: int, at: Baseline) -> Event:
        try:
            nbytes = self._fold(log, patch_bytes, at)
        except Exception as error:  # whatever it is: the version is there, and so is its patch
            fold = f"the fold {log.base}->{at.version}"
            return CallFailed(self._stream.name, "fold", kind_of(error), f"{fold}: {error}")
        return Folded(self._stream.name, log.base, at.version, nbytes, patch_bytes)

    def _fold(self, log: UndoLog, patch_bytes: int, at: Baseline) -> int:
        """Stores the fold, if it is smaller than the patches; its bytes."""
        ranks = self._ranks
        chunks: list[bytes] = []

        def code() -> bytes:
            if at.layout.has_file(ranks.rank):
                coded = self._coded(log, at)
                header = at.header(log.base_root, at.root, coded)
                chunks.extend([header.to_bytes(), *(encoded.payload for encoded in coded)])
            return sum(map(len, chunks)).to_bytes(8, "little")

        # 1. All ranks code before any stores: only their sum says whether the fold is worth it.
        nbytes = sum(int.from_bytes(said, "little") for said in ranks.run_on_all(code))
        if nbytes >= patch_bytes:
            return nbytes

        # 2. Payloads first, the link last: a fold that is listed can be fetched.
        def put() -> bytes:
            if not chunks:
                return b""
            payload = store_patch(self._stream, chunks)
            return f"{payload.sha256} {payload.bytes}".encode()

        said = [message.decode().split() for message in ranks.run_on_all(put) if message]
        parts = [Payload(digest, int(length)) for digest, length in said]

        def list_fold() -> bytes:
            self._stream.put_fold_link(log.base, at.version, parts)
            return b""

        ranks.on_rank0(list_fold)
        self.stored.append((log.base, at.version))
        return nbytes

    def _coded(self, log: UndoLog, at: Baseline) -> list[codecs.Encoded]:
        def run(index: int) -> codecs.Encoded:
            after = at.blocks[index].read(at.state)
            return encode_proved(
                at.blocks[index], log.rewind(index, after), after, codec=self._codec
            )[0]

        return list(ordered_map(run, range(len(at.blocks)), self._threads))
