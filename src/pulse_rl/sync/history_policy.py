"""Which of the last changes a publisher remembers, and its readers with it (docs/protocol.md, section 12).

What is remembered at a version must be known to everybody who can get there: by single patches, by a fold, or by an
anchor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Self

from ..patch.history import History, Window
from ..state.tensors import TensorSpec

_WINDOW = 8
_LONGEST = 16
_SHARE = 12
"""What is remembered takes at most one part in this many of the state's bytes."""


class Memory(NamedTuple):
    """At a multiple of ``window`` versions what they changed becomes one window, at one of ``anew`` all is
    forgotten."""

    window: int = _WINDOW
    anew: int = _WINDOW**2

    @classmethod
    def of(cls, folds: Collection[int]) -> Self:
        """So that all who come by these folds know what is remembered."""
        first, *longer = sorted(set(folds)) or [_WINDOW]
        if first > _LONGEST:
            return cls(_WINDOW, first)
        return cls(first, longer[0] if longer else first * _WINDOW)

    def after(
        self,
        history: History,
        patch: Window | None,
        base: int,
        version: int,
        specs: tuple[TensorSpec, ...],
        nbytes: int,
        *,
        threads: int | None,
    ) -> History:
        """What is remembered at ``version``, to which ``patch`` leads from version ``base``, where ``history`` ends, of
        a state of ``specs`` and ``nbytes``. None: the patch changes more than can be remembered.

        Versions may be left out: a multiple that is passed by counts as well.
        """
        if patch is None or version // self.anew > base // self.anew:
            return History()
        longer = history.then(patch)
        single = [span for span in longer.spans if span == 1]
        merged = (self.window,) if len(single) == self.window else ()
        spans = merged if version // self.window > base // self.window else longer.spans
        return longer.regrouped(spans, specs, threads=threads).within(most_remembered(nbytes))


def most_remembered(nbytes: int) -> int:
    """The bytes of what is remembered of a state of ``nbytes``, at most."""
    return nbytes // _SHARE
