"""What the programs of a run share: their processes, the store, the clock and the logs."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.network.shape import INTERFACE
from pulse_rl import Store, open_store
from pulse_rl.errors import NotFound

BUCKET = "pulse"
STORE_PORT = 5000
THREADS = 1
POLL_SECONDS = 0.02
#: Between two looks of a follower: long enough for TCP to begin slowly again, as in use.
LOOK_SECONDS = 0.5
# A worker in the midst of a full sync does not hear that it is to stop.
STOP_SECONDS = 5.0
_PINGS = 15
_START_SECONDS = 120.0

# S3 keeps connections. moto's server closes each, after it has discarded what comes behind a
# request: the next one.
_SERVER = """
from unittest.mock import MagicMock
from werkzeug import serving
from moto.server import main

serving.selectors = MagicMock()
serving.selectors.DefaultSelector.return_value.select.return_value = []
Handler = serving.WSGIRequestHandler
send = Handler.send_header
Handler.protocol_version, Handler.disable_nagle_algorithm = "HTTP/1.1", True
Handler.send_header = lambda self, name, value: name.lower() == "connection" or send(self, name, value)
main()
"""  # noqa: E501

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Spec:
    """What both programs know. ``method`` is one of `pulse_rl.study.plan.METHODS` or ``rsync``,
    ``trace`` is the folder of recorded runs and ``folder`` takes the logs. The state is ``copies``
    of the recorded one, each at another of its steps."""

    method: str
    step_seconds: float
    endpoint: str
    trace: str
    folder: str
    copies: int = 1

    def save(self) -> Path:
        path = Path(self.folder) / "spec.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> Spec:
        return cls(**json.loads(Path(path).read_text()))

    def log(self, name: str) -> Path:
        return Path(self.folder) / f"{name}.jsonl"

    @property
    def go(self) -> Path:
        """The file that starts the clock."""
        return Path(self.folder) / "go"

    def open_store(self) -> Store:
        return open_run(self.endpoint)

    def make_bucket(self) -> None:
        make_bucket(self.endpoint)


def open_run(endpoint: str, name: str = "run") -> Store:
    """A folder in the bucket of an S3-compatible server."""
    keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
    client = {"allow_http": True, "timeout": "300s"}
    return open_store(f"s3://{BUCKET}/{name}", endpoint=endpoint, client_options=client, **keys)


def s3_server(address: str) -> list[str]:
    """What runs one."""
    return [sys.executable, "-c", _SERVER, "-H", address, "-p", str(STORE_PORT)]


def make_bucket(endpoint: str) -> None:
    """Waits until the server answers."""
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


class Log:
    """JSON lines with the time since boot, which is one clock for all processes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, event: str, **facts: object) -> None:
        counters = {"rx_bytes": interface_bytes("rx"), "tx_bytes": interface_bytes("tx")}
        self._file.write(
            json.dumps({"event": event, "time": time.monotonic(), **counters, **facts}) + "\n"
        )


class Stop:
    """True from SIGTERM on, so that a program ends between two steps."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __bool__(self) -> bool:
        return self._asked

    def wait_for(self, go: Path) -> None:
        while not go.exists() and not self:
            time.sleep(POLL_SECONDS)


def interface_bytes(way: str) -> int:
    """What the namespace's interface has received ("rx") or sent ("tx")."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/{way}_bytes").read_text())


def upload_rate(store: Store) -> float:
    """Bit/s of a large object."""
    data = bytes(32 << 20)
    started = time.perf_counter()
    store.put("nothing-yet", data)
    return 8 * len(data) / (time.perf_counter() - started)


def ping(store: Store | tuple[str, int]) -> float:
    """Seconds of a small request, or of a connection to a host and port; the median of some."""
    taken = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        if isinstance(store, tuple):
            socket.create_connection(store).close()
        else:
            with suppress(NotFound):
                store.head("nothing")
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child whose output goes to ``log``, which ends with the context."""
    scratch = log.with_suffix(".scratch")
    scratch.mkdir()
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait_or_kill(child: subprocess.Popen[bytes], deadline: float) -> None:
    """Until the child has ended, or the deadline: one in the midst of a long download does not hear
    the signal."""
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def wait_until_ready(log: Path, children: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not log.exists() or '"ready"' not in log.read_text():
        check(children)
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready after {_START_SECONDS:.0f} s: {log.name}")
        time.sleep(0.1)


def check(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is not None:
            raise SystemExit(
                f"{child.args!r} ended with status {child.returncode}; see its log in the run's "
                "folder"
            )


def read_log(path: Path) -> Lines:
    """The whole lines of a log; the last one may be torn."""
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
