"""CUDA tensors are taken without the host's waiting, and the device's streams keep their order.

Without a GPU a stand-in for torch's streams and tensors shows what is asked of them
(`tests.support.cuda`).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pulse_rl import MemoryStore, Publisher, state_root, verify_stream
from pulse_rl import submit as device
from pulse_rl.state.tensors import DeviceTensor
from pulse_rl.submit import DeviceCopies, pinned
from tests.support.cuda import Stream, on_device, stand_in, step
from tests.support.publishers import staging

Device = tuple[Stream, list[int]]
SIZE, LARGE = 5000, 40_000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with stand_in(monkeypatch) as found:
        yield found


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", ["host", "device"])
def test_each_version_has_the_weights_between_two_steps(
    cuda: Device, given: torch.dtype, first: str
) -> None:
    current, _ = cuda
    weight = torch.randn(SIZE).to(given)
    copy = weight.clone()
    expected: list[str] = []
    store, before = MemoryStore(), 0
    with Publisher(store, stream="policy") as publisher:
        for _ in range(4):
            Stream.gate.clear()
            current.work.append(lambda: step(weight))
            step(copy)
            expected.append(
                state_root({"host": copy[:7].clone().bfloat16(), "weight": copy.bfloat16()})
            )
            tensors = {"host": copy[:7].clone(), "weight": on_device(weight)}
            submission = publisher.submit(tensors, dtype="BF16")
            assert sum(stream.done for stream in Stream.made) == before, "the host has waited"
            current.work.append(lambda: step(weight))
            step(copy)
            if first == "device":  # it comes to the next step before the host asks for the copy
                current.run()
            Stream.gate.set()
            assert submission.result(20).root == expected[-1]
            before = sum(stream.done for stream in Stream.made)
    assert [report.root for report in verify_stream(store, "policy")] == expected
    assert all(report.ok for report in verify_stream(store, "policy"))


def test_a_staged_copy_holds_up_nobody(cuda: Device, store: MemoryStore) -> None:
    """The trainer's next step waits for a copy within the device, and not for the one to the
    host."""
    current, _ = cuda
    weight = torch.randn(SIZE).bfloat16()
    expected = []
    with staging(store, stream="policy", copy_on_device=True) as publisher:
        for _ in range(4):
            Stream.gate.clear()
            current.work.append(lambda: step(weight))
            submission = publisher.submit({"weight": on_device(weight)})
            current.work.append(lambda: expected.append(state_root({"weight": weight})))
            current.work.append(lambda: step(weight))
            side = Stream.made[-1]
            current.run()
            assert side.done == 0, "a step was held up by a copy to the host"
            Stream.gate.set()
            assert submission.result(20).root == expected[-1]
    assert [report.root for report in verify_stream(store, "policy")] == expected


def test_without_room_on_the_device_a_copy_is_not_staged(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    current, _ = cuda
    weight = torch.randn(SIZE).bfloat16()
    expected = state_root({"weight": weight})
    with staging(MemoryStore(), stream="policy", copy_on_device=True) as publisher:
        monkeypatch.setattr(torch, "empty_like", full)
        submission = publisher.submit({"weight": on_device(weight)})
        current.work.append(lambda: step(weight))
        current.run()
        Stream.gate.set()
        assert submission.result(20).root == expected


def test_publish_waits_for_the_stream_of_its_caller(cuda: Device) -> None:
    """The threads that read the weights have streams of their own."""
    current, _ = cuda
    Stream.gate.set()
    weight = torch.randn(SIZE).bfloat16()
    after = weight.clone()
    step(after)
    with Publisher(MemoryStore(), stream="policy") as publisher:
        current.work.append(lambda: step(weight))
        assert publisher.publish({"weight": on_device(weight)}).root == state_root(
            {"weight": after}
        )


def test_page_locked_memory_is_used_again(cuda: Device) -> None:
    """One becomes the baseline, one is in flight, and one may wait."""
    _, locked = cuda
    weight = torch.randn(SIZE).bfloat16()
    with Publisher(MemoryStore(), stream="policy") as publisher:
        Stream.gate.set()
        for _ in range(6):
            step(weight)
            publisher.submit({"weight": on_device(weight)}).result(20)
    assert len(locked) == 2
    assert min(locked) >= 2 * SIZE


def test_a_version_that_is_replaced_leaves_its_memory_to_the_next(cuda: Device) -> None:
    """The device has not yet copied the one, and the next one is to be copied into the same
    memory."""
    current, locked = cuda
    weight = torch.randn(SIZE).bfloat16()
    store = MemoryStore()
    with Publisher(store, stream="policy") as publisher:
        for _ in range(6):
            current.work.append(lambda: step(weight))
            submission = publisher.submit({"weight": on_device(weight)}, replace=True)
        sides = [stream for stream in Stream.made if stream is not current]
        sides[-1].run()  # the device may do the work of its streams in any order that they allow
        for stream in sides:
            stream.run()
        expected = state_root({"weight": weight})
        Stream.gate.set()
        assert submission.result(20).root == expected
    assert len(locked) == 2, "one in flight, one that waits"


def test_memory_that_the_device_still_writes_into_is_kept(cuda: Device) -> None:
    """After an interrupt, or where a submission was replaced, nobody waits for the copy but its own
    end."""
    weight, array = torch.randn(SIZE).bfloat16(), np.empty(SIZE, np.uint16)
    copies = DeviceCopies()
    copies.start([(DeviceTensor(on_device(weight).view(torch.uint8), 2), array)])
    side = Stream.made[-1]
    Stream.gate.set()
    assert side.done == 0
    del copies
    gc.collect()
    assert side.done == len(side.work)
    assert array.tolist() == weight.view(torch.uint16).tolist()


def test_an_error_of_the_device_is_the_submission_s(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Stream) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    weight = torch.randn(SIZE).bfloat16()
    publisher = Publisher(MemoryStore(), stream="policy")
    with monkeypatch.context() as broken:
        broken.setattr(Stream, "synchronize", lost)
        with pytest.raises(RuntimeError, match="device-side assert"):
            publisher.submit({"weight": on_device(weight)}).result(20)
    Stream.gate.set()
    assert publisher.submit({"weight": on_device(weight)}).result(20).version == 0
    publisher.close()


def test_page_locked_memory_is_asked_for_in_pieces(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch rounds up to a power of two: 3 GiB in one would be 4."""
    _, locked = cuda
    monkeypatch.setattr(device, "_PIECE", 1024)
    sizes = [0, 400, 400, 400, 5000, 1, 64]
    arrays = pinned(sizes)
    assert [a.size for a in arrays] == sizes
    assert locked == [64 + 448 * 2, 64 + 448, 64 + 5056, 64 + 64 + 64]
    for k, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 or not array.size
        array[:] = k
    for k, array in enumerate(arrays):
        assert (array == k).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can lock pages for a device")
