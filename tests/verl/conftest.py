"""Where verl is not installed these tests are not looked at: `make test-verl` makes an environment
that has it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A real Ray on this machine; the CPUs are slots for processes, of which most wait at any
    time."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", str(Path(__file__).parents[2])
        )  # for the workers, which import the stand-ins
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20
        )
        yield
        ray.shutdown()
