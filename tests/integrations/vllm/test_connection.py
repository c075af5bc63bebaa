"""What `connect` takes."""

from __future__ import annotations

import pytest

from pulse_rl.engines.vllm import connect
from pulse_rl.errors import InputError


def test_arguments_are_checked_before_the_engine_is_asked() -> None:
    with pytest.raises(InputError, match="no engine"):
        connect(object(), store="s", stream="policy")
    with pytest.raises(InputError, match="no URL"):
        connect("localhost:8000", store="s", stream="policy")
    with pytest.raises(InputError, match="an address"):
        connect("http://localhost:1", store=object(), stream="policy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="in_flight"):
        connect("http://localhost:1", store="s", stream="policy", in_flight="drop")  # type: ignore[arg-type]
