"""A publisher that keeps the last version on the devices sends only what differs over the bus, and
the same versions.

Without a GPU a stand-in for torch's streams and tensors shows what is asked of them
(`tests.support.cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl import MemoryStore, Publisher, Subscriber, state_root, verify_stream
from pulse_rl.errors import InputError, StoreUnavailable
from pulse_rl.events import Hint
from pulse_rl.state.snapshot import await_devices, copied_within_devices
from pulse_rl.state.tensors import State, stored_tensor
from pulse_rl.sync import device_diff
from pulse_rl.sync.device_diff import ChangedTensor, DeviceDiff, Difference
from pulse_rl.sync.layout import whole_layout
from pulse_rl.sync.pending import Baseline
from pulse_rl.sync.request import LocalState
from tests.support.cuda import Stream, on_device, stand_in, step
from tests.support.publishers import resident
from tests.support.stores import FaultyStore

Device = tuple[Stream, list[int]]
SIZE = 40_000
PIECE = 1024


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(device_diff, "_PIECE_ELEMENTS", PIECE)
    with stand_in(monkeypatch) as found:
        yield found


def cast(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16() if weight.dtype == torch.float32 else weight


@pytest.mark.slow
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", ["submit", "publish", "both"])
def test_the_versions_are_the_same_and_little_crosses_the_bus(
    cuda: Device, given: torch.dtype, how: str
) -> None:
    current, locked = cuda
    weight, host = torch.randn(SIZE).to(given), torch.randn(7)
    expected: list[str] = []
    store = MemoryStore()
    with resident(store, stream="policy", on_device="baseline") as publisher:
        for number in range(6):
            Stream.gate.clear()
            step(weight, first=number)
            host += 1
            expected.append(state_root({"host": host.bfloat16(), "weight": cast(weight)}))
            tensors = {"host": host, "weight": on_device(weight)}
            if how == "publish" or (how == "both" and number % 2):
                Stream.gate.set()
                assert publisher.publish(tensors, dtype="BF16").root == expected[-1]
            else:
                submission = publisher.submit(tensors, dtype="BF16")
                current.work.append(lambda number=number: step(weight, first=number + 9))  # type: ignore[misc]
                host += 1
                sides = [stream for stream in Stream.made if stream is not current]
                before = [stream.done for stream in sides]
                current.run()
                assert [stream.done for stream in sides] == before, "a step was held up by the bus"
                Stream.gate.set()
                assert submission.result(20).root == expected[-1]
            if not number:
                first, locked[:] = sum(locked), []
    assert first >= 2 * SIZE
    assert sum(locked) < 5 * first / 4, "five versions"
    assert [report.root for report in verify_stream(store, "policy")] == expected


def test_what_changes_often_crosses_as_it_is(cuda: Device) -> None:
    Stream.gate.set()
    weight = torch.randn(SIZE).bfloat16()
    with resident(MemoryStore(), stream="policy", on_device="baseline") as publisher:
        for number in range(4):
            step(weight[: SIZE // 2], every=1 + number % 3)
            assert publisher.publish({"weight": on_device(weight)}).root == state_root(
                {"weight": weight}
            )


def test_every_bit_counts(cuda: Device) -> None:
    """Zeros of both signs are equal numbers, a NaN equals none; as bits it is the other way
    round."""
    Stream.gate.set()
    weight = torch.zeros(SIZE).bfloat16()
    weight[::3] = float("nan")
    with resident(MemoryStore(), stream="policy", on_device="baseline") as publisher:
        publisher.publish({"weight": on_device(weight)})
        weight[1] = -0.0
        weight.view(torch.int16)[3] ^= 1
        published = publisher.publish({"weight": on_device(weight)})
    assert published.changed == 2
    assert published.root == state_root({"weight": weight})


def test_all_widths_and_tied_tensors(cuda: Device) -> None:
    Stream.gate.set()
    generator = torch.Generator().manual_seed(3)
    plain = {
        "bytes": torch.randint(0, 255, (3000,), dtype=torch.uint8, generator=generator),
        "count": torch.zeros((), dtype=torch.int64),
        "empty": torch.zeros(0, dtype=torch.bfloat16),
        "wide": torch.randn(5000, dtype=torch.float64, generator=generator),
        "weight": torch.randn(5000, generator=generator),
    }
    store = MemoryStore()
    with resident(store, stream="policy", on_device="baseline") as publisher:
        for number in range(4):
            plain["count"] += 1
            plain["bytes"][number::100] += 1
            plain["wide"][number] += 1
            plain["weight"][number::99] += 1
            tensors: dict[str, Any] = {name: on_device(tensor) for name, tensor in plain.items()}
            names = (
                ("weight", "head") if number % 2 else ("head", "weight")
            )  # the first one stores it
            tied = tensors.pop("weight")
            tensors = {names[0]: tied, names[1]: tied} | tensors
            published = publisher.publish(tensors, dtype="BF16")
            assert number == 0 or published.changed < 200
    with Subscriber(store, stream="policy") as worker:
        worker.sync()
        assert worker.state is not None
        expected = {"head": plain["weight"].bfloat16()} | {
            n: t for n, t in plain.items() if n != "weight"
        }
        expected["wide"] = plain["wide"].float().bfloat16()
        assert worker.root == state_root(expected)
        assert worker.state.aliases == {"weight": "head"}


def test_other_tensors_are_a_new_beginning(cuda: Device) -> None:
    Stream.gate.set()
    one, two = torch.randn(SIZE).bfloat16(), torch.randn(SIZE).bfloat16()
    with resident(MemoryStore(), stream="policy", on_device="baseline") as publisher:
        for state in (
            {"one": one},
            {"one": one, "two": two},
            {"two": two},
            {"two": two.view(2, -1)},
            {"two": two},
        ):
            published = publisher.publish(
                {name: on_device(tensor) for name, tensor in state.items()}
            )
            assert published.root == state_root(state)
        plain = publisher.publish({"two": two})  # not on a device at all
        assert plain.changed == 0
        step(two)
        assert publisher.publish({"two": on_device(two)}).root == state_root({"two": two})


def test_a_tensor_moves_to_a_device_and_back(cuda: Device) -> None:
    Stream.gate.set()
    one, two = torch.randn(SIZE).bfloat16(), torch.randn(SIZE).bfloat16()
    with resident(MemoryStore(), stream="policy", on_device="baseline") as publisher:
        for number in range(6):
            step(one, first=number)
            step(two, first=number)
            there = [on_device(two), two, two, on_device(two), on_device(two), two][number]
            published = publisher.publish({"one": on_device(one), "two": there})
            assert published.root == state_root({"one": one, "two": two})


def test_another_version_than_the_hosts_is_not_compared_with(cuda: Device) -> None:
    """Whatever led to it: the differences would be those to other bits."""
    Stream.gate.set()
    weight = torch.randn(SIZE).bfloat16()
    devices, hosts = DeviceDiff(), []
    for number in range(2):
        step(weight, first=number)
        source = copied_within_devices(State.of({"weight": on_device(weight)}), None)
        assert source is not None
        await_devices(source)
        state = State.of({"weight": weight}).copy()
        layout = whole_layout(state.specs, {})
        host = Baseline(number, state_root(state), layout, layout.segments(0), [], state, {})
        hosts.append((LocalState(source), host))
    (first, first_host), (second, second_host) = hosts
    devices.follow(devices.scan(first, first_host).resident, first_host)
    for local, host in (
        (second, first_host),
        (second, second_host),
        (first, second_host),
        (first, first_host),
    ):
        seen = devices.scan(local, host)
        assert isinstance(stored_tensor(seen.state, "weight"), ChangedTensor) == (
            host is first_host
        )
        assert seen.state.read("weight").tolist() == local.source.read("weight").tolist()
    devices.forget()
    assert not isinstance(
        stored_tensor(devices.scan(first, first_host).state, "weight"), ChangedTensor
    )


@pytest.mark.parametrize("after", [False, True])
def test_what_is_not_committed_is_not_the_baseline(cuda: Device, *, after: bool) -> None:
    """Whatever call of the store fails, and whether or not it took effect."""
    Stream.gate.set()
    weight, inner = torch.randn(SIZE).bfloat16(), MemoryStore()
    store = FaultyStore(inner)
    failed = 0
    with resident(store, stream="policy", on_device="baseline") as publisher:
        publisher.publish({"weight": on_device(weight)})
        for lost in range(8):
            step(weight, first=lost)
            store.fail(lost, after=after)
            try:
                publisher.submit({"weight": on_device(weight)}).result(20)
            except StoreUnavailable:
                failed += 1
            store.heal()
            step(weight, first=lost + 7)
            published = publisher.publish({"weight": on_device(weight)})
            assert published.root == state_root({"weight": weight})
    assert failed >= 2
    reports = list(verify_stream(inner, "policy"))
    assert all(report.ok for report in reports)
    assert reports[-1].root == published.root


def test_publishers_take_over_from_each_other(cuda: Device) -> None:
    """Each finds that the head is not what it holds on the device."""
    Stream.gate.set()
    weight, store = torch.randn(SIZE).bfloat16(), MemoryStore()
    for number in range(4):
        publisher = resident(store, stream="policy", on_device="baseline")
        for again in range(3):
            step(weight, first=number + 5 * again)
            published = publisher.publish({"weight": on_device(weight)})
            assert published.root == state_root({"weight": weight})
            assert published.changed or not number
        publisher.close()
    assert len(list(verify_stream(store, "policy"))) == 12


@pytest.mark.parametrize("first", [2, 3])
def test_without_room_on_the_device_all_crosses_the_bus(
    cuda: Device, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    Stream.gate.set()
    weight = torch.randn(SIZE).bfloat16()
    events: list[object] = []
    with resident(
        MemoryStore(), stream="policy", on_device="baseline", on_event=events.append
    ) as publisher:
        for number in range(8):
            step(weight, first=number)
            expected = state_root({"weight": weight})
            with monkeypatch.context() as crowded:
                if number in (first if first == 2 else 5, 5):
                    crowded.setattr(torch.Tensor, "new_empty", full)
                if number in (3, 7):
                    crowded.setattr(torch.Tensor, "nonzero", full)
                how = (
                    publisher.publish
                    if number % 2
                    else lambda tensors: publisher.submit(tensors).result(20)
                )
                assert how({"weight": on_device(weight)}).root == expected
    notices = [event for event in events if isinstance(event, Hint)]
    assert [(notice.kind, notice.version) for notice in notices] == [("device_memory", first)]


def test_submissions_that_are_replaced(cuda: Device) -> None:
    current, _ = cuda
    weight = torch.randn(SIZE).bfloat16()
    store = MemoryStore()
    with resident(store, stream="policy", on_device="baseline") as publisher:
        for number in range(6):
            current.work.append(lambda number=number: step(weight, first=number))  # type: ignore[misc]
            submission = publisher.submit({"weight": on_device(weight)}, replace=True)
        current.run()
        expected = state_root({"weight": weight})
        Stream.gate.set()
        assert submission.result(20).root == expected
        step(weight)
        assert publisher.publish({"weight": on_device(weight)}).root == state_root(
            {"weight": weight}
        )
    assert all(report.ok for report in verify_stream(store, "policy"))


@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_any_codec(cuda: Device, codec: str) -> None:
    Stream.gate.set()
    weight, store = torch.randn(SIZE).bfloat16(), MemoryStore()
    with resident(
        store, stream="policy", codec=codec, folds=(2,), on_device="baseline"
    ) as publisher:
        for number in range(5):
            step(weight, every=(60, 60, 1, 60, 60)[number], first=number % 2)
            published = publisher.submit({"weight": on_device(weight)}).result(20)
            assert published.root == state_root({"weight": weight})
        publisher.wait()
    assert all(report.ok for report in verify_stream(store, "policy"))


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(InputError, match="on_device must be"):
        Publisher(MemoryStore(), stream="policy").publish({}, on_device="yes")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_tensor_reads_as_the_new_one(data: st.DataObject) -> None:
    size, piece = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 64))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    before = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    after = before.copy()
    changed = rng.random(size) < rng.choice([0, 0.02, 0.3, 1])
    after[changed] ^= 1
    differences = {}
    for k, start in enumerate(range(0, size, piece)):
        values = after[start : start + piece]
        places = np.flatnonzero(values != before[start : start + piece])
        if len(places) > piece // 2:
            differences[k] = Difference(None, values.copy())
        elif len(places):
            differences[k] = Difference(places.astype(np.uint32), values[places])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_diff, "_PIECE_ELEMENTS", piece)
        tensor = ChangedTensor(before, differences)
        for _ in range(10):
            start = data.draw(st.integers(0, size))
            stop = data.draw(st.integers(start, size))
            found = tensor.read(start, stop)
            assert found.tolist() == after[start:stop].tolist()
            assert found.flags.owndata or np.array_equal(before[start:stop], after[start:stop])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_a_real_device_finds_the_differences(given: torch.dtype) -> None:
    """Long work before the copy, and updates in place right after it."""
    weight = torch.randn(1 << 25, device="cuda").to(given)
    weight[::7] = float("nan")
    busy = torch.randn(4096, 4096, device="cuda")
    expected, store = [], MemoryStore()
    with resident(store, stream="policy", on_device="baseline") as publisher:
        for number in range(5):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            step(weight, first=number)
            taken = weight.clone()
            submission = publisher.submit({"weight": weight}, dtype="BF16")
            step(weight, first=number + 9)
            expected.append(state_root({"weight": taken.bfloat16().cpu()}))
            assert submission.result(60).root == expected[-1]
    assert [report.root for report in verify_stream(store, "policy")] == expected
