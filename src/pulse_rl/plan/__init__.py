"""Predicts what a sync costs: bytes, seconds by phase, utilisation, the bandwidth needed, and when
a full sync wins.

``model`` holds the arithmetic of one sync and its formulas, ``fleet`` that of many workers.
"""

from .fleet import Fleet, make_fleet_plan
from .model import Scenario, from_study, make_plan

__all__ = [
    "Fleet",
    "Scenario",
    "from_study",
    "make_fleet_plan",
    "make_plan",
]
