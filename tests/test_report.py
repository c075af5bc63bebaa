"""The page of a run or a study: static, the same bytes each time, and what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl.errors import InputError
from pulse_rl.metrics import JsonLines
from pulse_rl.report import read_run, render
from pulse_rl.study import CheckpointFolder, study
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
    assert page == render(run=read_run(run), title="Pulse report: run"), "not the same bytes"


def test_a_page_loads_and_runs_nothing(run: Path) -> None:
    failed = {
        "event": "fallback_used",
        "time": 1.0,
        "stream": "policy",
        "link": HOSTILE,
        "kind": HOSTILE,
        "reason": HOSTILE,
    }
    (run / "events-x.jsonl").write_text(json.dumps(failed) + "\n")
    page = render(run=read_run(run), title=HOSTILE)
    assert "<script" not in page
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!#)', page.replace("xlink:", ""))


def test_a_study_becomes_a_page(tmp_path: Path, rng: Rng) -> None:
    for k, state in enumerate(history(rng, 5)):
        write_checkpoint(tmp_path / f"step-{k}", state)
    found = study(CheckpointFolder(tmp_path), ks=(1, 2))
    page = render(study=json.loads(json.dumps(found)))
    assert page.count("<svg") == 3
    assert f"{found['rows'][0]['sparsity']:.3%}" in page


@pytest.mark.parametrize("given", [{}, {"format": "pulse.study.2"}, [], "x", {"rows": 1}])
def test_what_is_no_study_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="not a study"):
        render(study=given)


def test_what_has_nothing_to_show_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no events"):
        read_run(tmp_path / "empty")
    with pytest.raises(InputError, match="no events of the stream 'other'"):
        read_run(run, stream="other")
    with pytest.raises(InputError, match="nothing to draw"):
        render()
    other = json.loads((run / "events-trainer.jsonl").read_text().splitlines()[0])
    (run / "events-b.jsonl").write_text(json.dumps(other | {"stream": "b"}) + "\n")
    with pytest.raises(InputError, match="streams b, policy"):
        read_run(run)
