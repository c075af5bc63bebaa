"""Commands that would have destroyed something, or shown what a terminal obeys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import MemoryStore, Publisher, Signer
from pulse_rl.errors import Untrusted
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import Pulse
from tests.support.manifests import manifest_of
from tests.support.states import Rng, bits, history, present


def test_an_empty_path_is_not_the_current_folder(
    pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `-o "$OUT"` with a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    for command in (
        ("apply", "base", "patch", "-o", ""),
        ("follow", "store", "--stream", "policy", "--out", ""),
        ("follow", "store", "--stream", "policy", "--out", "out", "--cache", ""),
    ):
        with pytest.raises(SystemExit, match="2"):
            pulse(*command)
    assert not list(tmp_path.iterdir())


def test_publish_casts_and_tells_what_would_be_better(
    pulse: Pulse, tmp_path: Path, rng: Rng
) -> None:
    file, store = tmp_path / "m.safetensors", tmp_path / "store"
    for step in range(2):
        write_checkpoint(file, {"_orig_mod.w": rng.standard_normal(3000, np.float32)})
        pulse("publish", file, store, "--stream", "wide")
        assert ("--dtype BF16" in pulse.err) == (step == 1)
        assert "unwrapped" in pulse.err
    done = pulse("publish", file, store, "--stream", "wide", "--dtype", "bf16")
    assert "is BF16 [3000], but F32 [3000] in the version before" in done
    assert "BF16" not in pulse.err
    done = pulse.json("publish", file, store, "--stream", "wide", "--dtype", "BF16")
    assert (done["changed"], done["reason"], done["dense_bytes"]) == (0, "", 6000)


def test_names_cannot_speak_to_the_terminal(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    name = "w\x1b]0;owned\x07\nroot"
    write_checkpoint(tmp_path / "a.safetensors", {name: bits(rng, "BF16", 4)})
    shown = pulse("digest", tmp_path / "a.safetensors", "--tensors")
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert r"w\x1b]0;owned\x07\nroot" in shown


def test_a_signing_publisher_takes_nothing_from_a_stranger(rng: Rng, store: MemoryStore) -> None:
    """An unsigned head was its baseline, and head() returned a stranger's metadata."""
    signer = Signer.generate()
    own, strange = history(rng, 2)
    Publisher(store, stream="policy", signer=signer).publish(own, metadata={"step": 7})
    Publisher(store, stream="policy").publish(strange, metadata={"step": 999})
    events: list[object] = []
    publisher = Publisher(store, stream="policy", signer=signer, on_event=events.append)
    head = present(publisher.head())
    assert (head.version, head.metadata) == (0, {"step": 7})
    done = publisher.publish(strange)
    assert done.version == 2
    patch = present(manifest_of(store, "policy", 2).patch)
    assert patch.base == 0, "no patch rests on what nobody signed"
    assert [event.how for event in events if hasattr(event, "how")] == ["restored"]  # type: ignore[attr-defined]
    only_strange = MemoryStore()
    Publisher(only_strange, stream="policy").publish(strange)
    with pytest.raises(Untrusted):
        Publisher(only_strange, stream="policy", signer=signer).head()


def test_identities_anchors_and_restarts_by_command(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 4)
    for k, state in enumerate(states):
        write_checkpoint(tmp_path / f"{k}.safetensors", state)
    store, old, new = tmp_path / "store", tmp_path / "old.key", tmp_path / "new.key"
    old_key, new_key = pulse("keygen", old).strip(), pulse("keygen", new).strip()
    publish = ["publish", tmp_path / "0.safetensors", store, "--stream", "policy", "--json"]
    first = json.loads(pulse(*publish, "--sign-key", old))
    assert len(first["stream_id"]) == 32
    publish[1] = tmp_path / "1.safetensors"
    second = json.loads(pulse(*publish, "--sign-key", old, "--anchor"))
    assert second["anchor_bytes"] > 0
    assert second["stream_id"] == first["stream_id"]
    stream = [store, "--stream", "policy"]
    anchored = json.loads(pulse("anchor", *stream, "--json", "--sign-key", new, "--trust", old_key))
    assert (anchored["version"], anchored["root"]) == (2, second["root"])
    follow = ["follow", *stream, "--once", "--out", tmp_path / "out", "--json"]
    assert (
        json.loads(pulse(*follow, "--trust", new_key, "--stream-id", first["stream_id"]))["version"]
        == 2
    )
    pulse(
        "follow", *stream, "--once", "--out", tmp_path / "none", "--stream-id", "0" * 32, status=1
    )
    pulse(
        "verify", *stream, "--trust", new_key, "--trust", old_key, "--stream-id", first["stream_id"]
    )
    pulse("fold", *stream, "--folds", "2", "--sign-key", new, "--trust", old_key)
    pulse("gc", *stream, "--keep", "1", "--trust", new_key)
    shutil.rmtree(store)
    publish[1] = tmp_path / "3.safetensors"
    anew = json.loads(pulse(*publish))
    assert anew["stream_id"] != first["stream_id"]
    assert json.loads(pulse(*follow, "--allow-recreated"))["root"] == anew["root"]
