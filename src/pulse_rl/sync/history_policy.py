"""Which of the last changes a publisher remembers, and its readers with it (docs/protocol.md,
section 12).

What is remembered at a version must be known to everybody who can get there: by single patches, by
a fold, or by an anchor. Each rank remembers its own blocks, all of them the same versions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .. import codec as codecs
from .._util.threads import ordered_map
from ..patch.history import History, Recorder, Window
from .pending import Baseline, PublishState

DEFAULT_FOLDS = (8, 64)
"""The spans of folds, in versions: who comes by one knows what is remembered where it ends."""

_SHARE = 12
"""What is remembered takes at most one part in this many of the state's bytes."""


class Memory(NamedTuple):
    """At a multiple of ``window`` versions what they changed becomes one window, at one of
    ``restart`` all is forgotten."""

    window: int = DEFAULT_FOLDS[0]
    restart: int = DEFAULT_FOLDS[1]

    def after(
        self,
        history: History,
        patch: Window | None,
        base: int,
        version: int,
        most: int,
        *,
        threads: int | None,
    ) -> History:
        """What is remembered at ``version``, to which ``patch`` leads from version ``base``, where
        ``history`` ends, in ``most`` bytes. None: the patch changes more than can be remembered.

        Versions may be left out: a multiple that is passed by counts as well.
        """
        if patch is None or version // self.restart > base // self.restart:
            return History()
        longer = history.then(patch)
        single = [span for span in longer.spans if span == 1]
        merged = (self.window,) if len(single) == self.window else ()
        spans = merged if version // self.window > base // self.window else longer.spans
        return longer.regrouped(spans, threads=threads).within(most)


class Note(NamedTuple):
    """What one rank says of a version: the bytes of each of the ``windows`` that it can remember
    there, and of its sample without a history, ``plain``, and with it, ``coded``; 0 where they were
    not measured."""

    windows: Sequence[int] = ()
    plain: int = 0
    coded: int = 0


def most_remembered(nbytes: int) -> int:
    """The bytes of what is remembered of ``nbytes`` of weights, at most."""
    return nbytes // _SHARE


_SKEW = 4
_PAYS, _STILL_PAYS = 0.10, 0.08
"""Of the bytes of a patch: what a history must save to be turned on, and to stay on."""
_SAMPLE, _MIN_SAMPLE = 32, 2
"""One block in so many is measured, and so many blocks at least, of several ranks one of each."""
_MIN_MEASURED, _OFTEN, _SELDOM = 2, 4, 8
"""So many measurements it takes to decide; so many versions are measured one after another, then
one in so many."""
_KEPT = 0.5
"""What a measurement still counts at the next one."""
_MIN_BYTES = 4096
"""A smaller patch is made without a history anyway."""


class HistoryPolicy:
    """Decides whether a stream is coded by what changed before, by what that saves on a sample of
    the blocks.

    Of the sample it is always known what changed before: at most a twelfth of the bytes of these
    blocks, one in 32 and two at least. Now and then they are coded both ways. A history that saves
    a tenth of them is turned on for all blocks from the next version on; one that does not is
    turned off. Ranks decide alike, by what all of them measure.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.forced: bool | None = None
        """What is done whatever it saves, for tests."""
        self.on = False
        self._memory = Memory()
        self._least = 1 if ranks > 1 else _MIN_SAMPLE
        self._saves = 0.0
        self._measured = 0

    @property
    def remembers(self) -> bool:
        """Whether the next version is coded by what is remembered, and remembered itself."""
        return self.on if self.forced is None else self.forced

    def recorder(self, base: Baseline) -> Recorder | None:
        """What takes note of the changes to ``base``, of all blocks or of the sample."""
        if self.remembers:
            return Recorder(_most_of_rank(base))
        if self.forced is not None:
            return None
        sample = self._sample(base)
        return Recorder(most_remembered(_nbytes(base, sample)), sample)

    def note(
        self,
        draft: PublishState,
        base: Baseline,
        version: int,
        nbytes: int,
        *,
        threads: int | None,
    ) -> Note:
        """What this rank can remember at ``version``, to which ``draft`` leads from ``base`` by a
        patch of ``nbytes`` on all ranks. Measures what a history saves, where that is to be known.
        Other ranks must hear of it: `agree`."""
        sample = self._sample(base)

        def after(history: History, of: Collection[int] | None, most: int) -> History:
            window = None
            if draft.records is not None:
                records = {k: found for k, found in draft.records.items() if of is None or k in of}
                window = Window(1, base.root, records, base.blocks)
            return self._memory.after(history, window, base.version, version, most, threads=threads)

        note = Note()
        if draft.remembers:
            draft.history = after(base.history, None, _most_of_rank(base))
            note = Note([window.nbytes for window in draft.history.windows])
        if self.forced is None:
            draft.sampled = after(base.sampled, sample, most_remembered(_nbytes(base, sample)))
            due = self._measured < _OFTEN or version % _SELDOM == 0
            if due and nbytes >= _MIN_BYTES and (base.sampled.windows or draft.records is None):
                plain, coded = self._measure(draft, base, sample, threads)
                note = note._replace(plain=plain, coded=coded)
        return note

    def agree(self, draft: PublishState, notes: Sequence[Note]) -> None:
        """What ``draft`` remembers, and what the next version does, now that all ranks have said
        theirs."""
        count = min(len(note.windows) for note in notes)
        while sum(
            sum(note.windows[len(note.windows) - count :]) for note in notes
        ) > most_remembered(draft.layout.nbytes):
            count -= 1
        draft.history = draft.history.last(count)
        plain, coded = sum(note.plain for note in notes), sum(note.coded for note in notes)
        if not plain:
            return
        saves = 1 - coded / plain
        self._saves = _KEPT * self._saves + (1 - _KEPT) * saves if self._measured else saves
        self._measured += 1
        # Two bounds: one alone would turn it on and off around it, and each time what is remembered
        # starts anew.
        if self._measured >= _MIN_MEASURED:
            self.on = self._saves >= (_STILL_PAYS if self.on else _PAYS)

    def _sample(self, base: Baseline) -> list[int]:
        """Some of this rank's blocks, evenly spread."""
        blocks = len(base.blocks)
        count = min(blocks, max(self._least, blocks // _SAMPLE))
        return [(2 * k + 1) * blocks // (2 * count) for k in range(count)]

    def _measure(
        self, draft: PublishState, base: Baseline, sample: Sequence[int], threads: int | None
    ) -> tuple[int, int]:
        """The bytes of the sample without a history and with it. One of the two is in the draft."""
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
    """The bytes that a rank remembers, at most: more than its share of what all may, since some
    change more."""
    return min(most_remembered(base.layout.nbytes), _SKEW * most_remembered(_nbytes(base)))


def _nbytes(base: Baseline, indices: Sequence[int] | None = None) -> int:
    """The bytes of some of the blocks (None: of all)."""
    return sum(
        base.blocks[index].nbytes
        for index in (range(len(base.blocks)) if indices is None else indices)
    )
