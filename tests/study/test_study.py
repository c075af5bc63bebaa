"""What a study measures, against plain numpy and torch: sparsity and bytes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl import Bits, MemoryStore, Publisher, State
from pulse_rl.errors import InputError
from pulse_rl.ops import diff
from pulse_rl.state.cast import COMPUTE_DTYPES, CastState
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import DTYPES
from pulse_rl.study import study
from pulse_rl.study.run import evenly_spaced
from pulse_rl.study.tally import LAYERS, layer_of
from tests.support.states import Rng, publish_each

Floats = dict[str, np.ndarray]
KS = (1, 2, 3, 5)
TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SPECIAL = np.array(
    [np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-45, -1e-40, 3e38, 448, -465, 6e4, 7e4], np.float32
)


FIELDS = (
    "format source dtype dtypes parameters dense_bytes states rows layers kinds tensors pairs "
    "gradient_density gradients summary"
)
ROW_FIELDS = (
    "k pairs elements changed sparsity sparsity_min sparsity_max untouched coded_pairs bytes "
    "bytes_per_changed "
    "bytes_per_changed_zstd"
)


def studied(states: list[State], **settings: Any) -> dict[str, Any]:
    """The study of a stream of ``states``."""
    store = MemoryStore()
    with Publisher(store, stream="s", on_event=lambda event: None) as publisher:
        publish_each(publisher, states)
    return study(store, stream="s", **settings)


def masters(rng: Rng, count: int = 7, lr: float = 1e-3) -> list[Floats]:
    """FP32 states of a small model that drift; special values come and go in one of its tensors."""
    state: Floats = {
        "model.embed_tokens.weight": rng.standard_normal((50, 20), np.float32) * np.float32(0.02),
        "model.layers.0.self_attn.q_proj.weight": rng.standard_normal((30, 30), np.float32)
        * np.float32(0.05),
        "model.layers.0.mlp.up_proj.weight": rng.choice(SPECIAL, (20, 20)),
        "model.layers.0.mlp.up_proj.bias": np.zeros(20, np.float32),
        "model.norm.weight": np.ones(20, np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    states = [state]
    while len(states) < count:
        state = {
            k: v + rng.standard_normal(v.shape, np.float32) * np.float32(lr)
            for k, v in state.items()
        }
        special = state["model.layers.0.mlp.up_proj.weight"]
        special[rng.integers(20)] = rng.choice(SPECIAL, 20)
        states.append(state)
    return states


def cast_by_torch(values: np.ndarray, dtype: str) -> np.ndarray:
    return (
        torch.from_numpy(values)
        .to(TORCH[dtype])
        .view(torch.uint8 if "F8_" in dtype else torch.int16)
        .numpy()
    )


def by_hand(states: list[Floats], dtype: str, k: int) -> dict[str, Any]:
    """Changed elements per pair and tensor, and untouched ones per pair, from whole arrays of
    bits."""
    bits = [{name: cast_by_torch(v, dtype) for name, v in state.items()} for state in states]
    pairs = list(zip(bits, bits[k:], strict=False))
    changed = {name: [int((a[name] != b[name]).sum()) for a, b in pairs] for name in states[0]}
    untouched = []
    for start in range(len(pairs)):
        steps = list(pairwise(bits[start : start + k + 1]))
        untouched.append(
            sum(int(np.all([a[n] == b[n] for a, b in steps], axis=0).sum()) for n in states[0])
        )
    return {"changed": changed, "untouched": untouched}


def rows_of(found: dict[str, Any], kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [row for row in found[kind] if all(row[name] == value for name, value in fields.items())]


@pytest.mark.parametrize("lr", [1e-3, 1e-5])  # older states are kept as copies, as changes
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_k_step_sparsity_is_that_of_whole_arrays(rng: Rng, dtype: str, lr: float) -> None:
    states = masters(rng, lr=lr)
    found = studied([State.of(s) for s in states], dtype=dtype, ks=KS)
    elements = sum(v.size for v in states[0].values())
    assert (found["parameters"], found["dtype"]) == (elements, COMPUTE_DTYPES[dtype].name)
    assert [row["k"] for row in found["rows"]] == list(KS)
    for k in KS:
        expected = by_hand(states, dtype, k)
        totals = np.sum(list(expected["changed"].values()), axis=0)
        (row,) = rows_of(found, "rows", k=k)
        assert (row["pairs"], row["elements"]) == (len(states) - k, elements)
        assert row["changed"] == pytest.approx(np.mean(totals))
        assert row["sparsity"] == pytest.approx(1 - np.mean(totals) / elements)
        assert row["sparsity_min"] == 1 - max(totals) / elements
        assert row["sparsity_max"] == 1 - min(totals) / elements
        assert row["untouched"] == pytest.approx(np.mean(expected["untouched"]) / elements)
        assert [p["changed"] for p in rows_of(found, "pairs", k=k)] == totals.tolist()
        assert all(p["new"] - p["old"] == k for p in rows_of(found, "pairs", k=k))
        for name, counts in expected["changed"].items():
            (tensor,) = rows_of(found, "tensors", k=k, name=name)
            assert tensor["changed"] == pytest.approx(np.mean(counts))
            assert tensor["sparsity_min"] == 1 - max(counts) / max(states[0][name].size, 1)
        for layer in rows_of(found, "layers", k=k):
            members = [n for n in states[0] if layer_of(n) == layer["layer"]]
            summed = np.sum([expected["changed"][n] for n in members], axis=0)
            assert layer["changed"] == pytest.approx(np.mean(summed))
            assert layer["sparsity_max"] == 1 - min(summed) / max(layer["elements"], 1)


def test_something_changes_in_each_dtype_and_end_states_differ_less_than_what_was_touched(
    rng: Rng,
) -> None:
    for dtype in COMPUTE_DTYPES:
        rows = studied([State.of(s) for s in masters(rng)], dtype=dtype, ks=KS)["rows"]
        assert 0 < rows[-1]["untouched"] < rows[-1]["sparsity"] < rows[0]["sparsity"] < 1
        assert rows[0]["untouched"] == rows[0]["sparsity"]


def test_states_in_a_compute_dtype_are_compared_as_they_are(rng: Rng) -> None:
    """NaN payloads and the sign of zero are bits like others; FP16 stays FP16, integers and FP8
    stay, too."""
    old = {
        "bf16": Bits(np.array([0x7FC0, 0x7FC1, 0x0000, 0x8000, 0x3F80], np.uint16), "BF16"),
        "f16": Bits(np.array([0x7C01, 0x0000], np.uint16), "F16"),
        "f8": Bits(np.array([0x7F, 0x80], np.uint8), "F8_E4M3"),
        "steps": np.array([7, 8], np.int64),
    }
    new = {
        "bf16": Bits(np.array([0x7FC0, 0x7FC2, 0x8000, 0x8000, 0x3F80], np.uint16), "BF16"),
        "f16": Bits(np.array([0x7C02, 0x8000], np.uint16), "F16"),
        "f8": Bits(np.array([0x7F, 0x00], np.uint8), "F8_E4M3"),
        "steps": np.array([7, 1 << 60], np.int64),
    }
    found = studied([State.of(old), State.of(new)], ks=(1,))
    assert found["dtypes"] == {"BF16": 5, "F16": 2, "F8_E4M3": 2, "I64": 2}
    assert {t["name"]: t["changed"] for t in found["tensors"]} == {
        "bf16": 2,
        "f16": 2,
        "f8": 1,
        "steps": 1,
    }
    assert found["rows"][0]["bytes"] > 0


def big_states(rng: Rng, count: int = 4) -> list[State]:
    """BF16 by way of FP32 masters, one tensor larger than a block."""
    weights = {
        "big": rng.standard_normal((2100, 2100), np.float32) * np.float32(0.02),
        "small": rng.standard_normal(3000, np.float32) * np.float32(0.02),
    }
    states = []
    for _ in range(count):
        states.append(State.of({k: v.copy() for k, v in weights.items()}))
        for value in weights.values():
            value += rng.standard_normal(value.shape, np.float32) * np.float32(1e-6)
    return states


@pytest.mark.slow
def test_bytes_are_those_of_patches(rng: Rng) -> None:
    given = big_states(rng)
    found = studied(given, ks=(1, 3))
    states = [CastState(s, DTYPES["BF16"]).copy() for s in given]
    (row,) = rows_of(found, "rows", k=3)
    built = diff.build_patch(states[0], states[3], state_digest(states[0]))
    assert row["coded_pairs"] == 1
    assert row["bytes"] == pytest.approx(built.nbytes, abs=4)
    assert row["bytes_per_changed"] == row["bytes"] / built.header.changed
    zstd = diff.build_patch(states[0], states[3], state_digest(states[0]), codec="zstd")
    assert row["bytes_per_changed_zstd"] == pytest.approx(
        zstd.nbytes / built.header.changed, rel=1e-4
    )
    (row,) = rows_of(found, "rows", k=1)
    assert (row["pairs"], row["coded_pairs"]) == (3, 3)
    numbers = found["summary"]
    assert numbers["sparsity"] == row["sparsity"]
    assert numbers["bytes_per_sync"] == pytest.approx(row["bytes"], rel=1e-3)
    assert numbers["bandwidth_for_target"] == pytest.approx(
        8 * numbers["bytes_per_sync"] * 0.9 / 0.1 / 50
    )
    assert numbers["bandwidth_full"] == pytest.approx(8 * found["dense_bytes"] * 0.9 / 0.1 / 50)


@pytest.mark.slow
def test_little_memory_means_more_passes_and_the_same_numbers(
    rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress ends at the whole however often a pass was cut short."""
    states, heard = big_states(rng, 3), list[Any]()
    whole = studied(states, ks=(1, 2), threads=1, on_event=heard.append)
    total = 3 * (2100 * 2100 + 3000) * 2
    assert len(heard) == 3
    assert (heard[-1].done, heard[-1].total) == (total, total)
    monkeypatch.setattr("pulse_rl.study.run._SPARE_BYTES", -1 << 30)
    heard.clear()
    pieces = studied(states, ks=(1, 2), threads=2, on_event=heard.append)
    assert len(heard) == 3 * 3
    assert (heard[-1].done, heard[-1].total) == (total, total)
    assert pieces == whole