def test_without_page_locked_memory_it_is_ordinary() -> None:
    assert [a.size for a in pinned([3, 0, 100])] == [3, 0, 100]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
def test_a_step_never_waits_for_the_bus(cuda: Device, dtype: str) -> None:
    """Nor for what the host has to cast."""
    current, _ = cuda
    weight = torch.randn(LARGE, dtype=torch.float64 if dtype == "BF16" else torch.float32)
    with staging(MemoryStore(), stream="policy", copy_on_device=True) as publisher:
        submission = publisher.submit({"weight": on_device(weight)}, dtype=dtype)
        before = [stream.done for stream in Stream.made if stream is not current]
        current.run()
        assert [stream.done for stream in Stream.made if stream is not current] == before
        Stream.gate.set()
        submission.result(20)


def test_to_replace_a_version_does_not_wait_for_the_device(cuda: Device) -> None:
    current, _ = cuda
    weight = torch.randn(LARGE).bfloat16()
    with staging(MemoryStore(), stream="policy", copy_on_device=True) as publisher:
        late = threading.Timer(10, Stream.gate.set)
        late.start()
        for _ in range(4):
            last = publisher.submit({"weight": on_device(weight)}, replace=True)
        assert not Stream.gate.is_set(), "the host has waited"
        late.cancel()
        current.run()
        Stream.gate.set()
        last.result(20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("staged", [False, True])
def test_a_real_device_keeps_the_order(given: torch.dtype, *, staged: bool) -> None:
    """Long work before the copy, and updates in place right after it."""
    weight = torch.randn(1 << 24, device="cuda").to(given)
    busy = torch.randn(4096, 4096, device="cuda")
    expected = []
    store = MemoryStore()
    with staging(store, stream="policy", copy_on_device=staged) as publisher:
        for _ in range(5):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            step(weight)
            taken = weight.clone()
            submission = publisher.submit({"weight": weight}, dtype="BF16")
            step(weight)
            expected.append(state_root({"weight": taken.cpu().bfloat16()}))
            submission.result(60)
    assert torch.from_numpy(pinned([100])[0]).is_pinned()
    assert [report.root for report in verify_stream(store, "policy")] == expected
