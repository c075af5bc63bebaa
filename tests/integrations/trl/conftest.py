"""A pretended server for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .server import PretendedServer, listening


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedServer]:
    from pulse_rl.frameworks import trl as link

    monkeypatch.setattr(link, "_FIRST_WAIT_SECONDS", 0.01)
    with listening(PretendedServer()) as pretended:
        monkeypatch.setattr(link, "connect", pretended.connect)
        yield pretended
