"""States in a mapped file (notes/design/0036): found again by the next process, or else not used;
never wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import Publisher, State, Subscriber, open_store, state_root, verify_stream
from pulse_rl._util.threads import armed
from pulse_rl.errors import ConcurrentUse, InputError, StoreError, StoreFull, StoreUnavailable
from pulse_rl.events import BaselineRestored, Event, FallbackUsed, Progress, Synced
from tests.support.publishers import tuned
from tests.support.states import (
    Rng,
    Tensors,
    all_dtypes,
    history,
    mutated,
    policy,
    present,
    reach,
    roots,
    weights,
)
from tests.support.stores import FaultyStore


class Place:
    """A store in a folder, a publisher's baseline and a subscriber's state beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.store = FaultyStore(open_store(str(folder / "store")))

    def publish(self, *states: Tensors, **options: Any) -> list[str]:
        settings: dict[str, Any] = {
            "stream": "policy",
            "baseline": self.folder / "p",
            "on_event": self.events.append,
        } | options
        with tuned(self.store, **settings) as publisher:
            return [publisher.publish(state).root for state in states]

    def sync(self, *targets: int | None, **options: Any) -> str:
        settings: dict[str, Any] = {
            "stream": "policy",
            "state": self.folder / "s",
            "on_event": self.events.append,
        } | options
        with Subscriber(options.pop("store", self.store), **settings) as worker:
            for target in targets or (None,):
                update = worker.sync(target)
                if update:
                    update.acknowledge()
                del update
            return worker.root

    def fetched(self, work: Callable[[], Any]) -> tuple[Any, list[str]]:
        """What ``work()`` returns, and the payloads that were read for it."""
        self.store.calls.clear()
        result = work()
        return result, [
            name for call, name in self.store.calls if call.startswith("get") and "payloads" in name
        ]

    def not_used(self) -> list[str]:
        return [
            e.reason
            for e in self.events
            if isinstance(e, FallbackUsed) and "the state in" in e.link
        ]

    def state_file(self, which: str) -> Path:
        (file,) = (self.folder / which).glob("state-*")
        return file


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def killed_at(point: str, work: Callable[[], Any]) -> None:
    """Runs ``work()`` in a process that is killed when it comes to ``point``."""

    def armed_work() -> None:
        with armed(point, kill):
            work()

    killed(armed_work)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], Any]) -> None:
    """Runs ``work()``, which kills it, in another process."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("remembers", [False, True])
def test_a_restart_downloads_nothing_but_what_is_new(
    rng: Rng, place: Place, remembers: bool
) -> None:
    states = [all_dtypes(rng) | policy(rng, 20_000)]
    states += [mutated(rng, states[0], 0.02)]
    states += [mutated(rng, states[1], 0.02), mutated(rng, states[1], 0.02)]
    found = place.publish(*states[:2], history=remembers)
    assert place.sync() == found[1]
    # Another version by another process, which finds the baseline where the first one left it.
    more, read = place.fetched(lambda: place.publish(*states[2:], history=remembers))
    assert not read
    assert [e.how for e in place.events if isinstance(e, BaselineRestored)] == ["kept"]
    assert found + more == roots(states)
    root, read = place.fetched(place.sync)
    assert (root, len(read), place.not_used()) == (more[1], 2, [])


BIG = 1 << 20


class Broken:
    """Of a first sync of a state of 12 MB: the bytes that were read, and what happens in the place
    of read ``at``."""

    def __init__(self, place: Place, rng: Rng) -> None:
        self.state = {f"w{k}": weights(rng, 3 * BIG // 4 + k) for k in range(8)} | policy(rng)
        self.root = place.publish(self.state, baseline=None, shard_bytes=3 * BIG)[0]
        self.read, self.at = 0, 0
        self.fail: Callable[[], None] | None = None
        place.store.damage = self.damage

    def damage(self, name: str, data: bytes) -> bytes:
        if "payloads" in name and len(data) > BIG:
            self.at -= 1
            if self.at == 0:
                if self.fail:
                    self.fail()
                raise StoreUnavailable("the connection broke")
            self.read += len(data)
        return data


@pytest.mark.parametrize("by_a_kill", [False, True])
def test_a_first_sync_goes_on_where_it_was_broken_off(
    rng: Rng, place: Place, by_a_kill: bool
) -> None:
    broken = Broken(place, rng)
    broken.at = 3
    if by_a_kill:
        broken.fail = kill
        killed(lambda: place.sync(threads=1))
    else:
        with (
            pytest.raises(StoreUnavailable),
            Subscriber(place.store, stream="policy", state=place.folder / "s") as one,
        ):
            one.sync()
    damaged = np.memmap(place.state_file("s"), np.uint8, "r+")
    damaged[-1 - BIG] ^= 1  # whatever it holds, in whatever part of it
    broken.read, broken.at, place.events[:] = 0, 0, []
    assert place.sync(threads=1) == broken.root
    (synced,) = [event for event in place.events if isinstance(event, Synced)]
    done = [
        event for event in place.events if isinstance(event, Progress) and event.stage == "restore"
    ]
    assert 3 * BIG < broken.read < 10 * BIG
    assert broken.read <= synced.fetched_bytes < broken.read + 2 * BIG
    assert done[-1].done == done[-1].total
    assert done[-1].total == sum(each.array.nbytes for each in broken.state.values())
    assert len([*(place.folder / "s").glob("state-*")]) == 1


@pytest.mark.parametrize("other", ["a state", "tensors", "a version of it"])
def test_what_was_broken_off_is_no_use_for_another_state(
    rng: Rng, place: Place, other: str
) -> None:
    broken = Broken(place, rng)
    broken.at = 3
    with pytest.raises(StoreUnavailable):
        place.sync(threads=1)
    if other == "a state":
        new = {
            name: weights(rng, each.array.size) if name[0] == "w" else each
            for name, each in broken.state.items()
        }
    elif other == "tensors":
        new = dict(list(broken.state.items())[2:])
    else:
        new = mutated(rng, broken.state, 0.0001)
    shutil.rmtree(place.folder / "store")
    root = place.publish(new, baseline=None)[0]
    assert place.sync() == root
    assert len([*(place.folder / "s").glob("state-*")]) == 1


def test_an_update_that_is_held_keeps_its_values_when_its_file_is_mapped_again(
    rng: Rng, place: Place
) -> None:
    """An apply and its undo fail half-way, so that the next sync begins with what is kept: the held
    update's file."""

    def fail() -> None:
        raise MemoryError

    states = history(rng, 2)
    place.publish(states[0])
    with Subscriber(place.store, stream="policy", state=place.folder / "s") as worker:
        held = worker.sync()
        assert held
        values = [tensor.values.copy() for tensor in held.tensors]
        root = place.publish(states[1])[0]
        with armed("apply.written", fail), armed("apply.undo", fail), pytest.raises(MemoryError):
            worker.sync()
        assert worker.sync()
        assert worker.root == root
        for tensor, value in zip(held.tensors, values, strict=True):
            assert np.array_equal(tensor.values, value)


