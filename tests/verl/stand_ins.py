"""What stands in for the GPU parts of verl: the trained model, the rollout's engine, and the
replica that starts it.

Everything else is verl's own: its configuration, CheckpointEngineManager, RayWorkerGroup,
CheckpointEngineWorker, and the methods of ActorRolloutRefWorker that update weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2ForCausalLM
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

import pulse_rl
from tests.trainers.support import tiny

LR = 1e-6


def untied() -> Qwen2ForCausalLM:
    """427,136 FP32 weights, the same in every process."""
    return tiny(hidden_size=128, intermediate_size=256, tie_word_embeddings=False)


def configured(store: str) -> RolloutConfig:
    """The rollout's part of verl's own configuration, with the lines that docs/verl.md adds."""
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    lines = [
        f"{engine}.backend=pulse",
        f"{engine}.custom_backend_module=pulse_rl.frameworks.verl",
        f"+{engine}.engine_kwargs.pulse.store={store}",
        f"+{engine}.engine_kwargs.pulse.stream=policy",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer/config"), version_base=None
    ):
        made: RolloutConfig = omega_conf_to_dataclass(
            compose("ppo_trainer", lines).actor_rollout_ref.rollout
        )
    return made


class Actor(ActorRolloutRefWorker):
    """An actor rank: a tiny model in FP32, sharded by FSDP2 over gloo, instead of verl's FSDP
    engine on GPUs."""

    def __init__(self, rollout: RolloutConfig) -> None:
        Worker.__init__(self)
        initialize_global_process_group_ray(backend="cpu:gloo")
        engine = rollout.checkpoint_engine
        self.config = SimpleNamespace(rollout=rollout)
        self.actor = SimpleNamespace(engine=self)
        import_external_libs(engine.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend,
            is_master=self.rank == 0,
            bucket_size=1 << 20,
            **engine.engine_kwargs[engine.backend],
        )
        self.model = untied()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world_size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.extra: dict[str, torch.Tensor] = {}

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """As verl's FSDP engine does it: each tensor is a collective of all ranks, in the dtype of
        training."""
        params = {**self.model.state_dict(), **self.extra}
        whole = (
            (n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in params.items()
        )
        return whole, None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            tokens = torch.randint(0, 512, (4, 16), generator=torch.Generator().manual_seed(7))
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, extra: dict[str, torch.Tensor]) -> None:
        """Publishes these as well."""
        self.extra = extra

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def root(self) -> str:
        """Of the weights that the rollout must hold: cast to BF16 by torch."""
        return pulse_rl.state_root(
            {name: p.to(torch.bfloat16) for name, p in self.get_per_tensor_param()[0]}
        )


class Rollout(BaseRollout):
    """The rollout's side of a weight update: a BF16 model on the CPU, instead of an adapter to vLLM
    or SGLang."""

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.is_leader_rank = rank, True
        self.model = untied().to(torch.bfloat16)
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)  # nothing that was not received can pass for it
        self.steps: int | None = None

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        assert wire_format == "named_tensors"
        live = self.model.state_dict()
        async for name, tensor in weights:
            assert tensor.dtype == live[name].dtype
            live[name].copy_(tensor)
        self.steps = kwargs["global_steps"]


class RolloutWorker(CheckpointEngineWorker):
    def __init__(self, rollout: RolloutConfig, rank: int) -> None:
        super().__init__(rollout, model_config=None, server_adapter=Rollout(rank))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self) -> tuple[str, int | None]:
        """The root of the live model, and verl's count that came with it."""
        return pulse_rl.state_root(
            self.server_adapter.model.state_dict()
        ), self.server_adapter.steps


class Replica(RolloutReplica):
    """A rollout of one worker, without a server."""

    def __init__(self, rank: int, rollout: RolloutConfig) -> None:
        super().__init__(rank, rollout, model_config=None, gpus_per_node=1)
        self.group = group(RolloutWorker, 1, rollout, rank)
        self.workers = self.group.workers

    async def launch_servers(self) -> None: ...


def group(worker: type, ranks: int, *args: Any) -> RayWorkerGroup:
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(worker), *args), device_name="cpu")


class Fleet:
    """An actor of two ranks, rollout replicas, and verl's manager between them."""

    def __init__(self, store: str, replicas: int = 2) -> None:
        self.config = configured(store)
        self.actor = group(Actor, 2, self.config)
        self.manager = CheckpointEngineManager(self.config.checkpoint_engine, self.actor, [])
        self.count = 0
        for _ in range(replicas):
            self.join()

    def join(self) -> None:
        self.manager.add_replicas([Replica(self.count, self.config)])
        self.count += 1

    def lose(self, index: int) -> None:
        """A replica's process is killed, and verl told so."""
        replica = self.manager.replicas[index]
        ray.kill(replica.workers[0])
        self.manager.remove_replicas([replica])

    def restart_actor(self) -> None:
        """All actor ranks are killed, and begin at their checkpoint, which is the model before the
        first step."""
        for worker in self.actor.workers:
            ray.kill(worker)
        self.actor = self.manager.actor_wg = group(Actor, 2, self.config)

    def update(self, step: int | None) -> dict[str, float]:
        metrics: dict[str, float] = self.manager.update_weights(step)
        return metrics

    def held(self) -> list[tuple[str, int | None]]:
        return [held for replica in self.manager.replicas for held in replica.group.held()]

    def root(self) -> str:
        first, second = self.actor.root()
        assert first == second
        return str(first)
