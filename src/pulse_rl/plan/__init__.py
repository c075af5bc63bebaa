"""Predicts what a sync costs: bytes, seconds by phase, utilisation, the bandwidth needed, and when a full sync wins.

``model`` holds the arithmetic of one sync and its formulas, ``fleet`` that of many workers.
"""

from .fleet import WAYS, Fleet, catch_up_bytes, make_fleet_plan
from .model import METHODS, Scenario, bandwidth_for, from_study, make_plan, sync_bytes, utilisation

__all__ = [
    "METHODS",
    "WAYS",
    "Fleet",
    "Scenario",
    "bandwidth_for",
    "catch_up_bytes",
    "from_study",
    "make_fleet_plan",
    "make_plan",
    "sync_bytes",
    "utilisation",
]