def test_what_is_kept_is_new_to_a_model_that_starts(rng: Rng, place: Place) -> None:
    place.publish(*history(rng, 2))
    place.sync()
    with Subscriber(place.store, stream="policy", state=place.folder / "s") as worker:
        update = worker.sync()
        assert update
        assert (update.full, update.version, update.payload_bytes) == (True, 1, 0)
        update.acknowledge()
        assert worker.sync() is None


@pytest.mark.parametrize("point", ["apply.written", "apply.moved", "apply.after"])
@pytest.mark.parametrize("restored", [False, True])
def test_a_worker_killed_in_an_apply_downloads_one_patch(
    rng: Rng, place: Place, point: str, restored: bool
) -> None:
    expected = place.publish(*history(rng, 3))
    if not restored:
        place.sync(0)
    killed_at(point, lambda: place.sync(*([0, 1] if restored else [1])))
    root, read = place.fetched(place.sync)
    assert (root, place.not_used()) == (expected[2], [])
    assert len(read) <= 2


@pytest.mark.parametrize(
    "point", ["baseline.before", "baseline.written", "commit.before", "commit.after"]
)
def test_a_publisher_killed_in_a_commit_goes_on(rng: Rng, place: Place, point: str) -> None:
    states = history(rng, 3)
    place.publish(states[0])
    killed_at(point, lambda: place.publish(states[1]))
    _, read = place.fetched(lambda: place.publish(states[2]))
    assert place.not_used() == []
    assert len(read) == (point != "commit.before")  # the patch of the version that was committed
    assert place.sync() == roots(states)[2]


