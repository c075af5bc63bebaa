"""Whatever becomes of the objects in a store: a worker shows a verified state or says why not,
never a wrong one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, Store
from pulse_rl.errors import PulseError
from tests.support.lying_store import LyingStore
from tests.support.publishers import FoldingPublisher

from .oracle import STREAM, Trainer, Worker, copied, objects, publish


def flip(data: bytes, chance: Random) -> bytes | None:
    at = chance.randrange(len(data)) if data else 0
    return (
        data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if data else b"x"
    )


def cut(data: bytes, chance: Random) -> bytes | None:
    return data[: chance.randrange(len(data))] if data else None


def delete(data: bytes, chance: Random) -> bytes | None:
    return None


def junk(data: bytes, chance: Random) -> bytes | None:
    return chance.randbytes(chance.choice((1, 40, 5000)))


def link_to_a_file(path: Path) -> None:
    path.symlink_to("/etc/hostname")


Harm = Callable[[bytes, Random], bytes | None]
HARMS: list[Harm] = [flip, cut, delete, junk]


def stream(versions: int = 5) -> tuple[MemoryStore, list[str]]:
    store, trainer = MemoryStore(), Trainer(elements=600)
    with FoldingPublisher(
        store, stream=STREAM, folds=(2, 4), anchor_ratio=0.2, threads=1
    ) as publisher:
        return store, publish(publisher, trainer, versions)


def require_right_bits(store: Store, roots: list[str]) -> None:
    """Newcomers at each version get its very bits or an error of the library's."""
    for target in (*range(len(roots)), None):
        newcomer = Worker(store)
        try:
            newcomer.sync(target)
        except PulseError:
            continue
        if newcomer.subscriber.version is not None:
            assert newcomer.root == roots[newcomer.subscriber.version]


def require_goes_on(publisher: Publisher, store: Store, trainer: Trainer) -> None:
    publish(publisher, trainer)
    publish(publisher, trainer, anchor=True)
    late = Worker(store)
    late.reach(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: str(harm.__name__))
def test_any_object_may_be_harmed(harm: Harm) -> None:
    """One after another."""
    store, roots = stream()
    chance = Random(5)
    for name, data in objects(store).items():
        harmed = copied(store, MemoryStore())
        if (now := harm(data, chance)) is None:
            harmed.delete(name)
        else:
            harmed.put(name, now)
        require_right_bits(harmed, roots)
        with Publisher(harmed, stream=STREAM, threads=1) as publisher:
            require_goes_on(publisher, harmed, Trainer(seed=9, elements=600))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, link_to_a_file], ids=lambda m: m.__name__)
def test_a_folder_a_pipe_or_a_link_may_stand_in_the_place_of_any_object(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    store, roots = stream(versions=3)
    for number, name in enumerate(objects(store)):
        odd, trainer = copied(store, LocalStore(tmp_path / str(number))), Trainer(9, elements=600)
        with Publisher(odd, stream=STREAM, threads=1) as publisher:
            now = roots + publish(publisher, trainer)
            odd.delete(name)
            make(odd.root / name)
            require_right_bits(odd, now)
            require_goes_on(publisher, odd, trainer)


def test_a_link_that_is_damaged_is_fetched_again(store: Store) -> None:
    """What arrives damaged once, as over a bad line, is asked for once more."""
    trainer = Trainer()
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer, 3)

    def bad(liar: LyingStore[MemoryStore], name: str, right: Callable[[], bytes]) -> bytes:
        if "/payloads/" in name:
            liar.tell()
            return bytes(len(right()))
        return right()

    line = LyingStore(copied(store, MemoryStore()), "get", bad)
    worker = Worker(line)
    worker.sync()
    assert (worker.root, line.call) == (trainer.root, "")


def test_junk_in_every_folder_is_passed_over(store: Store) -> None:
    trainer, worker, chance = Trainer(), Worker(store), Random(2)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer, 3)
        worker.sync()
        for name in objects(store):
            folder, _, last = name.rpartition("/")
            store.put(f"{folder}/junk-{chance.getrandbits(32)}", b"junk")
            stem, dot, end = last.partition(".")
            store.put(
                f"{folder}/{int(stem) + 5:012d}{dot}{end}" if stem.isdigit() else f"{name}x",
                chance.randbytes(9),
            )
        publish(publisher, trainer)
        worker.reach(trainer)
    with Publisher(store, stream=STREAM) as publisher:
        publish(publisher, trainer)
    for each in (worker, Worker(store)):
        each.reach(trainer)
