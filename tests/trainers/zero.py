"""What each of two ranks on gloo does under DeepSpeed, started by torchrun with a folder
(`test_ranks`)."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from transformers import Trainer

from pulse_rl import LocalStore, Publisher, state_root
from pulse_rl.errors import UnsupportedTensor
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.frameworks.transformers import PulseCallback, checkpoint_weights
from pulse_rl.frameworks.weights import policy_weights
from tests.trainers.support import Witness, adapted, arguments, cast, followed, sentences, tiny


def config(stage: int, *, offload: bool = False) -> dict[str, Any]:
    # Parameters of up to 100 elements stay whole on all ranks: norms.
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    if offload:
        zero |= {
            name: {"device": "cpu", "pin_memory": False}
            for name in ("offload_param", "offload_optimizer")
        }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
    }


def engine(model: nn.Module, stage: int, *, bf16: bool = False) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    return deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config(stage, offload=bf16 and stage == 3) | {"bf16": {"enabled": bf16}},
    )[0]


def step(trained: Any, seed: int) -> None:
    """A real step, of which each rank has other examples."""
    rows = sentences(2 * (seed + 1) * dist.get_world_size())[-4:]
    batch = torch.stack([row["input_ids"] for row in rows])[2 * dist.get_rank() :][:2]
    trained.backward(trained(input_ids=batch, labels=batch).loss)
    trained.step()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state in BF16 by DeepSpeed's own gather, by the names of the checkpoint, of which
    the head is tied."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = {
            name: p.detach().to(torch.bfloat16, copy=True) for name, p in model.named_parameters()
        }
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def loop(store: LocalStore, stage: int, *, bf16: bool = False) -> None:
    """A loop of one's own, its publishers started again after three steps: gathered, and without a
    gather."""
    trained = engine(tiny(), stage, bf16=bf16)
    first = dist.get_rank() == 0
    stores = [LocalStore(store.root / name) for name in ("slices", "gathered")]
    roots = []
    for seeds in ((0, 1, 2), (3,)):
        with ShardedPublisher(stores[0], stream="policy") as ranks:
            publisher = Publisher(stores[1], stream="policy") if first else None
            for seed in seeds:
                step(trained, seed)
                roots.append(state_root(gathered(trained.module)))
                done = ranks.publish(trained, metadata={"step": seed}, dtype="BF16")
                assert done.root == roots[-1]
                assert (done.changed is None) == (seed == 0)
                weights = policy_weights(trained, "BF16", keep=first)
                if publisher:
                    assert publisher.publish(weights, metadata={"step": seed}).root == roots[-1]
            if publisher:
                publisher.close()
    assert len(set(roots)) == len(roots)
    dist.barrier()  # the first rank has committed the last version
    for one in stores:
        assert followed(one) == dict(enumerate(roots))


def zero3(store: LocalStore) -> None:
    """FP32 weights."""
    loop(store, 3)


def zero3_bf16(store: LocalStore) -> None:
    """BF16 weights with FP32 masters, offloaded to the host."""
    loop(store, 3, bf16=True)


def zero2(store: LocalStore) -> None:
    """Weights that are whole on all ranks."""
    loop(store, 2, bf16=True)


def traps(store: LocalStore) -> None:
    """Within a gather of the caller's own, which stays; and what DeepSpeed leaves in place of
    weights is refused."""
    model = engine(tiny(), 3).module
    expected = state_root(gathered(model))
    weight = model.model.layers[0].mlp.up_proj.weight
    with deepspeed.zero.GatheredParameters([weight]):
        assert state_root(policy_weights(model, "BF16")) == expected
        assert weight.numel() == 64 * 128
    assert weight.numel() == 0
    with (
        Publisher(store, stream="empty") as publisher,
        pytest.raises(UnsupportedTensor, match="in place of weights"),
    ):
        publisher.publish(model.state_dict())
    with (
        ShardedPublisher(store, stream="all") as ranks,
        pytest.raises(UnsupportedTensor, match="in place of weights"),
    ):
        ranks.publish(model.state_dict())


def lora(store: LocalStore) -> None:
    """Adapters are merged on whole layers, one after another."""
    made = adapted(tiny(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    alone = tiny()
    alone.load_state_dict(copy.deepcopy(made).merge_and_unload().state_dict())
    expected = state_root(cast(checkpoint_weights(alone)))
    weights = policy_weights(engine(made, 3), "BF16", keep=dist.get_rank() == 0)
    assert not weights or state_root(weights) == expected


class GatheredWitness(Witness):
    def note(self, step: int, model: nn.Module) -> None:
        self.roots[step] = state_root(gathered(model))


def trainer(store: LocalStore) -> None:
    """The Hugging Face Trainer with a config of DeepSpeed, resumed from its own checkpoint."""
    folder = store.root.parent
    roots = {}
    for steps in (3, 5):
        witness, callback = GatheredWitness(), PulseCallback(store, stream="policy", replace=False)
        settings = arguments(
            folder,
            deepspeed=config(3) | {"train_micro_batch_size_per_gpu": "auto"},
            max_steps=steps,
            save_steps=3,
            save_strategy="steps",
        )
        one = Trainer(tiny(), settings, train_dataset=sentences(), callbacks=[callback, witness])
        one.train(resume_from_checkpoint=steps == 5)
        assert callback.error is None
        dist.barrier()
        roots |= witness.roots
    assert set(roots) == set(range(6))
    assert followed(store) == roots


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Its all-reduce in shared memory is compiled when it is first used; gloo's serves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for case in (zero3, zero3_bf16, zero2, traps, lora, trainer):
        case(LocalStore(folder / case.__name__))
    print(f"rank {dist.get_rank()} is content", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
