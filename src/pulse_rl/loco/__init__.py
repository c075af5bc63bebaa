"""PULSELoCo: keeps trainers in sync by exchanging only what would change the next forward pass (docs/loco.md).

`PulseLoCo` wraps an inner optimizer; `DiLoCo`, `Ddp`, `TopK` and two ablations are the same loop with different
exchanges.
"""

from .baselines import CastDifference, Ddp, DiLoCo, TopK, WithoutFeedback
from .outer import OuterLoop, Round
from .pulseloco import PulseLoCo

__all__ = ["CastDifference", "Ddp", "DiLoCo", "OuterLoop", "PulseLoCo", "Round", "TopK", "WithoutFeedback"]
