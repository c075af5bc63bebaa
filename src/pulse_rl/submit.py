"""Publishing in the background (docs/protocol.md, section 3).

A state is copied, by threads of the host or by the device, and a thread publishes the copies one
after another. Only `Publisher.submit` needs this module.
"""

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

# Of the versions that are not published yet, one is in flight and one waits. A third would only add
# the memory of a state, since versions are published one after another.
_MAX_UNFINISHED = 2
# torch rounds page-locked allocations up to a power of two; arrays share pieces of this size.
_PIECE = 1 << 30
_PIECE_ELEMENTS = 1 << 22
T = TypeVar("T")


class Submission(Future[Published]):
    """Wait for a version that is published in the background: a ``concurrent.futures.Future``.

    ``cancel()`` succeeds while the version waits. On one rank of a `ShardedPublisher` it cancels
    the version on all ranks. If nobody asks for an error with `result` or `exception`, the
    publisher's next call raises it. A `ShardedPublisher`, whose ranks must stay in step, raises it
    in the next `wait` or `close`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self._begun = False

    def __repr__(self) -> str:
        if self.done():
            return f"<Submission: {'cancelled' if self.cancelled() else 'done'}>"
        return f"<Submission: {'running' if self._begun else 'waiting'}>"

    def cancel(self) -> bool:
        """Cancel the version if it still waits.

        Returns: Whether it will not be published.
        """
        with self._condition:
            return not self._begun and super().cancel()

    def begin(self) -> bool:
        """Mark the version as begun; from now on it cannot be cancelled.

        Returns: Whether it was not cancelled before.
        """
        with self._condition:
            self._begun = True
            return not self.cancelled()

    def _withdraw(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Published:
        """Wait for the commit and return what the version cost.

        Args:
            timeout: Seconds to wait. Default: no limit.
        Returns: The `Published` event of the version.
        Raises: TimeoutError if the version is not committed in time, CancelledError if it was
            cancelled, and what `Publisher.publish` raised.
        """
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the publish and return its error.

        Args:
            timeout: Seconds to wait. Default: no limit.
        Returns: The error, or None if the version was committed.
        Raises: TimeoutError if the publish does not end in time, and CancelledError if it was
            cancelled.
        """
        self._asked = True
        return super().exception(timeout)

    @property
    def _failed_unasked(self) -> bool:
        if self._asked or not self.done() or self.cancelled():
            return False
        return super().exception() is not None


class _Entry(NamedTuple, Generic[T]):
    """A submission in the queue.

    ``held`` holds the copied state until it is published or its memory is reused; then it is empty.
    """

    submission: Submission
    operation: Operation[None]
    held: list[T]


class Submissions(Generic[T]):
    """The queue of a publisher: at most one version in flight and one that waits.

    The publisher's own thread publishes them. One thread at a time may submit. ``together``: other
    ranks queue the same versions. A cancelled one stays in the queue until ``publish`` has reported
    it to them.
    """

    def __init__(self, serial: SerialThread, *, together: bool = False) -> None:
        self._serial = serial
        self._together = together
        self._entries: list[_Entry[T]] = []
        self._spare: deque[T] = deque(maxlen=_MAX_UNFINISHED)

    def make_room(self, replace: bool) -> T | None:
        """Wait until a version may be submitted.

        With ``replace`` the version that waits is cancelled instead. Returns a copy whose memory
        can be reused, or None. New memory would cost as much time as the copy itself.
        """
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
        self, taken: T, publish: Callable[[T | None, Submission], tuple[Published, T | None]]
    ) -> Submission:
        """Queue a version and return at once.

        The publisher's thread calls ``publish``, which returns the memory that is free again.
        ``publish`` must call `Submission.begin` and raise CancelledError if that fails; ``taken``
        may be gone by then.
        """
        submission, held = Submission(), [taken]

        def run() -> None:
            # This thread and `_reclaim` may both want the memory. The first to pop `held` owns it.
            taken = _popped(held)
            try:
                published, spare = publish(taken, submission)
            except CancelledError:
                submission._withdraw()
                if taken is not None:
                    self._spare.appendleft(taken)
            except BaseException as error:
                taken = None
                # The submission keeps the error, and the error's frames would keep every copied
                # state alive.
                clear_frames(error.__traceback__)
                submission.set_exception(error)
            else:
                if spare is not None:
                    self._spare.appendleft(spare)
                submission.set_result(published)

        self._entries.append(_Entry(submission, self._serial.post(run), held))
        return submission

    def raise_unasked(self) -> None:
        """Raise the first error of an ended version for which nobody has asked.

        The next call raises the next such error.
        """
        for entry in [e for e in self._entries if e.operation.ended]:
            self._entries.remove(entry)
            if entry.submission._failed_unasked and (error := entry.submission.exception()):
                raise error

    def forget(self) -> None:
        """Release spare memory."""
        self._spare.clear()

    def _reclaim(self) -> None:
        """Remove cancelled versions from the queue and take their memory back."""
        for entry in [e for e in self._entries if e.submission.cancelled()]:
            if self._together:
                # The entry stays in the queue: all ranks must pass the same calls in the same
                # order.
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
    """Take what is held; None if another thread was faster."""
    try:
        return held.pop()
    except IndexError:
        return None


# -- copies


class Snapshot(NamedTuple):
    """A copy of a state in host memory of its own; valid after ``copies.wait()``."""

    state: State
    copies: DeviceCopies


