"""Fixtures of the tests of codecs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pulse_rl._native._kernels import use_vectors


@pytest.fixture(autouse=True)
def vectors_as_they_were() -> Iterator[None]:
    yield
    use_vectors(True)
