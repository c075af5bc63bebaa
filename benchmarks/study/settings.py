"""The runs of the study and what they vary; everything else is as in the first of their kind."""

from __future__ import annotations

from dataclasses import dataclass

KS = (1, 2, 4, 8, 16, 32)
WARMUP = 20
#: Pairs whose older state is of this step or later count as steady: the warm-up and its peak are
#: over.
STEADY_FROM = 25
#: With STEADY_FROM this gives nine pairs of k = 32.
STEPS = 65


@dataclass(frozen=True)
class Settings:
    """One run. ``model`` is "minilm" or a size of the example's Qwen2; ``updates`` are optimizer
    updates per rollout batch; ``dtypes`` are compute dtypes that are measured beside BF16, from the
    same FP32 masters.
    """

    name: str
    model: str
    lr: float
    supervised: bool = False
    masters: bool = True
    warmup: int = WARMUP
    betas: tuple[float, float] = (0.9, 0.999)
    updates: int = 1
    steps: int = STEPS
    steady_from: int = STEADY_FROM
    dtypes: tuple[str, ...] = ()


RUNS = (
    Settings("lr5e-7", "minilm", 5e-7),
    Settings("lr1e-6", "minilm", 1e-6),
    Settings("lr3e-6", "minilm", 3e-6, dtypes=("F16", "F8_E4M3")),
    Settings("lr5e-6", "minilm", 5e-6),
    Settings("sft2e-5", "minilm", 2e-5, supervised=True),
    Settings("lr3e-6-no-warm-up", "minilm", 3e-6, warmup=1),
    Settings("lr3e-6-beta2-.95", "minilm", 3e-6, betas=(0.9, 0.95)),
    Settings("lr3e-6-4-updates", "minilm", 3e-6, updates=4),
    Settings("lr1e-6-bf16", "minilm", 1e-6, masters=False),
    Settings("lr3e-6-bf16", "minilm", 3e-6, masters=False),
    Settings("lr5e-6-bf16", "minilm", 5e-6, masters=False),
    Settings("sft2e-5-bf16", "minilm", 2e-5, supervised=True, masters=False),
    Settings("qwen-0.4m-lr3e-6", "qwen-0.4m", 3e-6),
    Settings("qwen-1.6m-lr3e-6", "qwen-1.6m", 3e-6),
    Settings("qwen-6m-lr3e-6", "qwen-6m", 3e-6),
    Settings("qwen-1.6m-lr1e-6", "qwen-1.6m", 1e-6),
    Settings("qwen-1.6m-lr1e-5", "qwen-1.6m", 1e-5),
    Settings("qwen-1.6m-lr3e-6-4-updates", "qwen-1.6m", 3e-6, updates=4),
    Settings("qwen-1.6m-sft2e-5", "qwen-1.6m", 2e-5, supervised=True),
    Settings("lr3e-6-400-steps", "minilm", 3e-6, steps=400, steady_from=200),
)
