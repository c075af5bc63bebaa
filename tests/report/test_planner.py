"""The page's script and the library say the same: the planner's model, and how numbers read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import quickjs

from pulse_rl._util import units
from pulse_rl.plan import METHODS, Scenario, make_plan
from pulse_rl.report.document import planner_costs
from pulse_rl.report.study import study_data
from tests.support.reports import study


@pytest.fixture(scope="module")
def script() -> quickjs.Context:
    """The parts of the page that draw nothing, in a JavaScript engine."""
    context = quickjs.Context()
    for name in ("units", "plan"):
        context.eval((files("pulse_rl.report") / "assets" / f"{name}.js").read_text(encoding="utf-8"))
    context.eval(f"var COSTS = {json.dumps(planner_costs())};")
    return context


def scenarios(count: int) -> list[Scenario]:
    """From a toy to the largest models, on slow and fast links, alone and in fleets, some with measured bytes."""
    rng = np.random.default_rng(7)

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    return [
        Scenario(
            params=round(between(1e3, 1e12)),
            density=[0.0, 1.0, between(1e-6, 1)][min(i, 2)],
            step_seconds=between(0.01, 1000),
            bandwidth=between(1e5, 1e12),
            upload_bandwidth=between(1e5, 1e12) if i % 3 == 0 else None,
            workers=round(between(1, 1000)),
            shared_link=i % 2 == 0,
            cores=round(between(1, 200)),
            round_trip_seconds=between(1e-4, 1) if i % 5 == 0 else 0.0,
            target=float(rng.uniform(0.5, 0.99)),
            param_bytes=[2.0, 1.0, 4.0][i % 3],
            bytes_per_changed=[{"context": between(0.1, 4)}, {"history": between(0.1, 4)}, {}, {}][i % 4],
        )
        for i in range(count)
    ]


def expected(scenario: Scenario) -> dict[str, Any]:
    plan = make_plan(scenario)
    methods = {name: {**asdict(m), "sync_seconds": m.sync_seconds} for name, m in plan.methods.items()}
    return {"methods": methods, "full_wins": asdict(plan.full_wins)}


def assert_close(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted) or set(found) == set(wanted), where
        for key, value in wanted.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif wanted is None:
        assert found is None, where
    else:
        # Crossovers are differences of nearly equal numbers and ends of a bisection.
        tolerance = 1e-6 if "full_wins" in where else 1e-9
        assert found == pytest.approx(wanted, rel=tolerance, abs=1 if where.endswith("sync_bytes") else 0), where


def test_the_planner_of_the_page_is_the_planner_of_the_library(script: quickjs.Context) -> None:
    for scenario in scenarios(300):
        found = json.loads(script.eval(f"JSON.stringify(makePlan({json.dumps(asdict(scenario))}, COSTS))"))
        assert list(found["methods"]) == list(METHODS)
        assert_close(found, expected(scenario), str(scenario))


def test_both_read_numbers_alike(script: quickjs.Context) -> None:
    values = [0.0, 1.0, 0.999, 999.4, 999.6, 1000, 1234, 56_789, 3.16e6, 1.4e10, 9.99e11, 2e12, 63_000_000]
    for value in values:
        assert script.eval(f"bytes({value})") == units.format_bytes(value)
        assert script.eval(f"bandwidth({value})") == units.format_bandwidth(value)
    for share in [0, 1, 0.5, 0.9926, 0.99, 0.9665, 0.99991, 0.9999999, 0.0335, 0.38e-2, 0.12e-4, 0.49, 0.75, 1 / 3]:
        assert script.eval(f"percent({share})") == units.format_percent(share), share
    durations = [0.0, 4e-9, 1e-6, 4.2e-5, 0.0009996, 0.0123, 0.122, 0.9994, 0.9996, 1.0, 46.0, 89.9, 91, 3600, 5401]
    for seconds in [*durations, 86400, 172_801, 5e6]:
        assert script.eval(f"seconds({seconds})") == units.format_duration(seconds)
    assert script.eval("bytes(null) + percent(null) + seconds(NaN)") == "–––"


@pytest.mark.parametrize(
    ("call", "ticks"),
    [
        ("linearTicks(0, 1, 4)", [0, 0.5, 1]),
        ("linearTicks(0.28, 0.58, 4)", [0.3, 0.4, 0.5]),
        ("linearTicks(-3, 7, 5)", [-2, 0, 2, 4, 6]),
        ("logTicks(3e4, 4e6, 5)", [1e5, 1e6]),
        ("logTicks(1, 20, 5)", [1, 2, 5, 10, 20]),
        ("logTicks(1, 1e12, 6)", [1, 1e2, 1e4, 1e6, 1e8, 1e10, 1e12]),
    ],
)
def test_ticks_are_round(script: quickjs.Context, call: str, ticks: list[float]) -> None:
    assert json.loads(script.eval(f"JSON.stringify({call})")) == pytest.approx(ticks)


def test_recurrence_reads_as_ages(script: quickjs.Context) -> None:
    script.eval((files("pulse_rl.report") / "assets" / "study.js").read_text(encoding="utf-8"))
    script.eval("var plural = (n, word) => `${n} ${word}s`;")
    script.eval("var dotRows = (spec) => spec, figure = (_host, words, chart) => (drawn = [words, chart]), drawn;")
    history = study_data(study())["history"]
    found = json.loads(script.eval(f"drawHistory(null, {json.dumps(history)}); JSON.stringify(drawn)"))
    names = ["1", "2", "3 to 4", "5 to 8", "9 and more", "not yet"]
    assert found[0]["table"]["rows"] == [[name, "50%" if name == "not yet" else "10%"] for name in names]
    assert found[1]["names"] == names
    assert "within 8: 40%. Bytes a change without and with history: bound 0.88 and 0.8, " in found[0]["note"]
