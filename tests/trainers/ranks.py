"""What each of two ranks on gloo does, started by torchrun with a folder
(tests/trainers/test_ranks.py)."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import Trainer

from pulse_rl import LocalStore, Publisher, state_root
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.frameworks.transformers import PulseCallback, checkpoint_weights
from pulse_rl.frameworks.weights import is_sharded, policy_weights
from tests.trainers.models import family
from tests.trainers.support import (
    Witness,
    adapted,
    arguments,
    cast,
    followed,
    saved,
    sentences,
    tiny,
)
from tests.trainers.test_trl import grpo


def ddp(store: LocalStore) -> None:
    """The Trainer under DDP: one publisher, and all ranks hold what the stream has."""
    witness, callback = Witness(), PulseCallback(store, stream="policy", replace=False)
    folder = store.root.parent
    followed_by_all(
        Trainer(
            tiny(), arguments(folder), train_dataset=sentences(), callbacks=[callback, witness]
        ),
        store,
        callback,
        witness,
    )


def grpo_ddp(store: LocalStore) -> None:
    """TRL's GRPOTrainer under DDP."""
    witness, callback = Witness(), PulseCallback(store, stream="policy", replace=False)
    folder = store.root.parent
    checkpoint = saved(folder / "checkpoint")  # which the first rank alone writes
    dist.barrier()
    followed_by_all(grpo(folder, [callback, witness], model=checkpoint), store, callback, witness)


def followed_by_all(
    trainer: Trainer, store: LocalStore, callback: PulseCallback, witness: Witness
) -> None:
    trainer.train()
    dist.barrier()  # the last version is committed when the first rank is here
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    assert followed(store) == witness.roots
    assert (callback.published is None) == (dist.get_rank() != 0)


def shard(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """As accelerate does it: each layer, then the rest with the tied embedding."""
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def fsdp2(store: LocalStore) -> None:
    """Sharded weights after a step of the optimizer are those of the same step on one process."""
    model, alone = tiny(), tiny()
    shard(model, model.model.layers)
    assert is_sharded(model)
    assert not is_sharded(alone)
    rows = sentences(2)
    batch = torch.stack([row["input_ids"] for row in rows])
    keep = dist.get_rank() == 0
    publisher = Publisher(store, stream="policy") if keep else None
    for one in (model, alone):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
        one(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    weights = policy_weights(model, "BF16", keep=keep)
    assert bool(weights) == keep
    if publisher:
        assert {t.dtype for t in weights.values()} == {torch.bfloat16}
        assert weights.keys() == alone.state_dict().keys() - {"lm_head.weight"}
        for name, tensor in cast(
            checkpoint_weights(alone)
        ).items():  # close only: the ranks' gradients are averaged
            torch.testing.assert_close(weights[name], tensor)
        assert publisher.publish(weights).root == state_root(weights)
    whole = {name: t.full_tensor() for name, t in model.state_dict().items()}
    if publisher:
        assert all(
            torch.equal(tensor, whole[name].to(torch.bfloat16)) for name, tensor in weights.items()
        )


def fsdp2_lora(store: LocalStore) -> None:
    """Sharded base and adapters: merged on the first rank, and no shard is written."""
    sharded_lora(each=False)


def fsdp2_lora_each(store: LocalStore) -> None:
    """The same where each adapted layer is a unit of its own."""
    sharded_lora(each=True)


def sharded_lora(*, each: bool) -> None:
    base = tiny(torch.bfloat16)
    model = adapted(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    expected = cast(copy.deepcopy(model).float().merge_and_unload().state_dict())
    model.float()
    for module in [m for m in model.modules() if each and hasattr(m, "base_layer")]:
        fully_shard(module)
    shard(model, base.model.layers)
    before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    keep = dist.get_rank() == 0
    weights = policy_weights(model, "BF16", keep=keep)
    if keep:
        assert state_root(weights) == state_root(expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name])


def fsdp2_experts(store: LocalStore) -> None:
    """Fused experts over ranks: each publishes its own, by the checkpoint's names."""
    for name in ("Mixtral", "Gemma2"):
        model, alone = family(name), family(name)
        shard(model, model.model.layers)
        with ShardedPublisher(store, stream=name) as publisher:
            published = publisher.publish(checkpoint_weights(model))
        assert published.root == state_root(checkpoint_weights(alone))
        weights = policy_weights(model, keep=dist.get_rank() == 0)
        assert not weights or published.root == state_root(weights)
        folder = store.root.parent / name
        if dist.get_rank() == 0:
            alone.save_pretrained(folder)
            assert published.root == state_root(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in (
        ddp,
        grpo_ddp,
        fsdp2,
        fsdp2_lora,
        fsdp2_lora_each,
        fsdp2_experts,
    ):  # the Trainer of the first makes the process group
        case(LocalStore(Path(sys.argv[1]) / case.__name__))
    print(f"rank {dist.get_rank()} is content")
    dist.destroy_process_group()
