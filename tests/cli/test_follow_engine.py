"""pulse follow --engine: what is refused before and without an engine; the rest is in tests/engines."""

from __future__ import annotations

import pytest

from tests.support.commands import Pulse

NOBODY = "http://127.0.0.1:1"


def test_an_engine_that_is_not_there_is_one_line(pulse: Pulse) -> None:
    arguments = ("follow", "store", "--stream", "policy", "--engine", NOBODY, "--once")
    pulse.refused(*arguments, kind="engine_unavailable", match=f"no answer from {NOBODY}")


def test_a_store_in_memory_is_refused(pulse: Pulse) -> None:
    arguments = ("follow", "memory://", "--stream", "policy", "--engine", NOBODY)
    pulse.refused(*arguments, kind="input", match="memory://")


@pytest.mark.parametrize("kept", [[], ["--out", "a", "--engine", NOBODY]])
def test_either_a_checkpoint_or_an_engine_is_kept(pulse: Pulse, kept: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        pulse("follow", "store", "--stream", "policy", *kept)
    assert ended.value.code == 2
