"""Stores that the promises are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulse_rl import LocalStore, MemoryStore, Store


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store")
