"""Events: frozen dataclasses passed to a callback. Metrics and progress bars are listeners.

In all events ``stream`` is the stream's name, and ``version`` and ``base`` are version numbers.
``root`` is a state's root (64 hexadecimal digits), and ``metadata`` the publisher's own data.
``seconds`` is a wall-clock duration, and ``reason`` an error's message.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, cast

from ._util.settings import format_bytes, format_number, format_percent
from .errors import InputError, PulseError

__all__ = [
    "BaselineRestored",
    "CallFailed",
    "FallbackUsed",
    "Folded",
    "Hint",
    "Progress",
    "Published",
    "Relayed",
    "Synced",
]

_BAR_DELAY_SECONDS = 0.5

#: The publisher's own data about a version (a training step, a reward), small and flat.
Metadata = dict[str, str | int | float | bool]

_log = logging.getLogger("pulse_rl")


class OneLine:
    """Prints a dataclass on one line.

    Fields with ``repr=False`` are left out. Fractional numbers have three significant digits.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        values = [(each.name, getattr(self, each.name)) for each in fields(self) if each.repr]  # type: ignore[arg-type]
        shown = (
            f"{name}={format_number(v) if isinstance(v, float) else repr(v)}" for name, v in values
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False)
class Progress(OneLine):
    """Report how far one stage of a call is.

    Args:
        stage: "diff", "apply", "digest", "upload" or "restore".
        done: Bytes of the model that the stage has processed.
        total: Bytes of the model that the stage will process.
    """

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, repr=False)
class Published(OneLine):
    """Report a committed version and what it cost.

    Args:
        stream: The stream's name.
        version: The number of the version.
        root: The root of the state, 64 hexadecimal digits.
        elements: Elements of the whole state.
        changed: Elements that the patch changes. None if the version has no patch: the first
            version, a version after a change of the tensor set, or an anchor alone.
        dense_bytes: Bytes of the whole state.
        patch_bytes: Bytes of the patch that was stored; 0 without a patch.
        anchor_bytes: Bytes of the anchor that was stored; 0 without an anchor.
        seconds: Wall-clock seconds of the publish.
        phases: Wall-clock seconds by phase. "resume" claims the stream and finds its head; it takes
            almost nothing after the first call. "build" compares, encodes and verifies, or copies
            the full state; a single process uploads an anchor meanwhile. "upload" stores the rest,
            and "commit" creates the manifest and moves the baseline.
        metadata: The caller's own data about the version.
        reason: Why no patch leads here from the version before: the difference between their names,
            dtypes, shapes or ties, or a patch that is no smaller than the state. "" if a patch
            does.
        stream_id: The stream's ID, 32 hexadecimal digits. It distinguishes streams of one name.
        blocked_seconds: Seconds that the caller waited: all ``seconds`` of ``publish``; for
            ``submit`` the copy of the state and the wait for a free slot.
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
        """Changed elements / all elements; 1.0 without a patch.

        Without a patch all elements are sent.
        """
        return 1.0 if self.changed is None else self.changed / max(self.elements, 1)

    @property
    def ratio(self) -> float:
        """Bytes of a full sync / bytes that a worker one version behind fetches.

        That worker fetches the patch, or the anchor if there is no patch.
        """
        return self.dense_bytes / max(self.patch_bytes or self.anchor_bytes, 1)

    @property
    def anchored(self) -> bool:
        """Whether an anchor was stored, alone or together with a patch."""
        return self.anchor_bytes > 0

    def __repr__(self) -> str:
        more = (
            f", density={format_number(self.density)}, ratio={format_number(self.ratio)}, "
            f"reason={self.reason!r})"
        )
        return f"{OneLine.__repr__(self)[:-1]}{more}"

    def __str__(self) -> str:
        """One line for a log: the version and its cost."""
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
    """Report how a publisher that starts on an existing stream got its baseline.

    Args:
        stream: The stream's name.
        version: The newest version of the stream.
        how: "matched": the caller's state has the root of that version. "kept": the folder
            ``baseline`` held it. "restored": it was read from the store. "anchored": it could not
            be restored, and an anchor follows.
        reason: Why the version could not be restored; "" otherwise.
    """

    stream: str
    version: int
    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Synced(OneLine):
    """Report that a subscriber's host state is now at a verified version.

    Args:
        stream: The stream's name.
        version: The version that the host state holds.
        previous: The version that it held before. None: it was empty.
        root: The verified root of the state, 64 hexadecimal digits.
        links: The links that were followed, in order, such as "the patch 6->7".
        fetched_bytes: Bytes of the objects that were fetched.
        seconds: Wall-clock seconds of the call.
        lag_seconds: Age of the version: from its commit by the publisher's clock to now by this
            machine's clock. NaN: not known, where the processes of an engine have synced.
        phases: Wall-clock seconds by phase. "plan" finds new versions and a path to them. "fetch"
            waits for patches; a fetch during an apply does not count. "apply" decodes, scatters and
            hashes. "restore" fetches and verifies an anchor.
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
        """Versions that the worker was behind before this sync; None if it had none."""
        return None if self.previous is None else self.version - self.previous


@dataclass(frozen=True, slots=True, repr=False)
class FallbackUsed(OneLine):
    """Report that a link, version or file was not usable; the call goes on without it.

    Args:
        stream: The stream's name.
        link: What was skipped, for example "the patch 6->7", "version 7", "file 'config.json'" or
            "the state in /nvme/s".
        reason: The message of the error.
        kind: The kind of the error (`pulse_rl.errors`).
    """

    stream: str
    link: str
    reason: str
    kind: str


