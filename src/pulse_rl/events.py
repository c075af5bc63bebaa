"""Events: frozen dataclasses passed to a callback. Metrics and progress bars are listeners.

In all events ``stream`` is the stream's name, ``version`` and ``base`` are version numbers,
``root`` is a state's root (64 hexadecimal digits), ``metadata`` the publisher's own data,
``seconds`` a wall-clock duration, and ``reason`` an error's message.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, cast

from ._util.settings import format_bytes, format_number, format_percent
from .errors import InputError, PulseError

__all__ = [
    "BaselineRestored",
    "CallFailed",
    "Event",
    "FallbackUsed",
    "Folded",
    "Hint",
    "Progress",
    "Published",
    "Relayed",
    "Synced",
]

_BAR_DELAY_SECONDS = 0.5

Metadata = dict[str, str | int | float | bool]
"""The publisher's own data about a version (a training step, a reward), small and flat."""

_log = logging.getLogger("pulse_rl")


class OneLine:
    """Prints a dataclass's fields, but those with ``repr=False``; numbers that are not whole with
    three digits."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = [(each.name, getattr(self, each.name)) for each in fields(self) if each.repr]  # type: ignore[arg-type]
        shown = (
            f"{name}={format_number(v) if isinstance(v, float) else repr(v)}" for name, v in values
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False)
class Progress(OneLine):
    """``stage`` (diff, apply, digest, upload, restore) has processed ``done`` of ``total`` bytes of
    model."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, repr=False)
class Published(OneLine):
    """A version was committed. ``patch_bytes`` and ``anchor_bytes`` were stored for it; either may
    be 0. ``stream_id`` is the stream's, 32 hexadecimal digits, which tells it from others of its
    name.

    ``elements`` and ``dense_bytes`` are those of the whole state. ``changed`` counts the elements
    that the patch changes; None where the version has no patch (the first one, after a change of
    the tensor set, or an anchor alone). ``phases`` are wall-clock seconds: "resume" (claiming the
    stream, finding its head; almost nothing after the first call), "build" (diff, encode and
    verify, or the copy of the full state, which one process stores meanwhile), "upload" and
    "commit" (the manifest; then the baseline moves). ``reason`` says why no patch leads here from
    the version before: what differs between their names, dtypes, shapes or ties, or that a patch
    would be no smaller than the state. ``blocked_seconds`` is how long the caller was held up:
    ``seconds`` by ``publish``, by ``submit`` the copy of the state and the wait for room.
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
    stream_id: str = field(default="", repr=False)
    blocked_seconds: float = field(default=0.0, repr=False)

    @property
    def density(self) -> float:
        """Changed elements / all elements; 1.0 if the version has no patch, since then all elements
        are sent."""
        return 1.0 if self.changed is None else self.changed / max(self.elements, 1)

    @property
    def ratio(self) -> float:
        """Bytes of a full sync / bytes that a worker one version behind fetches: the patch, or else
        the anchor."""
        return self.dense_bytes / max(self.patch_bytes or self.anchor_bytes, 1)

    @property
    def anchored(self) -> bool:
        """Whether an anchor was stored, alone or along with a patch."""
        return self.anchor_bytes > 0

    def __repr__(self) -> str:
        more = (
            f", density={format_number(self.density)}, ratio={format_number(self.ratio)}, "
            f"reason={self.reason!r})"
        )
        return f"{OneLine.__repr__(self)[:-1]}{more}"

    def __str__(self) -> str:
        """What it cost, for a log."""
        version, dense = f"version {self.version} of {self.stream}", format_bytes(self.dense_bytes)
        if self.changed is None:
            first = (
                "as a stream's first version is" if self.version == 0 else "no patch leads to it"
            )
            return (
                f"{version}: the full state of {dense} "
                f"({self.reason.removeprefix('anchor: ') or first})"
            )
        cost = (
            f"{format_bytes(self.patch_bytes)} for {dense}, {format_number(self.ratio)} times "
            "smaller"
        )
        return f"{version}: {format_percent(self.density)} changed, {cost}"


@dataclass(frozen=True, slots=True, repr=False)
class BaselineRestored(OneLine):
    """A publisher found its stream at ``version``; ``how`` is the way it got its baseline:
    "matched" (the caller's state has the head's root), "kept" (it was in the folder of the argument
    ``baseline``), "restored" (from the store), or "anchored" (the head could not be restored, see
    ``reason``)."""

    stream: str
    version: int
    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Synced(OneLine):
    """A subscriber's host state is now the verified ``version``; ``previous`` is the version that
    it held before (None: none).

    ``links`` are the roles of the objects, in order; ``fetched_bytes`` is their total size.

    ``lag_seconds`` is the age of the version: from its commit by the publisher's clock to now by
    this machine's. ``phases`` are wall-clock seconds: "plan" (finding what is new and the path to
    it), "fetch" (waiting for patches; fetching while another is applied does not count), "apply"
    (decode, scatter, SHA-256) and "restore" (an anchor, its fetch included).
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
        """How many versions the worker was behind when it looked; None if it had none."""
        return None if self.previous is None else self.version - self.previous


@dataclass(frozen=True, slots=True, repr=False)
class FallbackUsed(OneLine):
    """A path to a version failed at ``link``, and another is tried; or a version, "version 7",
    could not be read or trusted, and is passed over; or "the state in /nvme/s" is not used.
    ``kind`` is the error's (`pulse_rl.errors`)."""

    stream: str
    link: str
    reason: str
    kind: str


