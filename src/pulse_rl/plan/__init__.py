"""What a sync costs, predicted: bytes, seconds by phase, utilisation, the bandwidth that is needed, where dense wins.

`model` holds the arithmetic and its formulas, `units` reads ``0.2Gbit`` and ``7B``, `measured` reads a study. Nothing
here needs numpy.
"""

from .._util.units import parse_bandwidth, parse_count
from .measured import Measured, from_study
from .model import METHODS, Crossover, MethodPlan, Plan, Scenario, bandwidth_for, make_plan, patch_bytes, utilisation

__all__ = [
    "METHODS",
    "Crossover",
    "Measured",
    "MethodPlan",
    "Plan",
    "Scenario",
    "bandwidth_for",
    "from_study",
    "make_plan",
    "parse_bandwidth",
    "parse_count",
    "patch_bytes",
    "utilisation",
]
