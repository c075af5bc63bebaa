"""`pulse follow` waits for what may heal, says so once, and ends at everything else."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pulse_rl import LocalStore, Publisher, errors
from pulse_rl.errors import PulseError
from tests.support.commands import Pulse, at_waits, without_time
from tests.support.states import Rng, history, roots


class Follow:
    """Follows the folder ``store`` of the test; ``waits`` are the seconds between tries, ``notes``
    what was said."""

    def __init__(self, pulse: Pulse, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pulse, self._folder, self._patch = pulse, folder, monkeypatch
        self.waits: list[float] = []
        self.notes: list[str] = []

    def __call__(self, *steps: Callable[[], object]) -> list[str]:
        """At each wait a step is taken, after the last one a Ctrl-C. Returns the roots that were
        reached."""
        self.waits = at_waits(self._patch, *steps)
        found = [json.loads(line)["root"] for line in self._run(status=130)]
        self.notes = [without_time(line) for line in self._pulse.err.splitlines()]
        assert self.notes.pop() == "pulse: interrupted"
        return found

    def error(self, *options: object) -> str:
        """The kind of the error that ends it."""
        kind: str = json.loads(self._run(*options, status=1)[-1])["error"]
        return kind

    def _run(self, *options: object, status: int) -> list[str]:
        where = (self._folder / "store", "--stream", "policy", "--out", self._folder / "out")
        return self._pulse(
            "follow", *where, "--poll", 0.5, "--json", *options, status=status
        ).splitlines()


@pytest.fixture
def follow(pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follow:
    return Follow(pulse, tmp_path, monkeypatch)


def nothing() -> None:
    """A step at which the world stays as it is."""


def test_a_stream_that_is_not_there_yet_is_waited_for(
    follow: Follow, tmp_path: Path, rng: Rng
) -> None:
    states = history(rng, 1)
    publisher = Publisher(LocalStore(tmp_path / "store"), stream="policy")
    assert follow(nothing, nothing, lambda: publisher.publish(states[0]), nothing) == roots(states)
    (note,) = [note for note in follow.notes if "retrying" in note]
    assert "stream 'policy': there is no version of it yet" in note
    assert follow.waits == pytest.approx([0.5] * len(follow.waits), rel=0.25)
    assert len(set(follow.waits)) > 1, "workers that start together part"


def test_a_gap_is_waited_for_until_it_heals(follow: Follow, tmp_path: Path, rng: Rng) -> None:
    """It ended the command."""
    states = history(rng, 3)
    publisher = Publisher(
        LocalStore(tmp_path / "store"), stream="policy", anchor_ratio=float("inf")
    )
    publisher.publish(states[0])
    payloads, lost = tmp_path / "store" / "policy" / "payloads", list[Path]()

    def lose() -> None:
        before = set(payloads.iterdir())
        publisher.publish(states[1])
        lost.extend(set(payloads.iterdir()) - before)
        shutil.move(lost[0], tmp_path / "lost")

    def find() -> None:
        shutil.move(tmp_path / "lost", lost[0])

    later = functools.partial(publisher.publish, states[2])
    assert follow(lose, nothing, nothing, nothing, find, later) == roots(states)
    assert len([note for note in follow.notes if "retrying" in note]) == 1
    assert follow.waits == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 0.5, 0.5], rel=0.25)


def test_waits_grow_to_fifteen_seconds(follow: Follow, tmp_path: Path, rng: Rng) -> None:
    Publisher(LocalStore(tmp_path / "store"), stream="policy").publish(history(rng, 1)[0])
    shutil.rmtree(tmp_path / "store" / "policy" / "payloads")
    assert follow(*[nothing] * 9) == []
    assert follow.waits[-2:] == pytest.approx([15.0, 15.0], rel=0.25)


def test_a_store_that_is_away_is_asked_every_four_seconds(
    follow: Follow, tmp_path: Path, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of several stores, or one that starts during an outage, waited for up to a minute
    when they were back."""
    Publisher(LocalStore(tmp_path / "store"), stream="policy").publish(history(rng, 1)[0])

    def away(*_: object) -> bytes:
        raise errors.StoreUnavailable("the store is away")

    monkeypatch.setattr(LocalStore, "get", away)
    assert follow(*[nothing] * 9) == []
    assert follow.waits[-4:] == pytest.approx([4.0] * 4, rel=0.25)


def test_once_waits_for_nothing(follow: Follow, tmp_path: Path, rng: Rng) -> None:
    assert follow.error("--once") == "empty_stream"
    Publisher(LocalStore(tmp_path / "store"), stream="policy").publish(history(rng, 1)[0])
    shutil.rmtree(tmp_path / "store" / "policy" / "payloads")
    assert follow.error("--once") == "chain_gap"


def test_what_no_waiting_heals_ends_it(follow: Follow, tmp_path: Path) -> None:
    assert follow.error("--trust", "no key") == "input"
    (tmp_path / "store").write_bytes(b"")
    assert follow.error() == "store"


def test_which_errors_are_retryable() -> None:
    """One rule for all programs: the same call may succeed later although its caller changes
    nothing."""
    classes = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, PulseError)
    ]
    assert {cls.kind for cls in classes if cls.retryable} == {
        "not_found", "store_unavailable", "store_full", "empty_stream", "chain_gap",
        "engine_unavailable",
    }  # fmt: skip
