"""The suite for stores of others: a broken store fails by the guarantee that it breaks, and
outsiders can run it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

import pulse_rl.testing
from pulse_rl import MemoryStore, Store
from pulse_rl.errors import StoreUnavailable
from pulse_rl.store import Data
from pulse_rl.testing import Guarantee, StoreConformance
from tests.support import broken_stores as broken
from tests.support.stores import FaultyStore

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
CREATE, WHOLE, VISIBLE, ORDER, CALLS = Guarantee

TESTS = sorted(name for name in dir(StoreConformance) if name.startswith("test_"))


class Suite(StoreConformance):
    large_bytes: ClassVar[int] = 3000
    many_objects: ClassVar[int] = 33
    clock_seconds: ClassVar[float] = 0.1

    def __init__(
        self, make: Callable[[], Store], peer: Callable[[Store], Store] = lambda store: store
    ) -> None:
        self._make, self._peer = make, peer

    def new_store(self) -> Store:
        return self._make()

    def peer_of(self, store: Store) -> Store:
        return self._peer(store)

    def failures(self) -> dict[str, str]:
        """The message of every test that fails."""
        failed = {}
        for name in TESTS:
            try:
                getattr(self, name)()
            except Exception as error:
                failed[name] = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return failed


def guarantees(failures: dict[str, str]) -> set[Guarantee]:
    return {g for g in Guarantee for text in failures.values() if g in text}


def test_a_good_store_passes() -> None:
    assert Suite(MemoryStore).failures() == {}
    assert len(TESTS) > 20


@pytest.mark.parametrize(
    ("store", "expected", "test"),
    [
        (broken.Overwrites, {CREATE}, "a_second_create_is_refused"),
        (broken.RefusesButOverwrites, {CREATE}, "a_second_create_is_refused"),
        (broken.LooksBeforeItCreates, {CREATE}, "of_racing_creates_one_wins"),
        (broken.CreatesBeforeItWrites, {CREATE}, "of_racing_creates_one_wins"),
        (broken.CreatesBesidePuts, {CREATE}, "what_was_put_cannot_be_created"),
        (broken.ShowsHalf, {WHOLE}, "a_put_in_progress_shows_nothing"),
        (broken.KeepsHalf, {WHOLE}, "a_put_that_breaks_changes_nothing"),
        (broken.HidesErrors, {WHOLE}, "a_put_that_breaks_changes_nothing"),
        (broken.KeepsTheFirst, {WHOLE, VISIBLE, CALLS}, "put_replaces"),
        (broken.TakesOneChunk, {WHOLE, CALLS}, "put_takes_chunks"),
        (broken.ReadsStale, {CREATE, WHOLE, VISIBLE, CALLS}, "put_replaces"),
        (broken.IgnoresRanges, {WHOLE, VISIBLE, CALLS}, "ranges"),
        (broken.Slices, {CALLS}, "ranges_outside_the_object_are_errors"),
        (broken.RaisesKeyErrors, {WHOLE, VISIBLE, CALLS}, "what_is_absent_is_not_found"),
        (broken.TellsTheTimeOfTheFirstWrite, {CALLS}, "the_time_of_writing"),
        (broken.CountsInMilliseconds, {CALLS}, "the_time_of_writing"),
        (broken.ListsInDisorder, {ORDER}, "lists_are_in_order"),
        (broken.ListsFoldersFirst, {ORDER}, "lists_are_in_order"),
        (broken.ListsOnePage, {VISIBLE}, "a_list_of_more_than_a_page"),
        (broken.ListsByPrefix, {CALLS}, "lists_are_of_one_folder"),
        (broken.ListsOneLevel, {CALLS}, "lists_are_of_one_folder"),
        (broken.ListsByOffset, {VISIBLE}, "a_delete_during_a_list_hides_no_other_name"),
        (broken.ForgetsWhereToGoOn, {CALLS}, "lists_go_on_after_a_name"),
        (broken.DeletesByPrefix, {CALLS}, "a_delete_removes_one_object"),
        (broken.DeletesNothing, {CREATE, VISIBLE, CALLS}, "a_delete_removes_one_object"),
        (broken.DeletesOnce, {CALLS}, "a_delete_of_what_is_absent_is_no_error"),
        (broken.TakesAnyName, {CALLS}, "bad_names_are_refused"),
    ],
)
def test_a_broken_store_fails_by_name(
    store: type[MemoryStore], expected: set[Guarantee], test: str
) -> None:
    failures = Suite(store).failures()
    assert guarantees(failures) == expected, failures
    assert f"test_{test}" in failures


def test_every_broken_store_is_tried() -> None:
    (table,) = (mark.args[1] for mark in test_a_broken_store_fails_by_name.pytestmark)
    there = {
        found
        for found in vars(broken).values()
        if inspect.isclass(found) and found.__module__ == broken.__name__
    }
    assert {row[0] for row in table} == there


def test_a_peer_that_sees_nothing_new_fails() -> None:
    def snapshot(store: Store) -> Store:
        assert isinstance(store, MemoryStore)
        peer = MemoryStore()
        peer._objects = dict(store._objects)
        return peer

    assert guarantees(Suite(MemoryStore, snapshot).failures()) == {CREATE, WHOLE, VISIBLE}


@pytest.mark.slow
def test_readers_that_wait_for_a_put_are_no_failure() -> None:
    class Waits(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self._turn = threading.Lock()

        def put(self, name: str, data: Data) -> None:
            with self._turn:
                super().put(name, data)

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            with self._turn:
                return super().get(name, start, stop)

    assert Suite(Waits).failures() == {}


def test_a_store_that_cannot_be_reached_is_not_called_broken(faulty: FaultyStore) -> None:
    faulty.fail(0)
    suite = Suite(lambda: faulty)
    with pytest.raises(StoreUnavailable) as caught:
        suite.test_put_replaces()
    assert VISIBLE in caught.value.__notes__[-1]


def test_the_guarantees_are_those_of_the_protocol() -> None:
    section = PROTOCOL.read_text().split("\n## ")[2]
    assert section.startswith("2. What a store must guarantee")
    for guarantee in set(Guarantee) - {CALLS}:
        assert f"{guarantee}." in " ".join(section.split())


# -- as others run it

MY_STORE = """
from pathlib import Path
from pulse_rl import LocalStore

