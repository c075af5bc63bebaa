"""Engines on small models. Without vLLM nothing here is collected; `make test-vllm` has it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ.pop("OMP_NUM_THREADS", None)  # vLLM sees to its threads itself
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets a test break a worker from within


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    """A policy of its own, tied unless the test says ``indirect`` otherwise."""
    from .policy import Policy

    return Policy(tmp_path, tied=getattr(request, "param", True))
