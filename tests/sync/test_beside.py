"""Several streams of one state: each as a publisher of its own makes it, from one pass, whichever
of them fails."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl import MemoryStore, Publisher, Subscriber, checkout, verify_stream
from pulse_rl.errors import InputError, PulseError, StoreUnavailable
from pulse_rl.events import CallFailed, Event, Published
from pulse_rl.store import Data
from tests.support.states import Rng
from tests.support.stores import FaultyStore

FORMATS = ["fp8_block", "mxfp8", "mxfp4", "nvfp4"]
FP8 = {"policy-fp8": "fp8_block"}
CONFIG = {"config.json": b"{}"}


def masters(rng: Rng, rows: int = 160) -> dict[str, torch.Tensor]:
    """FP32 masters: matrices that are quantised, one that is tied to another, and what stays as it
    is."""
    given = {f"layers.{k}.up_proj.weight": rng.normal(0, 0.02, (rows, 256)) for k in range(3)}
    given |= {f"layers.{k}.norm.weight": np.ones(256) for k in range(3)}
    state = {name: torch.from_numpy(array.astype(np.float32)) for name, array in given.items()}
    embedding = torch.from_numpy(rng.normal(0, 0.02, (96, 256)).astype(np.float32))
    return state | {"embed_tokens.weight": embedding, "lm_head.weight": embedding}


def step(state: dict[str, torch.Tensor], rng: Rng) -> None:
    for tensor in state.values():
        tensor += torch.from_numpy(rng.normal(0, 3e-4, tuple(tensor.shape)).astype(np.float32))


def halved(name: str, weight: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    return {f"{name}_int": (weight * 100).astype(np.int8)} if weight.ndim == 2 else None


def newest(store: Any, stream: str) -> tuple[str, dict[str, Any], dict[str, bytes]]:
    with Subscriber(store, stream=stream) as worker:
        worker.sync()
        assert worker.root is not None
        return worker.root, worker.manifest.metadata, worker.files()


@pytest.mark.parametrize("submitted", [False, True])
def test_versions_are_those_of_two_publishers(submitted: bool, rng: Rng) -> None:
    """Root for root and byte for byte, in each format, and with the same metadata."""
    store, alone, state = MemoryStore(), MemoryStore(), masters(rng)
    given: dict[str, Any] = {"dtype": "BF16", "files": CONFIG}
    beside = {name: name for name in FORMATS}
    with Publisher(store, stream="policy") as publisher:
        others = {name: Publisher(alone, stream=name) for name in ["policy", *FORMATS]}
        for number in range(3):
            metadata = {"step": 10 * number}
            own = {
                name: other.publish(
                    state, metadata=metadata, quantise=None if name == "policy" else name, **given
                )
                for name, other in others.items()
            }
            if submitted:
                submission = publisher.submit(state, metadata=metadata, beside=beside, **given)
                kept = {name: tensor.clone() for name, tensor in state.items()}
                for tensor in state.values():
                    tensor.zero_()
                done = submission.result()
                for name, tensor in state.items():
                    tensor.copy_(kept[name])
            else:
                done = publisher.publish(state, metadata=metadata, beside=beside, **given)
            assert (done.stream, [*done.beside]) == ("policy", FORMATS)
            for name, each in {"policy": done, **done.beside}.items():
                assert (each.root, each.version, each.changed) == (
                    own[name].root,
                    number,
                    own[name].changed,
                )
                assert (each.patch_bytes, each.anchor_bytes) == (
                    own[name].patch_bytes,
                    own[name].anchor_bytes,
                )
                assert newest(store, name) == newest(alone, name)
                assert each.metadata == metadata
            step(state, rng)
    found = checkout(store, "mxfp4", metadata={"step": 10})
    assert found.manifest.version == 1


def test_any_of_the_streams_may_be_the_quantised_one(rng: Rng) -> None:
    """A function and a config quantise as names do; BF16 is beside FP8 as well as FP8 beside
    BF16."""
    state, stores = masters(rng), (MemoryStore(), MemoryStore())
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with Publisher(stores[0], stream="a") as publisher:
        others = {"b": halved, "c": config, "d": None}
        done = publisher.publish(state, quantise="mxfp4", dtype="BF16", beside=others)
    for name, how in {"a": "mxfp4", "b": halved, "c": config, "d": None}.items():
        with Publisher(stores[1], stream=name) as other:
            root = other.publish(state, quantise=how, dtype="BF16").root
        assert (done if name == "a" else done.beside[name]).root == root


@pytest.mark.parametrize("which", ["policy", "policy-fp8"])
@pytest.mark.parametrize("reply_lost", [False, True])
def test_one_stream_fails_at_each_call_and_the_same_call_again_mends_it(
    reply_lost: bool, which: str, rng: Rng
) -> None:
    """The other one has its version; nobody ever gets another weight; a step pairs versions of
    equal bits."""
    first, last = masters(rng), masters(rng)
    with Publisher(MemoryStore(), stream="policy") as publisher:
        done = publisher.publish(last, dtype="BF16", beside=FP8)
        expected = {"policy": done.root, "policy-fp8": done.beside["policy-fp8"].root}
    other = ({*expected} - {which}).pop()
    for at in itertools.count():
        store = OneStreamFails(MemoryStore(), which)
        events: list[Event] = []
        with Publisher(store, stream="policy", on_event=events.append) as publisher:
            publisher.publish(first, dtype="BF16", metadata={"step": 1}, beside=FP8)
            store.fail(at, after=reply_lost)
            error = failure(publisher, last)
            failed = store.fired
            store.heal()
            if error:
                assert f"version 1 of '{other}'" in "".join(error.__notes__)
                assert [(e.stream, e.kind) for e in events if isinstance(e, CallFailed)] == [
                    (which, error.kind)
                ]
                assert newest(store, other)[:2] == (expected[other], {"step": 2})
            done = publisher.publish(last, dtype="BF16", metadata={"step": 2}, beside=FP8)
            assert (done if other == "policy" else done.beside[other]).changed == 0
        for name, root in expected.items():
            assert newest(store, name)[:2] == (root, {"step": 2})
            assert checkout(store, name, metadata={"step": 2}).manifest.root == root
            assert [
                report.problems for report in verify_stream(store, name) if report.problems
            ] == []
        if not failed:
            assert at > 3, f"only {at} store calls were tried"
            return


def failure(publisher: Publisher, state: Any) -> StoreUnavailable | None:
    try:
        publisher.publish(state, dtype="BF16", metadata={"step": 2}, beside=FP8)
    except StoreUnavailable as error:
        return error
    return None


class OneStreamFails(FaultyStore):
    """Only calls on one stream are counted, and fail."""

    def __init__(self, inner: Any, stream: str) -> None:
        super().__init__(inner)
        self._stream = f"{stream}/"

    def _call(self, call: str, name: str, act: Any) -> Any:
        return super()._call(call, name, act) if name.startswith(self._stream) else act()


def test_both_fail_and_nothing_is_lost(rng: Rng) -> None:
    state = masters(rng)
    store = Away()
    with Publisher(store, stream="policy") as publisher:
        publisher.publish(state, beside=FP8)
        step(state, rng)
        store.away = True
        with pytest.raises(StoreUnavailable) as caught:
            publisher.publish(state, beside=FP8)
        assert "policy/" in str(caught.value)
        store.away = False
        done = publisher.publish(state, beside=FP8)
    assert (done.version, done.beside["policy-fp8"].version) == (1, 1)


class Away(MemoryStore):
    away = False

    def put(self, name: str, data: Data) -> None:
        if self.away:
            raise StoreUnavailable(f"{name}: away")
        super().put(name, data)


def test_what_cannot_be_published_leaves_no_version_in_any_stream(rng: Rng) -> None:
    store, state = MemoryStore(), masters(rng)
    odd = {"a.weight": np.zeros((3, 40), np.float32)}
    with Publisher(store, stream="policy") as publisher:
        with pytest.raises(InputError, match="groups of 32"):
            publisher.publish(odd, beside={"policy-fp4": "mxfp4"})
        with pytest.raises(InputError, match="groups of 32"):
            publisher.submit(odd, beside={"policy-fp4": "mxfp4"}).result()
        with pytest.raises(InputError, match="after="):
            publisher.publish(state, beside=FP8, after=-1)
        with pytest.raises(InputError, match="on_device"):
            publisher.submit(state, beside=FP8, on_device="baseline")
        wrong: list[Any] = ["policy-fp8", {"policy": None}, {"b": "fp9"}, {"b": 8}, {"a/b": None}]
        for beside in wrong:
            with pytest.raises(InputError):
                publisher.publish(state, beside=beside)
    assert not [
        found
        for stream in ("policy", "policy-fp4", "policy-fp8", "b")
        for found in store.list(stream)
    ]


def test_a_version_that_is_replaced_is_in_no_stream(rng: Rng) -> None:
    state, store = masters(rng), Gated()
    with Publisher(store, stream="policy") as publisher:
        publisher.publish(state, beside=FP8)
        store.gate.clear()
        submissions = []
        for _ in range(3):
            step(state, rng)
            submissions.append(publisher.submit(state, replace=True, beside=FP8))
            store.waiting.wait(20)
        store.gate.set()
        with pytest.raises(CancelledError):
            submissions[1].result()
        done = submissions[2].result()
    assert (done.version, done.beside["policy-fp8"].version) == (2, 2)


class Gated(MemoryStore):
    """Payloads wait."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.gate.set()

    def put(self, name: str, data: Data) -> None:
        if not self.gate.is_set():
            self.waiting.set()
        assert self.gate.wait(20)
        super().put(name, data)