def test_a_failed_apply_and_a_kill_after_it_leave_the_version_before(
    rng: Rng, place: Place
) -> None:
    expected = place.publish(*history(rng, 2))
    place.sync(0)

    def fail() -> None:
        raise RuntimeError("an error between the writes and the root")

    def work() -> None:
        with armed("apply.written", fail):
            place.sync(1)

    killed_at("apply.undo", work)
    assert (place.sync(), place.not_used()) == (expected[1], [])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda file: flip(file, -1),
    "its header": lambda file: flip(file, 20),
    "cut short": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "missing": lambda file: file.unlink(),
    "no record": lambda file: (file.parent / "pulse.state.json").write_text("{}"),
    "a record of another file": lambda file: edit(
        file, file.name.encode(), b"../../../../etc/passwd"
    ),
    "a record of another root": lambda file: edit(file, b'"root": "', b'"root": "00'),
    "a record of another version": lambda file: edit(file, b'"version": 1', b'"version": 0'),
    "a record of a version that is not there": lambda file: edit(
        file, b'"version": 1', b'"version": 9'
    ),
    "a record of another stream": lambda file: edit(file, b'"policy"', b'"other"'),
    "a record of another stream ID": lambda file: edit(file, b'"stream_id": "', b'"stream_id": "0'),
}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def poke(file: Path) -> None:
    """Changes a byte in place, as it is mapped."""
    np.memmap(file, np.uint8, "r+")[-9] ^= 64


def edit(file: Path, old: bytes, new: bytes) -> None:
    record = file.parent / "pulse.state.json"
    data = record.read_bytes()
    assert old in data
    record.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_not_used(rng: Rng, place: Place, damage: str) -> None:
    states = history(rng, 3)
    place.publish(*states[:2])
    place.sync()
    for which in ("p", "s"):
        DAMAGE[damage](place.state_file(which))
    expected = place.publish(states[2])
    assert place.sync() == expected[0] == roots(states)[2]
    unreadable = damage in ("no record", "a record of another file", "a record of another root")
    assert len(place.not_used()) == (0 if unreadable else 2)
    # Each folder has one state again, and that is used.
    assert (place.sync(), len(list(place.folder.glob("*/state-*")))) == (expected[0], 2)


@pytest.mark.parametrize("hand_out", ["state", "full_update", "save", "several", "a patch fails"])
def test_what_the_disk_changes_meanwhile_is_restored(rng: Rng, place: Place, hand_out: str) -> None:
    states = history(rng, 4)
    with (
        tuned(place.store, stream="policy") as publisher,
        Subscriber(
            place.store, stream="policy", state=place.folder / "s", on_event=place.events.append
        ) as worker,
    ):
        for state in states[:2]:
            publisher.publish(state)
            update = present(worker.sync())
            if hand_out != "several":
                update.acknowledge()
            del update
        poke(place.state_file("s"))
        update, newest = None, 1
        if hand_out == "full_update":
            update = worker.full_update()
        elif hand_out == "save":
            worker.save(place.folder / "out")
            assert state_root(place.folder / "out") == roots(states)[1]
        elif hand_out == "state":
            assert state_root(worker.state) == roots(states)[1]
        else:
            newest = 2
            publisher.publish(states[2])
            update = present(worker.sync())
            assert update.full
        if update is not None:
            expected = State.of(states[newest])
            for each in update.tensors:
                assert np.array_equal(each.values, expected.read(each.spec.name))
        assert worker.root == roots(states)[newest] == state_root(worker.state)
        assert [e for e in place.events if isinstance(e, FallbackUsed)]