@dataclass(frozen=True, slots=True, repr=False)
class CallFailed(OneLine):
    """A ``call`` ("publish", "sync", "relay", or "gc" of a relay's target) raised an error;
    ``kind`` is the error's stable name (`pulse_rl.errors`). After a "fold" that could not be made
    or stored readers use the patches instead."""

    stream: str
    call: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Hint(OneLine):
    """Something works, but would be better otherwise; ``hint`` says how. A publisher or subscriber
    gives each ``kind`` once: to its listener, or without one to ``warnings`` and the logger
    ``pulse_rl``. ``version`` is the one at which it showed, None where there is none.

    "no_stream": a subscriber has found no version for a second; ``reason`` lists the streams that
    are there. "dense": a patch changes much of the state. "wide_dtype": most of what changes are
    FP32 or FP64 elements, of which nearly all change at every step, while of the same weights in a
    compute dtype few do. "wrapped_names": names have parts that a wrapper of the module adds (DDP,
    FSDP, torch.compile), and that no inference engine knows. "fused_names": tensors have several
    experts each, as transformers fuses them in memory, where most checkpoints have them one by one.
    "retention": what a publisher was not to keep could not be deleted.
    """

    stream: str
    version: int | None
    kind: str
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"stream {self.stream!r}: {self.reason}. {self.hint}"


@dataclass(frozen=True, slots=True, repr=False)
class Folded(OneLine):
    """A fold over the versions from ``base`` to ``version`` was made. It was stored only if its
    ``nbytes`` are fewer than the ``patch_bytes`` that it spans."""

    stream: str
    base: int
    version: int
    nbytes: int
    patch_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Relayed(OneLine):
    """A relay's target is now at ``version``; it was at ``previous`` (None: it had none). ``links``
    are the roles of what was copied, ``nbytes`` the bytes of payloads that were fetched for it."""

    stream: str
    version: int
    previous: int | None
    links: tuple[str, ...]
    nbytes: int
    seconds: float


Event = (
    Progress
    | Published
    | BaselineRestored
    | Synced
    | FallbackUsed
    | CallFailed
    | Hint
    | Folded
    | Relayed
)
"""All that a listener may be handed."""

Listener = Callable[[Event], None]
"""Called from the thread that publishes or syncs, but with `Progress` and those of folds also from
others."""


def checked_listener(listener: Any) -> Listener | None:
    """``listener`` itself; raises InputError unless it is None or can be called with an event."""
    if listener is not None and not callable(listener):
        raise InputError(f"on_event must be a function of one event, not {listener!r}")
    return cast(Listener | None, listener)


def one_at_a_time(listener: Listener | None) -> Listener | None:
    """The listener, which threads call one after another."""
    if listener is None:
        return None
    lock = threading.RLock()

    def listen(event: Event) -> None:
        with lock:
            listener(event)

    return listen


def fell_back(listener: Listener | None, stream: str, what: str, error: PulseError) -> None:
    """Hands a `FallbackUsed` to the listener: ``error`` is why ``what`` was not used."""
    if listener:
        listener(FallbackUsed(stream, what, str(error), error.kind))


def kind_of(error: Exception) -> str:
    """The kind of an error, whoever's it is."""
    return error.kind if isinstance(error, PulseError) else PulseError.kind


def hint_to(listener: Listener | None, hint: Hint) -> None:
    """Hands a hint to the listener; without one, to ``warnings`` and the logger ``pulse_rl``."""
    if listener is not None:
        listener(hint)
        return
    if _log.hasHandlers():  # or Python would print what `warnings` says
        _log.warning("%s", hint)
    # Said from a thread of the library: a line of its source would say nothing to the reader.
    warnings.warn_explicit(str(hint), UserWarning, "pulse_rl", 0)


def progress_to(listener: Listener | None, stage: str, total: int) -> Callable[[int], None] | None:
    """A callback that adds up bytes and hands `Progress` to the listener, from several threads one
    after another; None without a listener."""
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


class ProgressBars:
    """A listener that shows each stage's `Progress` by tqdm, with the time left, where it takes
    more than a moment; in a notebook as a widget. Hands all events on to ``listener``. ``disable``:
    as tqdm's, None where there is no terminal. Events of one stage come one after another."""

    def __init__(self, listener: Listener | None = None, *, disable: bool | None = False) -> None:
        self._listener = listener
        self._disable = disable
        self._bars: dict[str, Any] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._show(event)
        if self._listener:
            self._listener(event)

    def _show(self, event: Progress) -> None:
        bar = self._bars.get(event.stage)
        if bar is None:
            from tqdm.auto import tqdm  # here: most programs show no bar

            bar = self._bars[event.stage] = tqdm(
                desc=event.stage,
                total=event.total,
                unit="B",
                unit_scale=True,
                delay=_BAR_DELAY_SECONDS,
                leave=False,
                disable=self._disable,
            )
        bar.update(event.done - bar.n)
        if event.done >= event.total:  # the stage's next piece of work has a bar of its own
            self._bars.pop(event.stage).close()

    def close(self) -> None:
        """Takes the bars away."""
        while self._bars:
            self._bars.popitem()[1].close()


@contextmanager
def progress_shown(wanted: bool, listener: Listener | None) -> Iterator[Listener | None]:
    """``listener``, or, where ``wanted``, one that shows bars as well until the block ends."""
    if not wanted:
        yield listener
        return
    with closing(ProgressBars(listener)) as bars:
        yield bars


class PhaseTimer:
    """Wall-clock seconds by phase: the time since the last phase's end goes to the one that ends
    now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@contextmanager
def failures_to(listener: Listener | None, stream: str, call: str) -> Iterator[None]:
    """Hands a `CallFailed` to the listener when an error of this library leaves the block."""
    try:
        yield
    except PulseError as error:
        if listener:
            listener(CallFailed(stream, call, error.kind, str(error)))
        raise
