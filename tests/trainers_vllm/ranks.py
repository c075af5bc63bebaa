"""What each of two ranks does, started by torchrun with a server's URL, a checkpoint and a folder
(test_rollout.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pulse_rl.frameworks.trl import pulse_rollout
from tests.trainers.support import Witness, followed

from .support import STEPS, grpo, weight_version


def main(url: str, checkpoint: str, folder: Path) -> None:
    store, witness = str(folder / "store"), Witness()
    rollout = pulse_rollout(url, store, "policy")
    trainer = grpo(checkpoint, folder, rollout, callbacks=[witness])
    trainer.train()
    dist.barrier()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    assert (rollout.published is None) == (dist.get_rank() != 0)
    assert followed(store) == witness.roots
    assert sorted(witness.roots) == list(range(STEPS + 1))
    assert weight_version(url) == str(STEPS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    print(f"rank {dist.get_rank()} is content")
    dist.destroy_process_group()
