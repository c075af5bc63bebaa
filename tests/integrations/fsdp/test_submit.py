"""Ranks publish behind their training: a copy of each rank's part is taken at once."""

from __future__ import annotations

import threading

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore
from pulse_rl.errors import RankLost, StoreUnavailable, UnsupportedTensor
from pulse_rl.events import CallFailed, Event
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.store import Data
from tests.support.sharded import followed, gathered, policy, require_equal, step
from tests.support.stores import FaultyStore
from tests.support.trainers import Trainer, each, together

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
            assert (first.result(20).version, third.result(20).version) == (
                2 * round_,
                2 * round_ + 1,
            )
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


def ranks_program(trainer: Trainer) -> None:
    failed = each(trainer, (behind, cancelled, failures, split), trainer.size)
    assert not failed, "\n".join(failed)


def test_two_ranks() -> None:
    together(ranks_program, 2, seconds=60)
