"""Predicts what a sync costs: bytes, seconds by phase, utilisation, the bandwidth needed, and when a full sync wins.

``model`` holds the arithmetic and its formulas, ``measured`` reads a study, `parse_bandwidth` and `parse_count` read
``0.2Gbit`` and ``7B``. Nothing here needs numpy.
"""

from .._util.units import parse_bandwidth, parse_count
from .measured import MeasuredInputs, from_study
from .model import METHODS, Crossover, MethodPlan, Plan, Scenario, bandwidth_for, make_plan, sync_bytes, utilisation

__all__ = [
    "METHODS",
    "Crossover",
    "MeasuredInputs",
    "MethodPlan",
    "Plan",
    "Scenario",
    "bandwidth_for",
    "from_study",
    "make_plan",
    "parse_bandwidth",
    "parse_count",
    "sync_bytes",
    "utilisation",
]
