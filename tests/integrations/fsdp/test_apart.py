"""What one rank alone meets must neither part the ranks unnoticed nor make them wait, behind their
training too: there a copy of each rank's part is taken at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore, MemoryStore, Publisher
from pulse_rl.errors import InputError, RankLost, StoreUnavailable, StreamError, UnsupportedTensor
from pulse_rl.events import BaselineRestored, CallFailed, Event
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.store import Data
from tests.support.sharded import followed, gathered, policy, require_equal, step
from tests.support.states import present
from tests.support.stores import FaultyStore
from tests.support.trainers import Trainer, all_pass, together

pytestmark = pytest.mark.slow


class Gated(LocalStore):
    """Payloads wait for the gate, once it is shut."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        super().__init__(trainer.folder / f"store-of-{name}")
        self.gate = threading.Event()
        self.gate.set()

    def put(self, name: str, data: Data) -> None:
        assert self.gate.wait(20)
        super().put(name, data)


def model_of(trainer: Trainer) -> nn.Module:
    model = policy(rows=301, width=20, blocks=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (trainer.size,)))
    return model


def a_listener_that_fails(trainer: Trainer) -> None:
    """On rank 0, when the ranks have resumed a stream: the call fails there, and the next ones go
    on on both."""
    model, store = model_of(trainer), LocalStore(trainer.folder / "listener")
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        publisher.publish(model.state_dict())

    def listen(event: Event) -> None:
        if isinstance(event, BaselineRestored) and trainer.rank == 0 and not failed:
            failed.append(event)
            raise OSError("the log's disk is full")

    failed: list[Event] = []
    with ShardedPublisher(
        store, stream="policy", threads=1, timeout_seconds=20, on_event=listen
    ) as publisher:
        for seed in range(3):
            step(model.state_dict(), seed)
            try:
                publisher.publish(model.state_dict())
            except OSError:
                assert (trainer.rank, seed) == (0, 0)
        require_equal(
            followed(store), gathered(model.state_dict()), publisher.publish(model.state_dict())
        )
    assert bool(failed) == (trainer.rank == 0)


def a_version_that_was_lost(trainer: Trainer) -> None:
    """Between the head and the last anchor: newcomers cannot pass it, so that the next version has
    an anchor."""
    model, store = model_of(trainer), LocalStore(trainer.folder / "lost")
    with ShardedPublisher(store, stream="policy", threads=1, anchor_ratio=1e9) as publisher:
        for seed in range(4):
            step(model.state_dict(), seed)
            publisher.publish(model.state_dict())
    trainer.barrier("published", tuple(range(trainer.size)))
    if trainer.rank == 0:
        store.delete("policy/versions/000000000001.json")
    trainer.barrier("deleted", tuple(range(trainer.size)))
    with ShardedPublisher(store, stream="policy", threads=1, anchor_ratio=1e9) as publisher:
        step(model.state_dict(), 9)
        published = publisher.publish(model.state_dict())
    assert published.anchor_bytes
    require_equal(followed(store), gathered(model.state_dict()), published)


def stores_of_their_own(trainer: Trainer) -> None:
    """An address that means another folder on each node: nothing is committed of which parts are
    elsewhere."""
    model, store = model_of(trainer), LocalStore(trainer.folder / f"store-{trainer.rank}")
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        with pytest.raises(InputError, match="does not find"):
            publisher.publish(model.state_dict())
        assert publisher.head() is None


class Fails(Mapping[str, Any]):
    """A state that cannot be read, for a reason that is none of this library's."""

    def __getitem__(self, name: str) -> Any:
        raise RuntimeError("an error of the device")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("an error of the device")

    def __len__(self) -> int:
        return 1


