"""Folds by the ranks of a sharded trainer: each codes and stores its own slices (docs/protocol.md, section 10)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ... import codec as codecs
from ..._util.collective import RankGroup
from ..._util.serial import shield
from ..._util.threads import ordered_map
from ...codec import Changes
from ...events import Event, Folded, FoldFailed
from ...patch.build import encode_proved
from ...patch.undo import UndoLog
from ...stream.manifest import Manifest, Payload
from ...stream.names import PATCH
from ...stream.stream import Stream
from ...sync.folds import checked_folds
from .draft import Baseline, header_of
from .upload import digest_of


class _Due(NamedTuple):
    """A fold that is to be made, and the bytes of the patches that it spans."""

    log: UndoLog
    patch_bytes: int


class RankFolds:
    """Keeps the old bits of what this rank publishes, and makes its parts of the folds that are due.

    ``folds`` are the spans in versions. What is due follows from the versions that the ranks have published together,
    and is the same on all. A fold whose span these ranks have not published with these slices (a restart, a version
    without a patch) is left out. ``tell`` gets `Folded` and `FoldFailed`. Raises InputError.
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
    ) -> None:
        self._stream = stream
        self._ranks = ranks
        self._spans = checked_folds(folds)
        self._codec = codec
        self._threads = threads
        self._tell = tell
        self._logs: dict[int, _Due] = {}
        self._due: list[_Due] = []
        self._at: Baseline | None = None

    @property
    def wanted(self) -> bool:
        """Whether `advanced` needs the old bits."""
        return bool(self._spans)

    def advanced(
        self, base: Baseline | None, manifest: Manifest, undo: Mapping[int, Changes], baseline: Baseline
    ) -> None:
        """Takes note of the old bits of a version, by block of this rank's part, and of the folds that are due."""
        if base is None or base is not self._at or manifest.patch is None:
            self._logs.clear()
        self._at, self._due = baseline, []
        if base is None or manifest.patch is None:
            return
        nbytes = sum(part.bytes for part in manifest.patch.parts)
        for span in self._spans:
            if base.version % span == 0:
                self._logs[span] = _Due(UndoLog(base.version, base.root), 0)
            if (kept := self._logs.get(span)) is None:
                continue
            kept.log.record(undo)
            self._logs[span] = kept._replace(patch_bytes=kept.patch_bytes + nbytes)
            if manifest.version >= kept.log.base + span:
                due = self._logs.pop(span)
                if manifest.version == kept.log.base + span:
                    self._due.append(due)

    def make(self) -> None:
        """Makes what is due, of the version at which the ranks are: a collective, and nothing where nothing is. Raises
        nothing: without folds readers take the patches."""
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
            return FoldFailed(self._stream.name, log.base, at.version, str(error))
        return Folded(self._stream.name, log.base, at.version, nbytes, patch_bytes)

    def _fold(self, log: UndoLog, patch_bytes: int, at: Baseline) -> int:
        """Stores the fold, if it is smaller than the patches; its bytes."""
        ranks, sole = self._ranks, at.layout.sole
        chunks: list[bytes] = []

        def code() -> bytes:
            if at.state.segments or sole == ranks.rank:
                coded = self._coded(log, at)
                header = header_of(at, log.base_root, at.root, coded)
                chunks.extend([header.to_bytes(), *(encoded.payload for encoded in coded)])
            return sum(map(len, chunks)).to_bytes(8, "little")

        nbytes = sum(int.from_bytes(said, "little") for said in ranks.run_on_all(code))
        if nbytes >= patch_bytes:
            return nbytes

        def put() -> bytes:
            if not chunks:
                return b""
            payload = Payload(digest_of(chunks), sum(map(len, chunks)))
            self._stream.put_payload(payload, PATCH, chunks)
            return f"{payload.sha256} {payload.bytes}".encode()

        said = [message.decode().split() for message in ranks.run_on_all(put) if message]
        parts = [Payload(digest, int(length)) for digest, length in said]

        def show() -> bytes:
            self._stream.put_fold_link(log.base, at.version, parts)
            return b""

        ranks.on_rank0(show)
        return nbytes

    def _coded(self, log: UndoLog, at: Baseline) -> list[codecs.Encoded]:
        def run(index: int) -> codecs.Encoded:
            after = at.blocks[index].read(at.state)
            return encode_proved(at.blocks[index], log.rewind(index, after), after, codec=self._codec)[0]

        return list(ordered_map(run, range(len(at.blocks)), self._threads))
