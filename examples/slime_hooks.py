"""slime and Miles without a file system that trainers and engines share: their two hooks.

Put this file on the PYTHONPATH of both sides, and name its functions by import path::

    # the trainer; of slime with --update-weight-transport disk, full weights
    PULSE_STORE=s3://bucket/run … --custom-update-weight-post-write-path slime_hooks.after_write

    # each host of engines; DIR is what --update-weight-disk-dir says, and is this host's own
    pulse follow s3://bucket/run --stream policy --out DIR --layout slime --keep 2
    … --sglang-custom-pull-weights-pre-read-hook slime_hooks.before_read

Miles, and slime's delta mode, write only what changed, in a format of their own. Their `pull`,
which is in the SGLang that they ship, makes a checkpoint of it for the publisher.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import pulse_rl

WAIT_SECONDS = 600.0
_publisher: pulse_rl.Publisher | None = None


def after_write(args: Any, version_dir: str, rollout_engines: object) -> None:
    """Publishes what was written. All ranks call this; Miles also calls it before the first
    version."""
    global _publisher
    folder = Path(version_dir)
    number = re.fullmatch(r"weight_v(\d{6,})", folder.name)
    if number is None or dist.get_rank() != 0:
        return
    step = int(number[1])
    index = folder / "model.safetensors.index.json"
    if index.exists() and '"delta_encoding"' in index.read_text():
        from sglang.srt.weight_sync.local_checkpoint import pull

        whole = folder.parent / "pulse-checkpoint"
        pull(str(whole), args.hf_checkpoint, str(folder.parent), step)
        folder = whole
    _publisher = _publisher or pulse_rl.Publisher(os.environ["PULSE_STORE"], stream="policy")
    _publisher.publish(folder, files=folder, metadata={"step": step})


def before_read(source_dir: str, target_version: int) -> None:
    """Waits until `pulse follow` has written the version. It appears whole."""
    folder = Path(source_dir, f"weight_v{target_version:06d}")
    deadline = time.monotonic() + WAIT_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{folder} has not come within {WAIT_SECONDS:.0f} s: does pulse follow run on "
                "this host?"
            )
        time.sleep(0.1)
