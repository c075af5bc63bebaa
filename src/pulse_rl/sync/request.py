"""What one rank is to publish: the caller's own memory, or a copy that was taken of it; and the versions that are
published behind the training, one after another (docs/protocol.md, section 3)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from typing import Any, Generic, NamedTuple, Self, TypeVar

from .._util.serial import Operation, SerialThread
from ..errors import ConcurrentUse, InputError, UnsupportedTensor
from ..events import Metadata, Published
from ..state.cast import CastState, compute_dtype_named
from ..state.checkpoint import StateSource, as_state
from ..state.companions import Files, checked_files
from ..state.memory import recorded
from ..state.quantise import Quantise, QuantisedState, config_of
from ..state.snapshot import (
    Snapshot,
    await_devices,
    copied_within_devices,
    cuda_tensors,
    merge,
    own_tensors,
    snapshot,
    split,
)
from ..state.tensors import DType, State, TensorSpec
from ..stream.manifest import checked_metadata
from .layout import Box, Held

BASELINE, COPY = "baseline", "copy"

_MAX_UNFINISHED = 2  # one in flight, one behind it
T = TypeVar("T")


class LocalState(NamedTuple):
    """This rank's elements of a state: ``source``, to be cast to ``dtype`` if there is one. ``boxes``: which elements
    of a tensor they are, where they are not all. ``owned``: nobody else writes to them. ``quantise``: what is to be
    made of them first, once the ranks have agreed on scales (`quantised`). ``beside``: of other streams the same.
    ``config``: what the config.json of a quantised state says of it."""

    source: State
    dtype: DType | None = None
    boxes: Mapping[str, Box] = {}
    owned: bool = False
    quantise: Quantise | None = None
    config: Mapping[str, Any] | None = None
    beside: Mapping[str, Quantise | None] | None = None

    @classmethod
    def of(cls, source: StateSource, dtype: str | None, quantise: Quantise | None = None) -> Self:
        """All of a state. Raises UnsupportedTensor and InputError."""
        compute = None if dtype is None else compute_dtype_named(dtype)
        state = as_state(source)
        if isinstance(source, Mapping):
            require_weights((spec.name, spec.shape) for spec in state.specs)
        if quantise is not None:
            made = QuantisedState(state, quantise, compute)
            return cls(made, config=config_of(quantise, made.kept))
        return cls(state, compute)

    @property
    def state(self) -> State:
        """What the version is to hold of them."""
        return self.source if self.dtype is None else CastState(self.source, self.dtype)

    @property
    def early_dtype(self) -> DType | None:
        """To what a copy of them is cast: not if it is still to be quantised, which is done from the masters."""
        return None if self.quantise is not None or self.beside else self.dtype

    @property
    def held(self) -> list[Held]:
        """What they are, for the other ranks: the stored tensors first, then the other names of tied ones."""
        state, found = self.state, []
        storages = {spec.name: k for k, spec in enumerate(state.specs)}
        for name in [*storages, *state.aliases]:
            spec = state.spec(name)
            box = self.boxes.get(name) or Box.whole(spec.shape)
            storage = storages[state.aliases.get(name, name)] if spec.elements else None
            found.append(Held(TensorSpec(name, spec.dtype, box.shape), box, storage))
        return found


def require_weights(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raises UnsupportedTensor for what sharded training leaves in place of weights, by names and shapes."""
    zero = "deepspeed" in sys.modules
    for name, shape in shapes:
        if name.rpartition(".")[2] == "_flat_param" or (zero and shape == (0,)):
            raise UnsupportedTensor(
                f"{name!r} is what FSDP1 or DeepSpeed ZeRO-3 leaves in place of weights that it has cut over ranks",
                hint="Use PulseCallback, or ShardedPublisher on all ranks, which takes the model itself.",
            )