NAMES = {
    "model.embed_tokens.weight": "embeddings",
    "transformer.wte.weight": "embeddings",
    "embeddings.position_embeddings.weight": "embeddings",
    "embeddings.LayerNorm.weight": "norms",
    "embeddings.LayerNorm.bias": "biases",
    "model.layers.11.self_attn.q_proj.weight": "attention",
    "model.layers.11.self_attn.q_proj.bias": "biases",
    "model.layers.3.self_attn.q_norm.weight": "norms",
    "model.layers.3.input_layernorm.weight": "norms",
    "transformer.h.0.ln_1.weight": "norms",
    "transformer.h.0.attn.c_attn.weight": "attention",
    "encoder.layer.0.attention.output.dense.weight": "attention",
    "encoder.layer.0.intermediate.dense.weight": "mlp",
    "encoder.layer.0.output.dense.weight": "mlp",
    "model.layers.0.mlp.experts.7.down_proj.weight": "mlp",
    "model.layers.0.block_sparse_moe.experts.1.w2.weight": "mlp",
    "lm_head.weight": "head",
    "score.weight": "head",
    "pooler.dense.weight": "others",
    "group0.3": "others",
}


@pytest.mark.parametrize("name", NAMES)
def test_layer_types(name: str) -> None:
    assert layer_of(name) == NAMES[name]
    assert layer_of(name) in LAYERS


