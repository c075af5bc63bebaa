"""PULSELoCo, the smallest run: two trainers with data of their own stay bit-identical while sending
little.

python examples/minimal_loco.py                      two processes on this machine
torchrun --nproc-per-node 4 examples/minimal_loco.py as many as you like, on as many machines
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pulse_rl.loco import PulseLoCo, Round

ROUNDS, SYNC_EVERY = 3, 8


def train() -> None:
    """One trainer, of a process group that is initialized."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = torch.Generator().manual_seed(1000 + dist.get_rank())

    with PulseLoCo(model, optimizer, sync_every=SYNC_EVERY, on_round=report):
        for _ in range(ROUNDS * SYNC_EVERY):
            batch = torch.randn(32, 64, generator=data)
            optimizer.zero_grad()
            (model(batch) - batch).square().mean().backward()
            # every SYNC_EVERY-th call runs a round: then all hold the same global weights
            optimizer.step()


def report(done: Round) -> None:
    if dist.get_rank() == 0:
        dense_bytes = 4 * done.parameters
        print(
            f"round {done.number}: {done.payload_bytes:,} bytes a trainer, not {dense_bytes:,}; "
            f"root {done.root[:16]}…"
        )


def local_trainer(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(local_trainer, (2, folder), nprocs=2)
