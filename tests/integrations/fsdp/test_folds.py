"""Folds that the ranks of a trainer make as they publish."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore, Signer, Store
from pulse_rl.errors import InputError
from pulse_rl.events import CallFailed, Event, Folded
from pulse_rl.integrations.fsdp import ShardedPublisher
from tests.support.manifests import folds_of
from tests.support.sharded import followed, gathered, policy, require_equal, step
from tests.support.stores import FaultyStore
from tests.support.trainers import Trainer, each, together

pytestmark = pytest.mark.slow


def folds_in(store: Store) -> list[tuple[int, int]]:
    return [(fold.base, fold.version) for fold in folds_of(store, "policy")]


def model_of(trainer: Trainer, steps: int = 0) -> policy:  # type: ignore[valid-type]
    model = policy(rows=1501, width=70, blocks=1)
    for seed in range(steps):
        step(model.state_dict(), seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (trainer.size,)))
    return model


def spans(trainer: Trainer) -> None:
    """Two spans; a rank that publishes without a pause, and signs. Each rank is told of each
    fold."""
    signer = Signer(bytes(32))
    store = LocalStore(trainer.folder / "store-of-spans")
    model, events = model_of(trainer), list[Event]()
    with ShardedPublisher(
        store, stream="policy", threads=1, folds=(2, 4), signer=signer, on_event=events.append
    ) as publisher:
        for seed in range(6):
            state = model.state_dict()
            step(state, seed)
            published = publisher.publish(state)
        publisher.wait()
        assert folds_in(store) == [(0, 2), (0, 4), (2, 4)]
        told = [(event.base, event.version) for event in events if isinstance(event, Folded)]
        assert sorted(told) == [(0, 2), (0, 4), (2, 4)]
        assert all(
            event.nbytes < event.patch_bytes for event in events if isinstance(event, Folded)
        )
        whole = gathered(state)
    for version in (1, 2, 3) if trainer.rank == 0 else ():
        store.delete(f"policy/versions/{version:012d}.json")
    trainer.barrier("deleted", tuple(range(trainer.size)))
    reader = followed(store, trusted_keys=[signer.public_key])
    reader.sync(0)
    require_equal(reader, whole, published)


def restarts(trainer: Trainer) -> None:
    """A fold whose span the ranks have not published themselves is left out; the next one is
    made."""
    store = LocalStore(trainer.folder / "store-of-restarts")
    for start, versions in ((0, 3), (3, 7)):
        model = model_of(trainer, start)
        with ShardedPublisher(store, stream="policy", threads=1, folds=(4,)) as publisher:
            for seed in range(start, start + versions):
                state = model.state_dict()
                step(state, seed)
                published = publisher.publish(state)
        require_equal(followed(store), gathered(state), published)
        trainer.barrier(f"published from {start}", tuple(range(trainer.size)))
    assert folds_in(store) == [(4, 8)]


def failures(trainer: Trainer) -> None:
    """What fails on one rank costs the fold, on all, and nothing else."""
    plain = LocalStore(trainer.folder / "store-of-failures")
    store = FaultyStore(plain)
    model, events = model_of(trainer), list[Event]()
    with ShardedPublisher(
        store, stream="policy", threads=1, folds=(2,), on_event=events.append
    ) as publisher:
        for seed in range(3):
            state = model.state_dict()
            step(state, seed)
            if seed == 2 and trainer.rank == trainer.size - 1:
                store.fail(1)  # the first is for the patch
            published = publisher.publish(state)
        publisher.wait()
        assert [type(event) for event in events if isinstance(event, Folded | CallFailed)] == [
            CallFailed
        ]
        for seed in (3, 4):
            state = model.state_dict()
            step(state, seed)
            published = publisher.publish(state)
    trainer.barrier("folded", tuple(range(trainer.size)))
    assert folds_in(plain) == [(2, 4)]
    require_equal(followed(plain), gathered(state), published)


def refusals(trainer: Trainer) -> None:
    with pytest.raises(InputError, match="folds span"):
        ShardedPublisher(
            LocalStore(trainer.folder / "store-of-refusals"), stream="policy", folds=(1,)
        )


def ranks_program(trainer: Trainer, *cases: object) -> None:
    failed = each(trainer, cases, trainer.size)  # type: ignore[arg-type]
    assert not failed, "\n".join(failed)


def test_two_ranks() -> None:
    together(ranks_program, 2, spans, restarts, failures, refusals, seconds=60)


def test_one_rank_writes_folds_as_a_publisher_does() -> None:
    together(ranks_program, 1, spans, restarts)
