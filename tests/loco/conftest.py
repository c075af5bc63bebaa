"""Fixtures of the tests of PULSELoCo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pulse_rl.loco import parameters
from tests.support.loco_reference import cut_blocks


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Shares hold parts of blocks, and of several."""
    before = parameters.BLOCK_ELEMENTS
    cut_blocks(700)
    yield
    cut_blocks(before)
