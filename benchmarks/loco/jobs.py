"""What the trainers are asked to do, and what each of them answers."""

from __future__ import annotations

from dataclasses import dataclass

TRAINERS = 4
SYNC_EVERY = 8
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
WARM_UP = 20
PRETRAINED_RATES = (1e-6, 3e-6)

# Of 1e-5, 3e-5, 1e-4 and 3e-4 those with DiLoCo's and DDP's lowest loss after 32 rounds of the
# arithmetic task, on a seed that is in no table. DiLoCo's outer momentum makes its steps some seven
# times as long: it wants a lower one.
LR, LR_DDP = 3e-5, 1e-4
#: The final reward and loss are means over so many last rounds.
LAST = 5


@dataclass(frozen=True)
class Job:
    """Rounds of a method from recorded inner steps at ``lr``, of which ``fill`` come before any is
    timed. ``store``: not in a group, but over the store at that endpoint, in a folder ``name``."""

    method: str
    lr: float
    fill: int
    store: str | None = None
    name: str = ""


@dataclass(frozen=True)
class RoundRecord:
    """One round as one trainer saw it. Of DDP: one inner step.

    ``payload_bytes``: its own message; ``sent_bytes``: what left its process by its own count;
    ``interface_bytes``: what left its network interface (None without one of its own). ``phases``:
    seconds of each; ``seconds``: of all that the round adds to its last inner step.
    """

    parameters: int
    entries: int
    payload_bytes: int
    sent_bytes: int
    interface_bytes: int | None
    phases: dict[str, float]
    seconds: float
    root: str | None


#: A sparse method's first round that counts: the residual fills for some rounds, and until then
#: less is sent.
STEADY_FROM = 6