@dataclass(frozen=True, slots=True, repr=False)
class CallFailed(OneLine):
    """Report that a call raised an error.

    A "fold" or "anchor" that failed does no harm: readers use the patches instead.

    Args:
        stream: The stream's name.
        call: "publish", "sync", "relay", "fold", "gc" for the deletion of old versions, "anchor"
            for one that found no room in the store, or "heartbeat" for a relay that cannot forward
            its workers' heartbeats.
        kind: The stable name of the error (`pulse_rl.errors`).
        reason: The message of the error.
    """

    stream: str
    call: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Hint(OneLine):
    """Report something that works but should be done in another way.

    A publisher or subscriber emits each ``kind`` once: to its listener, or without a listener to
    ``warnings`` and the logger ``pulse_rl``.

    Args:
        stream: The stream's name.
        version: The version at which it was noticed. None: it concerns no version.
        kind: "no_stream": a subscriber found no version for a second; ``reason`` lists the streams
            of the store. "dense": a patch changes a large part of the state. "wide_dtype": most
            changed elements are FP32 or FP64; nearly all of these change at every step, but only
            few in a compute dtype. "wrapped_names": names contain parts that DDP, FSDP or
            torch.compile adds, which no inference engine knows. "fused_names": tensors hold several
            experts each, as transformers fuses them in memory, but most checkpoints store experts
            one by one. "mixed_dtypes": a cast rounds the few wide tensors of a narrow state.
            "adapter_names": names are those of a PEFT model in memory. "retention": old versions
            could not be deleted.
        reason: What was noticed.
        hint: What to do.
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
    """Report a fold: one patch in place of all patches from ``base`` to ``version``.

    The fold is stored only if it is smaller than the patches.

    Args:
        stream: The stream's name.
        base: The version from which the fold leads.
        version: The version to which it leads.
        nbytes: Bytes of the fold.
        patch_bytes: Bytes of the patches that it replaces.
    """

    stream: str
    base: int
    version: int
    nbytes: int
    patch_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Relayed(OneLine):
    """Report that a relay's target is now at a version.

    Args:
        stream: The stream's name.
        version: The version that the target holds.
        previous: The version that it held before. None: it had none.
        links: The links that were copied, in order.
        nbytes: Bytes of the payloads that were fetched from the source.
        seconds: Wall-clock seconds of the call.
        lag_seconds: Age of the version: from its commit by the publisher's clock to now by this
            machine's clock.
    """

    stream: str
    version: int
    previous: int | None
    links: tuple[str, ...]
    nbytes: int
    seconds: float
    lag_seconds: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Served(OneLine):
    """Report an answer of an HTTP server (``pulse serve``).

    Args:
        method: The request's method, such as "GET".
        name: The path that was asked for, at most 512 characters.
        status: The status of the answer.
        nbytes: Bytes that the answer announces.
    """

    method: str
    name: str
    status: int
    nbytes: int


#: Everything that a listener can receive.
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
    | Served
)

#: A callback for events.
#:
#: The thread that publishes or syncs calls it. Worker threads may call it too, with `Progress` and
#: with the events of folds.
Listener = Callable[[Event], None]


def checked_listener(listener: Any) -> Listener | None:
    """Return ``listener`` if it is None or callable; raise InputError otherwise."""
    if listener is not None and not callable(listener):
        raise InputError(f"on_event must be a function of one event, not {listener!r}")
    return cast(Listener | None, listener)


def serialized(listener: Listener | None) -> Listener | None:
    """Return a listener that several threads can call; a lock serializes the calls."""
    if listener is None:
        return None
    lock = threading.RLock()

    def listen(event: Event) -> None:
        with lock:
            listener(event)

    return listen


def fell_back(listener: Listener | None, stream: str, what: str, error: PulseError) -> None:
    """Report to the listener that ``what`` was not used because of ``error``."""
    if listener:
        listener(FallbackUsed(stream, what, str(error), error.kind))


def hint_to(listener: Listener | None, hint: Hint) -> None:
    """Report a hint to the listener; without one, to the logger ``pulse_rl``, which prints it to
    stderr where the program has not set up logging."""
    if listener is not None:
        listener(hint)
    else:
        _log.warning("%s", hint)


def progress_to(listener: Listener | None, stage: str, total: int) -> Callable[[int], None] | None:
    """Return a callback that adds up bytes and reports `Progress`; None without a listener.

    Several threads may call it.
    """
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
    """A listener that shows a tqdm bar for each stage, and passes all events on to ``listener``.

    A bar appears after half a second, with the time left; in a notebook it is a widget. Events of
    one stage must come one after another. ``disable`` is tqdm's: None hides the bars where there is
    no terminal.
    """

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
        """Remove the bars."""
        while self._bars:
            self._bars.popitem()[1].close()


@contextmanager
def progress_shown(wanted: bool, listener: Listener | None) -> Iterator[Listener | None]:
    """Yield ``listener``, or, if ``wanted``, one that also shows bars until the block ends."""
    if not wanted:
        yield listener
        return
    with closing(ProgressBars(listener)) as bars:
        yield bars


class PhaseTimer:
    """Measures wall-clock seconds by phase: `end` adds the time since the previous `end`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@contextmanager
def failures_to(listener: Listener | None, stream: str, call: str) -> Iterator[None]:
    """Report a `CallFailed` to the listener when an error of this library leaves the block."""
    try:
        yield
    except PulseError as error:
        if listener:
            listener(CallFailed(stream, call, error.kind, str(error)))
        raise
