"""Publishing behind the training (docs/protocol.md, section 3): a state is copied, by the host's
threads or by the device, and the versions are published one after another. Only `Publisher.submit`
needs this module."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from traceback import clear_frames
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ._util.serial import Operation, SerialThread
from ._util.threads import ordered_map
from .errors import ConcurrentUse
from .events import Published
from .state.bits import LINE, contiguous
from .state.cast import CastState
from .state.tensors import DeviceTensor, State, TensorSpec, cuda_tensors
from .sync.request import PublishRequest

_MAX_UNFINISHED = 2  # one in flight, one behind it
_PIECE = 1 << 30  # bytes
_PIECE_ELEMENTS = 1 << 22
T = TypeVar("T")


class Submission(Future[Published]):
    """A version that is being published, a ``concurrent.futures.Future``: ``cancel()`` succeeds
    while it only waits; on one rank of a `ShardedPublisher` it cancels the version on all.

    An error that nobody has asked for, by `result` or `exception`, is raised by the publisher's
    next call; by the next `wait` or `close` of a `ShardedPublisher`, whose ranks must not part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self._begun = False

    def __repr__(self) -> str:
        state = (
            "cancelled"
            if self.cancelled()
            else "done"
            if self.done()
            else "running"
            if self._begun
            else "waiting"
        )
        return f"<Submission: {state}>"

    def cancel(self) -> bool:
        """Whether the version will not be published: it only waited."""
        with self._condition:
            return not self._begun and super().cancel()

    def begin(self) -> bool:
        """Whether the version is not cancelled. From now on it cannot be."""
        with self._condition:
            self._begun = True
            return not self.cancelled()

    def _withdraw(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Published:
        """What the version cost, once it is committed; raises what publishing raised. ``timeout``
        in seconds."""
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What publishing raised, None for a version that was committed. ``timeout`` in seconds."""
        self._asked = True
        return super().exception(timeout)

    @property
    def _failed_unasked(self) -> bool:
        return (
            not self._asked
            and self.done()
            and not self.cancelled()
            and super().exception() is not None
        )


class _Entry(NamedTuple, Generic[T]):
    """``held``: what was taken, until it is published or its memory is used again; empty from then
    on."""

    submission: Submission
    operation: Operation[None]
    held: list[T]


class Submissions(Generic[T]):
    """At most one version in flight and one behind it, on the publisher's own thread. Used by one
    thread at a time.

    ``together``: other ranks have each version in their queues, too. One that is cancelled stays
    there, until ``publish`` has told them.
    """

    def __init__(self, serial: SerialThread, *, together: bool = False) -> None:
        self._serial = serial
        self._together = together
        self._entries: list[_Entry[T]] = []
        self._spare: deque[T] = deque(maxlen=_MAX_UNFINISHED)

    def make_room(self, replace: bool) -> T | None:
        """Waits until a version may be submitted, or, to ``replace``, cancels the one that has not
        begun. Returns what an earlier version had taken and no longer needs: new memory costs as
        much as a copy."""
        while len(unfinished := self._unfinished()) >= _MAX_UNFINISHED:
            if not (replace and unfinished[-1].submission.cancel()):
                if self._serial.runs_here:
                    raise ConcurrentUse(
                        "a submission's callback would wait for itself",
                        hint="Submit so many from another thread.",
                    )
                unfinished[0].operation.wait()
        self._reclaim()
        return self._spare.pop() if self._spare else None

    def post(
        self,
        taken: T,
        publish: Callable[[T | None, Submission], tuple[Published, T | None]],
    ) -> Submission:
        """Returns at once; ``publish`` does the rest on the publisher's thread, and hands back the
        memory that it no longer needs. It begins the submission (`begin`), and raises
        CancelledError where that fails; what was ``taken`` for it may be gone then."""
        submission, held = Submission(), [taken]

        def run() -> None:
            # Whoever pops `held` first, this or `_reclaim`, has the memory.
            taken = _popped(held)
            try:
                published, spare = publish(taken, submission)
            except CancelledError:
                submission._withdraw()
                if taken is not None:
                    self._spare.appendleft(taken)
            except BaseException as error:
                taken = None
                # Or the error, which the submission keeps, would keep all states.
                clear_frames(error.__traceback__)
                submission.set_exception(error)
            else:
                if spare is not None:
                    self._spare.appendleft(spare)
                submission.set_result(published)

        self._entries.append(_Entry(submission, self._serial.post(run), held))
        return submission

    def raise_unasked(self) -> None:
        """Raises the first error of a version that has ended, if nobody has asked for it. The next
        call raises the next one."""
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
        self._entries = [
            e for e in self._entries if not e.operation.ended or e.submission._failed_unasked
        ]

    def _unfinished(self) -> list[_Entry[T]]:
        return [e for e in self._entries if not e.operation.ended and not e.submission.done()]


def _popped(held: list[T]) -> T | None:
    """What was held, for the one of two threads that comes first."""
    try:
        return held.pop()
    except IndexError:
        return None


# -- copies


class Snapshot(NamedTuple):
    """``state`` is in host memory of its own, and holds its values once ``copies`` were waited
    for."""

    state: State
    copies: DeviceCopies


def snapshot(
    state: State, into: Snapshot | None = None, *, threads: int | None = None, staged: bool = False
) -> Snapshot:
    """``state`` in host memory of its own: that of ``into``, which nobody needs any more, if it has
    the same tensors. What a device still copies into it comes first.

    New memory costs as much again as the copy: the system hands it out page by page. That of a
    state with CUDA tensors is page-locked, so that this returns before they are copied
    (`DeviceCopies`, which has ``staged``).
    """
    cuda = cuda_tensors(state)
    if into is None or into.state.specs != state.specs:
        into = Snapshot(
            _page_locked(state.specs) if cuda else State.empty(state.specs), DeviceCopies()
        )
    elif len(cuda) < len(state.specs):
        into.copies.wait()  # the host writes into it as well
    copied, copies = into.state.with_aliases(state.aliases), into.copies
    if cuda:
        copies.start(((tensor, copied.read(name)) for name, tensor in cuda.items()), staged=staged)
    pieces = [
        (spec.name, start, min(start + _PIECE_ELEMENTS, spec.elements))
        for spec in state.specs
        if spec.name not in cuda
        for start in range(0, spec.elements, _PIECE_ELEMENTS)
    ]

    def copy(piece: tuple[str, int, int]) -> None:
        copied.read(*piece)[:] = state.read(*piece)

    for _ in ordered_map(copy, pieces, threads):
        pass
    return Snapshot(copied, copies)


def _page_locked(specs: tuple[TensorSpec, ...]) -> State:
    arrays = pinned([s.nbytes for s in specs])
    return State(specs, {s.name: a.view(s.dtype.uint) for s, a in zip(specs, arrays, strict=True)})


def copied(
    request: PublishRequest, spare: Snapshot | None, *, staged: bool, threads: int | None
) -> PublishRequest:
    """``request`` of a copy in host memory, made into that of ``spare`` if that fits; ``staged``:
    by way of a copy on the device.

    What is on a CUDA device is copied as it is and cast later, so that the caller does not wait for
    the bus. What is to be quantized is made from the masters.
    """
    if request.local is None:
        return request
    source, dtype = request.local.source, request.local.dtype
    if dtype and request.local.quantize is None and not cuda_tensors(source):
        source, dtype = CastState(source, dtype), None
    taken = snapshot(source, spare, threads=threads, staged=staged)
    local = request.local._replace(source=taken.state, dtype=dtype, owned=dtype is None)
    return replace(request, local=local, copy=taken)


class DeviceCopies:
    """Copies of CUDA tensors into host memory that are under way on streams of their own.

    A copy begins after all work that the caller's current stream has been given; what that stream
    is given later, such as an optimizer's update in place, waits on the device for the copy's end,
    or, of a copy that is ``staged``, for the end of one within the device. The host waits in `wait`
    alone. Both ends of a copy are kept in memory until then.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Any]] = []

    def start(
        self, tensors: Iterable[tuple[DeviceTensor, npt.NDArray[Any]]], *, staged: bool = False
    ) -> None:
        """Enqueues the copy of each CUDA tensor into the array [elements] beside it, behind those
        that are under way. Returns before they are made if the arrays are page-locked (`pinned`),
        else after. ``staged``: by way of a copy on the device, where there is memory for it."""
        torch: Any = sys.modules["torch"]
        devices: dict[Any, list[tuple[Any, Any]]] = {}
        for tensor, array in tensors:
            host = torch.from_numpy(array.view(np.uint8))
            devices.setdefault(tensor.flat.device, []).append((tensor.flat, host))
        earlier = [(stream, ends) for stream, ends in self._under_way if not stream.query()]
        self._under_way = list(earlier)
        for device, pairs in devices.items():
            current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            copied = copied_on_device([(flat, flat.dtype) for flat, _ in pairs]) if staged else None
            if copied:
                pairs = [(flat, host) for flat, (_, host) in zip(copied, pairs, strict=True)]
            self._under_way.append((side, pairs))
            side.wait_stream(current)
            for stream, _ in earlier:
                side.wait_stream(stream)
            with torch.cuda.stream(side):
                for flat, host in pairs:
                    host.copy_(flat, non_blocking=True)
            if not copied:
                current.wait_stream(side)

    def wait(self) -> None:
        """Returns once all is copied. Raises what the device reports."""
        for stream, _ in self._under_way:
            stream.synchronize()
        self._under_way = []

    def __del__(self) -> None:
        # Whoever lost interest, by an interrupt or a cancelled submission: the device still writes
        # into the memory.
        with suppress(Exception):
            self.wait()


