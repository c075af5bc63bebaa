"""Quantized states: the bits of the library that defines the formats, whatever is read of them; and
streams of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl import Bits, MemoryStore, Publisher, State, Subscriber
from pulse_rl._native import block_maxima, to_e2m1, to_e4m3
from pulse_rl.cli import main
from pulse_rl.errors import InputError, UnsupportedTensor
from pulse_rl.follow.checkpoint import save
from pulse_rl.quantize.formats import FORMATS
from pulse_rl.quantize.states import QuantizedState
from pulse_rl.state.cast import cast
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import DTYPES
from tests.golden.make_quantized import CONFIGS, FILE
from tests.support.commands import POLICY, Pulse
from tests.support.states import Rng, reach

GOLDEN = np.load(FILE)
CASES = sorted({name.partition("/")[0] for name in GOLDEN})

#: Where ModelOpt divides 0 by 0, of which it makes 6 times a scale that is 0 or NaN.
UNDEFINED = [("zeros", "modelopt"), ("tiny", "modelopt")]


def layer(weight: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "model.layers.0.mlp.up_proj.weight": weight,
        "model.norm.weight": np.ones(weight.shape[1], np.float32),
    }


def quantized(weight: Any, name: str, dtype: str = "F32") -> QuantizedState:
    """A layer with that weight; of GPT-OSS two experts."""
    array = np.stack([weight.T] * 2) if name == "gpt_oss" else weight
    given = {
        "m.experts.up_proj" if name == "gpt_oss" else "m.weight": Bits(array, dtype)
        if dtype == "BF16"
        else array
    }
    return QuantizedState(State.of(given), CONFIGS.get(name, name))


@pytest.mark.parametrize("name", [*FORMATS, *CONFIGS])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_reference_librarys(case: str, name: str) -> None:
    """Of compressed-tensors, ModelOpt and, for GPT-OSS, triton_kernels (`make_quantized`). Odd
    shapes, zeros, ties, subnormal numbers and such whose scales are."""
    weight = GOLDEN[f"{case}/weight"]
    made = quantized(weight, name)
    expected = {
        key.rpartition("/")[2]: GOLDEN[key] for key in GOLDEN if key.startswith(f"{case}/{name}/")
    }
    assert {spec.name for spec in made.specs} == {f"m.{part}" for part in expected}
    if (case, name) in UNDEFINED:
        packed = made.read("m.weight")
        assert not np.stack([packed & 15, packed >> 4], 1).reshape(weight.shape)[weight == 0].any()
        return
    for part, bits in expected.items():
        assert made.read(f"m.{part}").tobytes() == bits.tobytes()
        assert made.spec(f"m.{part}").nbytes == bits.nbytes


@pytest.mark.parametrize("name", [*FORMATS, *CONFIGS])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_any_part_is_that_part_of_the_whole(name: str, dtype: str, rng: Rng) -> None:
    """Of the weights in any float: FP32 of what they are."""
    wide = rng.normal(0, 0.02, (260, 320)).astype(
        {"F64": np.float64, "F16": np.float16}.get(dtype, np.float32)
    )
    if dtype == "BF16":
        bits = cast(wide.reshape(-1).view(np.uint32), DTYPES["F32"], DTYPES["BF16"]).reshape(
            wide.shape
        )
        given, wide = bits, (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        given = wide
    whole, mixed = (
        quantized(array, name, kind)
        for array, kind in ((wide.astype(np.float32), "F32"), (given, dtype))
    )
    for spec in whole.specs:
        elements = whole.read(spec.name)
        for _ in range(20):
            start, stop = sorted(rng.integers(0, spec.elements + 1, 2).tolist())
            for one in (mixed, quantized(given, name, dtype)):
                np.testing.assert_array_equal(
                    one.read(spec.name, start, stop), elements[start:stop]
                )


@pytest.mark.parametrize(
    ("name", "scales", "nan"), [("fp8_block", "scale_inv", 0x7FC00000), ("mxfp4", "scale", 255)]
)
def test_a_nan_is_not_lost(name: str, scales: str, nan: int) -> None:
    weight = np.ones((4, 64), np.float32)
    weight[2, 5] = np.nan
    made = QuantizedState(State.of({"m.weight": weight}), name).read(f"m.weight_{scales}")
    assert nan in made.tolist()


def test_experts_are_quantized_one_by_one(rng: Rng) -> None:
    experts = rng.normal(0, 0.02, (3, 200, 130)).astype(np.float32)
    made = QuantizedState(State.of({"mlp.experts.down_proj": experts}), "fp8_block")
    assert made.spec("mlp.experts.down_proj_scale_inv").shape == (3, 2, 2)
    each = [QuantizedState(State.of({"m.weight": expert}), "fp8_block") for expert in experts]
    for part in ("", "_scale_inv"):
        joined = np.concatenate([one.read(f"m.weight{part}") for one in each])
        np.testing.assert_array_equal(made.read(f"mlp.experts.down_proj{part}"), joined)
        np.testing.assert_array_equal(made.read(f"mlp.experts.down_proj{part}", 1, 9), joined[1:9])


def test_what_is_left_out(rng: Rng) -> None:
    weight = rng.normal(0, 0.02, (64, 64)).astype(np.float32)
    names = [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.a",
        "model.layers.10.a",
    ]
    state = State.of(
        {f"{name}.weight": weight.copy() for name in names}
        | {"model.norm.weight": weight[0].copy()}
    )

    def codes(how: Any) -> set[str]:
        made = QuantizedState(state, how, DTYPES["BF16"])
        assert {spec.dtype.name for spec in made.specs} <= {"F8_E4M3", "U8", "F32", "BF16"}
        return {
            spec.name.removesuffix(".weight") for spec in made.specs if spec.dtype.name == "F8_E4M3"
        }

    assert codes("fp8_block") == {"model.layers.0.a", "model.layers.10.a"}
    fp8 = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0"],
    }
    assert codes(fp8) == {"model.layers.10.a"}
    packed = {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "ignore": ["re:.*10.a"],
    }
    assert codes(packed) == {"model.layers.0.a"}


@pytest.mark.parametrize(
    "wrong",
    [
        "fp4",
        {},
        {"quant_method": "awq"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        "mxfp4",
        "nvfp4",
    ],
)
def test_what_cannot_be_made_is_refused(wrong: str | Mapping[str, Any]) -> None:
    with pytest.raises(InputError):
        QuantizedState(State.of({"m.weight": np.zeros((3, 40), np.float32)}), wrong)


def test_scales_of_inputs_come_with_the_state(rng: Rng) -> None:
    """They are calibrated: with none an engine would compute with whatever is in its memory."""
    weight = rng.normal(0, 0.02, (64, 64)).astype(np.float32)
    experts = {"mlp.experts.up_proj": np.stack([weight, weight])}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(InputError, match=r"no 'input_scale' of it"):
        QuantizedState(State.of(layer(weight)), config)
    scale = {"model.layers.0.mlp.up_proj.input_scale": np.float32(0.3)}
    made = QuantizedState(State.of(layer(weight) | scale), config, DTYPES["BF16"])
    assert {spec.name: spec.dtype.name for spec in made.specs}.items() >= dict.fromkeys(
        scale, "F32"
    ).items()
    with pytest.raises(InputError, match="fused"):
        QuantizedState(State.of(experts), config | {"quant_algo": "W4A16_NVFP4"})


def test_a_function_quantizes(rng: Rng) -> None:
    """It sees FP32 whatever the weights are; where it makes other tensors than before it is
    refused."""
    calls: list[str] = []

    def halved(name: str, weight: np.ndarray[Any, Any]) -> dict[str, Any] | None:
        calls.append(name)
        if weight.ndim < 2:
            return None
        assert weight.dtype == np.float32
        return {f"{name}_int": (weight * 100).astype(np.int8), f"{name}_by": np.float32([100])}

    weight = rng.normal(0, 0.2, (32, 64)).astype(np.float32)
    state = State.of(layer(weight) | {"steps": np.int64(3)})
    made = QuantizedState(state, halved)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = (weight * 100).astype(np.int8).reshape(-1)
    for start, stop in ((0, 70), (70, weight.size)):
        np.testing.assert_array_equal(
            made.read(f"{name}_int", start, stop).view(np.int8), expected[start:stop]
        )
    assert {spec.name for spec in made.specs} == {
        f"{name}_int",
        f"{name}_by",
        "model.norm.weight",
        "steps",
    }

    def fickle(name: str, weight: np.ndarray[Any, Any]) -> dict[str, Any]:
        calls.append(name)
        return {f"{name}.{len(calls)}": weight.astype(np.float16)}

    with pytest.raises(UnsupportedTensor):
        QuantizedState(state, fickle).copy()


def test_the_command_quantizes(
    tmp_path: Path, rng: Rng, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a format's name, or as the config of a quantized model says."""
    save(
        tmp_path / "step.safetensors",
        State.of(layer(rng.normal(0, 0.02, (64, 64)).astype(np.float32))),
    )
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        )
    )
    roots = []
    for how in ("fp8_block", str(config)):
        store = f"{tmp_path}/{len(roots)}"
        given = ["publish", f"{tmp_path}/step.safetensors", store, *POLICY, "--quantize", how]
        assert main([*given, "--dtype", "BF16"]) == 0
        with Subscriber(store, stream="policy") as worker:
            worker.sync()
            assert {spec.dtype.name for spec in worker.state.specs} == {"F8_E4M3", "F32", "BF16"}
            roots.append(worker.root)
    assert roots[0] == roots[1]
    config.write_text("{}")
    with pytest.raises(SystemExit):
        main(["publish", f"{tmp_path}/step.safetensors", store, *POLICY, "--quantize", str(config)])
    assert "fp8_block" in capsys.readouterr().err


