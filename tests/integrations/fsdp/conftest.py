"""A stream of a trainer of three ranks, for those who read it."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore, MemoryStore, Signer, fold_stream
from pulse_rl.frameworks.fsdp import ShardedPublisher
from tests.support.sharded import gathered, policy, step
from tests.support.trainers import Trainer, together

VERSIONS = 9
SIGNER = Signer(bytes(32))


@dataclass(frozen=True, repr=False)
class ShardedStream:
    """The objects of the stream "policy", and the whole states of its versions."""

    objects: dict[str, bytes]
    states: list[dict[str, torch.Tensor]]

    def store(self) -> MemoryStore:
        """A store of its own with the stream."""
        store = MemoryStore()
        for name, data in self.objects.items():
            store.put(name, data)
        return store


def _publish(trainer: Trainer) -> tuple[dict[str, bytes], bytes]:
    """Two anchors, of version 0 and of version 5, and a fold over the first eight versions."""
    trainer.connect("stream")
    mesh = init_device_mesh("cpu", (trainer.size,))
    model = policy(rows=1501, width=70)
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    store = LocalStore(trainer.folder / "store")
    states = []
    with ShardedPublisher(store, stream="policy", signer=SIGNER, threads=1) as publisher:
        for seed in range(VERSIONS):
            state = model.state_dict()
            step(state, seed)
            files = (
                {"rank.txt" if trainer.rank == 0 else "../no name": str(trainer.rank).encode()}
                if seed == 2
                else None
            )
            publisher.publish(state, metadata={"step": seed}, anchor=seed == 5, files=files)
            states.append(gathered(state))
    trainer.barrier("published", tuple(range(trainer.size)))
    if trainer.rank == 0:
        assert list(fold_stream(store, "policy", (8,), signer=SIGNER, threads=1)) == [(0, 8)]
    objects = (
        {info.name: store.get(info.name) for info in store.list("policy")}
        if trainer.rank == 0
        else {}
    )
    saved = io.BytesIO()
    torch.save(states, saved)
    return objects, saved.getvalue()


@pytest.fixture(scope="session")
def sharded_stream() -> ShardedStream:
    objects, states = together(_publish, 3)[0]
    return ShardedStream(objects, torch.load(io.BytesIO(states)))
