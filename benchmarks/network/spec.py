"""What the programs of a run share: the spec, the store's address, logs on one clock, and how they are told to stop."""

from __future__ import annotations

import json
import signal
import statistics
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from benchmarks.network.shape import INTERFACE
from pulse_rl import Store, open_store
from pulse_rl.errors import NotFound

BUCKET = "pulse"
THREADS = 1
POLL_SECONDS = 0.02
_PINGS = 15
_STORE_START_SECONDS = 60.0


@dataclass(frozen=True)
class Spec:
    """What all programs of a run know. ``method`` is one of `pulse_rl.plan.METHODS`, ``workers`` are their names,
    ``trace`` is the folder of recorded runs and ``folder`` takes the logs."""

    method: str
    step_seconds: float
    endpoint: str
    workers: tuple[str, ...]
    trace: str
    folder: str

    def save(self) -> Path:
        path = Path(self.folder) / "spec.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> Spec:
        facts = json.loads(Path(path).read_text())
        return cls(**facts | {"workers": tuple(facts["workers"])})

    def log(self, name: str) -> Path:
        return Path(self.folder) / f"{name}.jsonl"

    @property
    def go(self) -> Path:
        """The file that starts the clock."""
        return Path(self.folder) / "go"

    def open_store(self) -> Store:
        keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
        client = {"allow_http": True, "timeout": "300s"}
        return open_store(f"s3://{BUCKET}/run", endpoint=self.endpoint, client_options=client, **keys)

    def make_bucket(self) -> None:
        """Waits until the store answers."""
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        deadline = time.monotonic() + _STORE_START_SECONDS
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
        self._file.write(json.dumps({"event": event, "time": time.monotonic(), **counters, **facts}) + "\n")


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


def ping(store: Store) -> float:
    """Seconds of a small request, the median of some."""
    taken = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        with suppress(NotFound):
            store.head("nothing")
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
