"""Who waits for whom when CUDA tensors are submitted.

Without a GPU a stand-in for torch's streams and tensors shows what is asked of them
(`tests.support.cuda`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from pulse_rl import MemoryStore
from tests.support.cuda import Stream, on_device, stand_in
from tests.support.publishers import staging

Device = tuple[Stream, list[int]]
SIZE = 40_000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with stand_in(monkeypatch) as found:
        yield found


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
def test_a_step_never_waits_for_the_bus(cuda: Device, dtype: str) -> None:
    """Nor for what the host has to cast."""
    current, _ = cuda
    weight = torch.randn(SIZE, dtype=torch.float64 if dtype == "BF16" else torch.float32)
    with staging(MemoryStore(), stream="policy", copy_on_device=True) as publisher:
        submission = publisher.submit({"weight": on_device(weight)}, dtype=dtype)
        before = [stream.done for stream in Stream.made if stream is not current]
        current.run()
        assert [stream.done for stream in Stream.made if stream is not current] == before
        Stream.gate.set()
        submission.result(20)


def test_to_replace_a_version_does_not_wait_for_the_device(cuda: Device) -> None:
    current, _ = cuda
    weight = torch.randn(SIZE).bfloat16()
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
