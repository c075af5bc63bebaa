"""A rollout worker: that of `examples.grpo`. It follows the global weights, which the trainers have
in common after each round."""

from __future__ import annotations

import math
import sys

import torch

from ..grpo.run import Alarm, RunFolder, run_role
from ..grpo.worker import TorchWorker
from .settings import Settings

#: Batches for each trainer beyond what a round takes: what it begins with while the next version is
#: on its way.
AHEAD = 1


def work(settings: Settings, folder: RunFolder, alarm: Alarm, name: str) -> None:
    torch.set_num_threads(1)
    places = math.ceil(settings.sync_every / settings.workers) + AHEAD
    inboxes = dict.fromkeys(settings.trainer_names, places)
    sizes = {"seed": settings.seed, "prompts": settings.prompts, "group": settings.group}
    TorchWorker(folder, name, alarm, inboxes=inboxes, **sizes).run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "name"))