def test_a_study_has_codes_and_scales_beside_the_weights(
    tmp_path: Path, rng: Rng, pulse: Pulse
) -> None:
    weight = rng.normal(0, 0.02, (256, 128)).astype(np.float32)
    for step in range(3):
        save(
            tmp_path / f"step-{step}.safetensors",
            State.of(layer(weight * np.float32(1 + 1e-4 * step))),
        )
    found = pulse.json("study", tmp_path, "--k", "1", "--quantize", "fp8_block")
    assert [(row["kind"], row["elements"]) for row in found["kinds"]] == [
        ("BF16", weight.size + 128)
    ]
    parts = {row["kind"]: row for row in found["quantized"]["kinds"]}
    assert (parts["scales"]["elements"], parts["scales"]["changed"]) == (2, 2), "all weights grow"
    assert (parts["F8_E4M3"]["elements"], parts["BF16"]["elements"]) == (weight.size, 128)
    assert parts["F8_E4M3"]["sparsity"] > found["kinds"][0]["sparsity"]
    assert "scales" in pulse("study", tmp_path, "--k", "1", "--quantize", "fp8_block")


def test_the_kernels_refuse_what_does_not_fit() -> None:
    elements = np.zeros(256, np.uint8)
    scales = np.ones(4, np.float32)
    codes = np.zeros(64, np.uint8)
    wrong: list[Callable[[], object]] = [
        lambda: block_maxima(elements, 3, (8, 1, 8)),
        lambda: block_maxima(elements, 4, (7, 1, 7)),
        lambda: block_maxima(elements, 4, (0, 1, 1)),
        lambda: to_e4m3(elements, 4, 0, (64, 1, 8), scales, codes),
        lambda: to_e4m3(elements, 4, 64, (32, 1, 32), scales[:3], codes),
        lambda: to_e4m3(elements, 4, 0, (64, 1, 16), scales, codes[:63]),
        lambda: to_e2m1(elements, 4, (8, 1, 8), scales, codes[:32]),
        lambda: to_e2m1(elements, 4, (64, 1, 16), scales, codes[:32]),
        lambda: to_e2m1(elements, 4, (16, 1, 16), scales[:3], codes[:32]),
        lambda: to_e2m1(elements, 4, (16, 1, 16), scales, codes[:31]),
        lambda: to_e2m1(elements, 4, (2, 31, 1), scales, codes[:32]),
        lambda: to_e2m1(elements, 4, (2, 30, 1), scales, codes[:32]),
        lambda: to_e2m1(elements, 4, (8, 8, 1), scales, codes[:32]),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r".+"):
            call()


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_of_quantized_states(name: str, rng: Rng, store: MemoryStore) -> None:
    """Followers see a state like any other, with the root of what the trainer could have quantized
    itself; tied weights stay tied, and what is submitted may change."""
    weight = torch.from_numpy(rng.normal(0, 0.02, (256, 512)).astype(np.float32))
    state: dict[str, Any] = {
        "a.weight": weight,
        "b.weight": weight,
        "lm_head.weight": weight.clone(),
    }
    with (
        Publisher(store, stream="policy") as publisher,
        Subscriber(store, stream="policy") as worker,
    ):
        for step in range(4):
            own = QuantizedState(State.of(state), name, DTYPES["BF16"]).copy()
            if step % 2:
                publisher.submit(state, quantize=name, dtype="BF16")
                weight.add_(1)
                publisher.wait()
                weight.sub_(1)
            else:
                publisher.publish(
                    state, quantize=name, dtype="BF16", files={"config.json": b'{"vocab_size": 9}'}
                )
            reach(worker, state_digest(own).root)
            assert worker.state.aliases == own.aliases
            assert len(worker.state.aliases) >= 2, "codes and scales of the tied weight"
            config = json.loads(worker.files()["config.json"])
            assert config.pop("vocab_size") == 9
            if step % 2 == 0:
                again = QuantizedState(
                    State.of(state), config["quantization_config"], DTYPES["BF16"]
                )
                assert state_digest(again).root == worker.root, (
                    "what the engine is told makes the same state"
                )
            weight.add_(torch.from_numpy(rng.normal(0, 1e-4, (256, 512)).astype(np.float32)))
