"""What one rank alone meets must neither part the ranks unnoticed nor make them wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore, MemoryStore, Publisher
from pulse_rl.errors import InputError, RankLost, StreamError
from pulse_rl.events import BaselineRestored, Event
from pulse_rl.frameworks.fsdp import ShardedPublisher
from tests.support.sharded import followed, gathered, policy, require_equal, step
from tests.support.trainers import Trainer, each, together

pytestmark = pytest.mark.slow


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
        head = publisher.head()
        assert head is not None
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


def ranks_program(trainer: Trainer, *cases: Callable[[Trainer], None]) -> None:
    failed = each(trainer, cases, trainer.size)
    assert not failed, "\n".join(failed)


def test_what_one_rank_alone_meets() -> None:
    cases = (
        a_listener_that_fails,
        a_version_that_was_lost,
        stores_of_their_own,
        an_error_of_the_device,
    )
    together(ranks_program, 2, *cases, a_store_that_does_not_open, out_of_step, seconds=90)


def test_what_is_not_the_same_on_all_ranks() -> None:
    together(ranks_program, 2, settings_of_their_own, calls_of_their_own, seconds=90)
