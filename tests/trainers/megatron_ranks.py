"""What each of two ranks on gloo does with a model of Megatron-Core, started by torchrun
(`test_ranks`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.megatron_host import OnHost  # before what needs its stand-ins

# isort: split
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func

from pulse_rl import LocalStore, Publisher, state_root
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.frameworks.megatron import MegatronWeights
from tests.trainers.support import followed, sentences, tiny

FUSIONS = (
    "gradient_accumulation_fusion",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
)


def built(
    checkpoint: Path, *, dtype: torch.dtype, tensor: int = 1, pipeline: int = 1
) -> tuple[Any, Any]:
    """The bridge and the model in Megatron's DDP, with the checkpoint's weights in the buffers of
    its optimizer."""
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = tensor, pipeline
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16 = dtype == torch.bfloat16
    provider.attention_dropout = provider.hidden_dropout = 0.0
    provider.transformer_layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    for fusion in FUSIONS:
        setattr(provider, fusion, False)
    provider.finalize()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
    )
    return bridge, provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
        use_cpu_initialization=True,
        bf16=provider.bf16,
    )


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step by Megatron's own schedule and gradients, of which each data parallel rank has other
    examples."""
    replica = parallel_state.get_data_parallel_rank()
    rows = torch.stack(
        [row["input_ids"] for row in sentences(4 * (seed + 1))[-4 + 2 * replica :][:2]]
    )
    for chunk in model:
        chunk.zero_grad_buffer()

    def forward(_: Any, chunk: Any) -> Any:
        places = torch.arange(rows.shape[1]).expand_as(rows)
        mask = torch.ones(1, 1, rows.shape[1], rows.shape[1]).triu(1).bool()
        losses = chunk(rows, places, mask, labels=rows)
        return losses, lambda out: (out.float().mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=model,
        num_microbatches=1,
        seq_length=rows.shape[1],
        micro_batch_size=rows.shape[0],
        forward_only=False,
    )
    finalize_model_grads(model)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
    optimizer.step()


def trained(store: LocalStore, *, dtype: torch.dtype, tied: bool, **parallel: int) -> None:
    """After each step what the ranks publish of their own slices is what the bridge gathers, and a
    follower has it; at first it is the checkpoint, whose weights came to the ranks by the bridge's
    other direction."""
    checkpoint = store.root.parent / f"{store.root.name}-checkpoint"
    if dist.get_rank() == 0:
        tiny(torch.bfloat16, tie_word_embeddings=tied).save_pretrained(checkpoint)
    dist.barrier()
    with OnHost():
        bridge, model = built(checkpoint, dtype=dtype, **parallel)
    weights = MegatronWeights(bridge, model)
    optimizer = torch.optim.AdamW([p for chunk in model for p in chunk.parameters()], lr=1e-3)
    first = dist.get_rank() == 0
    stores = [LocalStore(store.root / name) for name in ("slices", "gathered")]
    roots: list[str] = []
    for seeds in ((0, 1, 2), (3,)):  # the publishers are started again
        with ShardedPublisher(stores[0], stream="policy") as ranks:
            publisher = Publisher(stores[1], stream="policy") if first else None
            for seed in seeds:
                if seed:
                    with OnHost():
                        step(model, optimizer, seed)
                submit = ranks.submit(weights.slices(), metadata={"step": seed}, dtype="BF16")
                done = submit.result()
                assert (done.changed is None) == (seed == 0)
                roots.append(done.root)
                whole = weights.gathered("BF16", keep=first)
                assert bool(whole) == first
                if publisher:
                    assert publisher.publish(whole, metadata={"step": seed}).root == done.root
            if publisher:
                publisher.close()
    dist.barrier()  # the first rank has committed the last version
    assert roots[0] == state_root(checkpoint)
    assert len(set(roots)) == len(roots)
    for one in stores:
        assert followed(one) == dict(enumerate(roots))
    parallel_state.destroy_model_parallel()


def tensor_parallel(store: LocalStore) -> None:
    """FP32 weights, published in BF16."""
    trained(store, dtype=torch.float32, tied=False, tensor=2)


def pipeline_parallel(store: LocalStore) -> None:
    """BF16 weights; the last stage has a copy of the first one's embedding."""
    trained(store, dtype=torch.bfloat16, tied=True, pipeline=2)


def data_parallel(store: LocalStore) -> None:
    """All ranks have all weights: the first publishes them."""
    trained(store, dtype=torch.bfloat16, tied=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in (tensor_parallel, pipeline_parallel, data_parallel):
        case(LocalStore(Path(sys.argv[1]) / case.__name__))
    print(f"rank {dist.get_rank()} is content", flush=True)
    dist.destroy_process_group()
