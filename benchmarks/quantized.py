"""Streams of quantized states of a real run beside its BF16 stream: bytes a step, what changes, and
XOR + zstd.

    python -m benchmarks.quantized [--lr 1e-6] [--steps 40] [--last 10] [--keep-embeddings]
    [--speed]

The policy-gradient run of `benchmarks.trace` (22.7 M pretrained weights, FP32 masters). Each step
is published by one publisher a format, quantized from the masters; counted are whole patch files of
the last steps. All matrices are quantized, embeddings too, unless they are to be kept in BF16 as
engines keep them: they are half of this model, and a tenth or less of a large one. XOR + zstd codes
the same codes, tensor by tensor, without scales. --speed: gigabytes of weights a second that are
quantized, by one core and by all, and the memory that takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks import trace
from benchmarks.measure import timed
from pulse_rl import MemoryStore, Publisher, State, Subscriber
from pulse_rl.codec import compress
from pulse_rl.ops.diff import build_patch
from pulse_rl.patch.blocks import cut
from pulse_rl.quantize.formats import FORMATS
from pulse_rl.quantize.states import Quantize, QuantizedState
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import DTYPES
from pulse_rl.study.tally import kind_of

_LEVELS = (1, 9)


@dataclass
class Stream:
    """What a format's publisher has stored, and what the patches are made of."""

    name: str
    store: MemoryStore = field(default_factory=MemoryStore)
    nbytes: int = 0
    kinds: dict[str, list[int]] = field(
        default_factory=dict
    )  # elements, changed, bytes of payloads
    header: int = 0
    xor: list[int] = field(default_factory=lambda: [0] * len(_LEVELS))
    codes: int = 0  # that changed; of four bits each where they are packed
    before: State | None = None

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.store, stream="run")
        self.worker = Subscriber(self.store, stream="run")

    def take(self, state: State, counts: bool) -> None:
        done = self.publisher.publish(state)
        update = self.worker.sync()
        assert update is not None
        update.acknowledge()
        assert self.worker.root == done.root
        if counts:
            self.nbytes += done.patch_bytes
            assert self.before is not None
            self._part(self.before, state)
        self.before = state

    def _part(self, old: State, new: State) -> None:
        patch = build_patch(old, new, state_digest(old))
        self.header += len(patch.chunks[0])
        for block, entry in zip(cut(new.specs), patch.header.blocks, strict=True):
            kind = self.kinds.setdefault(kind_of(block.segments[0].spec), [0, 0, 0])
            for at, number in enumerate((block.elements, entry.changed, entry.length)):
                kind[at] += number
        for spec in new.specs:
            if spec.dtype.width == 1 and kind_of(spec) != "scales":
                xor = old.read(spec.name) ^ new.read(spec.name)
                packed = spec.name.endswith("_packed")
                self.codes += int(
                    sum(
                        (xor & part).astype(bool).sum()
                        for part in ((15, 240) if packed else (255,))
                    )
                )
                for k, level in enumerate(_LEVELS):
                    self.xor[k] += len(compress(xor.tobytes(), level))


