"""The field's own cases: TRL's scripts and verl's GRPO by their own settings, and Qwen3's shapes;
Pulse beside dense.

    python -m benchmarks.field [--models 0.6B 1.7B]     # what this machine can; the table says what
    it could not
    python -m benchmarks.field --commands               # what to run on GPUs, for each row
    python -m benchmarks.field --with-pulse URL STORE SCRIPT [ARGS …]

A row publishes random BF16 weights of a Qwen3's shape to a folder, changes 0.85% of them by a unit
in the last place, and has a subscriber follow. ``dense``: the same bytes through the same folder by
safetensors, written and read. Memory is the most that one call of either side needs beyond what it
held before, in states.

``--with-pulse`` runs a script of TRL's unchanged, but that GRPOTrainer gets
``rollout_func=pulse_rollout(URL, STORE, "policy")`` and AsyncGRPOTrainer
``weight_transfer=PulseWeightTransfer(URL, STORE, "policy")``. Their logs have the figures for the
table: ``pulse/bytes``, ``pulse/density``, ``pulse/pause_seconds``, ``perf/weight_sync_s``."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
import tempfile
import time
from functools import partial
from math import prod
from pathlib import Path

import torch

import pulse_rl
from benchmarks.device import tensors
from benchmarks.measure import timed

DENSITY, UPDATES = 0.0085, 3
GPUS = {"0.6B": 1, "1.7B": 1, "4B": 8, "8B": 8, "30B-A3B": 8}
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-{m} --max-model-len 2048 --logprobs-mode "
    "processed_logprobs"
)
TRL = (
    "--model_name_or_path Qwen/Qwen3-{m} --dataset_name trl-lib/DeepMath-103K --reward_funcs "
    "accuracy_reward"
    " --learning_rate 1e-6 --max_steps 20 --logging_steps 1 --output_dir out"
)
VERL = (
    "python3 -m verl.experimental.one_step_off_policy.main_ppo algorithm.adv_estimator=grpo"
    " data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet "
    "data.train_batch_size=64"
    " data.max_prompt_length=512 data.max_response_length=1024 "
    "actor_rollout_ref.model.path=Qwen/Qwen3-{m}"
    " actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.actor.use_kl_loss=True"
    " actor_rollout_ref.hybrid_engine=False actor_rollout_ref.actor.strategy=fsdp2"
    " actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 "
    "trainer.n_gpus_per_node={half}"
    " rollout.n_gpus_per_node={half} trainer.total_training_steps=20"
)
PULSE = (
    " actor_rollout_ref.rollout.checkpoint_engine.backend=pulse"
    " actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=pulse_rl.frameworks.verl"
    " +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.pulse.store=/shared/store"
    " +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.pulse.stream=policy"
)


def commands(model: str) -> dict[str, list[str]]:
    """By transport, what to run on one GPU or on eight. On one, TRL and its server share it: NCCL
    cannot join two processes on one GPU, so that TRL's own sync is that of its colocate mode
    there."""
    one = GPUS[model] == 1
    serve, trl = SERVE.format(m=model), TRL.format(m=model)
    fsdp = "CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --use_fsdp --fsdp_version 2 -m "
    launch = "python -m " if one else fsdp
    serve = (
        f"{serve} --gpu-memory-utilization 0.4"
        if one
        else f"CUDA_VISIBLE_DEVICES=4,5,6,7 {serve} -tp 4"
    )
    own = "--vllm_mode colocate --vllm_gpu_memory_utilization 0.4" if one else "--vllm_mode server"
    found = {
        "TRL": [] if one else [f'{serve} --weight-transfer-config \'{{"backend": "nccl"}}\''],
        "Pulse under TRL": [
            f'{serve} --weight-transfer-config \'{{"backend": "pulse"}}\'',
            f"{launch}benchmarks.field --with-pulse http://localhost:8000 /shared/store "
            f"trl.scripts.grpo {trl}",
        ],
    }
    found["TRL"].append(f"{launch}trl.scripts.grpo {trl} --use_vllm True {own}")
    if not one:
        verl = VERL.format(m=model, half=4)
        found |= {"verl": [verl], "Pulse under verl": [verl + PULSE]}
    return found


def with_pulse(url: str, store: str, script: str, words: list[str]) -> None:
    """Runs TRL's ``script``, a file or a module."""
    import trl
    from trl.experimental import async_grpo

    from pulse_rl.frameworks.trl import PulseWeightTransfer, pulse_rollout

    trl.GRPOTrainer = partial(trl.GRPOTrainer, rollout_func=pulse_rollout(url, store, "policy"))
    transfer = PulseWeightTransfer(url, store, "policy")
    async_grpo.AsyncGRPOTrainer = partial(async_grpo.AsyncGRPOTrainer, weight_transfer=transfer)
    sys.argv = [script, *words]
    (runpy.run_path if script.endswith(".py") else runpy.run_module)(script, run_name="__main__")


