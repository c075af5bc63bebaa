"""Predicts what a sync costs: bytes, seconds by phase, utilisation, the bandwidth needed, and when a full sync wins.

``model`` holds the arithmetic of one sync and its formulas, ``fleet`` that of many workers, ``measured`` reads a study,
`parse_bandwidth` and `parse_count` read ``0.2Gbit`` and ``7B``. Nothing here needs numpy.
"""

from .._util.units import parse_bandwidth, parse_count
from .fleet import WAYS, Fleet, FleetPlan, WayPlan, catch_up_bytes, density_of, make_fleet_plan
from .measured import MeasuredInputs, from_study
from .model import METHODS, Crossover, MethodPlan, Plan, Scenario, bandwidth_for, make_plan, sync_bytes, utilisation

__all__ = [
    "METHODS",
    "WAYS",
    "Crossover",
    "Fleet",
    "FleetPlan",
    "MeasuredInputs",
    "MethodPlan",
    "Plan",
    "Scenario",
    "WayPlan",
    "bandwidth_for",
    "catch_up_bytes",
    "density_of",
    "from_study",
    "make_fleet_plan",
    "make_plan",
    "parse_bandwidth",
    "parse_count",
    "sync_bytes",
    "utilisation",
]
