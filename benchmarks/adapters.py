"""LoRA: what a step's patch takes as merged weights, and as the adapter alone (docs/trainers.md).

    make bench-adapters

Trains LoRA on all linear layers of a small Qwen2 by AdamW on random tokens, and publishes both ways
after each step.
"""

from __future__ import annotations

import argparse
from statistics import mean

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from pulse_rl import MemoryStore, Published, Publisher
from pulse_rl.frameworks.weights import adapter_weights, policy_weights

STEPS = 20
SKIPPED = 5  # the first steps: B starts at zero, and Adam's steps are at their largest


def base(width: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).bfloat16()


def run(width: int, rank: int, lr: float, wide: bool) -> None:
    """Prints one line of the table. ``wide``: the adapter is trained in FP32, as PEFT has it by
    default."""
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base(width), lora, autocast_adapter_dtype=wide)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    merged, adapter = (Publisher(MemoryStore(), stream=name) for name in ("merged", "adapter"))
    results: list[tuple[Published, Published]] = []
    for step in range(STEPS + 1):
        weights = policy_weights(model, "BF16"), adapter_weights(model, "BF16")[0]
        results.append(
            (merged.publish(weights[0], dtype="BF16"), adapter.publish(weights[1], dtype="BF16"))
        )
        tokens = torch.randint(0, 1024, (4, 32), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = list(zip(*results[1 + SKIPPED :], strict=True))
    figures = [(mean(p.patch_bytes for p in side), mean(p.density for p in side)) for side in kept]
    cells = [f"{size / 1e3:.1f} kB, {density:.1%}" for size, density in figures]
    facts = [
        str(width),
        str(rank),
        "FP32" if wide else "BF16",
        f"{lr:g}",
        f"{results[0][1].dense_bytes / 1e3:.0f} kB",
    ]
    print("| " + " | ".join([*facts, *cells]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    settings = parser.parse_args()
    print(
        "| width | rank | trained in | learning rate | adapter, BF16 | merged: a step | adapter: "
        "a step |"
    )
    print("|---|---|---|---|---|---|---|")
    for width in settings.widths:
        for rank in settings.ranks:
            for lr in settings.lr:
                for wide in (True, False):
                    run(width, rank, lr, wide)


if __name__ == "__main__":
    main()
