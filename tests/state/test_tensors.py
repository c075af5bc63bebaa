"""How tensors become names, dtypes, shapes and bits, wherever their elements lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl import Bits, MemoryStore, Publisher, State, state_root
from pulse_rl.errors import InputError, UnsupportedTensor
from pulse_rl.state.tensors import TensorSpec
from tests.support.arrays import misaligned
from tests.support.states import UINTS, WIDTHS, all_dtypes, bits, snapshot

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NUMPY_DTYPES = {
    name: torch.zeros(0, dtype=dtype).numpy().dtype
    for name, dtype in TORCH_DTYPES.items()
    if name != "BF16" and not name.startswith("F8")
}


def the_only(value: Any) -> tuple[TensorSpec, bytes]:
    state = State.of({"w": value})
    return state.spec("w"), state.read("w").tobytes()


LIBRARIES = [
    *(("torch", name) for name in TORCH_DTYPES),
    *(("numpy", name) for name in NUMPY_DTYPES),
    *(("Bits", name) for name in WIDTHS),
]


def tensor_of(library: str, name: str, raw: Any) -> Any:
    """The tensor of a library with the memory of an array of bytes."""
    if library == "torch":
        return torch.frombuffer(raw, dtype=TORCH_DTYPES[name])
    if library == "numpy":
        return raw.view(NUMPY_DTYPES[name])
    return Bits(raw.view(UINTS[WIDTHS[name]]), name)


@pytest.mark.parametrize(("library", "name"), LIBRARIES)
def test_tensors_keep_their_bits(library: str, name: str, rng: np.random.Generator) -> None:
    raw = rng.integers(0, 2 if name == "BOOL" else 256, 6 * WIDTHS[name], np.uint8)
    flat = tensor_of(library, name, raw)
    shaped = Bits(flat.array.reshape(2, 3), name) if library == "Bits" else flat.reshape(2, 3)
    spec, stored = the_only(shaped)
    assert (spec.dtype.name, spec.shape, stored) == (name, (2, 3), raw.tobytes())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    for value in (
        torch.zeros(shape),
        np.zeros(shape, np.float32),
        Bits(np.zeros(shape, np.uint32), "F32"),
    ):
        spec, stored = the_only(value)
        assert spec.shape == shape
        assert stored == bytes(4 * spec.elements)


def test_a_numpy_scalar_is_a_tensor_without_dimensions() -> None:
    assert the_only(np.float32(1.5)) == the_only(np.array(1.5, np.float32))


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[::2], id="every-second-row"),
        pytest.param(lambda x: x[:, 1:3], id="columns"),
        pytest.param(lambda x: x.T, id="transposed"),
    ],
)
def test_non_contiguous_tensors_are_read_in_row_major_order(view: Callable[[Any], Any]) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = np.ascontiguousarray(view(array)).tobytes()
    assert the_only(view(array))[1] == expected
    assert the_only(view(torch.from_numpy(array)))[1] == expected
    assert the_only(Bits(view(array.view(np.uint32)), "F32"))[1] == expected


@pytest.mark.parametrize(
    "cut", [slice(None, None, -1), slice(None, None, 2), slice(1, None, 3)], ids=str
)
def test_vectors_with_gaps_are_read_in_order(cut: slice) -> None:
    """A strided vector kept its strides, which nothing that reads bytes can take."""
    values = np.arange(1000, dtype=np.float32)
    assert the_only(values[cut])[1] == values[cut].tobytes()
    store, moved = MemoryStore(), values.copy()
    publisher = Publisher(store, stream="s")
    for _ in range(3):
        assert publisher.publish({"w": moved[cut]}).root == state_root({"w": moved[cut].copy()})
        moved += 1
    assert state_root({"w": np.broadcast_to(np.float32(3), (5,))}) == state_root(
        {"w": np.full(5, 3, np.float32)}
    )


def test_memory_that_was_freed_is_not_read() -> None:
    """As sharded training frees a gathered parameter: its elements were read from whatever is there
    now."""
    for left in (0, 4 * 11):
        freed = torch.zeros(3, 4)
        freed.untyped_storage().resize_(left)
        with pytest.raises(UnsupportedTensor, match="'w' has been freed"):
            State.of({"w": freed})
    whole = torch.arange(20.0)
    for view in (
        whole[8:].view(3, 4),
        whole[3:15].view(4, 3).T,
        whole[19:].expand(5),
        whole[20:],
        whole.view(4, 5)[:, 4],
    ):
        assert the_only(view)[1] == view.numpy().tobytes()


def test_what_is_no_mapping_and_what_is_no_tensor() -> None:
    with pytest.raises(InputError, match="is not a state"):
        State.of([("w", np.zeros(3))])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedTensor, match="'_extra_state' is a dict") as caught:
        State.of({"_extra_state": {}})
    assert "Leave out" in caught.value.hint


@pytest.mark.parametrize(
    "shape", [(True,), (1.5,), (None,), [2], "", 3, None, (np.int64(3),)], ids=repr
)
def test_what_is_no_shape(shape: Any) -> None:
    with pytest.raises(InputError, match="tuple of whole numbers"):
        TensorSpec("w", the_only(np.float32(1))[0].dtype, shape)


def test_lazily_conjugated_and_negated_tensors_are_read_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert the_only(value.conj())[1] == np.array([1 - 2j, 3 + 4j], np.complex64).tobytes()
    assert the_only(value.conj().imag)[1] == np.array([-2, 4], np.float32).tobytes()


def test_parameters_and_plain_subclasses_are_tensors() -> None:
    class Named(torch.Tensor):
        pass

    expected = the_only(torch.ones(3))
    assert the_only(torch.nn.Parameter(torch.ones(3))) == expected
    assert the_only(torch.ones(3).as_subclass(Named)) == expected


def test_host_tensors_are_views_and_not_copies() -> None:
    array = np.zeros(3, np.float32)
    tensor = torch.zeros(3)
    given = Bits(np.zeros(3, np.uint16), "BF16")
    state = State.of({"a": array, "t": tensor, "g": given})
    array[1], tensor[1], given.array[1] = 1, 1, 7
    assert state.read("a")[1] == state.read("t")[1] == 0x3F800000
    assert state.read("g")[1] == 7


@pytest.mark.parametrize("code", [">u2", ">i4", ">f4", ">f8", ">c8"])
def test_big_endian_arrays_have_the_bits_of_little_endian_ones(code: str) -> None:
    big = np.arange(6).astype(code).reshape(2, 3)
    little = big.astype(big.dtype.newbyteorder("<"))
    assert the_only(big) == the_only(little)
    assert the_only(big.T) == the_only(little.T)
    assert the_only(Bits(np.array([1, 2], ">u2"), "BF16"))[1] == b"\x01\0\x02\0"


def test_two_converted_arrays_are_not_taken_for_tied() -> None:
    """A temporary copy's address is free for the next copy: it must not stand for the tensor's
    identity."""
    pairs = {f"w{k}": (np.arange(6) + 10 * k).astype(">f4").reshape(2, 3).T for k in range(8)}
    state = State.of(pairs)
    assert state.aliases == {}
    assert [float(state.read(f"w{k}").view(np.float32)[0]) for k in range(8)] == [
        10.0 * k for k in range(8)
    ]


def test_tensors_made_on_the_fly_are_not_taken_for_tied() -> None:
    class Lazy(dict[str, int]):
        def items(self) -> Any:
            return ((name, np.full((40, 60), k, np.float32)[:, ::2]) for name, k in super().items())

    state = State.of(Lazy({f"w{k}": k for k in range(8)}))
    assert state.aliases == {}
    assert [float(state.read(f"w{k}").view(np.float32)[0]) for k in range(8)] == list(range(8))


@pytest.mark.parametrize(
    "make", [torch.zeros, lambda *shape: np.zeros(shape, np.float32)], ids=["torch", "numpy"]
)
def test_tied_tensors_are_stored_under_the_first_name(make: Callable[..., Any]) -> None:
    tied, own = make(4, 2), make(4, 2)
    state = State.of({"z.embed": tied, "a.head": tied, "m.other": own, "b.head": tied})
    assert [s.name for s in state.specs] == ["m.other", "z.embed"]
    assert state.aliases == {"a.head": "z.embed", "b.head": "z.embed"}
    assert state.names == ["a.head", "b.head", "m.other", "z.embed"]
    assert list(state) == state.names
    assert len(state) == 4
    assert "a.head" in state
    assert "c.head" not in state
    tied[1, 1] = 5
    assert state.read("a.head").tobytes() == state.read("z.embed").tobytes()
    assert state.read("a.head").tobytes() != state.read("m.other").tobytes()
    assert state.spec("b.head") == state.spec("z.embed")
    assert state.copy().aliases == state.aliases == state.readonly().aliases


def test_ties_are_found_by_storage_and_not_by_value() -> None:
    base = torch.zeros(4, 4)
    same_bytes_other_meaning = {
        "w": base,
        "flat": base.view(-1),
        "ints": base.view(torch.int32),
        "transposed": base.T,
        "row": base[0],
        "next_row": base[1],
        "equal": torch.zeros(4, 4),
    }
    assert State.of(same_bytes_other_meaning).aliases == {}
    assert State.of({"a": torch.zeros(0), "b": torch.zeros(0)}).aliases == {}
    assert State.of({"a": base[1], "b": base[1]}).aliases == {"b": "a"}


def test_a_tied_state_has_the_root_of_the_state_without_aliases() -> None:
    tied = torch.arange(6.0)
    assert state_root({"embed": tied, "head": tied}) == state_root({"embed": tied.clone()})


def test_a_copy_is_independent_and_a_readonly_view_is_not_writable(
    rng: np.random.Generator,
) -> None:
    state = State.of(all_dtypes(rng))
    copy, before = state.copy(), snapshot(state)
    assert snapshot(copy) == before
    copy.read("BF16.values")[0] ^= 1
    assert snapshot(state) == before != snapshot(copy)
    with pytest.raises(ValueError, match="read-only"):
        state.readonly().read("BF16.values")[0] = 1


# -- at addresses that are no multiple of the element's width, where the kernels must not read them


@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library, name in LIBRARIES if WIDTHS[name] > 1]
)
def test_tensors_at_odd_addresses_are_copied(
    library: str, name: str, rng: np.random.Generator
) -> None:
    """`torch.frombuffer` makes them, and the kernels must not read them there. Aligned ones are not
    copied."""
    given = bits(rng, name, 100).array
    width = given.itemsize
    for offset in (1, width // 2, 0):
        raw = misaligned(given, offset)
        tensor = tensor_of(library, name, raw.view(np.uint8))
        assert library != "torch" or tensor.data_ptr() % width == offset
        state = State.of({"a": tensor, "tied": tensor})
        read = state.read("a")
        assert read.ctypes.data % width == 0
        assert (read.ctypes.data == raw.ctypes.data) == (offset == 0)
        np.testing.assert_array_equal(read, given)
        assert state.aliases == {"tied": "a"}