@dataclass(slots=True)
class HostCopy:
    """Memory into which a state is copied; ``resident`` are tensors that stay on their devices, and are there once
    ``written`` was waited for."""

    copied: Snapshot
    resident: State | None = None
    written: list[Any] = field(default_factory=list)

    def wait(self, local: LocalState) -> LocalState:
        """``local``, whose source is this copy, once all is there. Raises what the device reports."""
        self.copied.copies.wait()
        for event in self.written:
            event.synchronize()
        resident, self.resident = self.resident, None
        return local if resident is None else local._replace(source=merge(local.source, resident), owned=False)


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """What is to be published: the elements that ``local`` has, once its ``copy``, where there is one, was waited for;
    nothing where it was ``refused``; and the ``files`` beside the weights, None for those of the version before.
    ``after``: the version that the new one must follow, see `Publisher.publish`. ``out_of_memory``: whether a device
    had no memory for its copy."""

    local: LocalState | None
    metadata: Metadata
    dtype: str | None
    anchor: bool
    files: Mapping[str, bytes] | None = None
    on_device: str | None = None
    after: int | None = None
    out_of_memory: bool = False
    copy: HostCopy | None = None
    refused: Exception | None = None

    @property
    def quantise(self) -> Quantise | None:
        """What `LocalState` is to be quantised by."""
        return self.local.quantise if self.local else None

    @property
    def beside(self) -> Mapping[str, Quantise | None]:
        """The other streams that get the state, and what each is quantised by."""
        return (self.local and self.local.beside) or {}

    @classmethod
    def of(
        cls,
        read: Callable[[], LocalState],
        *,
        metadata: Metadata | None,
        dtype: str | None,
        anchor: bool,
        files: Files | None,
        on_device: str | None,
        after: int | None,
    ) -> Self:
        """The request of a call of `Publisher.publish`. Raises what that does for its arguments."""
        if on_device not in (None, COPY, BASELINE):
            raise InputError(f"on_device must be None, 'copy' or 'baseline', not {on_device!r}")
        facts = checked_metadata({} if metadata is None else metadata)
        taken = None if files is None else checked_files(files)
        if after is not None and (isinstance(after, bool) or not isinstance(after, int) or after < -1):
            raise InputError(f"after must be the number of a version, or -1 for a new stream, not {after!r}")
        return cls(read(), facts, dtype, anchor, taken, on_device, after)

    @classmethod
    def refusing(cls, error: Exception) -> Self:
        """One whose error the other ranks wait to be told."""
        return cls(None, {}, None, anchor=False, refused=error)

    def awaited(self) -> Self:
        """The same, once the caller's devices have written what is to be published."""
        request = self._within_devices()
        if request.local:
            await_devices(request.local.source)
        return request

    def taken(self, spare: HostCopy | None, threads: int | None) -> Self:
        """The same of a copy in host memory, made into that of ``spare`` if that fits.

        What is on a CUDA device is copied as it is and cast later, so that the caller waits for neither; its own copies
        on its device stay there.
        """
        if spare:
            spare.resident = None  # before the same memory is asked for again
        request = self._within_devices()
        if request.local is None:
            return request
        # Copies that devices have made for this call stay there; all else is copied to the host.
        resident, source = split(request.local.source, own_tensors(request.local.source))
        dtype = request.local.early_dtype
        # The host casts while it copies. A device's tensors are cast behind: the caller would wait for the bus.
        if dtype and not cuda_tensors(source):
            source, dtype = CastState(source, dtype), None
        into = spare.copied if spare else None
        copied = snapshot(source, into, threads=threads, staged=self.on_device is not None)
        as_it_is = request.local.early_dtype is None
        local = request.local._replace(
            source=copied.state, dtype=request.local.dtype if as_it_is else dtype, owned=dtype is None
        )
        written = recorded(cuda_tensors(resident).values())
        copy = HostCopy(copied, resident if len(resident) else None, written)
        return replace(request, local=local, copy=copy)

    def arrived(self) -> LocalState:
        """This rank's elements. Returns once all is copied; raises what is wrong with the request, and what the device
        reports."""
        if self.refused:
            raise self.refused
        assert self.local is not None
        return self.copy.wait(self.local) if self.copy else self.local

    def let_go(self) -> None:
        """Frees what it holds of devices' memory."""
        if self.copy:
            self.copy.resident = None

    def _within_devices(self) -> Self:
        """The same of a state whose CUDA tensors are copies on their devices, cast, where that is asked for and there
        is memory."""
        if self.local is None or self.on_device != BASELINE:
            return self
        source = copied_within_devices(self.local.source, self.local.early_dtype)
        if source is None:
            return replace(self, out_of_memory=True)
        return replace(self, local=self.local._replace(source=source))


