"""Real processes, killed with SIGKILL at random moments and started again: both sides resume, verified."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulse_rl import LocalStore, Publisher, state_root, verify_stream
from pulse_rl.state.checkpoint import load

pytestmark = pytest.mark.slow

COMMON = """
import sys, time
from pathlib import Path
import numpy as np
from pulse_rl import Bits, Publisher, Subscriber, state_root
from pulse_rl.state.checkpoint import load, save
store, out, stop = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

def move(state, step):
    "What one training step does; a function of the step alone, so that a restarted trainer is where it was."
    rng = np.random.default_rng(step)
    for tensor in state.values():
        tensor.array[rng.integers(0, tensor.array.size, 1 + tensor.array.size // 50)] ^= np.uint16(step)

def policy(step):
    "The trainer's weights after so many steps."
    first = np.random.default_rng(0)
    sizes = {"layer.0": 20_000, "layer.1": 30_000, "layer.2": 20_000, "norm": 50}
    state = {name: Bits(first.integers(0, 1 << 16, size, np.uint16), "BF16") for name, size in sizes.items()}
    for k in range(1, step + 1):
        move(state, k)
    return state
"""

PUBLISHER = (
    COMMON
    + """
publisher = Publisher(store, stream="policy", anchor_ratio=0.5, shard_bytes=60_000, threads=2)
head = publisher.head()
step = head.metadata["step"] if head else 0
state = policy(step)
if head and head.version % 2:
    # A trainer that restarts from its checkpoint publishes it again.
    assert publisher.publish(state, metadata={"step": step}).root == head.root
print("ready", flush=True)
while not stop.exists():
    step += 1
    move(state, step)
    publisher.publish(state, metadata={"step": step})
    time.sleep(0.01)
"""
)

SUBSCRIBER = (
    COMMON
    + """
base = load(out)[0] if out.exists() else None
subscriber = Subscriber(store, stream="policy", base=base, threads=2)
print("ready", flush=True)
while True:
    done = stop.exists()
    update = subscriber.sync()
    if update is not None:
        assert state_root(subscriber.state) == update.root
        save(out, subscriber.state, {"version": str(update.version)})
    elif done:
        break
    time.sleep(0.005)
"""
)


class Process:
    """One program that can be killed and started again."""

    def __init__(self, code: str, *args: Path) -> None:
        self._command = [sys.executable, "-c", code, *map(str, args)]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise AssertionError(self.process.communicate()[1])

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        _, errors = self.process.communicate(timeout=10)
        assert self.process.returncode == -signal.SIGKILL, f"it ended before it was killed: {errors}"

    def finish(self) -> None:
        assert self.process is not None
        _, errors = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, errors

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def test_killed_processes_resume_where_they_were(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out" / "model.safetensors"
    enough, published = tmp_path / "enough", tmp_path / "published"
    chance = random.Random(7)
    publisher, subscriber = Process(PUBLISHER, store, out, enough), Process(SUBSCRIBER, store, out, published)
    try:
        publisher.start()
        subscriber.start()
        for victims in ([publisher], [subscriber], [publisher, subscriber]) * 3:
            for victim in victims:
                victim.wait_until_ready()
            time.sleep(chance.uniform(0.0, 0.25))
            for victim in victims:
                victim.kill()
                victim.start()
        publisher.wait_until_ready()
        enough.touch()
        publisher.finish()
        published.touch()
        subscriber.wait_until_ready()
        subscriber.finish()
    finally:
        publisher.clean_up()
        subscriber.clean_up()
    reports = list(verify_stream(LocalStore(store), "policy"))
    assert [r.problems for r in reports] == [()] * len(reports)
    assert [r.version for r in reports] == list(range(len(reports)))
    assert len(reports) > 1  # how many it gets done between two kills is up to the machine
    state, metadata = load(out)
    assert state_root(state) == reports[-1].root
    head = Publisher(LocalStore(store), stream="policy").head()
    assert head is not None
    assert (head.root, str(head.version)) == (state_root(state), metadata["version"])
