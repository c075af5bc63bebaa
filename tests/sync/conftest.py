"""Fixtures of more than one module here."""

from __future__ import annotations

import pytest

from tests.support.members import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The store's clock, moved by hand."""
    return Clock(monkeypatch)
