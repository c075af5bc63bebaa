"""Which changes a publisher remembers, and its readers with it; and the file of a history.

See docs/protocol.md, section 12. A history starts anew at every anchor and at every multiple of
`START_SPAN`, where folds end too. So every way into a stream ends at an empty history. A reader
that follows the patches from there has the history that the next patch needs. Each rank remembers
its own blocks; all ranks remember the same versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import codec as codecs
from ._util.files import disk_error
from ._util.threads import ordered_map
from .errors import PulseError
from .follow.checkpoint import load, save, serialize
from .patch.blocks import Block
from .patch.history import MAX_WINDOWS, RECORD_BYTES, History, Recorder, Records, Window
from .state.digest import PartDigest, StateDigest
from .state.tensors import Bits, State, TensorSpec
from .sync.pending import Baseline, PublishState

#: The history starts anew at the multiples of this, and folds end there. The first patch after a
#: start has no history and takes twice the bytes. Bytes a change of a recorded run with BF16
#: weights: 0.334 with 8, 0.317 with 16, 0.308 with 32, 0.303 with 64. A longer span leaves a late
#: worker more single patches, and folds of 64 end at every second start.
START_SPAN = 32

# The history takes at most one part in this many of the state's bytes. A reader holds as much: a
# twelfth more memory is little next to the state. At 0.3% changed BF16 weights it is 14 versions.
_SHARE = 12


class RankReport(NamedTuple):
    """One rank's report of a version: the bytes of each of the ``windows`` that it can remember
    there, and the bytes of its sample without a history, ``plain``, and with it, ``coded``; 0 where
    the sample was not measured."""

    windows: Sequence[int] = ()
    plain: int = 0
    coded: int = 0


def most_remembered(nbytes: int) -> int:
    """The largest history of ``nbytes`` of weights, in bytes."""
    return nbytes // _SHARE


def next_history(
    history: History,
    window: Window | None,
    base: int,
    version: int,
    most: int,
    *,
    span: int = START_SPAN,
) -> History:
    """The history at ``version``, in at most ``most`` bytes.

    It is the ``history`` at version ``base`` with the ``window`` between the two; at a start it is
    empty. ``window`` is None if the version changes more than can be remembered. Numbers of
    versions may be skipped: a multiple of ``span`` between the two is a start as well.
    """
    starts = version // span > base // span
    return history.after(window, 0 if starts else MAX_WINDOWS, most)


# A rank may remember this many times its share of all bytes, since some ranks change more. With
# twice as much, ranks of which one had half of all changes remembered 6 versions instead of 15.
_SKEW = 4
# A history that saves this share of the bytes is turned on. With BF16 weights it saves 40 to 55%;
# with FP32 masters 4 to 6% for 1.2 times the seconds of a publish and a sync, which does not pay.
_PAYS = 0.10
# A history that saves less is turned off. One bound alone would turn it on and off around that
# bound, and each time the history would start anew.
_STILL_PAYS = 0.08
# One block in this many is measured: coding it twice costs 3% of a publish at most.
_SAMPLE = 32
# At least this many blocks are measured, since a single one may be an odd one (an embedding). Of
# several ranks each measures one.
_MIN_SAMPLE = 2
# A decision takes this many measurements: the first has only one version to look back at.
_MIN_MEASURED = 2
# This many versions are measured one after another, so that a new stream decides soon.
_OFTEN = 4
# Then one version in this many is measured, since what a history saves changes slowly.
_SELDOM = 8
# The weight of earlier measurements at the next one, so that a single odd version decides nothing.
_KEPT = 0.5
# A smaller patch is not measured: build.py makes it without a history anyway where that is smaller.
_MIN_BYTES = 4096


class HistoryPolicy:
    """Decides whether a stream is coded by its history, by what that saves on a sample of the
    blocks.

    The history of the sample is always known: one block in 32, two at least, in at most a twelfth
    of their bytes. Now and then these blocks are coded both ways. A history that saves a tenth of
    the bytes is turned on for all blocks from the next version on, and off when it no longer does.
    Ranks decide alike, from the measurements of all of them.
    """

    def __init__(self, ranks: int = 1) -> None:
        #: The decision whatever it saves, for tests; as is another ``span``.
        self.forced: bool | None = None
        self.span = START_SPAN
        self.on = False
        self._least = 1 if ranks > 1 else _MIN_SAMPLE
        self._saves = 0.0
        self._measured = 0

    @property
    def remembers(self) -> bool:
        """Whether the next version is coded by the history and recorded in it."""
        return self.on if self.forced is None else self.forced

    def recorder(self, base: Baseline) -> Recorder | None:
        """A recorder of the changes to ``base``: of all blocks, or of the sample."""
        if self.remembers:
            return Recorder(_most_of_rank(base))
        if self.forced is not None:
            return None
        sample = self._sample(base)
        return Recorder(most_remembered(_nbytes(base, sample)), sample)

    def note(
        self, draft: PublishState, base: Baseline, version: int, nbytes: int, *, threads: int | None
    ) -> RankReport:
        """This rank's report of ``version``, to which ``draft`` leads from ``base``; see `agree`.

        The patch has ``nbytes`` on all ranks. If a measurement is due, the report has what a
        history saves.
        """
        sample = self._sample(base)

        def after(history: History, of: Collection[int] | None, most: int) -> History:
            window = None
            if draft.records is not None:
                records = {k: found for k, found in draft.records.items() if of is None or k in of}
                window = Window(base.root, records, base.blocks)
            return next_history(history, window, base.version, version, most, span=self.span)

        note = RankReport()
        if draft.remembers:
            draft.history = after(base.history, None, _most_of_rank(base))
            note = RankReport([window.nbytes for window in draft.history.windows])
        if self.forced is None:
            draft.sampled = after(base.sampled, sample, most_remembered(_nbytes(base, sample)))
            due = self._measured < _OFTEN or version % _SELDOM == 0
            if due and nbytes >= _MIN_BYTES and (base.sampled.windows or draft.records is None):
                plain, coded = self._measure(draft, base, sample, threads)
                note = note._replace(plain=plain, coded=coded)
        return note

    def agree(self, draft: PublishState, notes: Sequence[RankReport]) -> None:
        """Set what ``draft`` remembers, and what the next version does, from the reports of all
        ranks."""
        # 1. The longest history that all ranks can hold, and that fits the limit of all bytes
        # together.
        count = min(len(note.windows) for note in notes)
        most = most_remembered(draft.layout.nbytes)
        while sum(sum(note.windows[len(note.windows) - count :]) for note in notes) > most:
            count -= 1
        draft.history = draft.history.last(count)
        # 2. The savings of all ranks together, averaged with earlier measurements.
        plain, coded = sum(note.plain for note in notes), sum(note.coded for note in notes)
        if not plain:
            return
        saves = 1 - coded / plain
        self._saves = _KEPT * self._saves + (1 - _KEPT) * saves if self._measured else saves
        self._measured += 1
        # 3. Two bounds (see `_STILL_PAYS`).
        if self._measured >= _MIN_MEASURED:
            self.on = self._saves >= (_STILL_PAYS if self.on else _PAYS)

    def _sample(self, base: Baseline) -> list[int]:
        """Evenly spread blocks of this rank."""
        blocks = len(base.blocks)
        count = min(blocks, max(self._least, blocks // _SAMPLE))
        return [(2 * k + 1) * blocks // (2 * count) for k in range(count)]

    def _measure(
        self, draft: PublishState, base: Baseline, sample: Sequence[int], threads: int | None
    ) -> tuple[int, int]:
        """The bytes of the sample without a history and with it. The draft has one of the two
        already."""
        known, by_history = base.sampled, draft.remembers and bool(base.history.windows)

        def measure(index: int) -> tuple[int, int]:
            changes = draft.changes[index]
            if changes is None:
                return 0, 0
            made = len(draft.coded[index].payload)
            if not by_history and not known.windows:
                return made, made
            block = base.blocks[index]
            before = block.read(base.state)
            after = before.copy()
            after[changes.positions] = changes.values
            layout = block.layout if by_history else block.layout._replace(past=known.past(index))
            other = len(codecs.encode_block(before, after, layout).payload)
            return (other, made) if by_history else (made, other)

        found = list(ordered_map(measure, sample, threads))
        return sum(plain for plain, _ in found), sum(coded for _, coded in found)


def _most_of_rank(base: Baseline) -> int:
    """The most bytes that a rank remembers: `_SKEW` times its share, since some ranks change
    more."""
    return min(most_remembered(base.layout.nbytes), _SKEW * most_remembered(_nbytes(base)))


def _nbytes(base: Baseline, indices: Sequence[int] | None = None) -> int:
    """The bytes of some blocks (None: of all)."""
    blocks = base.blocks if indices is None else [base.blocks[index] for index in indices]
    return sum(block.nbytes for block in blocks)


# -- a history on disk, next to the checkpoint of the state at which it ends (not a format that is
# exchanged)

FILE_NAME = "pulse.history"
_FORMAT = "pulse.history.1"
_ROOT = re.compile(r"[0-9a-f]{64}")


def history_path(checkpoint: Path) -> Path:
    """The path of the history of a checkpoint, which is a file or a folder."""
    return (checkpoint if checkpoint.is_dir() else checkpoint.parent) / FILE_NAME


def save_history(
    path: Path, history: History, blocks: tuple[Block, ...], root: str, *, durable: bool = True
) -> None:
    """Write ``history``, which ends at the state with this ``root``, atomically.

    ``blocks`` are the cut of that state. The file is removed if nothing is remembered. Raises
    StoreFull and StoreError. Not ``durable``: write a new file without a sync, and raise OSError;
    `load_history` refuses one that is cut short.
    """
    if not history.windows:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, f"write {path}") from error
        return
    history = history.of(blocks)
    records = {
        f"{k}.{index}": found
        for k, s in enumerate(history.windows)
        for index, found in s.records.items()
    }
    metadata = {
        "format": _FORMAT,
        "root": root,
        "roots": json.dumps([window.base_root for window in history.windows]),
        "sha256": _digest(records),
    }
    state = State.of({name: Bits(found, "U8") for name, found in records.items()})
    if durable:
        save(path, state, metadata)
        return
    with path.open("xb") as file:
        file.writelines(serialize(state, state.specs, metadata))


def load_history(path: Path, blocks: tuple[Block, ...], root: str) -> History | None:
    """The history by these ``blocks`` that ends at the state with this ``root``.

    None if the file is missing, damaged, or of another state.
    """
    try:
        if not path.is_file():
            return None
        state, metadata = load(path)
        if (metadata.get("format"), metadata.get("root")) != (_FORMAT, root):
            return None
        roots = json.loads(metadata["roots"])
        records = {name: state.read(name).copy() for name in state.names}
        if metadata["sha256"] != _digest(records) or not _are_roots(roots):
            return None
        found: list[dict[int, Records]] = [{} for _ in roots]
        for name, data in records.items():
            window, index = map(int, name.split("."))
            if window < 0 or not 0 <= index < len(blocks):
                return None
            if data.dtype != np.uint8 or data.size % RECORD_BYTES:
                return None
            found[window][index] = data.reshape(-1)
    except (PulseError, OSError, ValueError, KeyError, IndexError, RecursionError):
        return None
    return History(tuple(Window(*each, blocks) for each in zip(roots, found, strict=True)))


def specs_of(digest: StateDigest) -> tuple[TensorSpec, ...]:
    """The specs of the whole state."""
    return digest.whole if isinstance(digest, PartDigest) else digest.specs


def _digest(records: dict[str, Records]) -> str:
    whole = sha256()
    for name in sorted(records):
        whole.update(f"{name} {len(records[name])}\n".encode())
        whole.update(sha256(records[name].data).digest())
    return whole.hexdigest()


def _are_roots(roots: Any) -> bool:
    few = isinstance(roots, list) and 0 < len(roots) <= MAX_WINDOWS
    return few and all(isinstance(root, str) and _ROOT.fullmatch(root) for root in roots)
