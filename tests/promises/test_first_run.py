"""The first run explains itself: what a user who passes no listener is told, once, and how objects
print."""

from __future__ import annotations

import importlib
import re
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import (
    MemoryStore,
    MultiSubscriber,
    Publisher,
    Relay,
    Signer,
    State,
    Subscriber,
    open_store,
)
from pulse_rl.events import Event, Hint
from tests.support.states import present, run_python

from .oracle import STREAM, Trainer, publish


def hints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "pulse_rl"]


def test_an_fp32_model_is_told_once_what_to_add(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(10_000).astype(np.float32)
    lines = []
    with Publisher(MemoryStore(), stream="policy") as publisher:
        for _ in range(4):
            lines.append(str(publisher.publish({"w": weights})))
            weights = weights + rng.standard_normal(10_000).astype(np.float32) * 1e-6
    (told,) = hints(caplog)
    assert told.startswith("stream 'policy': ")
    assert 'dtype="BF16"' in told
    assert "FP32" in told
    assert re.fullmatch(r"version 0 of policy: the full state of 40 kB \(.*first.*\)", lines[0])
    assert re.fullmatch(
        r"version 1 of policy: \S+% changed, .* for 40 kB, .* times smaller", lines[1]
    )


def test_sparse_updates_are_no_reason_to_speak(caplog: pytest.LogCaptureFixture) -> None:
    weights = np.arange(10_000, dtype=np.uint16)
    with Publisher(MemoryStore(), stream="policy") as publisher:
        for step in range(3):
            publisher.publish({"w": weights})
            weights = weights.copy()
            weights[step] += 1
    assert hints(caplog) == []


def test_a_listener_hears_why_patches_are_large() -> None:
    events: list[Event] = []
    with Publisher(MemoryStore(), stream="policy", on_event=events.append) as publisher:
        for step in range(3):
            publisher.publish({"w": np.arange(10_000, dtype=np.uint16) + step})
    (hint,) = (event for event in events if isinstance(event, Hint))
    assert (hint.kind, hint.version) == ("dense", 1)
    assert "learning rate" in hint.hint


@pytest.mark.slow
@pytest.mark.parametrize("there", [[], ["policy", "policy-2"]])
def test_a_mistyped_stream_is_said_once_with_what_is_there(
    tmp_path: Path, there: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for stream in there:
        publish(Publisher(tmp_path, stream=stream), Trainer())
    (tmp_path / "notes.txt").write_text("no stream")
    worker = Subscriber(tmp_path, stream="polcy")
    assert list(worker.updates(poll_seconds=0.2, timeout_seconds=1.7)) == []
    (told,) = hints(caplog)
    assert told.startswith("stream 'polcy'")
    assert all(repr(stream) in told for stream in there)
    assert ("no streams" in told) == (not there)
    if not there:
        nowhere = Subscriber(tmp_path / "nowhere", stream="s")
        list(nowhere.updates(poll_seconds=0.2, timeout_seconds=1.7))
        assert "does not exist" in hints(caplog)[-1]


@pytest.mark.slow
def test_a_stream_that_is_there_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Subscriber(tmp_path, stream=STREAM)
    assert worker.sync() is None
    publish(Publisher(tmp_path, stream=STREAM), Trainer())
    time.sleep(1.1)
    assert worker.sync() is not None
    assert hints(caplog) == []


def test_objects_print_in_a_line(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publisher, worker = Publisher(store, stream=STREAM), Subscriber(store, stream=STREAM)
    publish(publisher, Trainer(), 2)
    update = present(worker.sync())
    submission = publisher.submit({"w": np.zeros(3, np.float32)})
    done = submission.result()
    with MultiSubscriber(store, [STREAM]) as several:
        objects = [
            publisher, worker, update, done, several, store, MemoryStore(), worker.state,
            worker.digest,
            Relay(store, MemoryStore(), stream=STREAM), Signer.generate(),
            State.of({"w": np.zeros(2)}),
            open_store("http://localhost:1"), *Trainer().state.values(),
        ]  # fmt: skip
        shown = [repr(each) for each in objects]
    for line in shown:
        assert "\n" not in line
        assert len(line) < 600
        assert " object at 0x" not in line
        assert not re.search(r"\d\.0*[1-9]\d{4,}", line), line
    assert "version 1" in repr(worker)
    assert STREAM in repr(publisher)
    assert all(word in repr(update) for word in ("changed=", "full=True", "metadata="))
    assert all(word in repr(done) for word in ("density=", "ratio=", "reason="))


@pytest.mark.slow
def test_no_public_object_prints_as_an_address() -> None:
    """But what users write themselves. What needs a framework is looked at where that is
    installed."""
    elsewhere = {"axolotl", "nemo_rl", "verl"}
    for line in (Path(__file__).parents[1] / "public_api.txt").read_text().splitlines():
        found = re.match(r"class (pulse_rl[\w.]*)\.(\w+)\(", line)
        if (
            found
            and found[1].rpartition(".")[2] not in elsewhere
            and not re.fullmatch("Store|.*Conformance", found[2])
        ):
            kind = getattr(importlib.import_module(found[1]), found[2])
            assert kind.__repr__ not in (object.__repr__, Future.__repr__), kind


@pytest.mark.slow
def test_a_missing_framework_says_how_to_install_it() -> None:
    code = """
import importlib, sys, traceback
sys.modules["torch"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"pulse_rl.{name}")
    except ImportError:
        traceback.print_exc()
"""
    names = ("frameworks.torch", "frameworks.transformers", "frameworks.fsdp", "loco")
    assert run_python(code, *names).stderr.count("pip install 'pulse-rl[torch]'") == len(names)


def test_without_a_configured_logger_warnings_are_seen_and_hints_once() -> None:
    code = """
import logging
from pulse_rl.events import Hint, hint_to
hint_to(None, Hint("policy", 0, "dtype", "a reason", "a hint"))
logging.getLogger("pulse_rl.frameworks.trl").warning("the training waits")
"""
    said = run_python(code).stderr
    assert said.count("a reason") == said.count("the training waits") == 1
