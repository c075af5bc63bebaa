"""The pause of a live vLLM engine, beside vLLM's own sparse patches on the same update.

Run it in the environment of `make test-vllm`: ``.venv-vllm/bin/python -m benchmarks.engines``. The
model has the shape of Qwen2.5-0.5B, or with ``--shape`` that of a small Qwen3-MoE or of a Qwen3,
and random weights; 1% of them change. What `connect` takes, with the map and its proofs, is told
beside the pause, in seconds and in those of the workers' CPUs, which other programs do not
lengthen. ``--bandwidth`` limits what the engine's worker reads from the store, in Mbit/s: the pause
must not depend on it. Memory is that of the engine's processes beside what they had before the
stream was opened, in states (bytes of the BF16 weights); each page that they share counts once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import pulse_rl
from pulse_rl.engines.vllm import connect

_DENSE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_MOE = _DENSE | {
    "vocab_size": 16384,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "tie_word_embeddings": False,
}


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, tied: bool
) -> tuple[Any, Any, dict[str, Any]]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
    }
    return Qwen3ForCausalLM, Qwen3Config, _DENSE | sizes


SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dense": (Qwen2ForCausalLM, Qwen2Config, _DENSE),
    "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _MOE),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="dense")
    parser.add_argument("--layers", type=int, help="default: those of the shape")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument(
        "--bandwidth", type=float, help="Mbit/s from the store (default: unlimited)"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--quantization", help="as vLLM's own, such as fp8_per_channel")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, Path(folder))


def run(arguments: argparse.Namespace, folder: Path) -> None:
    from vllm import LLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    kind, configuration, sizes = SHAPES[arguments.shape]
    model = kind(
        configuration(
            **sizes | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})
        )
    )
    torch.set_default_dtype(torch.float32)
    store = str(folder / "store")
    publisher = pulse_rl.Publisher(store, stream="policy")
    publisher.publish(saved(model, folder / "model"))
    llm = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        enforce_eager=not torch.cuda.is_available(),  # with CUDA graphs where there are any
        max_model_len=128,
        max_num_seqs=4,
        tensor_parallel_size=arguments.tensor_parallel,
        quantization=arguments.quantization,
        weight_transfer_config={"backend": "pulse"},
    )
    if arguments.bandwidth:
        llm.collective_rpc(slow_down, args=(arguments.bandwidth * 1e6 / 8,))
    weights = sum(p.numel() for p in model.parameters())
    print(f"{weights / 1e9:.2f} billion weights, density {arguments.density:.2%}")
    begun, busy = time.perf_counter(), llm.collective_rpc(cpu_seconds)
    with Memory(llm) as memory, connect(llm, store=store, stream="policy") as handle:
        opened = time.perf_counter() - begun
        spent = max(
            now - then for now, then in zip(llm.collective_rpc(cpu_seconds), busy, strict=True)
        )
        print(f"connect, with the map and its proofs: {opened:.2f} s (CPU {spent:.2f})")
        for _ in range(arguments.updates):
            old = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            change(model, arguments.density)
            publisher.publish(saved(model, folder / "now"))
            started, busy = time.perf_counter(), llm.collective_rpc(cpu_seconds)
            done = handle.sync()
            assert done is not None
            took = time.perf_counter() - started
            busy = [
                now - then for now, then in zip(llm.collective_rpc(cpu_seconds), busy, strict=True)
            ]
            audit = (
                "" if done.audit_seconds is None else f", of which audit {done.audit_seconds:.2f} s"
            )
            print(
                f"version {done.version}: {done.fetched_bytes / 1e6:.1f} MB in {took:.2f} s (CPU "
                f"{max(busy):.2f}, "
                f"fetch {done.fetch_seconds:.2f}, verify {done.verify_seconds:.2f}), "
                f"pause {1e3 * done.pause_seconds:.0f} ms, apply {1e3 * done.apply_seconds:.0f} "
                f"ms{audit}",
                flush=True,
            )
            print(
                f"  memory: {memory.now() / (2 * weights):.2f} states, at most "
                f"{memory.most / (2 * weights):.2f}"
            )
            if (
                arguments.tensor_parallel == 1
                and arguments.shape != "moe"
                and not arguments.quantization
            ):
                torch.save(patches(old, model), folder / "patches")
                seconds = llm.collective_rpc(patch, args=(str(folder / "patches"),))[0]
                print(
                    f"  the same by load_checkpoint_weight_patches: {1e3 * seconds:.0f} ms",
                    flush=True,
                )
        assert handle.audit() == ()
    llm.llm_engine.engine_core.shutdown()


class Memory:
    """Anonymous and shared memory of an engine's workers beyond what they have now, in bytes;
    sampled in a thread."""

    def __init__(self, llm: Any) -> None:
        self._processes = llm.collective_rpc(process_id)
        self._before = self._taken()
        self.most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def now(self) -> int:
        return self._taken() - self._before

    def _taken(self) -> int:
        files = [Path(f"/proc/{process}/smaps_rollup") for process in self._processes]
        lines = [line for file in files for line in file.read_text().splitlines()]
        return sum(
            int(line.split()[1]) << 10
            for line in lines
            if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
        )

    def _sample(self) -> None:
        while not self._end.wait(0.1):
            self.most = max(self.most, self.now())


def saved(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes: the names of checkpoints."""
    model.save_pretrained(folder, max_shard_size="100GB")  # type: ignore[operator]
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def cpu_seconds(worker: Any) -> float:
    return time.process_time()


def process_id(worker: Any) -> int:
    return os.getpid()


def change(model: torch.nn.Module, density: float) -> None:
    """Adds one rounding step to every n-th weight."""
    with torch.no_grad():
        for weight in model.parameters():
            flat = weight.view(-1).view(torch.int16)
            flat[torch.randint(int(1 / density), ()) :: int(1 / density)] += 1


def patches(
    old: dict[str, torch.Tensor], model: torch.nn.Module
) -> list[tuple[str, Any, Any, Any]]:
    """(name, shape, indices, values) of what changed."""
    found = []
    for name, weight in model.named_parameters():
        now, before = weight.detach().view(-1), old[name].view(-1)
        indices = (now.view(torch.int16) != before.view(torch.int16)).nonzero().squeeze(-1)
        found.append((name, tuple(weight.shape), indices.int(), now[indices].clone()))
    return found


def patch(worker: Any, file: str) -> float:
    """Seconds that vLLM needs to write the patches in ``file`` in the worker."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    wanted = [
        CheckpointWeightPatch(name, shape, v.dtype, v, i) for name, shape, i, v in torch.load(file)
    ]
    started = time.perf_counter()
    load_checkpoint_weight_patches(worker.get_model(), wanted)
    return time.perf_counter() - started


def slow_down(worker: Any, bytes_per_second: float) -> None:
    """Makes the worker read from local stores as over a link of ``bytes_per_second``."""
    from pulse_rl import LocalStore

    get = LocalStore.get

    def slow(self: Any, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = get(self, name, start, stop)
        time.sleep(len(data) / bytes_per_second)
        return data

    LocalStore.get = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
