"""The report's page and what it is made of, without a browser: data, escaping, policy, sizes,
errors."""

from __future__ import annotations

import base64
import json
import re
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl.errors import InputError
from pulse_rl.metrics import JsonLines
from pulse_rl.report import read_run, render
from pulse_rl.report.data import BUCKETS, busy, running_mean, thinned
from pulse_rl.report.document import SCRIPTS
from tests.support.commands import Pulse
from tests.support.reports import (
    DENSITY,
    HOSTILE,
    PARAMETERS,
    PATCH_BYTES,
    START,
    Page,
    published,
    quantised_too,
    study,
    synced,
    write,
    write_run,
)
from tests.support.states import Rng, history


def test_a_real_run_becomes_a_page(tmp_path: Path, rng: Rng, pulse: Pulse) -> None:
    store, states = MemoryStore(), history(rng, 6)
    done = []
    with (
        JsonLines(tmp_path / "run/events-trainer.jsonl") as trainer,
        JsonLines(tmp_path / "run/events-worker-7.jsonl") as worker,
    ):
        publisher = Publisher(store, stream="policy", on_event=trainer)
        subscriber = Subscriber(store, stream="policy", on_event=worker)
        for i, state in enumerate(states):
            done.append(publisher.publish(state, metadata={"reward": i / 8}))
            update = subscriber.sync()
            assert update is not None
    facts = pulse.json("report", tmp_path / "run", "-o", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert facts["bytes"] == len(text.encode())
    assert (facts["run"], facts["study"]) == (True, False)

    run = Page(text).data["run"]
    densities = [d.density or 0.0 for d in done[1:]]
    assert run["series"]["density"] == {"xs": [1, 2, 3, 4, 5], "ys": densities}
    assert run["series"]["reward"]["ys"] == [i / 8 for i in range(6)]
    assert run["series"]["patch_bytes"]["ys"] == [d.patch_bytes for d in done[1:]]
    summary = run["summary"]
    assert summary["sparsity"] == pytest.approx(1 - sum(densities) / 5)
    assert summary["bytes_per_sync"] == pytest.approx(sum(d.patch_bytes for d in done[1:]) / 5)
    assert summary["full_bytes"] == done[0].dense_bytes
    assert facts["summary"] == summary
    (follower,) = run["workers"]
    assert (follower["name"], follower["syncs"]) == ("worker-7", 6)
    assert set(follower["phases"]) <= {"plan", "fetch", "apply", "restore", "other"}
    assert set(run["publish_phases"]) <= {"resume", "build", "upload", "commit", "other"}
    assert sum(run["publish_phases"].values()) == pytest.approx(sum(d.seconds for d in done) / 6)
    headline = [text for _, text in Page(text).all("strong")]
    assert len(headline) == 3


def test_a_watched_run_is_written_again(
    tmp_path: Path, pulse: Pulse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever there is news, until it is interrupted."""
    run, out = write_run(tmp_path / "run", 3), tmp_path / "report.html"
    pages: list[str] = []

    def meanwhile(seconds: float) -> None:
        pages.append(out.read_text())
        if len(pages) == 2:
            write_run(tmp_path / "run", 5)
        if len(pages) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", meanwhile)
    said = pulse("report", run, "-o", out, "--watch", status=130)
    assert pages[0] == pages[1] != pages[2] == pages[3]
    assert len(said.splitlines()) == 2
    assert 'http-equiv="refresh" content="5"' in pages[0]
    pulse("report", run, "-o", out)
    assert 'http-equiv="refresh"' not in out.read_text()


def test_the_three_numbers(tmp_path: Path) -> None:
    page = Page(render(run=read_run(write_run(tmp_path, 30))))
    names = [text for _, text in page.all("dt")]
    values = [text for _, text in page.all("strong")]
    assert names == ["Sparsity", "Bytes per sync", "Bandwidth for 90% utilisation"]
    assert values == ["99%", "63 MB", "98.6 Mbit/s"]  # 8 * 63 MB * 0.9 / (0.1 * 46 s)
    notes = " ".join(text for _, text in page.all("small"))
    assert "14 GB: 222 times smaller" in notes
    assert "21.9 Gbit/s" in notes
    assert "46 s" in notes


def test_of_a_study_alone(tmp_path: Path, pulse: Pulse) -> None:
    (tmp_path / "study.json").write_text(json.dumps(study()))
    pulse("report", tmp_path / "study.json", "-o", tmp_path / "a.html")
    pulse("report", tmp_path, "-o", tmp_path / "b.html")
    page = Page((tmp_path / "a.html").read_text())
    assert page.data == Page((tmp_path / "b.html").read_text()).data
    assert [text for _, text in page.all("strong")] == ["98.8%", "75.6 MB", "200 Mbit/s"]
    assert page.data["run"] is None
    assert [row["k"] for row in page.data["study"]["rows"]] == [1, 2, 4, 8, 16, 32]
    scenario = page.data["scenario"]
    assert (scenario["params"], scenario["param_bytes"], scenario["step_seconds"]) == (
        PARAMETERS,
        2.0,
        50.0,
    )
    assert scenario["density"] == pytest.approx(0.012)
    assert scenario["bytes_per_changed"] == {"auto": 0.9, "zstd": 2.8, "history": 0.85}


def test_run_and_study_share_a_page_and_the_planner_starts_as_the_run(
    tmp_path: Path, pulse: Pulse
) -> None:
    write_run(tmp_path / "run", 20, workers=3)
    (tmp_path / "run/study.json").write_text(json.dumps(study()))
    facts = pulse.json("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert (facts["run"], facts["study"]) == (True, True)
    data = Page((tmp_path / "r.html").read_text()).data
    assert data["scenario"]["density"] == pytest.approx(DENSITY)
    assert (data["scenario"]["workers"], data["scenario"]["step_seconds"]) == (3, 46.0)


def test_without_data_there_is_the_planner() -> None:
    page = Page(render())
    assert (page.data["run"], page.data["study"]) == (None, None)
    assert page.data["scenario"]["params"] == PARAMETERS
    assert page.all("strong") == []


def test_the_page_is_complete_in_itself_and_its_policy_forbids_all_else(tmp_path: Path) -> None:
    text = render(run=read_run(write_run(tmp_path, 5)), study=study())
    page = Page(text)
    for _, attributes, _ in page.elements:
        assert not {"src", "href", "srcset", "action", "style", "onclick", "onload"} & set(
            attributes
        )
    assert not re.search(r"@import|url\(", page.all("style")[0][1])
    assert [name for name, _, _ in page.elements].count("link") == 0
    (policy,) = [
        a["content"]
        for a, _ in page.all("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    ]
    allowed = dict(part.split(" ", 1) for part in (policy or "").split("; "))
    assert (
        allowed.pop("default-src")
        == allowed.pop("base-uri")
        == allowed.pop("form-action")
        == "'none'"
    )
    style, script = page.all("style")[0][1], page.all("script")[1][1]
    assert allowed == {"style-src": hash_of(style), "script-src": hash_of(script)}
    head = {a.get("name"): a.get("content") for a, _ in page.all("meta")}
    assert head["viewport"] == "width=device-width, initial-scale=1"
    assert head["color-scheme"] == "light dark"
    assert page.all("html")[0][0] == {"lang": "en"}
    assert page.all("noscript")


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    write_run(tmp_path, 4, stream=HOSTILE)
    failed = {
        "event": "fallback_used",
        "time": START,
        "stream": HOSTILE,
        "link": HOSTILE,
        "reason": HOSTILE,
        "kind": HOSTILE,
    }
    write(
        tmp_path / "events-<img src=x onerror=alert(1)>.jsonl",
        [failed, synced(1, 0, stream=HOSTILE)],
    )
    made = study(name=HOSTILE) | {"source": HOSTILE, "dtype": HOSTILE}
    made["layers"][0]["layer"] = HOSTILE
    text = render(run=read_run(tmp_path), study=made, title=HOSTILE)
    assert text.encode()
    page = Page(text)
    assert len(page.all("script")) == 2
    assert page.all("img") == []
    assert page.all("title")[0][1].count("<script>") == 1  # as text
    assert page.data["run"]["stream"] == HOSTILE
    assert page.data["study"]["tensors"][0]["name"] == HOSTILE
    assert page.data["run"]["failures"]["newest"][0]["reason"] == HOSTILE
    assert "<!--" not in text.split('id="data">')[1].split("</script>")[0]


def test_a_page_with_a_lone_surrogate_can_be_written(tmp_path: Path, pulse: Pulse) -> None:
    write_run(tmp_path / "run", 2, stream=HOSTILE)
    pulse("report", tmp_path / "run", "-o", tmp_path / "r.html")


def test_scripts_never_parse_text_as_html() -> None:
    for name in SCRIPTS:
        source = (files("pulse_rl.report") / "assets" / f"{name}.js").read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|fetch\(",
            source,
        )
        assert "</" not in source
        assert source.count("\n") <= 400


def test_colours_have_contrast_in_both_schemes() -> None:
    """At least 4.5 : 1 on the page and on its panels, as WCAG asks of small text."""
    css = (files("pulse_rl.report") / "assets" / "page.css").read_text()
    schemes = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(schemes) == 3  # light, dark, print
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", scheme))
        for name in ("ink", "muted", "blue", "orange", "green", "purple", "grey", "red"):
            for ground in ("paper", "panel"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground, colours)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


# -- how far behind


def test_versions_behind_over_time(tmp_path: Path) -> None:
    """One worker that takes 0 and 1, is away for three versions, and then takes 4."""
    write(tmp_path / "events-trainer.jsonl", [published(v) for v in range(5)])
    write(tmp_path / "events-w.jsonl", [synced(0, None), synced(1, 0), synced(4, 1, lag=30.0)])
    (worker,) = read_run(tmp_path)["workers"]
    assert list(zip(worker["behind"]["xs"], worker["behind"]["ys"], strict=True)) == [
        (7.0, 0), (54.0, 1), (57.0, 0), (104.0, 1), (154.0, 2), (204.0, 3), (234.0, 0),
    ]  # fmt: skip
    assert worker["worst_behind"] == 3
    assert worker["lag_seconds"] == 3.0
    assert worker["busy"] == [[5.0, 2.0, 1.0], [55.0, 2.0, 1.0], [232.0, 2.0, 1.0]]


def test_a_slow_sync_ends_behind(tmp_path: Path) -> None:
    """Version 1 arrives ten seconds after version 2 was committed."""
    write(tmp_path / "events-trainer.jsonl", [published(v) for v in range(3)])
    write(tmp_path / "events-w.jsonl", [synced(0, None), synced(1, 0, lag=60.0)])
    (worker,) = read_run(tmp_path)["workers"]
    assert list(zip(worker["behind"]["xs"], worker["behind"]["ys"], strict=True))[-2:] == [
        (104.0, 2),
        (114.0, 1),
    ]


def test_without_the_trainers_events_the_workers_tell_of_commits(tmp_path: Path) -> None:
    write(tmp_path / "events-a.jsonl", [synced(v, v - 1 if v else None) for v in range(4)])
    write(tmp_path / "events-b.jsonl", [synced(0, None), synced(3, 0, lag=10.0)])
    run = read_run(tmp_path)
    assert run["summary"] is None
    assert [w["worst_behind"] for w in run["workers"]] == [1, 3]
    assert Page(render(run=run)).all("strong") == []


def test_a_worker_whose_clock_is_ahead_is_never_ahead_of_the_trainer(tmp_path: Path) -> None:
    write(tmp_path / "events-trainer.jsonl", [published(v) for v in range(3)])
    write(
        tmp_path / "events-w.jsonl", [synced(v, v - 1 if v else None, lag=-20.0) for v in range(3)]
    )
    (worker,) = read_run(tmp_path)["workers"]
    assert min(worker["behind"]["ys"]) == 0


def test_a_version_that_was_published_twice_counts_once(tmp_path: Path) -> None:
    again = published(2, time=START + 400, patch_bytes=1)
    write(tmp_path / "events-trainer.jsonl", [*(published(v) for v in range(3)), again])
    run = read_run(tmp_path)
    assert run["versions"] == 3
    assert run["series"]["patch_bytes"]["ys"] == [PATCH_BYTES, 1]


# -- long and short series


def test_a_long_series_keeps_its_extremes() -> None:
    ys: list[float | None] = [0.5] * 100_000
    ys[12_345], ys[77_777], ys[5] = 9.0, -3.0, None
    thin = thinned(range(100_000), ys)
    assert {len(values) for values in thin.values()} == {BUCKETS}
    assert (max(thin["highs"]), min(thin["lows"])) == (9.0, -3.0)
    assert sorted(thin["xs"]) == thin["xs"]
    assert sum(thin["ys"]) / BUCKETS == pytest.approx(0.5, abs=1e-3)


def test_a_short_series_is_as_it_was() -> None:
    assert thinned([1, 2, 3], [0.1, None, 0.3]) == {"xs": [1, 3], "ys": [0.1, 0.3]}
    assert thinned([], []) == {"xs": [], "ys": []}
    many = thinned(range(2 * BUCKETS), [0.0] * 2 * BUCKETS)
    assert len(many["xs"]) == 2 * BUCKETS


def test_running_means() -> None:
    assert running_mean([1.0, None, 3.0, 5.0], 2) == [1.0, None, 2.0, 4.0]


def test_many_syncs_become_the_share_of_time() -> None:
    assert busy([(1.0, 2.0)], 10.0) == [[1.0, 2.0, 1.0]]
    spans = [(i * 1.0, 0.25) for i in range(4000)]
    parts = busy(spans, 4000.0)
    assert len(parts) == BUCKETS
    assert all(share == pytest.approx(0.25) for _, _, share in parts)
    assert busy([(float(i), 10.0) for i in range(1000)], 1000.0)[5][2] == 1.0


@pytest.mark.slow
def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, 5000, workers=4))
    assert run["versions"] == 5000
    assert len(render(run=run)) < 400_000


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_a_run_that_has_just_begun(tmp_path: Path, versions: int) -> None:
    run = read_run(write_run(tmp_path, versions, workers=1))
    assert (run["summary"] is None) == (versions == 1)
    assert len(Page(render(run=run)).all("dt")) == (0 if versions == 1 else 3)


# -- what cannot be drawn


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    bad = [
        published(7, time=float("nan")),
        published(8, seconds="long"),
        published(9, elements=None),
        {"event": "published"},
    ]
    bad += [
        published(7, elements=10**400),
        published(10, stream=None),
        synced(3, 2, lag=float("inf")),
        {"event": "synced", "time": 1.0, "stream": "policy"},
    ]
    incomplete = published(
        3,
        metadata={"reward": float("nan")},
        phases={"build": "x", "weird": 1.0},
        changed=float("inf"),
    )
    write(
        tmp_path / "events-trainer.jsonl",
        [published(0), published(1), *bad, incomplete, published(4, metadata=None)],
    )
    run = read_run(tmp_path)
    assert run["versions"] == 4
    assert run["workers"] == []
    assert run["series"]["density"]["xs"] == [1, 4]
    assert "NaN" not in render(run=run).split('id="data">')[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s | {"format": "pulse.study.2"},
        lambda s: s | {"rows": []},
        lambda s: s | {"rows": [{"k": 1}]},
        lambda s: s | {"rows": None},
        lambda s: s | {"parameters": "many"},
        lambda s: s | {"tensors": [{"k": 1}]},
        lambda s: s | {"summary": None},
        lambda s: s | {"exponents": [[1]]},
        lambda s: {k: v for k, v in s.items() if k != "layers"},
        lambda s: s | {"history": {"changed": 3}},
        lambda s: s | {"history": [1]},
        lambda _: [],
        lambda _: "study",
        lambda _: 7,
    ],
)
def test_what_is_no_study_is_an_input_error(damage: Any) -> None:
    with pytest.raises(InputError, match="not a study"):
        render(study=damage(study()))


def test_a_study_of_little_is_drawn() -> None:
    made = study((4,))
    for row in made["rows"]:
        row |= dict.fromkeys(
            ["bytes", "bytes_per_changed", "bytes_per_changed_zstd", "entropy_bound", "times_bound"]
        )
    made |= {"layers": [], "tensors": [], "pairs": [], "exponents": [], "gradients": [], "lr": None}
    made |= {"gradient_density": None}
    made["summary"] |= dict.fromkeys(["bytes_per_sync", "bandwidth_for_target", "bandwidth_full"])
    page = Page(render(study=made))
    assert [text for _, text in page.all("dt")] == ["Sparsity"]
    assert "states 4 apart" in page.all("small")[0][1]


def test_a_quantised_study_stands_beside() -> None:
    made = quantised_too(study((1, 4)))
    found = Page(render(study=made)).data["study"]["quantised"]
    assert found["kinds"] == made["quantised"]["kinds"]
    assert [row["bytes"] for row in found["rows"]] == [row["bytes"] / 2 for row in made["rows"]]
    assert Page(render(study=study())).data["study"]["quantised"] is None


@pytest.mark.parametrize(
    "damage", [lambda s: s.pop("history"), lambda s: s["history"].update(changed=0)]
)
def test_a_study_without_history_is_drawn(damage: Any) -> None:
    made = study()
    damage(made)
    assert Page(render(study=made)).data["study"]["history"] is None
    assert len(Page(render(study=study())).data["study"]["history"]["ages"]) == 5


def test_refusals(tmp_path: Path, pulse: Pulse) -> None:
    out = tmp_path / "report.html"
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "two", 2, stream="a")
    write(tmp_path / "two/events-other.jsonl", [published(0, stream="b")])
    (tmp_path / "broken.json").write_text("{")
    write_run(tmp_path / "one", 2)
    pulse.refused("report", tmp_path / "nothing", "-o", out, kind="input", match="No such file")
    pulse.refused("report", tmp_path / "empty", "-o", out, kind="input", match="no events")
    pulse.refused("report", tmp_path / "two", "-o", out, kind="input", match="streams a, b")
    pulse.refused("report", tmp_path / "one", "--stream", "x", "-o", out, kind="input", match="'x'")
    pulse.refused("report", tmp_path / "broken.json", "-o", out, kind="input", match="cannot read")
    pulse.refused(
        "report", tmp_path / "one", "-o", tmp_path / "one", kind="input", match="is a folder"
    )
    assert not out.exists()
    assert "run report" in pulse("report", tmp_path / "two", "--stream", "b", "-o", out)
    assert pulse.json("report", tmp_path / "one/events-trainer.jsonl", "-o", out)["run"]
