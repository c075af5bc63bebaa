"""The page of a run or a study: static, the same bytes each time, and what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl.metrics import JsonLines
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import Pulse
from tests.support.states import Rng, history

pytest.importorskip("matplotlib")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path: Path, rng: Rng) -> Path:
    """Events of a publisher and a worker with a hostile name, over six versions."""
    store = MemoryStore()
    with (
        JsonLines(tmp_path / "run/events-trainer.jsonl") as trainer,
        JsonLines(tmp_path / "run/events-worker-<7>.jsonl") as worker,
        Publisher(store, stream="policy", on_event=trainer) as publisher,
        Subscriber(store, stream="policy", on_event=worker) as subscriber,
    ):
        for k, state in enumerate(history(rng, 6)):
            publisher.publish(state, metadata={"reward": k / 8})
            subscriber.sync()
    return tmp_path / "run"


def test_a_run_becomes_a_page(run: Path, pulse: Pulse) -> None:
    facts = pulse.json("report", run, "-o", run / "page.html")
    page = (run / "page.html").read_text()
    assert (facts["run"], facts["study"], facts["bytes"]) == (True, False, len(page.encode()))
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert captions == [
        "Changed elements, %",
        "Bytes of a patch, MB",
        "Seconds of a publish",
        "Reward",
        "Seconds from a version&#x27;s commit to its sync",
    ]
    assert page.count("<svg") == len(captions)
    assert "worker-&lt;7&gt;" in page
    pulse("report", run, "-o", run / "again.html")
    assert page == (run / "again.html").read_text(), "not the same bytes"


def test_a_page_loads_and_runs_nothing(run: Path, pulse: Pulse) -> None:
    failed = {
        "event": "fallback_used",
        "time": 1.0,
        "stream": "policy",
        "link": HOSTILE,
        "kind": HOSTILE,
        "reason": HOSTILE,
    }
    (run / "events-x.jsonl").write_text(json.dumps(failed) + "\n")
    named = run.rename(run.parent / HOSTILE.replace("/", ""))
    pulse("report", named, "-o", run.parent / "page.html")
    page = (run.parent / "page.html").read_text()
    assert page.count("&lt;script&gt;") > 5
    assert "<script" not in page
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!#)', page.replace("xlink:", ""))


def test_a_study_becomes_a_page(tmp_path: Path, rng: Rng, pulse: Pulse) -> None:
    for k, state in enumerate(history(rng, 5)):
        write_checkpoint(tmp_path / f"steps/step-{k}", state)
    found = pulse.json("study", tmp_path / "steps", "--k", 1, 2)
    (tmp_path / "study.json").write_text(json.dumps(found))
    pulse("report", tmp_path, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 3
    assert f"{found['rows'][0]['sparsity']:.3%}" in page


@pytest.mark.parametrize("given", [{}, {"format": "pulse.study.2"}, [], "x", {"rows": 1}])
def test_what_is_no_study_is_refused(given: Any, tmp_path: Path, pulse: Pulse) -> None:
    (tmp_path / "study.json").write_text(json.dumps(given))
    pulse.refused("report", tmp_path, "-o", tmp_path / "p", kind="input", match="not a study")


def test_what_has_nothing_to_show_is_refused(run: Path, tmp_path: Path, pulse: Pulse) -> None:
    def refused(folder: Path, *options: str, match: str) -> None:
        command = ("report", folder, "-o", tmp_path / "page.html", *options)
        pulse.refused(*command, kind="input", match=match)

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", match="has no events")
    refused(run, "--stream", "other", match="no events of the stream 'other'")
    other = json.loads((run / "events-trainer.jsonl").read_text().splitlines()[0])
    (run / "events-b.jsonl").write_text(json.dumps(other | {"stream": "b"}) + "\n")
    refused(run, match="streams b, policy")
