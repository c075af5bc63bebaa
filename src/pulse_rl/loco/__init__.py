"""PULSELoCo: keeps trainers in sync by exchanging only what would change the next forward pass
(docs/loco.md).

`PulseLoCo` wraps one inner optimizer or several; `DiLoCo` is the same loop with a dense all-reduce.
"""

from .._util import extra

with extra("torch"):
    from .exchange import GroupExchange, StoreExchange
    from .exchange import Round as Round
    from .loop import DiLoCo, PulseLoCo

__all__ = ["DiLoCo", "GroupExchange", "PulseLoCo", "StoreExchange"]
