"""A stand-in for CUDA where there is none: tensors that say they are on a device, and streams that
run when they must.

What a stream is given is kept until somebody synchronizes with it, in the order that the device
would have to keep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch


class Stream:
    """``done`` of its ``work`` has run. ``gate``: the host's `synchronize` waits for it."""

    made: ClassVar[list[Stream]] = []
    first: ClassVar[Stream]
    gate: ClassVar[threading.Event]
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, device: object = None) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0
        self.made.append(self)

    def wait_stream(self, other: Stream) -> None:
        until = len(other.work)
        self.work.append(lambda: other.run(until))

    def run(self, until: int | None = None) -> None:
        """As the device does, at whatever time."""
        with self._lock:
            while self.done < (len(self.work) if until is None else until):
                self.done += 1
                self.work[self.done - 1]()

    def query(self) -> bool:
        return self.done == len(self.work)

    def synchronize(self) -> None:
        assert self.gate.wait(20)
        self.run()


class Event:
    """What a stream had been given when it was recorded."""

    def record(self, stream: Stream) -> None:
        self.stream, self.until = stream, len(stream.work)

    def synchronize(self) -> None:
        assert Stream.gate.wait(20)
        self.stream.run(self.until)


class _Current(threading.local):
    """Each thread's stream; all begin with the device's first one."""

    chosen: Stream | None = None


_CURRENT = _Current()


def current_stream() -> Stream:
    return _CURRENT.chosen or Stream.first


class OnDevice(torch.Tensor):
    """A tensor that says it is on cuda:0; what is copied from it without blocking is copied by the
    current stream."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}
            target, source = args
            plain = target.as_subclass(torch.Tensor)
            current_stream().work.append(lambda: plain.copy_(source.as_subclass(torch.Tensor)))
            return target
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor: torch.Tensor) -> OnDevice:
    """A view of the same memory, which stands for a device's."""
    return tensor.as_subclass(OnDevice)


def step(weight: torch.Tensor, every: int = 50, first: int = 0) -> None:
    """One weight in ``every`` changes, in place."""
    weight.view(torch.int16 if weight.element_size() == 2 else torch.int32)[first::every] ^= 1 << 5


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, list[int]]]:
    """(the current stream, the sizes of what was page-locked so far, in bytes)."""
    Stream.made, Stream.gate = [], threading.Event()
    Stream.first = current = Stream()
    locked: list[int] = []
    empty = torch.empty

    def pin(size: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            locked.append(size)
        return empty(size, **options)

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, _CURRENT.chosen = _CURRENT.chosen, chosen
        try:
            yield
        finally:
            _CURRENT.chosen = before

    monkeypatch.setattr(torch, "empty", pin)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current_stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    yield current, locked
    Stream.gate.set()
