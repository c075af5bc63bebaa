"""What a publisher keeps on devices, for how long, and who waits for whom.

Without a GPU a stand-in for torch's streams and tensors shows what is asked of them
(`tests.support.cuda`).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pulse_rl import MemoryStore, Publisher, state_root
from pulse_rl.errors import StoreUnavailable
from pulse_rl.state import snapshot
from pulse_rl.state.memory import copied_on_device
from pulse_rl.sync import pending
from tests.support.cuda import Stream, on_device, stand_in, step
from tests.support.publishers import resident
from tests.support.stores import FaultyStore

Device = tuple[Stream, list[int]]
SIZE = 40_000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with stand_in(monkeypatch) as found:
        yield found


def test_a_first_version_is_copied_once(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy on the host becomes the host's baseline, the one on the device the device's."""
    _, locked = cuda
    Stream.gate.set()
    monkeypatch.setattr(pending, "allocated", lambda *_: pytest.fail("copied again"))
    weight = torch.randn(SIZE).bfloat16()
    with resident(MemoryStore(), stream="policy", on_device="baseline") as publisher:
        publisher.submit({"weight": on_device(weight)}).result(20)
        held = publisher._rank._devices._held["weight"]
        assert held.own
        assert held.flat.data_ptr() != weight.data_ptr()
        assert held.flat.view(torch.bfloat16).as_subclass(torch.Tensor).equal(weight)
        assert locked[-1] >= 2 * SIZE


def publish(publisher: Publisher, how: str, weight: torch.Tensor) -> None:
    if how == "submit":
        publisher.submit({"weight": on_device(weight)}).result(20)
    else:
        publisher.publish({"weight": on_device(weight)})


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Which of the copies on the device are still there, by number. Nothing is collected behind our
    backs."""
    made: list[weakref.ref[torch.Tensor]] = []

    def copied(tensors: Any) -> Any:
        found = copied_on_device(tensors)
        made.extend(map(weakref.ref, found or []))
        return found

    def alive() -> list[int]:
        for stream in Stream.made:  # the stand-in holds what it is given
            stream.run()
            stream.work, stream.done = [], 0
        return [number for number, copy in enumerate(made) if copy() is not None]

    monkeypatch.setattr(snapshot, "copied_on_device", copied)
    gc.collect()
    gc.disable()
    yield alive
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["submit", "publish"])
def test_a_failed_version_leaves_no_copy(
    cuda: Device, copies: Callable[[], list[int]], how: str
) -> None:
    Stream.gate.set()
    weight = torch.randn(SIZE).bfloat16()
    store = FaultyStore(MemoryStore())
    with resident(store, stream="policy", on_device="baseline") as publisher:
        publisher.publish({"weight": on_device(weight)})
        for number in range(4):
            step(weight, first=number)
            store.fail(0)
            with pytest.raises(StoreUnavailable):
                publish(publisher, how, weight)
            store.heal()
        publisher.publish({"weight": on_device(weight)})
        assert copies() == [5]
    assert copies() == []


def test_a_cancelled_version_leaves_no_copy(cuda: Device, copies: Callable[[], list[int]]) -> None:
    weight = torch.randn(SIZE).bfloat16()
    with resident(MemoryStore(), stream="policy", on_device="baseline") as publisher:
        first = publisher.submit({"weight": on_device(weight)})
        assert publisher.submit({"weight": on_device(weight)}).cancel()
        Stream.gate.set()
        first.result(20)
        publisher.head()  # behind what was submitted
        assert copies() == [0]


def test_close_lets_go_of_what_is_not_settled(
    cuda: Device, copies: Callable[[], list[int]]
) -> None:
    Stream.gate.set()
    weight = torch.randn(SIZE).bfloat16()
    store = FaultyStore(MemoryStore())
    publisher = resident(store, stream="policy", on_device="baseline")
    publisher.publish({"weight": on_device(weight)})
    step(weight)
    store.fail_on("put_new", "versions", after=True)
    with pytest.raises(StoreUnavailable):
        publisher.publish({"weight": on_device(weight)})
    assert copies() == [0, 1]
    publisher.close()
    assert copies() == []
    step(weight, first=13)
    assert publisher.publish({"weight": on_device(weight)}).root == state_root({"weight": weight})
    publisher.close()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
@pytest.mark.parametrize("kept", ["copy", "baseline"])
def test_a_step_never_waits_for_the_bus(cuda: Device, dtype: str, kept: str) -> None:
    """Nor for what the host has to cast."""
    current, _ = cuda
    weight = torch.randn(SIZE, dtype=torch.float64 if dtype == "BF16" else torch.float32)
    with resident(MemoryStore(), stream="policy", on_device=kept) as publisher:
        submission = publisher.submit({"weight": on_device(weight)}, dtype=dtype)
        before = [stream.done for stream in Stream.made if stream is not current]
        current.run()
        assert [stream.done for stream in Stream.made if stream is not current] == before
        Stream.gate.set()
        submission.result(20)


def test_to_replace_a_version_does_not_wait_for_the_device(cuda: Device) -> None:
    """Though some tensors are the host's: their memory is free, whatever the device is at."""
    current, _ = cuda
    weight, host = torch.randn(SIZE).bfloat16(), torch.randn(7)
    with resident(MemoryStore(), stream="policy", on_device="baseline") as publisher:
        late = threading.Timer(10, Stream.gate.set)
        late.start()
        for _ in range(4):
            last = publisher.submit({"weight": on_device(weight), "host": host}, replace=True)
        assert not Stream.gate.is_set(), "the host has waited"
        late.cancel()
        current.run()
        Stream.gate.set()
        last.result(20)
