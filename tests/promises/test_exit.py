"""A program that ends waits for what it has submitted, as it would for an executor's work, and
never aborts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, Subscriber, verify_stream
from tests.support.states import run_python

PROGRAM = """
import atexit, sys, threading, numpy as np
from pulse_rl import Bits, Publisher, Subscriber, MultiSubscriber

store, how = sys.argv[1:]
rng = np.random.default_rng(1)
weight = rng.integers(0x3C00, 0x4000, (3000, 1000)).astype(np.uint16)
publisher = Publisher(store, stream="s")
many = MultiSubscriber(store, streams=["s"], poll_seconds=0.01, threads=2)

def read(): list(many.updates())

def follow(): list(Subscriber(store, stream="s").updates(poll_seconds=0.001))

for work in () if how == "destructor" else (read, follow):
    threading.Thread(target=work, daemon=True).start()

def submit(*_):
    for step in range(3):
        publisher.submit({name: Bits(weight, "BF16") for name in "ab"})
        weight[step::9] += np.uint16(1)

starts = {"thread": threading.Timer(0.2, submit).start, "at exit": lambda: atexit.register(submit)}
starts.get(how, submit)()
kept = [type("Late", (), {"__del__": submit})() if how == "destructor" else None]
kept.append(kept)
if how == "exception": raise ValueError("as any other")
if how == "exit": sys.exit(3)
"""


def test_where_no_thread_can_be_started_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that ends, on some versions of Python."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("pulse_rl._util.threads.start_new_thread", refuse)
    monkeypatch.setattr("pulse_rl._util.serial.start_new_thread", refuse)
    store, state = MemoryStore(), {name: np.ones((3000, 1000), np.float32) for name in "ab"}
    with Publisher(store, stream="s", threads=4) as publisher:
        publisher.submit(state)
        state["b"][0] = 2
        root = publisher.publish(state).root
    with Subscriber(store, stream="s", threads=4) as worker:
        worker.sync()
        assert (worker.version, worker.root) == (1, root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("normal", 0),
        ("exception", 1),
        ("exit", 3),
        ("thread", 0),
        ("at exit", 0),
        ("destructor", 0),
    ],
)
def test_what_was_submitted_is_published(how: str, status: int, tmp_path: Path) -> None:
    """`python -m tests.faults exits` has programs that end at any moment."""
    ended = run_python(PROGRAM, str(tmp_path), how)
    assert ended.returncode == status, ended.stderr
    assert ("ValueError" in ended.stderr) == (how == "exception")
    assert ("the program has ended" in ended.stderr) == (how == "destructor")
    reports = list(verify_stream(LocalStore(tmp_path), "s"))
    assert [report.version for report in reports] == [0, 1, 2]
    assert all(report.ok for report in reports)
