"""What is yielded comes later; a wrong argument is said at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulse_rl import MemoryStore, fold_stream, verify_stream
from pulse_rl.errors import EmptyStream, InputError


@pytest.mark.parametrize("call", [fold_stream, verify_stream])
@pytest.mark.parametrize("wrong", [{"threads": 0}, {"on_event": 1}, {"stream_id": "me"}])
def test_wrong_arguments_are_refused_by_the_call(
    call: Callable[..., Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(InputError):
        call(MemoryStore(), "policy", **wrong)


@pytest.mark.parametrize("call", [fold_stream, verify_stream])
def test_an_empty_stream_is_found_when_it_is_read(call: Callable[..., Any]) -> None:
    reports = call(MemoryStore(), "policy")
    with pytest.raises(EmptyStream):
        next(reports)
