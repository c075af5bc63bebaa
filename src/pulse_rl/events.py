"""What happens, as frozen dataclasses handed to a callback: metrics and progress bars are listeners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Metadata = dict[str, str | int | float | bool]
"""The publisher's own facts about a version (a training step, a reward), small and flat."""


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` bytes of model went through ``stage`` (diff, apply, digest, upload, restore)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Published:
    """A version was committed. Bytes are those stored for this version; seconds are wall-clock.

    ``changed`` is None where the version has no patch (the first one, or after a change of the tensor set). ``phases``
    are wall-clock seconds: "resume" (claiming the stream, finding its head; next to nothing after the first call),
    "build" (diff, encode and proof), "upload" and "commit" (the manifest; then the baseline moves).
    """

    stream: str
    version: int
    root: str
    elements: int
    changed: int | None
    dense_bytes: int
    patch_bytes: int
    anchor_bytes: int
    seconds: float
    phases: dict[str, float] = field(repr=False)
    metadata: Metadata = field(repr=False)
    reason: str = field(default="", repr=False)

    @property
    def density(self) -> float | None:
        """Changed elements / all elements."""
        return None if self.changed is None else self.changed / max(self.elements, 1)

    @property
    def ratio(self) -> float | None:
        """Bytes of a full sync / bytes of the patch."""
        return None if self.changed is None else self.dense_bytes / self.patch_bytes

    @property
    def anchored(self) -> bool:
        return self.anchor_bytes > 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """A publisher found its stream at ``version``; ``how`` it got its baseline: "matched" (the caller's state has the
    head's root), "restored" (from the store), or "anchored" (the head could not be restored, see ``reason``)."""

    stream: str
    version: int
    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Synced:
    """A subscriber's host state is now the verified ``version``. ``links`` are the objects' roles, in order.

    ``lag_seconds`` is how old the version was by then: from the publisher's clock at its commit to this machine's.
    ``phases`` are wall-clock seconds: "plan" (what is new, and the way to it), "fetch" (waiting for patches; what
    arrives while another is applied costs nothing), "apply" (decode, scatter, SHA-256) and "restore" (an anchor, its
    fetch included).
    """

    stream: str
    version: int
    previous: int | None
    root: str
    links: tuple[str, ...]
    fetched_bytes: int
    seconds: float
    lag_seconds: float
    phases: dict[str, float] = field(repr=False)

    @property
    def versions_behind(self) -> int | None:
        """How many versions the worker was behind when it looked; None where it had none."""
        return None if self.previous is None else self.version - self.previous


@dataclass(frozen=True, slots=True)
class Applied:
    """A live model took over ``version``, and could not generate for ``seconds``. Only the caller knows: it makes this
    event and hands it to its listener."""

    stream: str
    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PathFailed:
    """A way to a version did not work and another one is tried. ``kind`` is that of the error (`pulse_rl.errors`)."""

    stream: str
    link: str
    reason: str
    kind: str


@dataclass(frozen=True, slots=True)
class Folded:
    """A fold over the versions from ``base`` to ``version`` was made: stored, unless ``nbytes`` is not less than the
    ``patch_bytes`` that it spans."""

    stream: str
    base: int
    version: int
    nbytes: int
    patch_bytes: int


@dataclass(frozen=True, slots=True)
class FoldFailed:
    """A fold could not be made or stored. Readers take the patches instead."""

    stream: str
    base: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class DensityDrift:
    """Density left its usual band, from ``low`` to ``high``, for several versions (`pulse_rl.metrics.DriftWatch`)."""

    stream: str
    version: int
    density: float
    low: float
    high: float


Event = Progress | Published | Resumed | Synced | Applied | PathFailed | Folded | FoldFailed | DensityDrift
Listener = Callable[[Event], None]
"""Called from the thread that publishes or syncs, but with `Progress`, `Folded` and `FoldFailed` also from others."""


def progress_to(listener: Listener | None, stage: str, total: int) -> Callable[[int], None] | None:
    """A callback that adds up bytes and hands `Progress` to the listener, from several threads one after another; None
    without a listener."""
    if listener is None:
        return None
    done = 0
    lock = threading.Lock()

    def add(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            listener(Progress(stage, done, total))

    return add


class PhaseTimer:
    """Wall-clock seconds by phase: the time since the last phase's end goes to the one that ends now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
