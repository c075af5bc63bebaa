"""Folds: patches over several versions, so that workers far behind fetch the logarithm of what was published.

A fold of span s leads from version k·s to (k+1)·s. It is stored only if it is smaller than the patches it spans.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from hashlib import sha256

from .. import codec as codecs
from .._util.settings import checked_collection
from ..codec import Changes
from ..errors import InputError, PulseError
from ..events import Folded, FoldFailed, Listener
from ..patch import build_fold
from ..patch.undo import UndoLog
from ..state.digest import StateDigest
from ..state.tensors import State
from ..stream.chain import Link
from ..stream.manifest import Payload
from ..stream.names import PATCH
from ..stream.stream import Stream

DEFAULT_FOLDS = (8, 64)
"""The spans of folds, in versions."""


def checked_folds(folds: Collection[int]) -> list[int]:
    """The spans in ascending order, each once. Raises InputError unless each is a whole number of at least 2."""
    spans = checked_collection("folds", folds, "(8, 64)")
    if any(isinstance(span, bool) or not isinstance(span, int) or span < 2 for span in spans):
        raise InputError(f"folds span whole numbers of versions, 2 or more, not {list(folds)}")
    return sorted(set(folds))


class FoldMaker:
    """Watches a state move from version to version and stores the folds that are due, in a background thread.

    A `Watcher` of the host state. ``folds`` are the spans; ``skip`` are existing folds, as (base, version). It keeps
    the old bits of what changed since the last multiple of each span: about 6 bytes for every BF16 weight that changed
    at least once in that time.
    """

    def __init__(
        self,
        stream: Stream,
        folds: Collection[int] = DEFAULT_FOLDS,
        *,
        codec: str = codecs.AUTO,
        skip: Collection[tuple[int | None, int]] = (),
        threads: int | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._stream = stream
        self._spans = checked_folds(folds)
        self._codec = codec
        self._skip = skip
        self._threads = threads
        self._listener = listener
        self._logs: dict[int, UndoLog] = {}
        self._patch_bytes: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self.stored: list[tuple[int, int]] = []
        """The folds that were stored, as (base, version)."""

    def advanced(
        self, link: Link, base_root: str, undo: Mapping[int, Changes], state: State, digest: StateDigest
    ) -> None:
        """Takes note of the old bits, and starts the folds that are due."""
        assert link.base is not None
        due = []
        for span in self._spans:
            if link.base % span == 0:
                self._logs[span] = UndoLog(link.base, base_root)
                self._patch_bytes[span] = 0
            log = self._logs.get(span)
            if log is None:
                continue
            log.record(undo)
            self._patch_bytes[span] += link.nbytes
            if link.version == log.base + span:
                del self._logs[span]
                if (log.base, link.version) not in self._skip:
                    due.append((log, self._patch_bytes[span]))
        if due:
            self._thread = threading.Thread(
                target=self._make, args=(due, link.version, state, digest), name="pulse-fold", daemon=True
            )
            self._thread.start()

    def replaced(self) -> None:
        """The state has moved in another way: the logs no longer lead back."""
        self.wait()
        self._logs.clear()

    def wait(self) -> None:
        """Returns when the state may move again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _make(self, due: list[tuple[UndoLog, int]], version: int, state: State, digest: StateDigest) -> None:
        for log, patch_bytes in due:
            try:
                built = build_fold(log, state, digest, codec=self._codec, threads=self._threads)
                if built.nbytes < patch_bytes:
                    payload = Payload(sha256(built.to_bytes()).hexdigest(), built.nbytes)
                    self._stream.put_payload(payload, PATCH, built.chunks)
                    self._stream.put_fold_link(log.base, version, [payload])
                    self.stored.append((log.base, version))
                if self._listener:
                    self._listener(Folded(self._stream.name, log.base, version, built.nbytes, patch_bytes))
            except PulseError as error:
                # A fold is a shortcut: without it readers take the patches. The publisher must not fail for it.
                if self._listener:
                    self._listener(FoldFailed(self._stream.name, log.base, version, str(error)))
