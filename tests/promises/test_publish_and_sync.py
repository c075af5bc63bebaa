"""What is published arrives, bit for bit, whatever the way to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl import (
    Bits,
    MemoryStore,
    MultiSubscriber,
    Publisher,
    Store,
    Subscriber,
    audit,
    state_root,
    verify_stream,
)
from pulse_rl.errors import InputError
from pulse_rl.frameworks.torch import apply_
from tests.support.states import UINTS, WIDTHS, present

from .oracle import STREAM, Trainer, Worker, publish, root_of


def test_a_worker_that_follows_has_every_version(store: Store) -> None:
    trainer, worker = Trainer(), Worker(store)
    with Publisher(store, stream=STREAM) as publisher:
        for version in range(8):
            (root,) = publish(publisher, trainer)
            update = worker.sync()
            assert (update.version, update.root, worker.root) == (version, root, root)
            assert worker.sync() is None
    assert state_root(trainer.state) == trainer.root


def test_a_newcomer_reaches_every_version_and_the_stream_verifies(store: Store) -> None:
    trainer = Trainer()
    with Publisher(store, stream=STREAM, anchor_ratio=0.05) as publisher:
        roots = publish(publisher, trainer, 12)
    for version, root in enumerate(roots):
        worker = Worker(store)
        worker.sync(version)
        assert (worker.subscriber.version, worker.root) == (version, root)
    reports = list(verify_stream(store, STREAM))
    assert [(report.version, report.root, report.problems) for report in reports] == [
        (version, root, ()) for version, root in enumerate(roots)
    ]


def test_a_worker_that_was_away_has_each_change_once(store: Store) -> None:
    """With the newest bits, also of what changed twice or back again."""
    trainer, worker = Trainer(), Worker(store)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        worker.sync()
        first = trainer.state
        publish(publisher, trainer, 4)
        trainer.state = first
        publish(publisher, trainer)
        update = worker.sync()
    assert (update.previous, update.version, update.full) == (0, 5, False)
    for name, indices, values in update:
        assert indices is not None
        assert np.all(np.diff(indices) > 0)
        np.testing.assert_array_equal(values, trainer.state[name].array.reshape(-1)[indices])
    assert worker.root == trainer.root


def test_bits_survive_whatever_they_mean(store: Store) -> None:
    rng, worker = np.random.default_rng(3), Worker(store)
    state = {"empty": Bits(np.zeros((3, 0), np.uint16), "BF16")}
    for dtype, width in WIDTHS.items():
        state[dtype] = Bits(
            rng.integers(0, 1 << 8 * width - 1, (7, 11), dtype=np.uint64).astype(UINTS[width]),
            dtype,
        )
    special = np.array(
        [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF] * 30, np.uint16
    )
    with Publisher(store, stream=STREAM) as publisher:
        for shift in range(4):
            state["special"] = Bits(np.roll(special, shift), "BF16")
            publisher.publish(state)
            worker.sync()
            assert worker.root == root_of(state)


def test_another_set_of_tensors_arrives(store: Store) -> None:
    trainer, worker = Trainer(), Worker(store)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer, 2)
        worker.sync()
        trainer.state["new.weight"] = Bits(np.arange(50, dtype=np.uint16), "BF16")
        publish(publisher, trainer)
        worker.reach(trainer)
        del trainer.state["layers.0.weight"]
        trainer.state["embed.weight"] = Bits(np.arange(60, dtype=np.uint16).reshape(6, 10), "BF16")
        publish(publisher, trainer, 2)
        worker.reach(trainer)


def test_tied_tensors_are_stored_once_and_arrive_under_all_names(store: Store) -> None:
    first = np.arange(4000, dtype=np.uint16)
    tied = Bits(first, "BF16")
    with Publisher(store, stream=STREAM) as publisher:
        published = publisher.publish({"embed": tied, "head": tied})
        assert published.elements == 4000
    subscriber = Subscriber(store, stream=STREAM)
    update = subscriber.sync()
    (alias,) = update.aliases
    assert {alias, update.aliases[alias]} == {"embed", "head"}
    assert np.array_equal(subscriber.state.read("embed"), subscriber.state.read("head"))


def test_a_patch_costs_a_fraction_of_the_state(store: Store) -> None:
    trainer = Trainer(elements=100_000)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        published = publisher.publish(trainer.step(0.004))
    assert published.anchor_bytes == 0
    assert 0 < published.patch_bytes < 0.015 * published.dense_bytes
    assert published.changed is not None
    assert 0 < published.changed < 0.005 * published.elements


def test_an_update_that_was_not_taken_over_is_delivered_again(store: Store) -> None:
    trainer, worker = Trainer(), Worker(store)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        worker.sync()
        publish(publisher, trainer)
        lost = present(worker.subscriber.sync())
        for _ in lost:
            break  # an interrupt in the midst
        publish(publisher, trainer)
        update = worker.sync()
    assert (update.previous, update.version, worker.root) == (0, 2, trainer.root)


def test_a_worker_begins_with_the_checkpoint_that_it_has(store: Store) -> None:
    trainer = Trainer()
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        base = dict(trainer.state)
        published = [publisher.publish(trainer.step()) for _ in range(2)]
    worker = Worker(store, base=base)
    worker.tensors = {name: Bits(bits.array.copy(), bits.dtype) for name, bits in base.items()}
    update = present(worker.sync())
    assert not update.full
    assert worker.root == trainer.root
    assert update.payload_bytes <= sum(each.patch_bytes for each in published)


def test_states_are_taken_when_they_are_submitted(store: Store) -> None:
    trainer, roots, submitted = Trainer(), [], []
    with Publisher(store, stream=STREAM) as publisher:
        for _ in range(5):
            state = trainer.step()
            roots.append(trainer.root)
            submitted.append(publisher.submit(state))
            for bits in state.values():
                bits.array[...] ^= 1  # the next step is under way
    assert [each.result().root for each in submitted] == roots
    assert [each.result().version for each in submitted] == list(range(5))
    assert all(not report.problems for report in verify_stream(store, STREAM))


def test_a_trainer_that_restarts_submits_what_it_has(store: Store) -> None:
    """Its first state is the head: the memory that it was copied into is the publisher's from then
    on."""
    trainer = Trainer()
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer, 2)
    with Publisher(store, stream=STREAM) as publisher:
        submitted = [publisher.submit(trainer.state)]
        submitted += [publisher.submit(trainer.step()) for _ in range(4)]
        assert [each.result().version for each in submitted] == list(range(2, 7))
    assert all(not report.problems for report in verify_stream(store, STREAM))


def test_a_waiting_submission_is_replaced_and_the_last_one_is_committed(store: Store) -> None:
    trainer = Trainer()
    with Publisher(store, stream=STREAM) as publisher:
        submitted = [publisher.submit(trainer.step(), replace=True) for _ in range(9)]
    assert submitted[-1].result().root == trainer.root
    worker = Worker(store)
    worker.reach(trainer)
    done = [each.result().version for each in submitted if not each.cancelled()]
    assert done == list(range(len(done)))


def test_many_streams_are_followed_together() -> None:
    store, streams = MemoryStore(), [f"adapter-{k}" for k in range(12)]
    trainers = [Trainer(k, 600) for k in range(len(streams))]
    publishers = [Publisher(store, stream=stream, threads=1) for stream in streams]
    with MultiSubscriber(store, streams, threads=2, poll_seconds=0.05) as fleet:
        roots: dict[str, str] = {}
        for _ in range(2):
            for publisher, trainer in zip(publishers, trainers, strict=True):
                publish(publisher, trainer)
            newest = {
                stream: trainer.root for stream, trainer in zip(streams, trainers, strict=True)
            }
            for stream, update in fleet.updates(timeout_seconds=30):
                roots[stream] = update.root
                if roots == newest:
                    break
            assert roots == newest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_model_of_torch_has_the_bits_that_torch_would_have_cast(
    store: Store, dtype: torch.dtype
) -> None:
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
    torch.manual_seed(0)
    weights = {"a": torch.randn(50, 20) * 0.02, "b": torch.randn(300)}
    live = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in weights.items()}
    subscriber = Subscriber(store, stream=STREAM)
    with Publisher(store, stream=STREAM) as publisher:
        for _ in range(3):
            for tensor in weights.values():
                tensor += torch.randn_like(tensor) * 0.001
            publisher.publish(weights, dtype=names[dtype])
            update = present(subscriber.sync())
            apply_(live, update)
            for name, tensor in weights.items():
                assert torch.equal(live[name].view(torch.uint8), tensor.to(dtype).view(torch.uint8))
    assert audit(live, subscriber.root).ok
    live["b"].view(torch.uint8)[7] ^= 1
    assert not audit(live, subscriber.root).ok


@pytest.mark.parametrize("source", [{"a": "text"}, {"a": Bits(np.zeros(3, np.uint16), "F4")}, 7])
def test_what_is_no_state_is_refused_and_commits_nothing(store: Store, source: Any) -> None:
    trainer = Trainer()
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
        with pytest.raises((InputError, TypeError, ValueError)):
            publisher.publish(source)
        publish(publisher, trainer)
    worker = Worker(store)
    worker.sync()
    assert (worker.subscriber.version, worker.root) == (1, trainer.root)