def states(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """The FP32 masters of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, generator = trace.Policy(), torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trace.load_start(policy, (args.start or Path(folder)) / "start.pt", 0)
    adam, prompts = (
        trace.AdamW(policy, trace.Run("quantized", args.lr)),
        trace.Prompts(policy.vocabulary, 0),
    )
    assert adam.master is not None
    for _ in range(args.steps):
        policy.policy_gradient(prompts, generator)
        adam.step()
        parts = adam.master.split([int(np.prod(shape)) for shape in policy.shapes.values()])
        named = zip(policy.shapes.items(), parts, strict=True)
        # Names that no rule keeps, unless embeddings are to be kept.
        yield {
            name
            if args.keep_embeddings
            else name.replace("embeddings", "table").replace("Norm", "N"): part.view(shape)
            for (name, shape), part in named
        }


def print_streams(streams: Sequence[Stream], args: argparse.Namespace) -> None:
    dense, *others = streams
    steps = args.last
    changed, elements = dense.kinds["BF16"][1], dense.kinds["BF16"][0]
    print(
        f"\nlr {args.lr:g}, FP32 masters, the last {steps} of {args.steps} steps, a step in the "
        "mean:"
    )
    print(
        f"BF16: {changed / elements:.3%} changed, {dense.nbytes / steps / 1e3:.1f} kB, "
        f"{dense.nbytes / changed:.3f} B"
    )
    print("| | kB a step | smaller | codes changed | bytes a code | scales changed "
          "| kB of codes + scales + header + rest | XOR + zstd-1, bytes a code | zstd-9 |")  # fmt: skip  # noqa: E501
    print("|---|---|---|---|---|---|---|---|---|")
    for of in others:
        codes = next(kind for name, kind in of.kinds.items() if name in ("F8_E4M3", "U8"))
        scales, rest = of.kinds["scales"], of.kinds["BF16"]
        sizes = " + ".join(
            f"{n / steps / 1e3:.2f}" for n in (codes[2], scales[2], of.header, rest[2])
        )
        whole = codes[0] * (2 if "U8" in of.kinds else 1)
        xor = " | ".join(f"{n / of.codes:.2f}" for n in of.xor)
        print(
            f"| {of.name} | {of.nbytes / steps / 1e3:.1f} | {dense.nbytes / of.nbytes:.1f} times | "
            f"{of.codes / whole:.4%} | {codes[2] / of.codes:.2f} | {scales[1] / scales[0]:.1%} | "
            f"{sizes} | {xor} |"
        )


def speeds(copies: int = 4, experts: int = 64) -> Iterator[tuple[str, int, float, float, float]]:
    """(format, threads, GB/s, GB/s of a core, states of memory) of FP32 weights, ``copies`` *
    ``experts`` * 4 MB, read as a publisher does."""
    made_once = (0.02 * torch.randn(experts, 1024, 1024)).repeat(copies, 1, 1)
    weights = made_once.view(experts, copies, 1024, 1024)
    state = State.of({f"m.experts.{k}": of for k, of in enumerate(weights)})
    formats: dict[str, Quantize] = {name: name for name in FORMATS}
    formats["GPT-OSS"] = {"quant_method": "mxfp4"}
    for name, how in formats.items():
        for threads in (1, os.cpu_count() or 1):

            def run(how: Quantize = how, threads: int = threads) -> float:
                made, started = QuantizedState(state, how), time.perf_counter()
                with ThreadPoolExecutor(threads) as pool:
                    for _ in pool.map(lambda spec: made.read(spec.name).size, made.specs):
                        pass
                return time.perf_counter() - started

            runs = [timed(run) for _ in range(3)]
            seconds, cost = min((seconds, cost) for cost, seconds in runs)
            size = state.nbytes / 1e9
            yield name, threads, size / seconds, size / cost.cpu, cost.peak / state.nbytes


def speed() -> None:
    for name, threads, all_of_them, core, states in speeds():
        print(f"{name:10} {threads} threads: {all_of_them:5.2f} GB/s, a core {core:.2f} GB/s, "
              f"{states:.3f} states more")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--last", type=int, default=10)
    parser.add_argument("--keep-embeddings", action="store_true")
    parser.add_argument(
        "--start", type=Path, help="a folder that keeps the fitted start for the next run"
    )
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    if args.speed:
        return speed()
    streams = [Stream("BF16"), *map(Stream, FORMATS)]
    for step, masters in enumerate(states(args), 1):
        source = State.of(masters)
        for of in streams:
            if step >= args.steps - args.last:
                how = "fp8_block" if of.name == "BF16" else of.name
                state = QuantizedState(
                    source, how if of is not streams[0] else lambda *_: None, DTYPES["BF16"]
                )
                of.take(state.copy(), step > args.steps - args.last)
    print_streams(streams, args)
    return None


if __name__ == "__main__":
    main()
