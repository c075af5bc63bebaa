"""NeMo-RL's checkpoint engine: policy ranks and rollout workers in one process, called as its
synchronizer does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_rl import Subscriber, state_root
from pulse_rl.errors import EngineError, InputError
from tests.support.framework_stubs import base, integration

ENGINE = f"{integration('nemo_rl').__name__}:PulseEngine"

Weights = dict[str, torch.Tensor]
BUCKET = 600


def engine(store: Path | str, **others: Any) -> Any:
    # NeMo-RL's own setting comes with the user's.
    settings = {"store": str(store), "stream": "policy", "release_after_refit": False} | others
    return base("nemo_rl").create_checkpoint_engine(
        ENGINE, bucket_size_bytes=BUCKET, engine_kwargs=settings
    )


def connect(policy: list[Any], rollouts: list[Any]) -> None:
    metadata = [{**one.prepare(), "rank": rank} for rank, one in enumerate(policy)]
    metadata += [{**one.prepare(), "rank": rank} for rank, one in enumerate(rollouts)]
    topology = {
        "train_world_size": len(policy),
        "rollout_world_size": len(rollouts),
        "metadata": metadata,
    }
    for rank, one in enumerate(policy):
        one.init_policy_process_group(worker_rank=rank, **topology)
    for rank, one in enumerate(rollouts):
        one.init_rollout_process_group(rollout_rank=rank, **topology)


async def received(worker: Any) -> Weights:
    found: Weights = {}
    async for batch in worker.receive_weight_batches():
        assert len(batch) == 1 or sum(tensor.nbytes for _, tensor in batch) <= BUCKET
        found |= batch
    return found


def refit(weights: Weights, policy: list[Any], rollouts: list[Any]) -> list[Weights]:
    """On a loop of its own, as each of NeMo-RL's workers makes one for every refit."""

    async def together() -> list[Any]:
        sent = [one.send_weights(iter(weights.items())) for one in policy]
        return await asyncio.gather(*(received(worker) for worker in rollouts), *sent)

    return asyncio.run(together())[: len(rollouts)]


def weights(step: int) -> Weights:
    made = {f"layer.{k}": torch.full((16, 8), k + step / 64) for k in range(5)}
    return made | {"large": torch.full((64, 64), float(step)), "ids": torch.arange(5)}


def cast(state: Weights) -> Weights:
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in state.items()}


def test_every_rollout_worker_gets_each_refit(tmp_path: Path) -> None:
    policy, rollouts = [engine(tmp_path) for _ in range(2)], [engine(tmp_path) for _ in range(3)]
    assert isinstance(policy[0], base("nemo_rl").CheckpointEngine)
    connect(policy, rollouts)
    for step in range(3):
        expected = state_root(cast(weights(step)))
        assert [state_root(got) for got in refit(weights(step), policy, rollouts)] == [expected] * 3
    for one in policy + rollouts:
        one.finalize()
    with Subscriber(tmp_path, stream="policy") as reader:
        reader.sync()
        assert reader.version == 2
        assert reader.manifest.metadata["refit"] == 3


@pytest.mark.slow
def test_a_run_that_starts_again_is_not_mistaken_for_the_one_before(tmp_path: Path) -> None:
    policy, rollout = [engine(tmp_path)], engine(tmp_path, timeout_seconds=3)
    connect(policy, [])
    refit(weights(0), policy, [])
    connect([engine(tmp_path)], [rollout])
    with pytest.raises(EngineError, match=r"no version for this update within 3 s"):
        asyncio.run(received(rollout))
    # And goes on after a refit that one side has lost.
    connect(again := [engine(tmp_path)], [rollout])
    (got,) = refit(weights(1), again, [rollout])
    assert state_root(got) == state_root(cast(weights(1)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"store": "relative/folder"}, "another place in every process of NeMo-RL"),
        ({"stream": ""}, "needs a store and a stream"),
    ],
)
def test_settings_are_checked_before_the_first_refit(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        engine(settings.pop("store", tmp_path), **settings)
