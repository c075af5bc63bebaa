"""The kernel that writes an update, run by Triton's interpreter on the CPU, which stands in for a
GPU; and compiled."""

from __future__ import annotations

import pytest

from tests.support.programs import ran

PROGRAM = """
from pulse_rl.frameworks.scatter_kernel import by_kernel
from tests.support.scatter import check
for width in (1, 2, 4, 8):
    check(width, by_kernel)
print("written")
"""


COMPILATION = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pulse_rl.frameworks.scatter_kernel import _scatter
for capability in (80, 90):
    for value in ("u8", "i16", "i32", "i64"):
        for position in ("i32", "i64"):
            signature = {"programs": "*i64", "positions": "*" + position, "values": "*" + value, "size": "constexpr"}
            attributes = {(k,): [["tt.divisibility", 16]] for k in range(3)}
            source = ASTSource(_scatter, signature=signature, constexprs={(3,): 1024}, attrs=attributes)
            triton.compile(source, target=GPUTarget("cuda", capability, 32))
print("compiled")
"""  # noqa: E501


def test_the_kernel_compiles_for_devices_that_are_not_here() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    assert ran("-c", COMPILATION) == "compiled\n"


def test_the_kernel_writes_what_it_should() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    assert ran("-c", PROGRAM, TRITON_INTERPRET="1") == "written\n"
