"""Weights that are quantized on a device: the bits that the host makes. Where there is no GPU, the
device is the CPU's torch, which has the same operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl import Bits, MemoryStore, Publisher, State
from pulse_rl._native import block_maxima, to_e2m1, to_e4m3
from pulse_rl.quantize import device as quantize_device
from pulse_rl.quantize.formats import FORMATS
from pulse_rl.quantize.states import QuantizedState
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import DeviceTensor
from tests.golden.make_quantized import CONFIGS, FILE
from tests.support.states import Rng

GOLDEN = np.load(FILE)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32 = np.float32
ODD_SCALES = np.array([0, 2**-149, 2**-127, np.inf, np.nan, 1], F32)


def there(state: State) -> State:
    """The same as tensors of a device."""
    data = {
        spec.name: DeviceTensor(
            torch.from_numpy(state.read(spec.name).view(np.uint8)).to(DEVICE), spec.dtype.width
        )
        for spec in state.specs
    }
    return State(state.specs, data, state.aliases)


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_device, "DEVICES", (DEVICE,))


@pytest.fixture
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight comes to the host."""
    read = DeviceTensor.read

    def read_nothing(tensor: DeviceTensor, start: int, stop: int) -> Any:
        assert start == stop
        return read(tensor, start, stop)

    monkeypatch.setattr(DeviceTensor, "read", read_nothing)


def odd_bits(rng: Rng, scales: np.ndarray[Any, Any], size: int, width: int) -> np.ndarray[Any, Any]:
    """Elements by groups that have these ``scales``: half of them are codes' numbers and ties
    between these times the scale, or a unit in the last place beside; the others any bits."""
    elements = rng.integers(0, 1 << 32, (len(scales), size), np.uint32)
    ties = np.array(
        [0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, 17, 248, 464, 2**-10, 3 * 2**-10, 2**-6, -0.0]
    )
    with np.errstate(all="ignore"):
        near = (rng.choice(ties, elements.shape).astype(F32) * scales[:, None]).view(np.uint32)
    near += rng.integers(-1, 2, elements.shape).astype(np.uint32)
    near ^= rng.integers(0, 2, elements.shape, np.uint32) << np.uint32(31)
    mixed = np.where(rng.integers(0, 2, elements.shape), near, elements).reshape(-1)
    return mixed if width == 4 else (mixed >> 16).astype(np.uint16)


