"""Everything that needs a GPU, in at most eight minutes, as one table.

    python -m benchmarks.gpu            # on a machine with a GPU python -m benchmarks.gpu --try
    # the same with small shapes, on the CPU where there is no GPU

Each row is a command of its own, which is printed; its result is the last lines of what it prints.
A row that this machine cannot run says why. Rows stand in the order of their worth: those for which
no time is left are not run. The engine's rows need vLLM and the Qwen3 ones transformers, beside
pulse-rl.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from math import prod
from statistics import median
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from pulse_rl import state_root


class Row(NamedTuple):
    """``lines``: of the end of what ``command`` prints, its result. ``needs``: "gpu", a module, or
    a program."""

    name: str
    command: list[str]
    lines: int
    needs: tuple[str, ...] = ()


def rows(small: bool) -> Iterator[Row]:
    python = [sys.executable, "-m"]
    device = [*python, "benchmarks.device"]
    for option in ([], ["--copy-on-device"]):
        shape = "10m" if small else "0.5b"
        yield Row(" ".join(["submit", *option]), [*device, "--shape", shape, *option], 1)
    yield Row(
        "scatter, Triton's kernel beside index_copy_", [*python, "benchmarks.gpu", "--scatter"], 1
    )
    yield Row("quantize, device and host", [*python, "benchmarks.gpu", "--quantize"], 1)
    for shape in ("dense", "qwen3-0.6b"):
        size = ["--layers", "2", "--updates", "1"] if small else []
        yield Row(
            f"engine, {shape}",
            [*python, "benchmarks.engines", "--shape", shape, *size],
            8,
            ("vllm",),
        )
    for shape in ("10m",) if small else ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"):
        command = [*device, "--shape", shape, "--updates", "2", "--copy-on-device"]
        yield Row(f"{shape}, copied on the device", command, 1, ("gpu",))
    for shape in ("qwen3-4b", "qwen3-8b"):
        command = [*python, "benchmarks.engines", "--shape", shape, "--updates", "2"]
        yield Row(f"engine, {shape}", command, 8, ("gpu", "vllm"))
    checked = [
        "compute-sanitizer",
        "--error-exitcode",
        "1",
        *device,
        "--shape",
        "10m",
        "--copy-on-device",
    ]
    yield Row(
        "compute-sanitizer, submit and apply",
        [*checked, "--updates", "1"],
        2,
        ("gpu", "compute-sanitizer"),
    )


def missing(row: Row) -> str:
    """What this machine lacks for ``row``."""
    for need in row.needs:
        if need == "gpu":
            there = torch.cuda.is_available()
        else:
            there = importlib.util.find_spec(need) is not None or shutil.which(need) is not None
        if not there:
            return "no GPU" if need == "gpu" else f"no {need}"
    return ""


def run(row: Row, seconds: float) -> str:
    try:
        done = subprocess.run(
            row.command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not run to its end: {seconds:.0f} s were left"
    said = [line for line in done.stdout.splitlines() if line.strip()][-row.lines :]
    return (
        "; ".join(said)
        if done.returncode == 0
        else f"FAILED ({done.returncode}): {done.stderr.strip()[-300:]}"
    )


def scatter() -> str:
    """Writes 1% of a 0.5B-shaped state by both of the ways that `apply_` has; needs the same bits
    of both."""
    from benchmarks.device import seconds
    from benchmarks.synthetic import SHAPES
    from pulse_rl.frameworks.torch import Scatter, by_indices, write_group
    from pulse_rl.patch.apply import TensorChanges

    gpu = torch.cuda.is_available()
    device, shape = ("cuda", SHAPES["0.5b"]) if gpu else ("cpu", SHAPES["10m"])
    ways = {"index_copy_": by_indices}
    if gpu:
        from pulse_rl.frameworks.scatter_kernel import by_kernel

        ways["kernel"] = by_kernel
    sizes = [prod(dims) for _, dims in shape.tensors()]
    made = [(np.arange(n % 100, n, 100, dtype=np.int64), n) for n in sizes if n > 100]
    changes = [(TensorChanges.at(at, np.full(len(at), 7, np.uint16)), n) for at, n in made]
    took, roots = {}, set()
    for name, launch in ways.items():
        group = [
            Scatter(change, torch.zeros(n, dtype=torch.int16, device=device))
            for change, n in changes
        ]
        took[name] = median(
            seconds(device, lambda g=group, by=launch: write_group(g, by)) for _ in range(5)
        )  # type: ignore[misc]
        roots.add(state_root({str(n): one.flat for n, one in enumerate(group)}))
    assert len(roots) == 1, "the two ways wrote different bits"
    said = ", ".join(f"{name} {1e3 * found:.1f} ms" for name, found in took.items())
    return f"{device}, {sum(len(at) for at, _ in made):,} elements of {len(made)} tensors: {said}"


def quantize() -> str:
    """Quantizes FP32 and BF16 weights, and any bits, where they are, and by the host; needs the
    same bits of both, and that no weights are copied for the first."""
    from benchmarks.device import seconds
    from pulse_rl import State
    from pulse_rl.quantize import device as quantize_device
    from pulse_rl.quantize.formats import FORMATS
    from pulse_rl.quantize.states import Quantize, QuantizedState
    from pulse_rl.state.digest import state_digest
    from pulse_rl.state.tensors import DTYPES, DeviceTensor, TensorSpec

    device, size = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 256)
    assert quantize_device.divides_exactly(torch.device(device)), (
        "it divides otherwise than the host, and is not used"
    )
    weights = [0.02 * torch.randn(2, size, size, device=device) for _ in range(3)]
    odd = torch.randint(
        -(1 << 31), 1 << 31, (2, size, size), dtype=torch.int32, device=device
    ).view(torch.float32)
    tensors = [
        of for weight in (*weights, odd) for of in ((weight, "F32"), (weight.bfloat16(), "BF16"))
    ]
    state = State(
        tuple(
            TensorSpec(f"m.experts.{k}", DTYPES[name], tuple(of.shape))
            for k, (of, name) in enumerate(tensors)
        ),
        {
            f"m.experts.{k}": DeviceTensor(of.view(-1).view(torch.uint8), of.itemsize)
            for k, (of, _) in enumerate(tensors)
        },
    )

    def read(made: QuantizedState) -> None:
        for spec in made.specs:
            for at in range(0, spec.elements, 1 << 22):
                made.read(spec.name, at, min(at + (1 << 22), spec.elements))

    def refuse(*_: object) -> None:
        raise AssertionError("weights were copied to the host")

    quantize_device.DEVICES = (device,)
    ways = {"device": (DeviceTensor, "read", refuse), "host": (quantize_device, "DEVICES", ())}
    formats: dict[str, Quantize] = {name: name for name in FORMATS} | {
        "GPT-OSS": {"quant_method": "mxfp4"}
    }
    said = []
    for name, how in formats.items():
        roots, took = set(), []
        for target, attribute, replacement in ways.values():
            with mock.patch.object(target, attribute, replacement):
                roots.add(state_digest(QuantizedState(state, how)).root)
                took.append(
                    median(
                        seconds(device, lambda h=how: read(QuantizedState(state, h)))
                        for _ in range(3)
                    )
                )  # type: ignore[misc]
        assert len(roots) == 1, f"{name}: the device and the host make different bits"
        said.append(f"{name} {' / '.join(f'{1e3 * found:.0f}' for found in took)}")
    return (
        f"{device}, {state.elements:,} weights, the same bits; ms by one thread, device / "
        f"host: {', '.join(said)}"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--try", dest="small", action="store_true", help="small shapes")
    parser.add_argument("--minutes", type=float, default=8.0)
    for part in (scatter, quantize):
        parser.add_argument(
            f"--{part.__name__}",
            dest="part",
            action="store_const",
            const=part,
            help=argparse.SUPPRESS,
        )
    arguments = parser.parse_args(words)
    if arguments.part is not None:
        print(arguments.part())
        return
    until = time.monotonic() + 60 * arguments.minutes
    name = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "no GPU: the host does what devices would"
    )
    print(
        f"{name}, torch {torch.__version__}\n\n| | result | seconds | command |\n|---|---|---|---|",
        flush=True,
    )
    for row in rows(arguments.small):
        began, lacks = time.monotonic(), missing(row)
        if lacks:
            result = f"not run: {lacks}"
        elif began >= until:
            result = "not run: no time was left"
        else:
            result = run(row, until - began)
        command = " ".join(word.replace(sys.executable, "python") for word in row.command)
        print(
            f"| {row.name} | {result} | {time.monotonic() - began:.0f} | `{command}` |", flush=True
        )


if __name__ == "__main__":
    main()
