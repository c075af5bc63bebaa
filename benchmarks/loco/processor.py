"""What a round takes of a processor, over a local folder and over gloo: each trainer a process, in
turns.

    python -m benchmarks.loco.processor [--trainers 4 8] [--parameters 16777216] [--repeat 2]
    [--json FILE]

Inner steps are random, of a size that opens about two in a hundred gates. Time is that of a
trainer's process and its threads in the call that ends a round, a mean over trainers and rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.loco.many import STEP
from pulse_rl.loco import GroupExchange, PulseLoCo, StoreExchange

#: The first rounds fill residuals, and do not count.
FIRST, ROUNDS = 3, 8
GLOO, FOLDER = "gloo", "folder"


def work(
    rank: int, where: str, trainers: int, parameters: int, compression: Any, place: str, spent: Any
) -> None:
    """One trainer's rounds; puts its seconds of a round."""
    torch.set_num_threads(1)
    exchange: Any = StoreExchange(place, trainer=f"trainer-{rank}", min_trainers=trainers)
    if where == GLOO:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{place}", rank=rank, world_size=trainers
        )
        exchange = GroupExchange()
    weights = torch.nn.Parameter(
        0.02 * torch.randn(parameters, generator=torch.Generator().manual_seed(0))
    )
    noise = torch.Generator().manual_seed(1 + rank)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    loop = PulseLoCo(
        {"w": weights}, optimizer, sync_every=1, exchange=exchange, compression=compression
    )
    loop.threads = 1
    seconds = []
    with loop:
        for _ in range(ROUNDS):
            weights.grad = STEP * torch.randn(parameters, generator=noise)
            began = time.process_time()
            optimizer.step()
            seconds.append(time.process_time() - began)
    spent.put(fmean(seconds[FIRST:]))
    if where == GLOO:
        dist.destroy_process_group()


def measure(where: str, trainers: int, parameters: int, compression: str) -> float:
    """Seconds of a round and trainer."""
    spent = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}" if where == GLOO else folder
        free.close()
        mp.spawn(work, (where, trainers, parameters, compression, place, spent), nprocs=trainers)
    return fmean(spent.get() for _ in range(trainers))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loco.processor", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--trainers", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--parameters", type=int, default=1 << 24)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all numbers to this file"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found = []
    print("processor seconds of a round and trainer\ntrainers  form    gloo  folder  folder / gloo")
    for trainers in arguments.trainers:
        for form in ("fp32", "e8m2"):
            for _ in range(arguments.repeat):
                gloo, folder = (
                    measure(where, trainers, arguments.parameters, form) for where in (GLOO, FOLDER)
                )
                found.append(
                    {"trainers": trainers, "compression": form, GLOO: gloo, FOLDER: folder}
                )
                print(
                    f"{trainers:>8} {form:>5} {gloo:>7.3f} {folder:>7.3f} {folder / gloo:>14.2f}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"parameters": arguments.parameters, "measured": found}) + "\n"
        )


if __name__ == "__main__":
    main()
