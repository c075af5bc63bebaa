"""The report in a real browser: what is drawn, what moves with the sliders, narrow, dark, printed,
hostile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pulse_rl._util.settings import format_bandwidth, format_bytes, format_duration, format_percent
from pulse_rl.plan import Scenario, make_plan
from pulse_rl.plan.model import MethodPlan
from pulse_rl.report import read_run, render
from pulse_rl.report.document import planned
from tests.support import chromium
from tests.support.chromium import Chromium
from tests.support.plans import METHODS
from tests.support.reports import (
    HOSTILE,
    PARAMETERS,
    START,
    published,
    quantised_too,
    study,
    synced,
    write,
    write_run,
)

EXECUTABLE = chromium.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        EXECUTABLE is None, reason="no Chromium here: install one, or name it in PULSE_CHROMIUM"
    ),
]

SLIDERS = {"step_seconds": (0.01, 1000), "bandwidth": (1e6, 1e12), "workers": (1, 1024)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert EXECUTABLE is not None
    with Chromium(EXECUTABLE) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Path]:
    """Pages by name: with everything, the planner alone, three versions, a long run, hostile
    names."""
    long_name = "worker-" + "x" * 200
    write_run(folder / "whole", 60)
    failed = {
        "event": "fallback_used",
        "time": START,
        "stream": "policy",
        "kind": "digest_mismatch",
        "reason": "it differs",
    }
    drift = {"event": "density_drift", "time": START + 9, "stream": "policy", "version": 7}
    write(
        folder / f"whole/events-{long_name}.jsonl",
        [
            synced(0, None),
            failed | {"link": "the patch 1->2"},
            drift | {"density": 0.2, "low": 0.003, "high": 0.03},
        ],
    )
    write_run(folder / "hostile", 5, stream=HOSTILE)
    write(
        folder / "hostile/events-<b>.jsonl",
        [synced(1, 0, stream=HOSTILE), failed | {"stream": HOSTILE, "link": HOSTILE}],
    )
    hostile = study(name=HOSTILE) | {"source": HOSTILE * 5}
    hostile["layers"][0]["layer"] = HOSTILE
    made = {
        "whole": render(
            run=read_run(write_run(folder / "whole", 60)), study=quantised_too(study())
        ),
        "planner": render(),
        "short": render(run=read_run(write_run(folder / "short", 3))),
        "long": render(run=read_run(write_run(folder / "long", 3000, workers=3))),
        "hostile": render(run=read_run(folder / "hostile"), study=hostile, title=HOSTILE),
    }
    facts = {"loco_sent_bytes": 2_000_000, "loco_dense_bytes": 90_000_000}
    rounds = [published(v, metadata={"round": v, "reward": v / 20, **facts}) for v in range(12)]
    write(folder / "trainers/events.jsonl", rounds)
    made["trainers"] = render(run=read_run(folder / "trainers"))
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


PAGES = ["whole", "planner", "short", "long", "hostile", "trainers"]


def table(browser: Chromium) -> dict[str, list[str]]:
    """The planner's rows: method, then bytes, time, two utilisations, bandwidth for the target."""
    rows: dict[str, list[str]] = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.plan tbody tr')].map("
        "row => [row.dataset.method, [...row.querySelectorAll('td')].map(cell => "
        "cell.textContent)]))"
    )
    return rows


def row(plan: MethodPlan) -> list[str]:
    return [
        format_bytes(plan.sync_bytes),
        format_duration(plan.sync_seconds),
        format_percent(plan.utilisation),
        format_percent(plan.worker_utilisation),
        format_bandwidth(plan.bandwidth_for_target),
    ]


def slide(browser: Chromium, name: str, position: int) -> float:
    """Moves a slider to one of its 1000 places and returns the value that it then stands for."""
    browser.evaluate(
        f"(slider => {{ slider.value = {position}; slider.dispatchEvent(new Event('input')); }})"
        f"(document.getElementById('plan-{name}'))"
    )
    low, high = SLIDERS[name]
    value = low * (high / low) ** (position / 1000)
    return round(value) if name == "workers" else float(f"{value:.3g}")