def an_error_of_the_device(trainer: Trainer) -> None:
    model, store = model_of(trainer), LocalStore(trainer.folder / "device")
    with ShardedPublisher(store, stream="policy", threads=1, timeout_seconds=60) as publisher:
        began = time.monotonic()
        with pytest.raises(
            RuntimeError if trainer.rank == 1 else StreamError, match="of the device"
        ):
            publisher.publish(Fails() if trainer.rank == 1 else model.state_dict())
        assert time.monotonic() - began < 30
        assert publisher.publish(model.state_dict()).version == 0


def a_store_that_does_not_open(trainer: Trainer) -> None:
    began = time.monotonic()
    store: Any = MemoryStore() if trainer.rank == 0 else 7
    with pytest.raises(InputError):
        ShardedPublisher(store, stream="policy", timeout_seconds=60)
    assert time.monotonic() - began < 30


def settings_of_their_own(trainer: Trainer) -> None:
    """Of one rank: wrong, or not those of the others. All are told at once, with the reason."""
    began = time.monotonic()
    folder = trainer.folder / "settings"
    usual: dict[str, Any] = {"store": str(folder), "stream": "policy", "timeout_seconds": 60}
    for other, reason in (
        ({"anchor_ratio": "much"}, "anchor_ratio"),
        ({"timeout_seconds": -1}, "timeout_seconds"),
        ({"keep": 0}, "keep"),
        ({"anchor_ratio": 2.0}, "anchor_ratio is 1.0 on rank 0, but 2.0 on rank 1"),
        ({"keep": 5}, "keep is None on rank 0, but 5 on rank 1"),
        ({"stream": "other"}, "stream is 'policy' on rank 0, but 'other' on rank 1"),
        ({"trusted_keys": ("ab" * 32,)}, "trusted_keys"),
        ({"store": f"{folder}-2"}, "store"),
        ({"timeout_seconds": 50}, "timeout_seconds"),
    ):
        given = usual | (other if trainer.rank == 1 else {})
        with pytest.raises(InputError, match=reason):
            ShardedPublisher(given.pop("store"), **given)
    assert time.monotonic() - began < 30


def calls_of_their_own(trainer: Trainer) -> None:
    """Arguments that are not those of the others are an error on all, and the next call goes on. A
    rank that has missed a step is told so, as are the others, before anything is committed."""
    model, store = model_of(trainer), LocalStore(trainer.folder / "calls")
    one = trainer.rank == 1
    with ShardedPublisher(store, stream="policy", threads=1, timeout_seconds=60) as publisher:
        for step_number in range(2):
            step(model.state_dict(), step_number)
            with pytest.raises(InputError, match="dtype is None on rank 0, but 'BF16' on rank 1"):
                publisher.publish(model.state_dict(), dtype="BF16" if one else None)
            with pytest.raises(InputError, match="anchor is False on rank 0, but True on rank 1"):
                publisher.publish(model.state_dict(), anchor=one)
            published = publisher.publish(model.state_dict(), metadata={"step": step_number})
            assert published.version == step_number
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"rank 0 publishes ..step.: 2., rank 1 ..step.: 3."):
            publisher.publish(model.state_dict(), metadata={"step": 2 + one})
        with pytest.raises(RankLost):
            publisher.publish(model.state_dict(), metadata={"step": 3})
        assert time.monotonic() - began < 30
        head = present(publisher.head())
        assert head.version == 1


def out_of_step(trainer: Trainer) -> None:
    """A rank that has left the order of the calls is noticed, whatever it then sends."""
    model, store = model_of(trainer), LocalStore(trainer.folder / "order")
    with ShardedPublisher(store, stream="policy", threads=1, timeout_seconds=20) as publisher:
        publisher.publish(model.state_dict())
        if trainer.rank == 1:
            publisher._rank._ranks._step += 1
        with pytest.raises(RankLost, match="different steps"):
            publisher.publish(model.state_dict())
    with Publisher(MemoryStore(), stream="policy") as alone:
        assert alone.publish(gathered(model.state_dict())).version == 0