def snapshot(
    state: State, into: Snapshot | None = None, *, threads: int | None = None, staged: bool = False
) -> Snapshot:
    """Copy ``state`` into host memory.

    ``into`` is a snapshot that nobody uses any more: its memory is reused if it has the same
    tensors. New memory costs as much as the copy, because the system hands it out page by page. A
    state with CUDA tensors is copied into page-locked memory, so this returns before the copy ends.
    ``staged``: see `DeviceCopies`.
    """
    # 1. Memory: that of `into` if it fits, else new memory, page-locked for the device.
    cuda = cuda_tensors(state)
    if into is None or into.state.specs != state.specs:
        into = Snapshot(
            _page_locked(state.specs) if cuda else State.empty(state.specs), DeviceCopies()
        )
    elif len(cuda) < len(state.specs):
        into.copies.wait()  # the host writes into it as well
    # 2. CUDA tensors: the device copies them while the host goes on.
    copied, copies = into.state.with_aliases(state.aliases), into.copies
    if cuda:
        copies.start(((tensor, copied.read(name)) for name, tensor in cuda.items()), staged=staged)
    # 3. Host tensors: threads copy pieces of 4 Mi elements.
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
    """Return ``request`` with its state copied into host memory, reusing ``spare`` if it fits.

    CUDA tensors are copied as they are and cast later, so the caller does not wait for the bus. A
    state that will be quantized is copied uncast, because the codes are made from the masters.
    ``staged``: copy within the device first.
    """
    if request.local is None:
        return request
    source, dtype = request.local.source, request.local.dtype
    if dtype and request.local.quantize is None and not cuda_tensors(source):
        source, dtype = CastState(source, dtype, request.local.uncast), None
    taken = snapshot(source, spare, threads=threads, staged=staged)
    local = request.local._replace(source=taken.state, dtype=dtype, owned=dtype is None)
    return replace(request, local=local, copy=taken)


class DeviceCopies:
    """Copies of CUDA tensors into host memory, on streams of their own.

    A copy starts after the work that is already on the caller's current stream. Later work on that
    stream, such as an optimizer's in-place update, waits on the device for the copy. For a
    ``staged`` copy it waits only for the copy within the device. The host waits in `wait` alone.
    Source and target stay in memory until then.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Any]] = []

    def start(
        self, tensors: Iterable[tuple[DeviceTensor, npt.NDArray[Any]]], *, staged: bool = False
    ) -> None:
        """Enqueue a copy of each CUDA tensor into its array [elements], after earlier copies.

        This returns before the copies end if the arrays are page-locked (`pinned`). ``staged``
        copies within the device first, if its memory suffices.
        """
        # 1. Pairs of source and target by device, both as bytes.
        torch: Any = sys.modules["torch"]
        devices: dict[Any, list[tuple[Any, Any]]] = {}
        for tensor, array in tensors:
            host = torch.from_numpy(array.view(np.uint8))
            devices.setdefault(tensor.flat.device, []).append((tensor.flat, host))
        # 2. The copies that still run: they may write into the same arrays, so the new ones wait
        # for them.
        earlier = [(stream, ends) for stream, ends in self._under_way if not stream.query()]
        self._under_way = list(earlier)
        # 3. One new stream per device. It waits for the caller's stream, so it copies finished
        # values.
        for device, pairs in devices.items():
            current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            copied = copied_on_device([flat for flat, _ in pairs]) if staged else None
            if copied:
                pairs = [(flat, host) for flat, (_, host) in zip(copied, pairs, strict=True)]
            self._under_way.append((side, pairs))
            side.wait_stream(current)
            for stream, _ in earlier:
                side.wait_stream(stream)
            with torch.cuda.stream(side):
                for flat, host in pairs:
                    host.copy_(flat, non_blocking=True)
            # A copy within the device is safe already. Otherwise later writes must wait for the
            # transfer.
            if not copied:
                current.wait_stream(side)

    def wait(self) -> None:
        """Wait until all copies have ended; raise what the device reports."""
        for stream, _ in self._under_way:
            stream.synchronize()
        self._under_way = []

    def __del__(self) -> None:
        # After an interrupt or a cancelled submission the device still writes into this memory, so
        # it must not be freed yet.
        with suppress(Exception):
            self.wait()


def copied_on_device(tensors: Sequence[Any]) -> list[Any] | None:
    """Copy torch tensors on their device; None if its memory does not suffice.

    The device's current stream makes the copies.
    """
    torch: Any = sys.modules["torch"]
    try:
        copies = [torch.empty_like(source) for source in tensors]
    except torch.cuda.OutOfMemoryError:
        return None
    for copy, source in zip(copies, tensors, strict=True):
        copy.copy_(source, non_blocking=True)
    return copies


def pinned(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Allocate uninitialized arrays of the given ``sizes`` in bytes, page-locked by torch.

    A device copies into page-locked memory while the host goes on. Ordinary memory is used if none
    can be locked. torch rounds each allocation up to a power of two, so arrays share pieces of 1
    GiB; a larger array has its own piece.
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
    """Allocate one array of ``nbytes`` as `pinned` does."""
    torch: Any = sys.modules["torch"]
    try:
        locked: npt.NDArray[np.uint8] = torch.empty(
            nbytes, dtype=torch.uint8, device="cpu", pin_memory=True
        ).numpy()
    except RuntimeError:  # no device, or the system's limit of locked memory
        return np.empty(nbytes, np.uint8)
    return locked
