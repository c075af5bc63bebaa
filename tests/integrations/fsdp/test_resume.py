"""Ranks that come and go: a killed one, other numbers of them, publishers of another kind in
between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore, Publisher, Signer, Store, checkout, verify_stream
from pulse_rl._util.threads import running
from pulse_rl.errors import InputError, PublisherConflict, RankLost, StreamError
from pulse_rl.events import BaselineRestored, Event
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.patch import build as build_module
from pulse_rl.sharding import rank as sharded_module
from pulse_rl.store.base import Data
from pulse_rl.sync import rank as rank_module
from tests.support.sharded import followed, gathered, policy, require_equal, step
from tests.support.trainers import Group, Trainer, side_by_side, together

pytestmark = pytest.mark.slow


def sharded(trainer: Trainer, size: int, steps: int) -> nn.Module:
    """The policy after so many ``steps``, over ``size`` ranks (0: whole)."""
    model = policy(rows=1501, width=70, blocks=1)
    for seed in range(steps):
        step(model.state_dict(), seed)
    if size:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model


@contextmanager
def publishing(
    store: Store | str, **settings: Any
) -> Iterator[tuple[ShardedPublisher, list[Event]]]:
    events: list[Event] = []
    with ShardedPublisher(
        store, stream="policy", threads=1, on_event=events.append, **settings
    ) as publisher:
        yield publisher, events


def resumed(events: list[Event]) -> list[str]:
    return [event.how for event in events if isinstance(event, BaselineRestored)]


def resharding(trainer: Trainer) -> None:
    """2, 4, 1 ranks, a Publisher, and 3: each goes on with a patch from what it reads of the
    store."""
    store = LocalStore(trainer.folder / "store")
    follower = followed(store)
    version = 0
    for size in (2, 4, 1, 0, 3):
        ranks = tuple(range(max(size, 1)))
        if trainer.rank in ranks:
            trainer.connect(f"{size} ranks", ranks)
            model = sharded(trainer, len(ranks), version)
            if size == 0:
                step(model.state_dict(), version)
                whole = gathered(model.state_dict())
                with Publisher(store, stream="policy") as plain:
                    published = plain.publish(whole)
                require_equal(follower, whole, published)
            else:
                with publishing(store) as (publisher, events):
                    for seed in (version, version + 1, version + 2):
                        state = model.state_dict()
                        step(state, seed)
                        published = publisher.publish(state)
                        assert published.version == seed
                        assert (published.changed is None) == (seed == 0), published.reason
                        require_equal(follower, gathered(state), published)
                        require_equal(followed(store), gathered(state), published)
                    assert resumed(events) == ([] if version == 0 else ["restored"])
        version += 3 if size else 1
        trainer.barrier(f"done with {size}", tuple(range(trainer.size)))


def test_a_stream_goes_on_with_other_numbers_of_ranks() -> None:
    together(resharding, 4, seconds=60)


def the_same_weights(trainer: Trainer) -> None:
    """A restart from the checkpoint of the head needs nothing of the store."""
    store = LocalStore(trainer.folder / "store")
    for start in range(2):
        trainer.connect(f"start {start}")
        model = sharded(trainer, trainer.size, 1)
        with publishing(store) as (publisher, events):
            published = publisher.publish(model.state_dict())
            assert (published.version, published.changed) == (start, 0 if start else None)
            assert resumed(events) == ["matched"] * start
            require_equal(followed(store), gathered(model.state_dict()), published)


def test_ranks_with_the_weights_of_the_head_take_it_as_it_is() -> None:
    together(the_same_weights, 2)


def a_branch(trainer: Trainer) -> None:
    store = LocalStore(trainer.folder / "store")
    trainer.connect("a branch")
    if trainer.rank == 0:
        with Publisher(store, stream="parent") as parent:
            parent.publish(sharded(trainer, 0, 1).state_dict())
        with checkout(store, "parent") as found, Publisher(store, stream="policy") as publisher:
            publisher.begin_from(found)
    trainer.barrier("begun", tuple(range(trainer.size)))
    model = sharded(trainer, trainer.size, 2)
    with checkout(store, "parent") as found, publishing(store) as (ranks, _):
        with pytest.raises(InputError, match="go on from it") as raised:
            ranks.begin_from(found)
        assert raised.value.hint
        published = ranks.publish(model.state_dict())
    assert (published.version, published.anchor_bytes) == (1, 0)
    require_equal(followed(store), gathered(model.state_dict()), published)


def test_ranks_go_on_from_a_version_of_another_stream() -> None:
    together(a_branch, 2)


class Deadly(LocalStore):
    """Kills its process at a call for an object of this kind, before or after the call."""

    deadly: tuple[str, str, bool] | None = None

    def put(self, name: str, data: Data) -> None:
        self._at("put", name, False)
        super().put(name, data)
        self._at("put", name, True)

    def put_new(self, name: str, data: Data) -> None:
        self._at("put_new", name, False)
        super().put_new(name, data)
        self._at("put_new", name, True)

    def _at(self, call: str, name: str, after: bool) -> None:
        if (
            self.deadly is not None
            and self.deadly[0] == call
            and self.deadly[1] in name
            and self.deadly[2] == after
        ):
            os.kill(os.getpid(), signal.SIGKILL)


# Who is killed, and where: at the first call for a part, in the middle of comparing, before and
# after the commit.
PLACES: dict[str, tuple[int, tuple[str, str, bool] | None]] = {
    "compares": (1, None),
    "stores a part": (1, ("put", ".patch", False)),
    "has stored a part": (2, ("put", ".patch", True)),
    "commits": (0, ("put_new", "versions", False)),
    "has committed": (0, ("put_new", "versions", True)),
}


def killed(trainer: Trainer, place: str) -> None:
    """A rank dies in the middle of a version; the others are told, and new ranks go on."""
    trainer.connect("first")
    victim, deadly = PLACES[place]
    others = tuple(rank for rank in range(3) if rank != victim)
    store = Deadly(trainer.folder / "store")
    model = sharded(trainer, trainer.size, 1)
    with publishing(store, timeout_seconds=20) as (publisher, _):
        published = publisher.publish(model.state_dict())
        require_equal(followed(store), gathered(model.state_dict()), published)
        step(model.state_dict(), 1)
        whole = gathered(model.state_dict())
        if trainer.rank == victim:
            store.deadly = deadly
            if deadly is None:
                rank_module.make_pending = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):  # for good
            with pytest.raises(RankLost):
                publisher.publish(model.state_dict())
    trainer.barrier("told", others)
    trainer.connect("second", others)
    again = policy(rows=1501, width=70, blocks=1)
    with torch.no_grad():
        for name, tensor in again.state_dict().items():
            tensor.copy_(whole[name])
    fully_shard(again, mesh=init_device_mesh("cpu", (2,)))
    with publishing(store) as (publisher, events):
        published = publisher.publish(again.state_dict())
        committed = place == "has committed"
        assert published.version == 1 + committed
        assert bool(published.changed) != committed
        assert resumed(events) == ["matched" if committed else "restored"]
        require_equal(followed(store), whole, published)
    if trainer.rank == others[0]:
        assert all(report.ok for report in verify_stream(store, "policy"))


def test_a_killed_rank_leaves_the_chain_whole() -> None:
    side_by_side(
        {place: Group(killed, 3, place, lost=(rank,)) for place, (rank, *_) in PLACES.items()}
    )


def stopped(trainer: Trainer, place: str) -> None:
    """A rank that stands still, before others wait for its word, or for the hash of a leaf that
    they share."""
    trainer.connect("stopped")
    model = sharded(trainer, trainer.size, 0)
    with publishing(LocalStore(trainer.folder / "store"), timeout_seconds=2) as (publisher, _):
        publisher.publish(model.state_dict())
        step(model.state_dict(), 1)
        trainer.barrier("here", (0, 1))
        if trainer.rank == 0:
            module = sharded_module if place == "hash_shared" else rank_module
            setattr(module, place, lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP))
        began = time.monotonic()
        with pytest.raises(RankLost):
            publisher.publish(model.state_dict())
        assert 1 < time.monotonic() - began < 15


def test_a_rank_that_stands_still_is_not_waited_for() -> None:
    side_by_side(
        {place: Group(stopped, 2, place, lost=(0,)) for place in ("make_pending", "hash_shared")}
    )


def interrupted(trainer: Trainer) -> None:
    """Ctrl-C on one rank while it compares: the other is told, and both go on with the next
    call."""
    trainer.connect("interrupted")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = LocalStore(trainer.folder / "store")
    model = sharded(trainer, trainer.size, 0)
    encode = build_module.encode_verified

    def interrupt(*arguments: Any, **options: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        until = time.monotonic() + 10
        while not running.operation.stopping and time.monotonic() < until:
            time.sleep(0.001)
        return encode(*arguments, **options)

    with publishing(store) as (publisher, _):
        publisher.publish(model.state_dict())
        step(model.state_dict(), 1)
        if trainer.rank == 1:
            build_module.encode_verified = interrupt
        expected = (
            (StreamError, "rank 1 failed: Stopped")
            if trainer.rank == 0
            else (KeyboardInterrupt, None)
        )
        with pytest.raises(expected[0], match=expected[1]):
            publisher.publish(model.state_dict())
        build_module.encode_verified = encode
        published = publisher.publish(model.state_dict())
        assert (published.version, bool(published.changed)) == (1, True)
        require_equal(followed(store), gathered(model.state_dict()), published)


def test_an_interrupt_of_one_rank_ends_the_call_on_all() -> None:
    together(interrupted, 2)


def superseded(trainer: Trainer) -> None:
    """Another publisher takes the stream over: all ranks are told, at their next version."""
    trainer.connect("superseded")
    store = LocalStore(trainer.folder / "store")
    model = sharded(trainer, trainer.size, 0)
    with publishing(store) as (publisher, _):
        publisher.publish(model.state_dict())
        whole = gathered(model.state_dict())
        if trainer.rank == 0:
            with Publisher(store, stream="policy") as other:
                other.publish(whole)
        trainer.barrier("taken over", (0, 1))
        for _ in range(2):
            with pytest.raises(PublisherConflict):
                publisher.publish(model.state_dict())
    assert followed(store).sync().version == 1


def test_another_publisher_is_noticed_by_all() -> None:
    together(superseded, 2)


def signed(trainer: Trainer) -> None:
    """Signed, with anchors as the ratio says; junk in the place of the next version is passed
    over."""
    trainer.connect("signed")
    store = LocalStore(trainer.folder / "store")
    signer = Signer(bytes(32))
    model = sharded(trainer, trainer.size, 0)
    anchored = []
    with publishing(store, signer=signer, anchor_ratio=0.1) as (publisher, _):
        for seed in range(6):
            if trainer.rank == 0 and seed == 2:
                store.put_new("policy/versions/000000000002.json", b"junk")
            state = model.state_dict()
            step(state, seed)
            published = publisher.publish(state)
            anchored.append(published.anchored)
            require_equal(
                followed(store, trusted_keys=[signer.public_key]), gathered(state), published
            )
    assert published.version == 6
    assert anchored[0]
    assert 0 < sum(anchored[1:]) < 5
    selecting = followed(store, trusted_keys=[signer.public_key], select="embed.*")
    selecting.sync()
    assert selecting.version == 6
    stream_id = publisher.stream_id
    assert stream_id == selecting.stream_id


def test_a_signed_stream() -> None:
    together(signed, 2)


def emptied(trainer: Trainer) -> None:
    """The store lost the newest version: the ranks go on above it with an anchor."""
    trainer.connect("emptied")
    store = LocalStore(trainer.folder / "store")
    model = sharded(trainer, trainer.size, 0)
    with publishing(store) as (publisher, events):
        for seed in range(3):
            step(model.state_dict(), seed)
            publisher.publish(model.state_dict())
        if trainer.rank == 0:
            store.delete("policy/versions/000000000002.json")
        trainer.barrier("deleted", (0, 1))
        step(model.state_dict(), 3)
        published = publisher.publish(model.state_dict())
        assert published.version == 3
        assert published.changed is None
        assert resumed(events) == ["anchored"]
        require_equal(followed(store), gathered(model.state_dict()), published)


def test_a_lost_head_is_followed_by_an_anchor() -> None:
    together(emptied, 2)


def unreadable(trainer: Trainer, damaged: str) -> None:
    """A head that cannot be restored, because a payload is damaged, is followed by an anchor."""
    store = LocalStore(trainer.folder / "store")
    for start in range(2):
        trainer.connect(f"start {start}")
        model = sharded(trainer, trainer.size, start)
        with publishing(store) as (publisher, events):
            for seed in range(3):
                step(model.state_dict(), 10 + seed)
                published = publisher.publish(model.state_dict())
                assert (published.changed is None) == (seed == 0)
            require_equal(followed(store), gathered(model.state_dict()), published)
            assert resumed(events) == ["anchored"] * start
        trainer.barrier(f"done {start}", (0, 1))
        if trainer.rank == 0 and start == 0:
            name = next(
                info.name for info in store.list("policy/payloads") if info.name.endswith(damaged)
            )
            data = bytearray(store.get(name))
            data[-1] ^= 1
            store.put(name, bytes(data))
        trainer.barrier(f"damaged {start}", (0, 1))


@pytest.mark.parametrize("damaged", ["patch", "safetensors"])
def test_a_head_that_is_damaged_is_followed_by_an_anchor(damaged: str) -> None:
    together(unreadable, 2, damaged)
