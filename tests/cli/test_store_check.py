"""``pulse store-check`` says what a store does not keep, leaves nothing in it, and calls none
unsafe that is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulse_rl import LocalStore, MemoryStore, Store
from tests.support import broken_stores as broken
from tests.support.commands import Pulse
from tests.support.stores import names, unreachable_store


def checked_at(monkeypatch: pytest.MonkeyPatch, store: Store) -> Store:
    monkeypatch.setattr("pulse_rl.cli.streams.open_store", lambda address: store)
    return store


@pytest.mark.slow
def test_a_sound_store_is_safe_and_left_as_it_was(pulse: Pulse, tmp_path: Path) -> None:
    pulse.refused("store-check", tmp_path / "stroe", kind="input", match="no folder")
    assert not (tmp_path / "stroe").exists()
    LocalStore(tmp_path / "store").put("own/object", b"x")
    facts = pulse.json("store-check", tmp_path / "store")
    assert facts["safe"]
    assert len(facts["findings"]) > 20
    assert all(f["held"] and not f["seen"] for f in facts["findings"])
    assert names(LocalStore(tmp_path / "store"), "pulse-store-check") == []
    assert names(LocalStore(tmp_path / "store"), "own") == ["own/object"]
    text = pulse("store-check", "memory://")
    assert "ok   of racing creates one wins" in text
    assert text.endswith("memory:// is safe to publish to\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "word"),
    [
        (broken.Overwrites, "create"),
        (broken.ListsInDisorder, "order"),
        (broken.IgnoresRanges, "range"),
    ],
)
def test_a_broken_store_is_not(
    pulse: Pulse, monkeypatch: pytest.MonkeyPatch, store: type[MemoryStore], word: str
) -> None:
    checked_at(monkeypatch, store())
    facts = pulse.json("store-check", "x", status=1)
    assert not facts["safe"]
    failed = [f for f in facts["findings"] if not f["held"]]
    assert any(word in f["guarantee"] for f in failed)
    assert all(f["seen"] for f in failed)
    text = pulse("store-check", "x", status=1)
    assert "FAIL " in text
    assert text.endswith("x is NOT safe to publish to\n")
    assert ("one publisher alone may use it, by convention" in text) == (store is broken.Overwrites)


def test_an_unreachable_store_is_not_called_unsafe(
    pulse: Pulse, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_at(monkeypatch, unreachable_store())
    pulse("store-check", "x", status=1)
    assert "NOT safe" not in pulse.out + pulse.err