def slide_density(browser: Chromium, place: int, start: float = 0.01) -> float:
    """Moves the slider of the density to a place and returns the density that the library planned
    there."""
    browser.evaluate(
        f"(slider => {{ slider.value = {place}; slider.dispatchEvent(new Event('input')); }})"
        "(document.getElementById('plan-density'))"
    )
    density: float = planned(Scenario(params=1, density=start, step_seconds=1, bandwidth=1))[
        "densities"
    ][place]
    return density


def curves(browser: Chromium) -> list[str]:
    """The paths of the chart of utilisation by bandwidth, and where its marks are."""
    drawn: list[str] = browser.evaluate(
        "[...document.querySelectorAll('#plan svg')[0].querySelectorAll('path.curve, line.mark')]"
        ".map(shape => shape.getAttribute('d') ?? shape.getAttribute('x1'))"
    )
    return drawn


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", PAGES)
def test_pages_draw_fit_and_ask_for_nothing(
    browser: Chromium, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.show(pages[name], width=width, height=780, dark=dark, mobile=width < 600)
    assert browser.errors == []
    assert browser.requests == [pages[name].as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    outside = browser.evaluate(
        "[...document.querySelectorAll('svg text')].filter(text => {"
        " const box = text.getBoundingClientRect(), around = "
        "text.ownerSVGElement.getBoundingClientRect();"
        " return box.left < Math.max(-1, around.left - 8) || box.right > Math.min(innerWidth + "
        "1, around.right + 14);"
        "}).map(text => text.textContent)"
    )
    assert outside == []
    paper, ink = browser.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (brightness(paper) < 60, brightness(ink) > 200) == (dark, dark)
    unlabelled = browser.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].filter(svg => "
        "!svg.getAttribute('aria-label')).length +"
        "[...document.querySelectorAll('input')].filter(input => !input.labels.length).length"
    )
    assert unlabelled == 0


def brightness(colour: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def test_every_figure_is_there(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["whole"])
    titles = browser.evaluate(
        "[...document.querySelectorAll('figure h3')].map(title => title.textContent)"
    )
    assert titles == [
        "Reward", "Density", "Bytes", "Phases", "Workers over time",
        "Sparsity by k", "Cost of a change", "Recurrence by age", "Quantised, beside "
                                                                  "BF16", "Density by layer type",
        "Density by size of the weight", "Density over time", "Tensors of the highest density",
        "Utilisation by bandwidth", "Where the time of a sync goes",
    ]  # fmt: skip
    assert browser.evaluate("document.querySelectorAll('figure').length") == len(titles)
    figure = f"document.querySelectorAll('figure')[{titles.index('Quantised, beside BF16')}]"
    cells = browser.evaluate(
        f"[...{figure}.querySelector('tbody tr').children].map(cell => cell.textContent)"
    )
    assert cells == ["1", "1.2%", "0.1%", "75%", "37.8 MB", "2"]
    warnings = browser.evaluate(
        "[...document.querySelectorAll('.warning.wide')].map(node => node.firstChild.textContent)"
    )
    assert warnings == [
        "Density drift at version 7: 20%, outside 0.3% to 3%.",
        "1 path to a version failed, and another was taken.",
    ]


def test_the_reward_is_drawn_by_the_bytes_between_trainers(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.show(pages["trainers"])
    figure = "document.querySelectorAll('figure')[1]"
    assert browser.evaluate(f"{figure}.querySelector('h3').textContent") == "Reward by bytes"
    assert "45 times more" in browser.evaluate(f"{figure}.textContent")
    label = browser.evaluate(f"{figure}.querySelector('svg[role=img]').getAttribute('aria-label')")
    assert label == "The same rewards after 24 MB and, by a dense all-reduce, 1.08 GB."
    dense, sent = browser.evaluate(
        f"[...{figure}.querySelectorAll('path.curve')].slice(-2).map(path => path.getBBox())"
        ".map(box => [box.x, box.width])"
    )
    assert sent[0] < dense[0]
    assert sent[1] == pytest.approx(dense[1], abs=1), "logarithmic: so many times more everywhere"


def test_charts_show_what_the_data_says(browser: Chromium, pages: dict[str, Path]) -> None:
    """Positions of what is drawn, read back through the axes' own ticks."""
    browser.show(pages["short"])
    labels = browser.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].map(svg => svg.getAttribute('aria-label'))"
    )
    assert labels[0] == "Reward by version, running mean from 0.5 to 0.502."
    assert labels[1] == "Density by version, mean 1%."
    assert labels[2] == "Patches have 63 MB on average, full syncs 14 GB."
    assert labels[3].startswith("Mean time by phase: publish 4 s")
    heights = browser.evaluate(
        "[...document.querySelectorAll('figure')[2].querySelectorAll('path.curve')].slice(-2)"
        ".map(path => path.getBBox().y)"
    )
    full, patch = heights
    ticks = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('figure')[2].querySelectorAll('svg:last-of-type text')]"  # noqa: E501
        ".filter(text => /B$/.test(text.textContent))"
        ".map(text => [text.textContent, Number(text.getAttribute('y')) - 4]))"
    )
    decade = ticks["1 GB"] - ticks["10 GB"]
    assert (ticks["10 GB"] - full) / decade == pytest.approx(0.146, abs=0.02)  # log10 of 14 / 10
    assert (patch - ticks["100 MB"]) / decade == pytest.approx(
        0.2007, abs=0.02
    )  # log10 of 100 / 63