def behind(trainer: Trainer) -> None:
    """The state changes as soon as it is taken; the versions are what it was."""
    store, model = Gated(trainer, "behind"), model_of(trainer)
    state = model.state_dict()
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        store.gate.clear()
        step(state, 0)
        first = gathered(state)
        submitted = publisher.submit(state, metadata={"step": 0})
        step(state, 1)
        assert not submitted.done()
        store.gate.set()
        published = submitted.result(20)
        assert (published.version, published.metadata) == (0, {"step": 0})
        assert 0 < published.blocked_seconds < published.seconds
        require_equal(followed(store), first, published)
        for seed in (2, 3, 4):
            second = gathered(state)
            submitted = publisher.submit(state)
            step(state, seed)
        publisher.wait()
        require_equal(followed(store), second, submitted.result())
        require_equal(followed(store), gathered(state), publisher.publish(state))


def cancelled(trainer: Trainer) -> None:
    """By one rank alone, or replaced there: then nobody publishes it, and the others are told."""
    store, model = Gated(trainer, "cancelled"), model_of(trainer)
    state = model.state_dict()
    ranks = tuple(range(trainer.size))
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        for round_, replaces in enumerate((False, True)):
            store.gate.clear()
            first = publisher.submit(state)
            step(state, round_)
            second = publisher.submit(state)
            mine = trainer.rank == round_ % trainer.size
            if mine and not replaces:
                assert second.cancel()
            trainer.barrier(f"cancelled {round_}", ranks)
            if not mine or not replaces:
                store.gate.set()
            third = publisher.submit(state, replace=mine and replaces)
            if mine and replaces:
                assert second.cancelled()
            store.gate.set()
            assert first.result(20).version == 2 * round_
            assert third.result(20).version == 2 * round_ + 1
            assert second.cancelled()
            assert not third.cancel()
        require_equal(followed(store), gathered(state), third.result())


def failures(trainer: Trainer) -> None:
    """On one rank: told to all by their Submissions; by `wait` where nobody asks. The next versions
    come."""
    plain, events = LocalStore(trainer.folder / "store-of-failures"), list[Event]()
    store, model = FaultyStore(plain), model_of(trainer)
    state = model.state_dict()
    with ShardedPublisher(store, stream="policy", threads=1, on_event=events.append) as publisher:
        publisher.publish(state)
        step(state, 1)
        if trainer.rank == 1:
            store.fail_on("put", "payloads")
        with pytest.raises(StoreUnavailable):
            publisher.submit(state).result(20)
        bad = publisher.submit({"strings": "no tensor"} if trainer.rank else state)  # type: ignore[dict-item]
        good = publisher.submit(state)
        assert good.result(20).version == 1
        assert [event.kind for event in events if isinstance(event, CallFailed)] == [
            "store_unavailable",
            "unsupported_tensor",
        ]
        with pytest.raises(UnsupportedTensor):
            publisher.wait()
        assert bad.done()
        publisher.wait()
        require_equal(followed(plain), gathered(state), publisher.publish(state))


def split(trainer: Trainer) -> None:
    """A rank that was interrupted before a call which the others made: its next one is not taken
    for theirs."""
    model = model_of(trainer)
    with ShardedPublisher(
        LocalStore(trainer.folder / "store-of-parted"), stream="policy", threads=1
    ) as publisher:
        publisher.publish(model.state_dict())
        publisher._calls += trainer.rank
        with pytest.raises(RankLost, match="interrupted before a call"):
            publisher.submit(model.state_dict()).result(20)


def test_what_one_rank_alone_meets() -> None:
    cases = (
        a_listener_that_fails,
        a_version_that_was_lost,
        stores_of_their_own,
        an_error_of_the_device,
    )
    together(all_pass, 2, *cases, a_store_that_does_not_open, out_of_step, seconds=90)


def test_what_is_not_the_same_on_all_ranks() -> None:
    together(all_pass, 2, settings_of_their_own, calls_of_their_own, seconds=90)


def test_ranks_that_publish_behind_their_training() -> None:
    together(all_pass, 2, behind, cancelled, failures, split, seconds=60)