def copied_on_device(tensors: Sequence[tuple[Any, Any]]) -> list[Any] | None:
    """Copies [bytes] of torch tensors on their device, each cast to the dtype beside it, made by
    its current stream; None where they do not fit."""
    torch: Any = sys.modules["torch"]
    try:
        copies = [
            source.new_empty(source.numel() * dtype.itemsize, dtype=torch.uint8)
            for source, dtype in tensors
        ]
    except torch.cuda.OutOfMemoryError:
        return None
    for copy, (source, dtype) in zip(copies, tensors, strict=True):
        copy.view(dtype).copy_(source, non_blocking=True)
    return copies


def pinned(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Arrays of so many bytes, uninitialized, page-locked by torch, so that a device copies into
    them while the host goes on; ordinary memory where none can be locked.

    torch rounds each allocation up to a power of two: arrays share pieces of 1 GiB, only larger
    ones have their own.
    """
    arrays: list[npt.NDArray[np.uint8]] = []
    group: list[int] = []
    filled = LINE
    for size in sizes:
        padded = size + -size % LINE
        if group and filled + padded > _PIECE:
            arrays += contiguous(group, page_locked)
            group, filled = [], LINE
        group.append(size)
        filled += padded
    return arrays + contiguous(group, page_locked)


def page_locked(nbytes: int) -> npt.NDArray[np.uint8]:
    """One array as those of `pinned`."""
    torch: Any = sys.modules["torch"]
    try:
        locked: npt.NDArray[np.uint8] = torch.empty(
            nbytes, dtype=torch.uint8, device="cpu", pin_memory=True
        ).numpy()
    except RuntimeError:  # no device, or the system's limit of locked memory
        return np.empty(nbytes, np.uint8)
    return locked