def test_moving_sliders_draws_what_the_plan_says(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["planner"])
    scenario = Scenario(params=PARAMETERS, density=0.01, step_seconds=50.0, bandwidth=2e8)
    plan = make_plan(scenario)
    assert table(browser) == {name: row(plan.methods[name]) for name in METHODS}
    seen = [curves(browser)]
    changes: dict[str, Any] = {}
    for name, position in [("bandwidth", 700), ("density", 38), ("step_seconds", 400)]:
        move = (
            slide_density(browser, position)
            if name == "density"
            else slide(browser, name, position)
        )
        changes[name] = move
        plan = make_plan(Scenario(**({"params": PARAMETERS, "density": 0.01, "step_seconds": 50.0,
        "bandwidth": 2e8}
                                    | changes)))  # fmt: skip
        assert table(browser) == {method: row(plan.methods[method]) for method in METHODS}, name
        shown = browser.evaluate(f"document.querySelector('output[for=plan-{name}]').textContent")
        assert shown == browser.evaluate(
            f"document.getElementById('plan-{name}').getAttribute('aria-valuetext')"
        )
        seen.append(curves(browser))
    assert all(before != after for before, after in pairwise(seen))
    assert browser.errors == []


def test_a_shared_link_divides_the_bandwidth_among_workers(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.show(pages["planner"])
    alone = table(browser)
    slide(browser, "workers", 600)
    assert table(browser) == alone
    browser.evaluate("document.getElementById('plan-shared').click()")
    workers = int(
        browser.evaluate("document.querySelector('output[for=plan-workers]').textContent")
    )
    plan = make_plan(
        Scenario(params=PARAMETERS, density=0.01, step_seconds=50.0, bandwidth=2e8, sharers=workers)
    )
    assert table(browser) == {name: row(plan.methods[name]) for name in METHODS} != alone


def test_the_keyboard_moves_a_slider(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["planner"])
    before = table(browser)
    browser.evaluate("document.getElementById('plan-bandwidth').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Home", code="Home", windowsVirtualKeyCode=36
        )
    assert (
        browser.evaluate("document.querySelector('output[for=plan-bandwidth]').textContent")
        == "1 Mbit/s"
    )
    plan = make_plan(Scenario(params=PARAMETERS, density=0.01, step_seconds=50.0, bandwidth=1e6))
    assert table(browser) == {name: row(plan.methods[name]) for name in METHODS} != before


def test_bytes_that_a_study_measured_hold_at_its_density(browser: Chromium, folder: Path) -> None:
    page = folder / "study.html"
    page.write_text(render(study=study()), encoding="utf-8")
    browser.show(page)
    measured = {"auto": 0.9, "zstd": 2.8, "history": 0.85}
    inputs: dict[str, Any] = {"params": PARAMETERS, "step_seconds": 50.0, "bandwidth": 2e8}
    density = 1 - study()["rows"][0]["sparsity"]
    start = make_plan(Scenario(**inputs, density=density, bytes_per_changed=measured))
    assert table(browser) == {name: row(start.methods[name]) for name in METHODS}
    moved = make_plan(Scenario(**inputs, density=slide_density(browser, 60, density)))
    assert table(browser) == {name: row(moved.methods[name]) for name in METHODS}


def test_tables_hold_the_numbers(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["whole"])
    browser.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    tables = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('details .scroll')].map("
        "box => [box.getAttribute('aria-label'), [...box.querySelectorAll('tr')].map("
        "row => [...row.children].map(cell => cell.textContent))]))"
    )
    assert tables["Table: Density"][1] == ["1", "1%"]
    assert len(tables["Table: Reward"]) == 41  # a head, and 40 of the 60 versions
    assert tables["Table: Reward"][-1] == ["59", "0.559"]
    assert tables["Table: Sparsity by k"][1][:3] == ["1", "39", "98.8%"]
    assert tables["Table: Workers over time"][1][0] == "worker-0"
    assert ["publish", "build", "3 s"] in tables["Table: Phases"]
    assert tables["Table: failed paths"][1][1:] == [
        "digest_mismatch",
        "the patch 1->2",
        "it differs",
    ]


