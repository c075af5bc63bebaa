"""A trainer's world and a session in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .world import Model, Session, World


@pytest.fixture
def model_class() -> type[Model]:
    return Model


@pytest.fixture
def world(tmp_path: Path, model_class: type[Model]) -> Iterator[World]:
    made = World(tmp_path, model_class)
    yield made
    for session in made.sessions:
        session.close()


@pytest.fixture
def session(world: World) -> Session:
    return world.session()
