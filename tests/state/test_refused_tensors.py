"""Tensors, names, shapes and sets of tensors that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pulse_rl import Bits, State
from pulse_rl.errors import InputError, StateMismatch, UnsupportedTensor
from pulse_rl.state.tensors import TensorSpec

BF16 = State.of({"w": Bits(np.zeros(1, np.uint16), "BF16")}).spec("w").dtype


class _Wrapper(torch.Tensor):
    """Like DTensor and torchao's tensors: a subclass that holds its data elsewhere."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        wrapper: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class _Sharded(torch.Tensor):
    def full_tensor(self) -> torch.Tensor:
        return self


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.zeros(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "fake": _fake,
    "wrapper-subclass": lambda: _Wrapper(torch.zeros(3)),
    "sharded": lambda: torch.zeros(3).as_subclass(_Sharded),
    "int4": lambda: torch.empty(3, dtype=torch.int4),
    "uint4": lambda: torch.empty(3, dtype=torch.uint4),
    "float4": lambda: torch.empty(3, dtype=torch.float4_e2m1fn_x2),
    "complex128": lambda: torch.zeros(3, dtype=torch.complex128),
    "a-dtype": lambda: torch.float32,
    "strings": lambda: np.array(["x"]),
    "objects": lambda: np.array([None]),
    "records": lambda: np.zeros(3, "f4,i4"),
    "longdouble": lambda: np.zeros(3, np.longdouble),
    "times": lambda: np.zeros(3, "M8[s]"),
    "bits-of-another-width": lambda: Bits(np.zeros(3, np.uint32), "BF16"),
    "signed-bits": lambda: Bits(np.zeros(3, np.int16), "BF16"),
    "unknown-name": lambda: Bits(np.zeros(3, np.uint8), "F6_E3M2"),
    "list": lambda: [1.0, 2.0],
    "float": lambda: 1.0,
    "none": lambda: None,
}


@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, on making such tensors
def test_what_has_no_plain_bits_is_unsupported(make: Callable[[], Any]) -> None:
    value = make()
    with pytest.raises(UnsupportedTensor) as caught:
        State.of({"fine": torch.zeros(1), "odd": value})
    assert "odd" in str(caught.value) or "F6_E3M2" in str(caught.value)


# The last is where a safetensors header keeps its metadata: an anchor with such a tensor could not
# be read back.
@pytest.mark.parametrize(
    "name", ["", "x" * 1025, "é" * 513, "\ud800", 1, None, b"w", "__metadata__"]
)
def test_names_that_are_refused(name: Any) -> None:
    with pytest.raises(InputError):
        State.of({name: np.zeros(1)})
    tied = np.zeros(1)
    with pytest.raises(InputError):
        State.of({"first": tied, name: tied})


def test_names_that_are_kept() -> None:
    names = ["x" * 1024, "é" * 512, " ", "a/b", "..", "\0", "\U0001f600", "Ω"]
    assert [s.name for s in State.of({n: np.zeros(1) for n in names}).specs] == sorted(
        names, key=str.encode
    )


@pytest.mark.parametrize(
    "shape",
    [
        (-1,),
        (2, -3),
        (1,) * 17,
        ((1 << 48) + 1,),
        (1 << 24, 1 << 24, 2),
        (0, 1 << 64),
        (0, 1 << 70),
    ],
)
def test_shapes_past_the_caps_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError):
        TensorSpec("w", BF16, shape)


def test_shapes_at_the_caps_are_kept() -> None:
    assert TensorSpec("w", BF16, (1 << 48,)).nbytes == 1 << 49
    assert TensorSpec("w", BF16, (1,) * 16).elements == 1


@pytest.mark.slow
def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="262145 tensors"):
        State(tuple(TensorSpec(f"{k:06}", BF16, (1,)) for k in range((1 << 18) + 1)), {})


@pytest.mark.parametrize("aliases", [{"b": "absent"}, {"a": "a"}, {"a": "c"}])
def test_aliases_must_fit_the_tensors(aliases: dict[str, str]) -> None:
    state = State.of({"a": np.zeros(1), "c": np.zeros(1)})
    with pytest.raises(InputError, match="alias"):
        State(state.specs, {}, aliases)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": np.zeros(2, np.float32)}, "'b'"),
        ({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.int8), "c": np.zeros(1)}, "'c'"),
        (
            {"a": np.zeros(2, np.float32), "b": np.zeros((3, 1), np.int8)},
            r"'b' is I8 \[3\], but I8 \[3, 1\]",
        ),
        (
            {"a": np.zeros(2, np.int32), "b": np.zeros(3, np.int8)},
            r"'a' is F32 \[2\], but I32 \[2\]",
        ),
    ],
)
def test_the_first_difference_of_two_tensor_sets_is_named(
    other: dict[str, Any], message: str
) -> None:
    state = State.of({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.int8)})
    state.require_specs(state.copy().specs, "itself")
    with pytest.raises(StateMismatch, match=message):
        state.require_specs(State.of(other).specs, "the other")
