"""What publishing from 1, 2 and 4 ranks costs: seconds, CPU seconds, bytes, host memory of the
slowest or largest rank.

Run by `make bench-sharded`. Every rank has its rows of the same BF16 weights, of which a hundredth
moves by one step between two versions; each uses one thread. With as many ranks as cores, or fewer,
seconds are those of the method.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.measure import memory, reset_peak
from pulse_rl import LocalStore
from pulse_rl.frameworks.fsdp import ShardedPublisher

MIB = 1 << 20
COLUMNS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--elements", type=int, default=192 * MIB, help="of the state (default: %(default)s)"
    )
    parser.add_argument(
        "--versions",
        type=int,
        default=5,
        help="with a patch, the median counts (default: %(default)s)",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    print(
        f"{args.elements / 1e6:.0f} M BF16 weights, {len(os.sched_getaffinity(0))} cores, one "
        "thread a rank"
    )
    print(
        "| ranks | a version, s | CPU, s a rank | CPU, s in all "
        "| patch, bytes | first version, s | host memory / share |"
    )
    print("|---|---|---|---|---|---|---|")
    for size in args.ranks:
        found = _measure(size, args.elements, args.versions)
        cpu = [rank["cpu"] for rank in found]
        print(
            f"| {size} | {max(rank['seconds'] for rank in found):.2f} | {max(cpu):.2f} | "
            f"{sum(cpu):.2f} "
            f"| {found[0]['bytes']:,} | {max(rank['first'] for rank in found):.2f} "
            f"| {max(rank['memory'] for rank in found):.2f} |"
        )


def _measure(size: int, elements: int, versions: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(size) as pool:
        ranks = [(rank, size, folder, elements, versions) for rank in range(size)]
        return pool.starmap(_rank, ranks, chunksize=1)


def _rank(rank: int, size: int, folder: str, elements: int, versions: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(rank)
    rows = elements // COLUMNS // 16 // size
    state = {
        f"layers.{k}.weight": DTensor.from_local(
            (torch.randn(rows, COLUMNS, generator=generator) * 0.02).bfloat16(), mesh, [Shard(0)]
        )
        for k in range(16)
    }
    share = sum(tensor.to_local().nbytes for tensor in state.values())
    before, seconds, cpu = memory("VmRSS"), [], []
    reset_peak()
    with ShardedPublisher(
        LocalStore(Path(folder) / "store"), stream="policy", threads=1
    ) as publisher:
        for _ in range(1 + versions):
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            published = publisher.publish(state)
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - busy)
            for tensor in state.values():
                flat = tensor.to_local().reshape(-1).view(torch.int16)
                flat[torch.randint(len(flat), (len(flat) // 100,), generator=generator)] += 1
    peak = memory("VmHWM") - before
    dist.barrier()
    return {
        "seconds": statistics.median(seconds[1:]),
        "cpu": statistics.median(cpu[1:]),
        "bytes": published.patch_bytes,
        "first": seconds[0],
        "memory": peak / share,
    }


if __name__ == "__main__":
    main()
