"""Commands that would have destroyed something, or shown what a terminal obeys."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, Signer, State, Untrusted
from pulse_rl.state import checkpoint
from pulse_rl.stream.stream import Stream
from tests.support.commands import Pulse
from tests.support.states import Rng, bits, history, mutated, policy


def test_a_patch_never_replaces_a_checkpoint(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    old, new = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    state = policy(rng)
    checkpoint.save(old, State.of(state))
    checkpoint.save(new, State.of(mutated(rng, state)))
    before = new.read_bytes()
    pulse.refused("diff", old, new, "-o", new, kind="input", match="is not a patch")
    assert new.read_bytes() == before
    pulse("diff", old, new, "-o", tmp_path / "p")
    pulse("diff", old, new, "-o", tmp_path / "p")


def test_follow_replaces_only_what_follow_has_written(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    publisher = Publisher(LocalStore(tmp_path / "store"), stream="policy")
    first, second = history(rng, 2)
    publisher.publish(first)
    out = tmp_path / "out"
    out.mkdir()
    checkpoint.save(out / "model.safetensors", State.of(policy(rng)), {"format": "pt"})
    own = (out / "model.safetensors").read_bytes()
    follow = ("follow", tmp_path / "store", "--stream", "policy", "--once", "--out")
    pulse.refused(*follow, out, kind="input", match="not written by pulse follow")
    assert (out / "model.safetensors").read_bytes() == own
    pulse(*follow, tmp_path / "other")
    publisher.publish(second)
    pulse(*follow, tmp_path / "other")


def test_names_cannot_speak_to_the_terminal(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    name = "w\x1b]0;owned\x07\nroot"
    checkpoint.save(tmp_path / "a.safetensors", State.of({name: bits(rng, "BF16", 4)}))
    shown = pulse("digest", tmp_path / "a.safetensors", "--tensors")
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert r"w\x1b]0;owned\x07\nroot" in shown


def test_a_signing_publisher_takes_nothing_from_a_stranger(rng: Rng) -> None:
    """An unsigned head was its baseline, and head() returned a stranger's metadata."""
    store, signer = MemoryStore(), Signer.generate()
    own, strange = history(rng, 2)
    Publisher(store, stream="policy", signer=signer).publish(own, metadata={"step": 7})
    Publisher(store, stream="policy").publish(strange, metadata={"step": 999})
    events: list[object] = []
    publisher = Publisher(store, stream="policy", signer=signer, on_event=events.append)
    head = publisher.head()
    assert head is not None
    assert (head.version, head.metadata) == (0, {"step": 7})
    done = publisher.publish(strange)
    assert done.version == 2
    patch = Stream(store, "policy").manifest(2).patch
    assert patch is not None
    assert patch.base == 0, "no patch rests on what nobody signed"
    assert [event.how for event in events if hasattr(event, "how")] == ["restored"]  # type: ignore[attr-defined]
    only_strange = MemoryStore()
    Publisher(only_strange, stream="policy").publish(strange)
    with pytest.raises(Untrusted):
        Publisher(only_strange, stream="policy", signer=signer).head()