def survives(work: Callable[[], Any]) -> None:
    """Runs ``work()`` in another process, which SIGBUS may end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("length", [0, 8192])
@pytest.mark.parametrize("hand_out", ["state", "save", "sync"])
def test_a_state_whose_file_is_cut_is_restored(
    rng: Rng, place: Place, hand_out: str, length: int
) -> None:
    states = history(rng, 3, elements=50_000)
    options: dict[str, Any] = {"state": place.folder / "s", "on_event": place.events.append}

    def work() -> None:
        with (
            tuned(place.store, stream="policy") as publisher,
            Subscriber(place.store, stream="policy", **options) as worker,
        ):
            publisher.publish(states[0])
            present(worker.sync()).acknowledge()
            os.truncate(place.state_file("s"), length)
            if hand_out == "save":
                worker.save(place.folder / "out")
                assert state_root(place.folder / "out") == roots(states)[0]
            elif hand_out == "state":
                assert state_root(worker.state) == roots(states)[0]
            else:
                publisher.publish(states[1])
                assert present(worker.sync()).full
                assert state_root(worker.state) == roots(states)[1]
            assert [e for e in place.events if isinstance(e, FallbackUsed)]
        # The file that was restored is found by the next process.
        assert place.fetched(place.sync) == (roots(states)[hand_out == "sync"], [])

    survives(work)


def test_a_baseline_whose_file_is_cut_is_not_used(rng: Rng, place: Place) -> None:
    states = history(rng, 3, elements=50_000)

    def work() -> None:
        with tuned(place.store, stream="policy", baseline=place.folder / "p") as publisher:
            publisher.publish(states[0])
            os.truncate(place.state_file("p"), 8192)
            assert "changed on the disk" in publisher.publish(states[1]).reason
            assert publisher.publish(states[2]).patch_bytes
        found = [each.root for each in verify_stream(place.store, "policy") if each.ok]
        assert found == roots(states)

    survives(work)


def test_no_patch_is_coded_against_a_baseline_that_the_disk_has_changed(
    rng: Rng, place: Place
) -> None:
    states = history(rng, 4)
    with tuned(place.store, stream="policy", baseline=place.folder / "p") as publisher:
        publisher.publish(states[0])
        poke(place.state_file("p"))
        assert "changed on the disk" in publisher.publish(states[1]).reason
        assert publisher.publish(states[2]).patch_bytes
    found = [each.root for each in verify_stream(place.store, "policy") if each.ok]
    assert found == roots(states)[:3]


def test_a_stream_that_was_recreated_is_not_taken_for_the_old_one(rng: Rng, place: Place) -> None:
    place.publish(*history(rng, 2))
    place.sync()
    shutil.rmtree(place.folder / "store")
    other = history(rng, 3)
    place.publish(*other)
    assert place.sync() == roots(other)[2]
    assert len(place.not_used()) == 1  # the subscriber's; a publisher begins anew in an empty store


def test_a_stream_that_is_recreated_meanwhile_takes_the_place_of_the_old_one(
    rng: Rng, place: Place
) -> None:
    place.publish(*history(rng, 2))
    state = place.folder / "s"
    with Subscriber(place.store, stream="policy", state=state) as worker:
        worker.allow_recreated = True
        worker.sync()
        shutil.rmtree(place.folder / "store")
        other = history(rng, 3)
        place.publish(*other)
        reach(worker, roots(other)[2])
    assert place.sync() == roots(other)[2]
    assert place.not_used() == []


def test_another_set_of_tensors_takes_the_place_of_the_old_one(rng: Rng, place: Place) -> None:
    states = history(rng, 2)
    states += [{"other.weight": weights(rng, 50, 10)}]
    with tuned(place.store, stream="policy", baseline=place.folder / "p") as publisher:
        expected = [publisher.publish(state).root for state in states]
        assert place.sync(1, 2) == expected[2]
        assert place.state_file("p")
    assert place.sync() == place.publish(states[2])[0] == expected[2]
    assert place.not_used() == []


def test_an_update_that_is_held_keeps_its_values(rng: Rng, place: Place) -> None:
    """The state moves in a copy, which is found again."""
    states = history(rng, 3)
    place.publish(*states)
    with Subscriber(place.store, stream="policy", state=place.folder / "s") as worker:
        held = worker.sync(0)
        assert held
        held.acknowledge()
        worker.sync(1)
        values = {tensor.spec.name: tensor.values for tensor in held.tensors}
        for name, tensor in states[0].items():
            assert np.array_equal(values[name], tensor.array.reshape(-1)), name
        assert place.state_file("s")
    root, read = place.fetched(place.sync)
    assert (root, len(read)) == (roots(states)[2], 1)


@pytest.mark.parametrize("what", ["a file", "a folder with files"])
def test_what_is_not_ours_is_left_alone(place: Place, what: str) -> None:
    for which, kind in (("p", Publisher), ("s", Subscriber)):
        other = place.folder / which
        if what == "a file":
            other.write_text("theirs")
        else:
            other.mkdir()
            (other / "state-1.safetensors").write_text("theirs")
        argument: Any = {"baseline" if kind is Publisher else "state": other}
        with pytest.raises(InputError, match=r"no folder|holds other files") as caught:
            kind(place.store, stream="policy", **argument)
        assert "folder of its own" in caught.value.hint
        assert (
            other if what == "a file" else other / "state-1.safetensors"
        ).read_text() == "theirs"


def test_a_second_user_is_refused(rng: Rng, place: Place) -> None:
    states = history(rng, 2)
    place.publish(states[0])
    with Subscriber(place.store, stream="policy", state=place.folder / "s"):
        pass
    for theirs in ("state-dict.pt", "history-of-runs.txt"):  # put there by somebody
        (place.folder / "s" / theirs).write_text("theirs")
    with Subscriber(place.store, stream="policy", state=place.folder / "s") as worker:
        worker.sync()
        assert {"state-dict.pt", "history-of-runs.txt"} <= set(os.listdir(place.folder / "s"))
        child = os.fork()  # another process
        if not child:
            try:
                place.sync()
            except ConcurrentUse as error:
                os._exit(0 if str(os.getppid()) in str(error) and "state=" in error.hint else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(ConcurrentUse):  # another object of this one
            place.sync()
        place.publish(states[1])
        worker.sync()
        # What was closed may be used by others, and by the same object again.
        worker.close()
        assert place.sync() == roots(states)[1]
        reach(worker, roots(states)[1])


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_before_a_state_is_written(
    rng: Rng, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = history(rng, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreFull, match="no space left to map"):
            place.publish(states[0])
    place.publish(*states)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreFull, match="no space left to map"):
            place.sync()
    assert place.sync() == roots(states)[1]
    assert len(list(place.folder.glob("*/state-*"))) == 2


@pytest.mark.parametrize("call", ["pwritev", "replace"])
def test_where_no_note_can_be_made_the_work_goes_on(
    rng: Rng, place: Place, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Only the next start costs a download."""
    states = history(rng, 4)
    place.publish(states[0])
    place.sync()
    with monkeypatch.context() as patched:
        real = getattr(os, call)
        own = "pulse.state.json"
        patched.setattr(
            os,
            call,
            full if call == "pwritev" else lambda a, b: full() if own in str(b) else real(a, b),
        )
        place.publish(*states[1:3])
        assert place.sync() == roots(states)[2]
    place.publish(states[3])
    assert place.sync() == roots(states)[3]


def test_the_folder_must_be_writable(place: Place) -> None:
    with pytest.raises(StoreError, match="cannot use the folder") as caught:
        Subscriber(place.store, stream="policy", state="/proc/self/pulse")
    assert caught.value.hint
    with pytest.raises(InputError, match="select and state"):
        Subscriber(place.store, stream="policy", state=place.folder / "s", select="a")


def test_a_first_version_is_stored_while_it_is_copied(rng: Rng, place: Place) -> None:
    state = {f"layers.{k}.weight": weights(rng, 3000, 4000) for k in range(2)}
    (root,) = place.publish(state, shard_bytes=1 << 20, threads=1)
    stages = [e.stage for e in place.events if isinstance(e, Progress)]
    assert stages.index("upload") < len(stages) - 1 - stages[::-1].index("digest")
    assert place.sync() == root == roots([state])[0]
