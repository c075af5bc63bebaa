"""Changed elements of many tensors are written in groups, each by one transfer.

The kernel itself needs Triton (tests/trainers/test_scatter_kernel.py) or a GPU; what leads to it is
tested without.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl import State, Update, state_root
from pulse_rl.errors import InputError
from pulse_rl.frameworks import torch as integration
from pulse_rl.frameworks.torch import Scatter, Sent, apply_, by_indices, scatter
from pulse_rl.patch.apply import Piece, TensorChanges
from pulse_rl.state.tensors import DTYPES, TensorSpec
from pulse_rl.sync.update import TensorUpdate
from tests.support.cuda import Event, Stream, on_device, stand_in
from tests.support.interrupts import Boom, Steps
from tests.support.scatter import check, kernel_of_numpy
from tests.support.states import Rng, all_dtypes, mutated


@pytest.mark.parametrize(
    "how", [by_indices, kernel_of_numpy], ids=["tensor by tensor", "all at once"]
)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_group_is_written(width: int, how: Any) -> None:
    check(width, how)


def test_pieces_are_put_together() -> None:
    pieces = [Piece(np.array([0, 3], np.uint32), 100, np.array([7, 8], np.uint16))]
    pieces.append(Piece(np.array([5, 6], np.uint32), 0, np.array([1, 2], np.uint16)))
    changes = TensorChanges(pieces)
    assert changes.fits(104, 2)
    assert not changes.fits(103, 2)
    assert not changes.fits(104, 4)
    assert [part.indices.tolist() for part in changes.cut(1)] == [[5], [6], [100], [103]]
    assert [part.values.tolist() for part in changes.cut(2)] == [[1, 2], [7, 8]]
    for dtype in (np.int32, np.int64):
        indices, values = np.empty(4, dtype), np.empty(4, np.uint16)
        changes.write_into(indices, values)
        assert indices.tolist() == [5, 6, 100, 103]
        assert values.tolist() == [1, 2, 7, 8]
    assert not TensorChanges.at(np.array([-1, 2]), np.zeros(2, np.uint16)).fits(9, 2)


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Sent] = []
    monkeypatch.setattr(integration, "_GROUP_ELEMENTS", 100)
    monkeypatch.setattr(
        integration,
        "_launch_of",
        lambda device: lambda group: sent.append(group) or by_indices(group),
    )
    tensors = [torch.zeros(200, dtype=torch.int16) for _ in range(7)]
    counts = [40, 40, 40, 150, 1, 0, 49]
    scatter(
        Scatter(TensorChanges.at(np.arange(n, dtype=np.int64), np.full(n, k + 1, np.uint16)), flat)
        for k, (n, flat) in enumerate(zip(counts, tensors, strict=True))
    )
    assert [list(np.diff(group.firsts)) for group in sent] == [[40, 40], [40], [100], [50, 1, 49]]
    assert [int((flat == k + 1).sum()) for k, flat in enumerate(tensors)] == counts


# -- a stand-in for a GPU: what its stream is given runs when the host waits for an event, or when a
# test says so. How fast anything is, or what a real device does, is not tested here.


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, list[int]]]:
    """(its stream, the sizes of what was page-locked). Two threads fill buffers of 1 kB and groups
    of 100 changes."""

    def launch(sent: Sent) -> None:
        current.work.append(lambda: kernel_of_numpy(sent))

    with stand_in(monkeypatch) as (current, locked):
        Stream.gate.set()
        settings = {"_BUFFER_BYTES": 1 << 10, "_GROUP_ELEMENTS": 100, "_FILLERS": 2}
        calls = {"default_threads": lambda: 16, "_launch_of": lambda _: launch}
        for name, value in {**settings, **calls}.items():
            monkeypatch.setattr(integration, name, value)
        yield current, locked


def changes(old: State, new: State, *, full: bool) -> tuple[Update, list[Any]]:
    """An update, and the arrays that it refers to."""
    tensors, arrays = [], []
    for spec in new.specs:
        before, values = old.read(spec.name), new.read(spec.name).copy()
        indices = None if full else np.flatnonzero(before != values)
        if indices is not None:
            values = values[indices]
        tensors.append(TensorUpdate(spec, indices, values))
        arrays += [values] if indices is None else [values, indices]
    return Update(1, None if full else 0, "", tuple(tensors), {}, {}, 0, 0.0), arrays


def in_device_memory(state: State) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model of which one tensor is strided and one a lazy conjugate; and its plain memory."""
    memory = integration.to_torch(state.copy())
    memory["BF16.values"] = memory["BF16.values"].repeat_interleave(2, dim=1)[:, ::2]
    memory["C64.values"] = memory["C64.values"].conj().clone().conj()
    assert not memory["BF16.values"].is_contiguous()
    assert memory["C64.values"].is_conj()
    return {name: on_device(tensor) for name, tensor in memory.items()}, memory


