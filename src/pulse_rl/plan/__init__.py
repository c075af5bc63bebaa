"""Predicts what a sync costs: bytes, seconds by phase, utilisation, the bandwidth needed, and when
a full sync wins.

``model`` holds the arithmetic and its formulas.
"""

from .model import Scenario, from_study, make_plan

__all__ = [
    "Scenario",
    "from_study",
    "make_plan",
]