def test_the_dict_is_json_with_the_documented_fields(rng: Rng) -> None:
    found = studied([State.of(s) for s in masters(rng)])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["format"] == "pulse.study.1"
    assert [row["k"] for row in found["rows"]] == [1, 2, 4]
    assert found["rows"][0].keys() == set(ROW_FIELDS.split())
    assert found.keys() == set(FIELDS.split())
    assert (found["gradient_density"], found["gradients"]) == (None, [])


def test_states_that_are_all_equal_cost_nothing_per_change(rng: Rng) -> None:
    state = State.of(masters(rng, 1)[0])
    found = studied([state, state, state])
    assert [(r["sparsity"], r["bytes_per_changed"]) for r in found["rows"]] == [(1.0, None)] * 2
    assert found["summary"]["bytes_per_sync"] == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "F4"}, "F4"),
        ({"dtype": "fp16"}, "fp16"),
        ({"ks": ()}, "1 or more"),
        ({"ks": (0, 1)}, "1 or more"),
        ({"ks": (9,)}, "too few"),
    ],
)
def test_arguments_that_make_no_sense(rng: Rng, options: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        studied([State.of(s) for s in masters(rng, 3)], **options)


def test_evenly_spread() -> None:
    assert evenly_spaced(1, 64, 3) == {1, 33, 64}
    assert evenly_spaced(5, 6, 3) == {5, 6}
    assert evenly_spaced(5, 5, 3) == {5}