def test_hostile_names_are_shown_and_not_run(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["hostile"])
    assert browser.evaluate("[document.scripts.length, document.images.length]") == [2, 0]
    assert browser.evaluate("document.title").startswith("</script>")
    assert "</script><script>" in browser.evaluate("document.querySelector('.about').textContent")


def test_the_policy_stops_the_network_and_other_scripts(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.show(pages["planner"])
    refused = browser.evaluate("fetch('http://127.0.0.1:9/').then(() => false, () => true)")
    ran = browser.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = true';"
        " document.body.append(s); return window.ran === true; })()"
    )
    assert (refused, ran) == (True, False)
    assert any("Content Security Policy" in error for error in browser.errors)


def test_the_pointer_reads_a_chart(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["whole"])
    x, y = browser.evaluate(
        "(box => [box.left + box.width / 2, box.top + box.height / 2])"
        "(document.querySelectorAll('figure svg[role=img]')[1].getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    readout = browser.evaluate("document.querySelectorAll('figure .readout')[1].textContent")
    assert re.fullmatch(r"version \d+ · density 1%", readout)


def test_it_prints_on_paper(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["whole"], dark=True)
    browser.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert brightness(browser.evaluate("getComputedStyle(document.body).backgroundColor")) == 255
    assert len(browser.call("Page.printToPDF")["data"]) > 20_000
    browser.call("Emulation.setEmulatedMedia", media="")


def test_charts_follow_the_width(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["planner"])
    wide = browser.evaluate("document.querySelector('#plan svg').getAttribute('width')")
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=500,
        height=800,
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")
    assert (
        0
        < float(browser.evaluate("document.querySelector('#plan svg').getAttribute('width')"))
        < float(wide)
    )
    assert browser.errors == []


def test_without_a_trainers_events_the_rest_is_drawn(browser: Chromium, folder: Path) -> None:
    write(folder / "lone/events-w.jsonl", [synced(v, v - 1 if v else None) for v in range(4)])
    first = write_run(folder / "first", 1)
    for number, source in enumerate([folder / "lone", first]):
        page = folder / f"part-{number}.html"
        page.write_text(render(run=read_run(source)), encoding="utf-8")
        browser.show(page)
        assert browser.errors == []
        assert "Workers over time" in browser.evaluate("document.body.innerText")
    unchanged = published(1, changed=0, patch_bytes=0)
    write(folder / "unchanged/events-trainer.jsonl", [published(0), unchanged])
    (folder / "unchanged.html").write_text(
        render(run=read_run(folder / "unchanged")), encoding="utf-8"
    )
    browser.show(folder / "unchanged.html")
    assert browser.errors == []