@pytest.mark.parametrize("full", [True, False])
def test_a_buffer_is_filled_again_when_the_device_has_copied_it(
    rng: Rng, device: tuple[Stream, list[int]], monkeypatch: pytest.MonkeyPatch, *, full: bool
) -> None:
    """And the host waits for nothing else: once a buffer, whatever the number of tensors."""
    current, locked = device
    asked, recorded = [], []
    wait, record = Event.synchronize, Event.record
    monkeypatch.setattr(Event, "synchronize", lambda event: (asked.append(1), wait(event)))
    monkeypatch.setattr(Event, "record", lambda *of: (recorded.append(1), record(*of)))
    monkeypatch.setattr(Stream, "synchronize", None)
    tensors = all_dtypes(rng, 2000)
    old, new = State.of(tensors), State.of(mutated(rng, tensors, 0.3))
    model, memory = in_device_memory(old)
    update, arrays = changes(old, new, full=full)
    versions = {name: tensor._version for name, tensor in model.items()}
    apply_(model, update)
    for array in arrays:  # nobody has to keep what the device has not copied yet
        array[...] = 0
    assert current.done < len(current.work)
    assert len(asked) == len(recorded) - len(locked) > 50
    transfers = 3 if full else 6  # one for each width, and for each tensor that is not plain
    assert len(locked) <= 4 * transfers
    assert max(locked) <= 2048
    current.run()
    assert state_root(memory) == state_root(new)
    moved = {name for name, tensor in model.items() if tensor._version > versions[name]}
    assert moved == {t.spec.name for t in update.tensors if t.elements}, "autograd knows"


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False])
def test_an_interrupt_leaves_old_and_new_bits(
    rng: Rng, device: tuple[Stream, list[int]], *, full: bool
) -> None:
    """The device goes on with what it was given, from memory that nobody has used again."""
    current, _ = device
    tensors = all_dtypes(rng, 120)
    old, new = State.of(tensors), State.of(mutated(rng, tensors, 0.3))
    update, _ = changes(old, new, full=full)
    number, step, interrupted = 0, 1999, True
    while interrupted:
        number, interrupted = number + step, False
        model, memory = in_device_memory(old)
        try:
            Steps(number).run(partial(apply_, model, update))
        except Boom:
            interrupted = True
        current.run()
        found = State.of(memory)
        for spec in new.specs:
            bits = found.read(spec.name)
            before, after = old.read(spec.name), new.read(spec.name)
            assert ((bits == before) | (bits == after)).all(), (spec.name, number)
        apply_(model, update)
        current.run()
        assert state_root(memory) == state_root(new), f"again, after an interrupt at {number}"
    assert number > 3 * step


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_way_of_writing_is_tried_out(dtype: torch.dtype) -> None:
    def half(sent: Sent) -> None:
        kernel_of_numpy(sent._replace(programs=sent.programs[::2]))

    for how in (by_indices, kernel_of_numpy):
        integration._try_out(how, dtype, torch.device("cpu"))
    for wrong in (half, lambda sent: None):
        with pytest.raises(AssertionError, match="something else"):
            integration._try_out(wrong, dtype, torch.device("cpu"))


