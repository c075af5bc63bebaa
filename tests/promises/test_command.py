"""The command `pulse` does what the library does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from pulse_rl import Signer, state_root
from tests.support.commands import Pulse


def test_checkpoints_travel_from_folder_to_folder(pulse: Pulse, tmp_path: Path) -> None:
    rng, store, key = np.random.default_rng(0), tmp_path / "store", tmp_path / "key"
    pulse("keygen", key)
    trust = Signer.load(key).public_key
    state = {
        "a": rng.standard_normal((50, 40)).astype(np.float32),
        "b": np.arange(30, dtype=np.int64),
    }
    for step in range(4):
        state["a"][step] += 1
        save_file(state, tmp_path / "model.safetensors")
        pulse("publish", tmp_path / "model.safetensors", store, "--stream", "s", "--sign-key", key)
    pulse("verify", store, "--stream", "s", "--trust", trust)
    pulse("fold", store, "--stream", "s", "--sign-key", key, "--folds", 2)
    pulse("relay", store, tmp_path / "near", "--stream", "s", "--once", "--trust", trust)
    pulse("gc", store, "--stream", "s", "--keep", 1, "--grace", 0)
    for number, place in enumerate((store, tmp_path / "near")):
        out = tmp_path / f"out-{number}"
        pulse("follow", place, "--stream", "s", "--out", out, "--once", "--trust", trust)
        got = load_file(out / "model.safetensors")
        assert state_root(got) == state_root(state)
    for payload in (store / "s" / "payloads").iterdir():
        payload.write_bytes(b"x" * payload.stat().st_size)
    pulse("verify", store, "--stream", "s", "--trust", trust, status=1)
