"""PULSELoCo: keeps trainers in sync by exchanging only what would change the next forward pass (docs/loco.md).

`PulseLoCo` wraps one inner optimizer or several; `DiLoCo`, `Ddp`, `TopK` and two ablations are the same loop with
different exchanges.
"""

from .baselines import CastDifference, Ddp, DiLoCo, TopK, WithoutFeedback
from .outer import OuterLoop
from .pulseloco import PulseLoCo
from .rounds import Round

__all__ = ["CastDifference", "Ddp", "DiLoCo", "OuterLoop", "PulseLoCo", "Round", "TopK", "WithoutFeedback"]
