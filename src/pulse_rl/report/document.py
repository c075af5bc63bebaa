"""The page: template, style, scripts, the three numbers at its top, and the data that the scripts
draw."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from .._util.settings import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
)
from ..plan import Scenario, make_plan
from ..plan.model import METHODS, MethodPlan
from .data import study_data


def headline(run: Mapping[str, Any] | None, study: Mapping[str, Any] | None) -> str:
    """The numbers of the run, else of the study, as HTML that needs no script; empty where neither
    has them."""
    if run and run["summary"]:
        facts, between = run["summary"], "from one version to the next"
        work = "the run’s median"
    elif study:
        facts, k = study["summary"], study["rows"][0]["k"]
        between = "from one state to the next" if k == 1 else f"between states {k} apart"
        work = "assumed"
    else:
        return ""
    nbytes, full = facts["bytes_per_sync"], facts["full_bytes"]
    entries = [
        ("Sparsity", format_percent(facts["sparsity"]), f"of the weights keep their bits {between}")
    ]
    if nbytes is not None:
        note = f"instead of {format_bytes(full)}: {_times(full, nbytes)} times smaller"
        entries.append(("Bytes per sync", format_bytes(nbytes), note))
    if facts["bandwidth_for_target"] is not None:
        target, step = format_percent(facts["target"]), format_duration(facts["step_seconds"])
        full_rate = facts["bandwidth_full"]
        instead = (
            ""
            if full_rate is None
            else f"instead of {format_bandwidth(full_rate)} for full syncs, "
        )
        note = f"{instead}with {step} of work between two syncs ({work})"
        entries.append(
            (
                f"Bandwidth for {target} utilisation",
                format_bandwidth(facts["bandwidth_for_target"]),
                note,
            )
        )
    cells = [
        f"<div><dt>{html.escape(name)}</dt><dd><strong>{html.escape(value)}</strong>"
        f"<small>{html.escape(note)}</small></dd></div>"
        for name, value, note in entries
    ]
    return f'<dl class="headline">{"".join(cells)}</dl>'


def _times(full: float, nbytes: float) -> str:
    return format_number(full / nbytes) if nbytes else "infinitely many"


SCRIPTS = ("units", "dom", "plan", "chart", "bars", "run", "study", "planner", "main")
"""In the order in which they are joined."""

_DECADES, _A_DECADE = 5, 24


def render(
    *,
    run: Mapping[str, Any] | None = None,
    study: Any = None,
    title: str = "Pulse report",
    refresh_seconds: int | None = None,
) -> str:
    """The whole page under ``title``. ``run`` comes from `read_run`, ``study`` from ``pulse
    study``; raises InputError if it is not a study. A browser loads the page again every
    ``refresh_seconds`` (None: never).

    All text of the data is escaped. A content security policy allows no network, and no script but
    the page's own.
    """
    drawn = None if study is None else study_data(study)
    style, script, scenario = _asset("page.css"), script_source(), _scenario(run, drawn)
    data = {
        "run": run,
        "study": drawn,
        "scenario": scenario,
        "planned": planned(
            Scenario(
                **{
                    name: scenario[name]
                    for name in scenario.keys() & Scenario.__annotations__.keys()
                }
            )
        ),
    }
    policy = (
        f"default-src 'none'; style-src {_source_of(style)}; script-src "
        f"{_source_of(script)}; base-uri 'none'"
    )
    parts = {
        "policy": f"{policy}; form-action 'none'",
        "refresh": f'<meta http-equiv="refresh" content="{refresh_seconds:d}">\n'
        if refresh_seconds
        else "",
        "title": html.escape(title),
        "about": html.escape(_about(run, drawn)),
        "version": html.escape(version("pulse-rl")),
        "headline": headline(run, drawn),
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    # One pass, so that a part that holds a marker stays as it is.
    page = re.sub(r"\{\{([a-z]+)\}\}", lambda match: parts[match[1]], _asset("page.html"))
    return page.encode(
        "utf-8", "replace"
    ).decode()  # a lone surrogate of a file's name has no UTF-8


def planned(scenario: Scenario) -> dict[str, Any]:
    """What the planner's slider of the density shows: `make_plan` at each of ``densities``, without
    the link, which has sliders of its own. Bytes a change that were measured hold at the scenario's
    own density only."""
    densities = sorted(
        {scenario.density, *(10 ** (k / _A_DECADE) for k in range(-_DECADES * _A_DECADE, 1))}
    )
    plans = [
        make_plan(
            scenario
            if each == scenario.density
            else replace(scenario, density=each, bytes_per_changed={})
        )
        for each in densities
    ]
    return {
        "densities": densities,
        "methods": {
            name: [_without_link(plan.methods[name]) for plan in plans] for name in METHODS
        },
    }


def _without_link(method: MethodPlan) -> dict[str, Any]:
    coding = {
        phase: float(f"{method.phases[phase]:.9g}")
        for phase in ("encode", "hash", "verify", "apply")
    }
    return {"sync_bytes": method.sync_bytes, "coding": coding}


def script_source() -> str:
    """The page's scripts as one, in a scope of their own."""
    joined = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{joined}}})();\n'


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or begin a
    comment."""
    text = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _source_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def _about(run: Mapping[str, Any] | None, study: Mapping[str, Any] | None) -> str:
    parts = []
    if run:
        workers = _counted(len(run["workers"]) + run["more_workers"], "worker")
        took = (
            f"{_counted(run['versions'], 'version')} in {format_duration(run['seconds'])}, "
            f"{workers}"
        )
        ran = run["versions"] or run["workers"]
        parts.append(
            f"A run of the stream {run['stream']}: {took}."
            if ran
            else f"Of the stream {run['stream']}."
        )
    if study:
        parts.append(f"A study of {study['source']}: {_counted(study['states'], 'state')}.")
    return " ".join(parts) or "What a sync of your model would cost."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _scenario(run: Mapping[str, Any] | None, study: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where the planner starts: as the run was, else as the study was, else the paper's 7B model.
    Of `Scenario` all but ``sharers``: there are ``workers``, which have a ``shared_link`` or none;
    and the ``target`` utilisation."""
    scenario: dict[str, Any] = {
        "params": 7_000_000_000,
        "density": 0.01,
        "step_seconds": 50.0,
        "bandwidth": 2e8,
        "upload_bandwidth": None,
        "workers": 4,
        "shared_link": False,
        "cores": 8,
        "round_trip_seconds": 0.0,
        "target": 0.9,
        "param_bytes": 2.0,
        "bytes_per_changed": {},
    }
    summary = run and run["summary"]
    if run and summary:
        scenario["workers"] = max(1, len(run["workers"]) + run["more_workers"])
        scenario |= {"params": summary["parameters"], "density": 1 - summary["sparsity"]}
        scenario["param_bytes"] = summary["full_bytes"] / summary["parameters"]
        scenario["step_seconds"] = summary["step_seconds"] or scenario["step_seconds"]
    elif study:
        scenario |= study["scenario"]
    return scenario