def row(model: str) -> str:
    """The cells of a Qwen3's sync, or why there are none."""
    shapes = tensors(f"qwen3-{model.lower()}") if model != "30B-A3B" else []
    nbytes = 2 * sum(prod(dims) for _, dims in shapes) or int(61.1e9)
    (line,) = (
        each
        for each in Path("/proc/meminfo").read_text().splitlines()
        if each.startswith("MemAvailable")
    )
    free = int(line.split()[1]) << 10
    if free < 4.5 * nbytes or shutil.disk_usage(tempfile.gettempdir()).free < 4 * nbytes:
        return f"not run: {4.5 * nbytes / 1e9:.0f} GB of free memory are needed, and as much disk"
    weights = {name: torch.randn(dims).mul_(0.02).bfloat16() for name, dims in shapes}
    with tempfile.TemporaryDirectory() as temporary:
        store, found = str(Path(temporary) / "store"), []
        with (
            pulse_rl.Publisher(store, stream="policy") as publisher,
            pulse_rl.Subscriber(store, stream="policy") as worker,
        ):
            first, _ = timed(lambda: publisher.publish(weights))
            first_sync, update = timed(worker.sync)
            update.acknowledge()
            del update
            for _ in range(UPDATES):
                for weight in weights.values():
                    flat = weight.view(-1).view(torch.int16)
                    flat[torch.randint(len(flat), (int(len(flat) * DENSITY),))] += 1
                published, done = timed(lambda: publisher.publish(weights))
                synced, update = timed(worker.sync)
                assert update.root == pulse_rl.state_root(weights)
                update.acknowledge()
                del update
                found.append((published.wall, synced.wall, done))
        publish, sync, done = sorted(found, key=lambda each: each[0] + each[1])[UPDATES // 2]
        peak = max(first.peak, first_sync.peak) / nbytes
        dense = _dense(weights, Path(temporary) / "dense.safetensors")
    return (
        f"{nbytes / 1e9:.2f} GB, {len(shapes)} tensors | {first.wall:.1f} + "
        f"{first_sync.wall:.1f} | "
        f"{publish:.2f} + {sync:.2f} | {done.patch_bytes / 1e6:.1f} MB | "
        f"{100 * done.density:.2f}% | "
        f"{dense:.1f} s, {nbytes / 1e6:.0f} MB | {peak:.1f}"
    )


def _dense(weights: dict[str, torch.Tensor], file: Path) -> float:
    from safetensors.torch import load_file, save_file

    began = time.perf_counter()
    save_file(weights, file)
    os.sync()
    load_file(file)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.field", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--with-pulse", nargs=argparse.REMAINDER, metavar="URL STORE SCRIPT ARG")
    arguments = parser.parse_args()
    if arguments.with_pulse:
        url, store, script, *words = arguments.with_pulse
        with_pulse(url, store, script, words)
        return
    if arguments.commands:
        for model in arguments.models:
            for transport, lines in commands(model).items():
                print(f"# Qwen3-{model}, {GPUS[model]} GPU, {transport}", *lines, "", sep="\n")
        return
    heads = (
        "state | first publish + sync, s | publish + sync, s | patch | density | dense | "
        "memory, states"
    )
    print(
        f"| | {heads} | under TRL | TRL's own | under verl | verl's own |\n{'|---' * 12}|",
        flush=True,
    )
    for model in arguments.models:
        cells = row(model)
        cells += "" if " | " in cells else " |" * 6
        why = "not run: no GPU" if not torch.cuda.is_available() else "see --commands"
        print(f"| Qwen3-{model} | {cells} |" + f" {why} |" * 4, flush=True)


if __name__ == "__main__":
    main()