def test_folders_and_folds_and_what_is_kept_are_those_of_each_stream(
    tmp_path: Path, rng: Rng
) -> None:
    """A publisher that starts again with the folder fetches no state; background work is done for
    all streams."""
    store, state, events = MemoryStore(), masters(rng), list[Event]()
    settings: dict[str, Any] = {"baseline": tmp_path / "kept", "folds": [2]}

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, Published) and event.stream == "policy":
            head = publisher.head()
            assert head is not None
            assert head.version == event.version

    for _ in range(2):
        with Publisher(store, stream="policy", on_event=listen, **settings) as publisher:
            for _ in range(3):
                publisher.publish(state, dtype="BF16", beside=FP8)
                step(state, rng)
            publisher.wait()
    assert Counter(event.stream for event in events if isinstance(event, Published)) == {
        "policy": 6,
        "policy-fp8": 6,
    }
    restored = {
        (event.stream, event.how) for event in events if type(event).__name__ == "BaselineRestored"
    }
    assert restored == {("policy", "kept"), ("policy-fp8", "kept")}
    assert {event.stream for event in events if type(event).__name__ == "Folded"} == {
        "policy",
        "policy-fp8",
    }


LOCK = threading.Lock()


class Counted(torch.Tensor):
    """A tensor that says it is on a device. ``copied`` bytes came from there, of which the host has
    ``held`` at once at the ``most``."""

    copied = held = most = 0
    lost = False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("mps")

    @staticmethod
    def forget(nbytes: int) -> None:
        with LOCK:
            Counted.held -= nbytes
            Counted.most = max(Counted.most, Counted.held)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            if Counted.lost:
                raise RuntimeError("device lost")
            copy = args[0].as_subclass(torch.Tensor).clone()
            Counted.copied += copy.nbytes
            Counted.forget(-copy.nbytes)
            weakref.finalize(copy, Counted.forget, copy.nbytes)
            return copy
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(state: dict[str, torch.Tensor]) -> tuple[dict[str, Any], int]:
    """The same memory as tensors of a device, and its bytes."""
    given = {name: tensor.as_subclass(Counted) for name, tensor in state.items()}
    given["lm_head.weight"] = given["embed_tokens.weight"]
    return given, sum(tensor.nbytes for name, tensor in state.items() if name != "lm_head.weight")


