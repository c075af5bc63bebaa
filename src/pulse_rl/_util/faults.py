"""Fault points: places at which a test stops, fails or delays the library, where no call to a store
shows the moment.

``hit("commit.after")`` does nothing unless a test has armed the point; then it calls what the test
gave, which may raise or look around. A point cannot skip anything: what a check is worth is shown
by data that it must refuse. Points stand outside of loops over elements and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

POINTS = frozenset(
    {
        "payload.before",  # a payload is about to be stored
        "payload.after",
        "claim.before",  # a publisher is about to create its claim to the stream
        "commit.before",  # all that a version needs is stored, its manifest is not
        "commit.after",  # the version exists, its publisher's baseline is still the one before
        "baseline.before",  # a publisher's baseline is about to be written to
        "baseline.written",  # it has the new bits, and not yet their version
        "fold.before",  # a fold's payloads are stored, and not listed
        "apply.written",  # a worker's state has all new bits, and its root is not known yet
        "apply.undo",  # an apply has failed, and nothing is undone yet
        # the state is verified as the next version, and its folder does not say so yet
        "apply.moved",
        "apply.after",  # the state is verified, and its owner has not been given the update
        "relay.before",  # what leads to a version is copied, its manifest is not
    }
)
_armed: dict[str, Callable[[], None]] = {}


def hit(point: str) -> None:
    """The code has come to ``point``."""
    if _armed and point in _armed:
        _armed[point]()


@contextmanager
def armed(point: str, act: Callable[[], None]) -> Iterator[None]:
    """Within it, ``act`` is called whenever any thread comes to ``point``."""
    if point not in POINTS:
        raise ValueError(f"{point!r} is no fault point")
    _armed[point] = act
    try:
        yield
    finally:
        del _armed[point]
