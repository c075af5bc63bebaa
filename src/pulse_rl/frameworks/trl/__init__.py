"""TRL: a vLLM server that holds the trainer's newest weights (docs/trl.md).

`PulseWeightTransfer` is the ``weight_transfer`` of AsyncGRPOTrainer, `pulse_rollout` makes the
``rollout_func`` of GRPOTrainer. Neither imports TRL or vLLM.
"""

from __future__ import annotations

from .rollout import pulse_rollout
from .transfer import PulseWeightTransfer

__all__ = ["PulseWeightTransfer", "pulse_rollout"]