@pytest.mark.parametrize("rows", [1024, pytest.param(17_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", FORMATS)
def test_each_tensor_of_a_device_is_read_once(
    how: str, rows: int, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is memory for two large ones, too, and one stream waits for the other."""
    state = masters(rng, rows)
    given, nbytes = on_device(state)
    largest = max(tensor.nbytes for tensor in state.values())
    threads = 1 if rows > 1024 else None
    if threads:
        monkeypatch.setattr("pulse_rl.state.read_once._EACH", 0)
    with Publisher(MemoryStore(), stream="a", threads=threads) as publisher:
        for _ in range(3):
            step(state, rng)
            Counted.copied = Counted.most = 0
            done = publisher.publish(given, dtype="BF16", beside={"b": how})
            assert Counted.copied == nbytes
            assert not threads or Counted.most < 2.1 * largest
        with Publisher(MemoryStore(), stream="b") as alone:
            assert alone.publish(given, quantise=how, dtype="BF16").root == done.beside["b"].root


def test_a_function_may_look_at_all_weights_first(
    rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory for two of them, while no other stream goes on."""
    monkeypatch.setattr("pulse_rl.state.read_once._EACH", 0)
    monkeypatch.setattr("pulse_rl.state.read_once._PATIENCE_SECONDS", 1e9)
    state = masters(rng)
    with Publisher(MemoryStore(), stream="a") as publisher:
        done = publisher.publish(on_device(state)[0], beside={"b": halved})
    with Publisher(MemoryStore(), stream="b") as alone:
        assert alone.publish(state, quantise=halved).root == done.beside["b"].root


def test_a_stream_whose_store_hangs_does_not_hold_up_the_other(
    rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_rl.state.read_once._EACH", 0)
    monkeypatch.setattr("pulse_rl.state.read_once._PATIENCE_SECONDS", 0.1)
    committed = threading.Event()

    class Held(MemoryStore):
        def list(self, folder: str, start_after: str | None = None) -> Any:
            if folder.startswith("b/"):
                assert committed.wait(20)
            return super().list(folder, start_after)

    def listen(event: Event) -> None:
        if isinstance(event, Published) and event.stream == "a":
            committed.set()

    with Publisher(Held(), stream="a", on_event=listen) as publisher:
        assert (
            publisher.publish(on_device(masters(rng))[0], beside={"b": "fp8_block"})
            .beside["b"]
            .version
            == 0
        )


def test_a_device_that_is_lost_leaves_no_version(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "lost", True)
    store = MemoryStore()
    with Publisher(store, stream="a") as publisher:
        with pytest.raises(RuntimeError, match="device lost"):
            publisher.publish(on_device(masters(rng))[0], beside={"b": "mxfp4"})
        assert publisher.head() is None
    with pytest.raises(PulseError):
        checkout(store, "b")