class MyStore(LocalStore):
    def __init__(self, address):
        super().__init__(Path(__file__).parent / "objects" / address)
        self.address = address
"""
BROKEN = "    def put_new(self, name, data):\n        self.put(name, data)\n"
UNITTEST = """
import unittest
from uuid import uuid4
from my_store import MyStore
from pulse_rl.testing import StoreConformance

class TestMyStore(StoreConformance, unittest.TestCase):
    large_bytes = 100_000
    many_objects = 103
    clock_seconds = 0.5

    def new_store(self):
        return MyStore(str(uuid4()))
"""


def example() -> str:
    """The file in the package's docstring."""
    _, _, block = (pulse_rl.testing.__doc__ or "").partition("::\n")
    return textwrap.dedent(re.match(r"\n(?:    .*\n|\n)+", block)[0])  # type: ignore[index]


def outside(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "command"),
    [(example(), ("pytest", "test_my_store.py")), (UNITTEST, ("unittest", "test_my_store.py"))],
    ids=["pytest", "unittest"],
)
def test_others_run_it_in_a_file_of_their_own(
    program: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "test_my_store.py").write_text(program)
    (tmp_path / "my_store.py").write_text(MY_STORE)
    done = outside(tmp_path, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\b{len(TESTS)} (passed|tests in)", done.stdout + done.stderr)
    (tmp_path / "my_store.py").write_text(MY_STORE + BROKEN)
    done = outside(tmp_path, *command, "-k", "create")
    assert done.returncode == 1
    assert f"broken: {CREATE}" in done.stdout + done.stderr
