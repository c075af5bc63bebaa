"""The page's script and the library say the same: the planner's model, and how numbers read."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.resources import files

import pytest
import quickjs

from pulse_rl._util import settings as units
from pulse_rl.plan import Scenario, make_plan
from pulse_rl.report.data import study_data
from pulse_rl.report.document import planned, script_source
from tests.support.plans import METHODS
from tests.support.reports import study


@pytest.fixture(scope="module")
def script() -> quickjs.Context:
    """The parts of the page that draw nothing, in a JavaScript engine."""
    context = quickjs.Context()
    for name in ("units", "plan"):
        context.eval(
            (files("pulse_rl.report") / "assets" / f"{name}.js").read_text(encoding="utf-8")
        )
    return context


SCENARIOS = [
    Scenario(params=7 * 10**9, density=0.01, step_seconds=50, bandwidth=2e8),
    Scenario(params=10**6, density=0.0, step_seconds=0.1, bandwidth=1e9, sharers=9, cores=1),
    Scenario(
        params=4 * 10**11, density=1.0, step_seconds=300, bandwidth=1e11, param_bytes=1.0, cores=96
    ),
    Scenario(
        params=10**8,
        density=0.03,
        step_seconds=5,
        bandwidth=1e10,
        bytes_per_changed={"auto": 0.3, "zstd": 2.0},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_planner_of_the_page_shows_what_the_library_plans(
    script: quickjs.Context, scenario: Scenario
) -> None:
    """At each place of the slider of the density, and on another link."""
    tables, target = planned(scenario), 0.5 if scenario.cores == 96 else 0.9
    script.eval(f"var PLANNED = {json.dumps(tables)};")
    for at, density in enumerate(tables["densities"]):
        for bandwidth in (scenario.bandwidth, 3e7):
            slack = 8 * scenario.sharers / bandwidth  # of a byte, which the table rounds to
            own = scenario.bytes_per_changed if density == scenario.density else {}
            moved = replace(scenario, density=density, bandwidth=bandwidth, bytes_per_changed=own)
            link = {"workers": moved.sharers, "shared_link": True, "target": target}
            place = json.dumps(asdict(moved) | link | {"at": at})
            found = json.loads(script.eval(f"JSON.stringify(makePlan({place}, PLANNED))"))
            wanted = make_plan(moved, target=target)
            assert list(found["methods"]) == list(METHODS)
            for name, method in wanted.methods.items():
                expected = asdict(method) | {"sync_seconds": method.sync_seconds}
                assert found["methods"][name].pop("phases") == pytest.approx(
                    expected.pop("phases"), rel=1e-8, abs=slack
                )
                assert found["methods"][name] == pytest.approx(expected, rel=1e-3)
            if wanted.full_wins.bandwidth is None:
                assert found["full_wins"]["bandwidth"] is None
            else:
                assert found["full_wins"]["bandwidth"] == pytest.approx(
                    wanted.full_wins.bandwidth, rel=1e-4
                )
    reached, exact = found["full_wins"]["density"], wanted.full_wins.density
    assert (reached is None) == (exact is None)
    if exact is not None and not own:
        assert exact <= reached <= exact * 1.11, "the next place of the slider"


def test_the_script_can_be_parsed() -> None:
    quickjs.Context().eval(f"(() => {{ {script_source()} }})")


def test_both_read_numbers_alike(script: quickjs.Context) -> None:
    values = [
        0.0,
        1.0,
        0.999,
        999.4,
        999.6,
        1000,
        1234,
        56_789,
        3.16e6,
        1.4e10,
        9.99e11,
        2e12,
        63_000_000,
    ]
    for value in values:
        assert script.eval(f"bytes({value})") == units.format_bytes(value)
        assert script.eval(f"bandwidth({value})") == units.format_bandwidth(value)
    for share in [
        0,
        1,
        0.5,
        0.9926,
        0.99,
        0.9665,
        0.99991,
        0.9999999,
        0.0335,
        0.38e-2,
        0.12e-4,
        0.49,
        0.75,
        1 / 3,
    ]:
        assert script.eval(f"percent({share})") == units.format_percent(share), share
    durations = [
        0.0,
        4e-9,
        1e-6,
        4.2e-5,
        0.0009996,
        0.0123,
        0.122,
        0.9994,
        0.9996,
        1.0,
        46.0,
        89.9,
        91,
        3600,
        5401,
    ]
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
    script.eval(
        "var dotRows = (spec) => spec, figure = (_host, words, chart) => (drawn = [words, "
        "chart]), drawn;"
    )
    history = study_data(study())["history"]
    found = json.loads(
        script.eval(f"drawHistory(null, {json.dumps(history)}); JSON.stringify(drawn)")
    )
    names = ["1", "2", "3 to 4", "5 to 8", "9 and more", "not yet"]
    assert found[0]["table"]["rows"] == [
        [name, "50%" if name == "not yet" else "10%"] for name in names
    ]
    assert found[1]["names"] == names
    assert (
        "within 8: 40%. Bytes a change without and with history: bound 0.88 and 0.8, "
        in found[0]["note"]
    )
