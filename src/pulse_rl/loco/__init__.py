"""PULSELoCo: keeps trainers in sync by exchanging only what would change the next forward pass (docs/loco.md).

`PulseLoCo` wraps one inner optimizer or several; `DiLoCo`, `SparseLoCo`, `Ddp`, `TopK` and two ablations are the same
loop with different exchanges.
"""

from .baselines import CastDifference, Ddp, DiLoCo, TopK, WithoutFeedback
from .feedback import ErrorFeedbackLoop
from .outer import OuterLoop
from .pulseloco import PulseLoCo
from .rounds import Round
from .sparseloco import SparseLoCo

__all__ = [
    "CastDifference",
    "Ddp",
    "DiLoCo",
    "ErrorFeedbackLoop",
    "OuterLoop",
    "PulseLoCo",
    "Round",
    "SparseLoCo",
    "TopK",
    "WithoutFeedback",
]
