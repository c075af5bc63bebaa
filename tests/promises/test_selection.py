"""A worker of some tensors has their very bits, proved by the version's root, and fetches little
else."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_rl import Bits, MemoryStore, Publisher, Subscriber, audit
from pulse_rl.errors import PulseError
from tests.support.states import Live

from .oracle import STREAM, Trainer, copied, held, objects, publish, root_of


def part(trainer: Trainer) -> dict[str, Bits]:
    return {name: bits for name, bits in trainer.state.items() if name.startswith("layers.")}


def selecting(store: Any, select: str | list[str] = "layers.*") -> Subscriber:
    return Subscriber(store, stream=STREAM, select=select, threads=1)


@pytest.mark.parametrize("select", ["layers.*", ["layers.*"], ["layers.0.*", "layers.1.*"]])
def test_a_part_is_followed_with_the_bits_of_the_whole(store: Any, select: Any) -> None:
    trainer, worker, live = Trainer(), selecting(store, select), Live()
    with Publisher(store, stream=STREAM, anchor_ratio=0.2) as publisher:
        for _ in range(6):
            publish(publisher, trainer)
            update = worker.sync()
            live.apply(update)
            assert {tensor.spec.name for tensor in update.tensors} <= part(trainer).keys()
            assert worker.root == trainer.root, "the root is the whole state's"
            assert audit(live.tensors, worker.digest).ok
            newcomer = selecting(store, select)
            newcomer.sync()
            for tensors in (held(worker), held(newcomer), live.tensors):
                assert root_of(tensors) == root_of(part(trainer))


@pytest.mark.slow
def test_a_part_is_never_wrong() -> None:
    store, trainer = MemoryStore(), Trainer(elements=600)
    with Publisher(store, stream=STREAM, anchor_ratio=0.2) as publisher:
        publish(publisher, trainer, 4)
    shown = 0
    for name, data in objects(store).items():
        for at in {0, len(data) // 3, len(data) // 2, len(data) - 1} if data else ():
            harmed = copied(store, MemoryStore())
            harmed.put(name, data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            worker = selecting(harmed)
            try:
                worker.sync(3)
            except PulseError:
                continue
            shown += 1
            assert root_of(held(worker)) == root_of(part(trainer))
    assert shown