@pytest.mark.parametrize("piece", [96, 1 << 20])
@pytest.mark.parametrize("width", [2, 4])
def test_operations_make_the_bits_of_the_kernels(
    width: int, piece: int, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all exponents, of NaN, infinities, subnormal numbers and ties, with scales of any bits;
    from any place."""
    monkeypatch.setattr(quantize_device, "_PIECE", piece)
    for rows, columns, block_rows, block_columns in [
        *(
            (rows, columns, 128, 128)
            for rows, columns in ((300, 77), (128, 128), (5, 259), (1, 1), (257, 128))
        ),
        *((200, size, 1, size) for size in (16, 32)),
        *((64, columns, 32, 1) for columns in (7, 130)),
        (1, 4096, 1, 32),
        (1, 1000, 1, 1000),
    ]:
        across, count = -(-columns // block_columns), rows * columns
        bits = rng.integers(0, 0x7F800002, -(-rows // block_rows) * across, np.uint32)
        scales = (bits & rng.choice(np.uint32([0x7F800000, 0x7FFFFFFF]), bits.shape)).view(
            F32
        )  # half powers of two
        scales = np.where(rng.random(bits.shape) < 0.9, scales, rng.choice(ODD_SCALES, bits.shape))
        of = (
            np.arange(count) // columns // block_rows * across
            + np.arange(count) % columns // block_columns
        )
        host = odd_bits(rng, scales[of], 1, width)
        blocks = (columns, block_rows, block_columns)
        ints = torch.from_numpy(host.view(f"i{width}")).to(DEVICE)
        most = block_maxima(host.view(np.uint8), width, blocks)
        assert quantize_device.block_maxima(ints, blocks).tobytes() == most.tobytes()
        for start, stop in [
            (0, count),
            *(sorted(rng.integers(0, count + 1, 2).tolist()) for _ in range(5)),
        ]:
            here, on_device = np.empty((2, stop - start), np.uint8)
            to_e4m3(host[start:stop].view(np.uint8), width, start, blocks, scales, here)
            quantize_device.to_e4m3(ints[start:stop], start, blocks, scales, on_device)
            np.testing.assert_array_equal(on_device, here)
        if block_columns in (1, 16) or blocks == (32, 1, 32):
            here, on_device = np.empty((2, count // 2), np.uint8)
            to_e2m1(host.view(np.uint8), width, blocks, scales, here)
            quantize_device.to_e2m1(ints, blocks, scales, on_device)
            np.testing.assert_array_equal(on_device, here)


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize("name", [*FORMATS, *CONFIGS])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_state_on_a_device_has_the_root_of_the_hosts(
    name: str, dtype: str, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read of it, tied tensors and fused experts too."""
    monkeypatch.setattr(quantize_device, "_PIECE", 1 << 12)
    shapes = {"a": (260, 352), "b": (33, 64), "any": (160, 96)}
    given = {
        f"{key}.weight": rng.normal(0, 0.02, shape).astype(F32) for key, shape in shapes.items()
    }
    given["any.weight"] = odd_bits(rng, np.full(160, 0.01, F32), 96, 4).view(F32).reshape(160, 96)
    given |= {
        f"{k}.weight": GOLDEN[f"{case}/weight"]
        for k, case in enumerate({n.partition("/")[0] for n in GOLDEN})
    }
    if name != "modelopt":
        given["mlp.experts.up_proj"] = rng.normal(0, 0.02, (3, 160, 96)).astype(F32)
        given["mlp.experts.any"] = given["any.weight"][None].copy()
    if name == "fp8_block":
        given["odd.weight"] = rng.normal(0, 0.02, (131, 259)).astype(F32)
    if dtype == "BF16":
        given = {
            key: Bits((array.view(np.uint32) >> 16).astype(np.uint16), dtype)
            for key, array in given.items()
        }  # type: ignore[misc]
    state = State.of(given | {"tied.weight": given["a.weight"]})
    host = QuantizedState(state, CONFIGS.get(name, name))
    device = QuantizedState(there(state), CONFIGS.get(name, name))
    # What GPT-OSS's config leaves as it is is copied.
    quantized = [each for made in device.made.values() if len(made) > 1 for each in made]
    assert quantized
    assert device.aliases == host.aliases
    if name != "gpt_oss":
        assert len(quantized) == len(device.specs)
        assert state_digest(device).root == state_digest(host).root
    for each in quantized:
        elements = host.read(each.name)
        np.testing.assert_array_equal(device.read(each.name), elements)
        for _ in range(5):
            start, stop = sorted(rng.integers(0, len(elements) + 1, 2).tolist())
            np.testing.assert_array_equal(device.read(each.name, start, stop), elements[start:stop])


@pytest.mark.parametrize("name", FORMATS)
def test_a_publish_from_a_device(name: str, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device fails, or divides otherwise, the host quantizes."""
    state = State.of(
        {"a.weight": rng.normal(0, 0.02, (256, 512)).astype(F32), "norm.weight": np.ones(64, F32)}
    )
    root = state_digest(QuantizedState(state, name)).root
    copied = list[int]()
    read = DeviceTensor.read
    monkeypatch.setattr(
        DeviceTensor,
        "read",
        lambda tensor, start, stop: copied.append(stop - start) or read(tensor, start, stop),
    )

    def largest_copy() -> int:
        copied.clear()
        with Publisher(MemoryStore(), stream="policy") as publisher:
            assert publisher.publish(there(state), quantize=name).root == root
        return max(copied)

    assert largest_copy() == 64

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    for function in ("block_maxima", "to_e2m1" if name.endswith("fp4") else "to_e4m3"):
        with monkeypatch.context() as patch:
            patch.setattr(quantize_device, function, fails)
            assert largest_copy() > 64
    for attribute, otherwise in (("divides_exactly", lambda device: False), ("DEVICES", ())):
        with monkeypatch.context() as patch:
            patch.setattr(quantize_device, attribute, otherwise)
            assert largest_copy() > 64


def test_a_device_that_divides_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, tried = torch.device("cpu"), quantize_device.divides_exactly.__wrapped__
    assert tried(cpu)
    divided = torch.Tensor.__truediv__

    def flushed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = divided(one, other)
        return torch.where(found.abs() < 2**-126, found * 0, found)

    for wrong in (flushed, lambda one, other: one * other.reciprocal()):
        monkeypatch.setattr(torch.Tensor, "__truediv__", wrong)
        assert not tried(cpu)
