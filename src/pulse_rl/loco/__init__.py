"""PULSELoCo: trainers that stay in step by exchanging what would change the next forward pass (docs/loco.md).

`PulseLoCo` wraps an inner optimizer; `DiLoCo`, `Ddp`, `TopK` and two ablations are the same loop with other exchanges.
"""

from .baselines import CastDifference, Ddp, DiLoCo, TopK, WithoutFeedback
from .outer import OuterLoop, Round
from .pulseloco import PulseLoCo

__all__ = ["CastDifference", "Ddp", "DiLoCo", "OuterLoop", "PulseLoCo", "Round", "TopK", "WithoutFeedback"]
