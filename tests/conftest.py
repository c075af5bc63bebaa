"""Settings and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from pulse_rl import MemoryStore, Signer
from pulse_rl._util.retry import RETRY_SECONDS, Patience
from tests.support.commands import Pulse
from tests.support.stores import FaultyStore

# The same examples on every machine and run: a red suite stays red until it is repaired. More
# examples, and new ones: pytest --hypothesis-profile=search
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.register_profile("few", settings.get_profile("suite"), max_examples=10)
settings.load_profile("suite")

# In all processes that tests start, too: models as small as these are faster without torch's
# threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Stores are folders and sync what they write, 8 ms on some disks: they are in memory where there is
# enough of it.
if (
    "TMPDIR" not in os.environ
    and os.access("/dev/shm", os.W_OK)
    and shutil.disk_usage("/dev/shm").free > 4 << 30
):
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts background jobs so; the tests that interrupt themselves need Python's own
    # handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def brief_retries() -> Iterator[None]:
    """Stores repeat what fails for a second, where a test does not say for how long."""
    make = Patience.__init__

    def brief(self: Patience, store: str, seconds: float) -> None:
        make(self, store, 1.0 if seconds == RETRY_SECONDS else seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Patience, "__init__", brief)
        yield


# Files whose tests are all slow.
_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--few", action="store_true", help="the last of many parameters, and few examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--few"):
        settings.load_profile("few")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The last of many parameters that is not slow. Others are not made at all: to collect them
    all takes three times as long."""
    if metafunc.config.getoption("--few"):
        fast = [call for call in metafunc._calls if not any(m.name == "slow" for m in call.marks)]
        metafunc._calls[:] = fast[-1:] or metafunc._calls[-1:]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is imported stays: looking through torch takes a garbage collection 0.3 s, and some
    tests ask for one."""
    gc.disable()
    done = yield
    gc.freeze()
    gc.enable()
    return done


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A quick run does not import what it would leave out as a whole: some of it imports
    transformers, for seconds."""
    if config.getoption("markexpr") != "not slow":
        return None
    files = (
        [collection_path]
        if collection_path.suffix == ".py"
        else list(collection_path.rglob("test_*.py"))
    )
    slow = [_SLOW.search(file.read_text()) for file in files]
    return True if slow and all(slow) else None


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260203)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def source() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def signer() -> Signer:
    return Signer.generate()


@pytest.fixture
def faulty() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def pulse(capsys: pytest.CaptureFixture[str]) -> Pulse:
    return Pulse(capsys)


def _one_conditional_write_at_a_time(app: Callable[..., Any]) -> Callable[..., Any]:
    """moto looks whether an object is there, and then stores it: two threads can both find
    nothing."""
    lock = threading.Lock()

    def served(environ: dict[str, Any], start_response: Any) -> Any:
        conditional = "HTTP_IF_NONE_MATCH" in environ or "HTTP_IF_MATCH" in environ
        with (
            lock if conditional and environ["REQUEST_METHOD"] in ("PUT", "POST") else nullcontext()
        ):
            return app(environ, start_response)

    return served


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server on loopback with one bucket, "bucket"."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    listening: Any = server._server
    listening.app = _one_conditional_write_at_a_time(listening.app)
    host, port = server.get_host_and_port()
    urllib.request.urlopen(
        urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
    ).close()
    yield f"http://{host}:{port}"
    server.stop()