def test_without_triton_tensors_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller of `apply_` is told where. Nor is a kernel used that does not do what it
    should."""
    monkeypatch.setattr(integration, "_is_on_cuda", lambda target: True)
    monkeypatch.setattr(integration, "_launch_of", lambda device: integration._tried_out(device))
    kernel = types.ModuleType("kernel")
    model = {"w": torch.zeros(10, dtype=torch.bfloat16)}
    changed = TensorUpdate(
        TensorSpec("w", DTYPES["BF16"], (10,)), np.array([3]), np.array([5], np.uint16)
    )
    for by_kernel, said in (
        (None, "ImportError"),
        (lambda sent: None, "AssertionError: the kernel wrote something"),
    ):
        if by_kernel:
            kernel.by_kernel = by_kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pulse_rl.frameworks.scatter_kernel", kernel)
        model["w"].zero_()
        with pytest.warns(UserWarning, match=f"tensor by tensor on cpu: {said}") as told:
            apply_(model, Update(1, 0, "", (changed,), {}, {}, 0, 0.0))
        assert told[0].filename == __file__
        assert model["w"].view(torch.int16).tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0]
    kernel.by_kernel = kernel_of_numpy  # type: ignore[attr-defined]
    assert integration._tried_out(torch.device("cpu")) is kernel_of_numpy


def test_a_device_without_memory_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    kernel = types.ModuleType("kernel")
    kernel.by_kernel = kernel_of_numpy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pulse_rl.frameworks.scatter_kernel", kernel)
    monkeypatch.setattr(integration, "_LAUNCHES", {})
    device = torch.device("cuda", 0)
    with monkeypatch.context() as crowded:
        crowded.setattr(integration, "_try_out", full)
        assert integration._launch_of(device) is by_indices
    monkeypatch.setattr(integration, "_try_out", lambda *_: None)
    assert integration._launch_of(device) is kernel_of_numpy
    monkeypatch.setattr(integration, "_try_out", full)
    assert integration._launch_of(device) is kernel_of_numpy, "tried out once"


@pytest.mark.parametrize("on_cuda", [False, True])
def test_an_update_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, *, on_cuda: bool
) -> None:
    monkeypatch.setattr(integration, "_is_on_cuda", lambda target: on_cuda)
    spec = TensorSpec("w", DTYPES["BF16"], (10,))
    model = {"v": torch.zeros(10, dtype=torch.bfloat16), "w": torch.zeros(10, dtype=torch.bfloat16)}
    good = TensorUpdate(
        TensorSpec("v", DTYPES["BF16"], (10,)), np.array([1]), np.array([5], np.uint16)
    )
    cases: list[tuple[Any, Any]] = [
        ([0, 10], np.zeros(2, np.uint16)),
        ([-1, 3], np.zeros(2, np.uint16)),
        ([1 << 40], np.zeros(1, np.uint16)),
        ([1, 2], np.array([70000, 1], np.uint32)),
        ([1, 2], np.array([1.5, 2.5], np.float32)),
        ([1, 2], np.array([7], np.uint16)),
        ([1.5, 2.5], np.array([7, 8], np.uint16)),
        ([1], np.array([7, 8], np.uint16)),
        (None, np.zeros(9, np.uint16)),
    ]
    for indices, values in cases:
        changed = TensorUpdate(spec, None if indices is None else np.array(indices), values)
        with pytest.raises(InputError, match="'w' does not fit its 10 elements"):
            apply_(model, Update(1, 0, "", (good, changed), {}, {}, 0, 0.0))
    assert not any(tensor.any() for tensor in model.values())
