"""Where TRL or vLLM is not installed these tests are not looked at: `make test-vllm` makes an
environment with both."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.pop("OMP_NUM_THREADS", None)  # vLLM sees to its threads itself
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The policy that all trainings start from."""
    from .support import saved

    return saved(tmp_path_factory.mktemp("policy") / "checkpoint")


@pytest.fixture(scope="session")
def url(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the checkpoint that the tests share: each brings a stream of its own."""
    from tests.engines.server import server

    log: Path = tmp_path_factory.mktemp("server") / "log"
    # AsyncGRPO asks for the model by the checkpoint's path.
    with server(checkpoint, log, options=["--served-model-name", checkpoint, "policy"]) as address:
        yield address


@pytest.fixture
def async_grpo_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's AsyncGRPO on a CPU."""
    from .support import run_on_cpu

    run_on_cpu(monkeypatch.setattr)