class Submission(Future[Published]):
    """A version that is being published, a ``concurrent.futures.Future``: ``cancel()`` succeeds while it only waits; on
    one rank of a `ShardedPublisher` it cancels the version on all.

    An error that nobody has asked for, by `result` or `exception`, is raised by the publisher's next call; by the next
    `wait` or `close` of a `ShardedPublisher`, whose ranks must not part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self._begun = False

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "running" if self._begun else "waiting"
        return f"<Submission: {state}>"

    def cancel(self) -> bool:
        """Whether the version will not be published: it only waited."""
        with self._condition:
            return not self._begun and super().cancel()

    def _begin(self) -> bool:
        with self._condition:
            self._begun = True
            return not self.cancelled()

    def _withdraw(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Published:
        """What the version cost, once it is committed; raises what publishing raised. ``timeout`` in seconds."""
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What publishing raised, None for a version that was committed. ``timeout`` in seconds."""
        self._asked = True
        return super().exception(timeout)

    @property
    def _failed_unasked(self) -> bool:
        return not self._asked and self.done() and not self.cancelled() and super().exception() is not None


def begin(submission: Submission) -> bool:
    """Whether the version is not cancelled. From now on it cannot be."""
    return submission._begin()


class _Entry(NamedTuple, Generic[T]):
    """``held``: what was taken, until it is published or its memory is used again; empty from then on."""

    submission: Submission
    operation: Operation[None]
    held: list[T]


class Submissions(Generic[T]):
    """At most one version in flight and one behind it, on the publisher's own thread. Used by one thread at a time.

    ``together``: other ranks have each version in their queues, too. One that is cancelled stays there, until
    ``publish`` has told them.
    """

    def __init__(self, serial: SerialThread, *, together: bool = False) -> None:
        self._serial = serial
        self._together = together
        self._entries: list[_Entry[T]] = []
        self._spare: deque[T] = deque(maxlen=_MAX_UNFINISHED)

    def submit(
        self,
        take: Callable[[T | None], T],
        publish: Callable[[T | None, Submission], tuple[Published, T | None]],
        replace: bool,
    ) -> Submission:
        """Makes room, takes a state by ``take``, into memory that is no longer needed, and returns; ``publish`` does
        the rest behind, and hands back the memory that it no longer needs. Room is made by waiting, or, to ``replace``,
        by cancelling the version that has not begun. ``publish`` begins the submission (`begin`), and raises
        CancelledError where that fails; what was taken for it may be gone then.
        """
        # 1. Room: by cancelling what waits, or by waiting for what is in flight.
        while len(unfinished := self._unfinished()) >= _MAX_UNFINISHED:
            if not (replace and unfinished[-1].submission.cancel()):
                if self._serial.runs_here:
                    raise ConcurrentUse(
                        "a submission's callback would wait for itself", hint="Submit so many from another thread."
                    )
                unfinished[0].operation.wait()
        # 2. The copy, into memory that an earlier version no longer needs: new memory costs as much as the copy.
        self._reclaim()
        submission, held = Submission(), [take(self._spare.pop() if self._spare else None)]

        def run() -> None:
            # 3. Behind the caller. Whoever pops `held` first, this or `_reclaim`, has the memory.
            taken = _popped(held)
            try:
                published, spare = publish(taken, submission)
            except CancelledError:
                submission._withdraw()
                if taken is not None:
                    self._spare.appendleft(taken)
            except BaseException as error:
                taken = None
                clear_frames(error.__traceback__)  # or the error, which the submission keeps, would keep all states
                submission.set_exception(error)
            else:
                if spare is not None:
                    self._spare.appendleft(spare)
                submission.set_result(published)

        self._entries.append(_Entry(submission, self._serial.post(run), held))
        return submission

    def raise_unasked(self) -> None:
        """Raises the first error of a version that has ended, if nobody has asked for it. The next call raises the
        next one."""
        for entry in [e for e in self._entries if e.operation.ended]:
            self._entries.remove(entry)
            if entry.submission._failed_unasked and (error := entry.submission.exception()):
                raise error

    def forget(self) -> None:
        """Lets spare memory go."""
        self._spare.clear()

    def _reclaim(self) -> None:
        """Takes cancelled versions out of the thread's way, and their memory back."""
        for entry in [e for e in self._entries if e.submission.cancelled()]:
            if self._together:
                if (held := _popped(entry.held)) is not None:
                    self._spare.append(held)
            elif entry.operation.cancel():
                entry.submission._withdraw()
                self._entries.remove(entry)
                self._spare.append(entry.held.pop())
        self._entries = [e for e in self._entries if not e.operation.ended or e.submission._failed_unasked]

    def _unfinished(self) -> list[_Entry[T]]:
        return [e for e in self._entries if not e.operation.ended and not e.submission.done()]


def _popped(held: list[T]) -> T | None:
    """What was held, for the one of two threads that comes first."""
    try:
        return held.pop()
    except IndexError:
        return None
