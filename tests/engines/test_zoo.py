"""Each family of models computes with the stream's weights, to the last bit as a fresh engine does,
or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.zoo import FAMILIES, TIED_ONLY, UNTIED_ONLY, measure

FAST = {("GLM-4.5 MoE", 1, False)}
#: Families that are refused, and a part of the reason.
REFUSED: dict[str, str] = {}


def cases() -> list[object]:
    found = []
    for family in FAMILIES:
        for tied in (False, True):
            for size in (1, 2):
                if family not in (UNTIED_ONLY if tied else TIED_ONLY):
                    marks = [] if (family, size, tied) in FAST else [pytest.mark.slow]
                    name = f"{family}-{'tied' if tied else 'untied'}-{size}"
                    found.append(
                        pytest.param(family, tied, size, id=name.replace(" ", "-"), marks=marks)
                    )
    return found


@pytest.mark.parametrize(("family", "tied", "tensor_parallel"), cases())
def test_equal_to_a_fresh_engine(
    tmp_path: Path, family: str, tied: bool, tensor_parallel: int
) -> None:
    row = measure(tmp_path, family, tied=tied, tensor_parallel=tensor_parallel)
    if family in REFUSED:
        assert REFUSED[family] in row.refused
    else:
        assert row.equal, row


@pytest.mark.slow
def test_compiled_code_reads_the_live_weights(tmp_path: Path) -> None:
    row = measure(tmp_path, "Qwen3-MoE", enforce_eager=False)
    assert row.equal, row
