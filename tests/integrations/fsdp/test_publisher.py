"""Ranks of a sharded trainer publish together: what a subscriber holds is what the ranks would have gathered."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse_rl import LocalStore
from pulse_rl.integrations.fsdp import ShardedPublisher
from tests.support.sharded import followed, gathered, policy, require_equal, step
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.slow


def fsdp2(trainer: Trainer) -> None:
    trainer.connect("fsdp2")
    model = policy()
    mesh = init_device_mesh("cpu", (trainer.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    store = LocalStore(trainer.folder / "store")
    follower = followed(store)
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        for seed in range(4):
            state = model.state_dict()
            step(state, seed)
            published = publisher.publish(state, metadata={"step": seed})
            assert published.version == seed
            assert (published.changed is None) == (seed == 0)
            require_equal(follower, gathered(state), published)
            require_equal(followed(store), gathered(state), published)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_subscriber_holds_what_the_ranks_would_have_gathered(ranks: int) -> None:
    together(fsdp2, ranks)
