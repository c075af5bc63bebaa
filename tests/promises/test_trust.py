"""With keys, nothing is believed that a trusted one has not signed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from pulse_rl import MemoryStore, Publisher, Signer, Store
from pulse_rl.errors import PulseError

from .oracle import STREAM, Trainer, Worker, copied, objects, publish

OURS, THEIRS = Signer(bytes(range(32))), Signer(bytes(range(1, 33)))
TRUST: dict[str, Any] = {"trusted_keys": [OURS.public_key]}


def shown(store: Store) -> str | None:
    """The root that a worker with our key shows, None if it shows none."""
    worker = Worker(store, **TRUST)
    with suppress(PulseError):
        worker.sync()
    return worker.root if worker.subscriber.version is not None else None


@pytest.mark.parametrize("signer", [None, THEIRS], ids=["unsigned", "another key"])
def test_versions_of_others_above_ours_are_passed_over(signer: Signer | None) -> None:
    """Somebody continues the stream in a copy, and puts what came of it into ours."""
    store, trainer = MemoryStore(), Trainer(1)
    with Publisher(store, stream=STREAM, signer=OURS) as publisher:
        publish(publisher, trainer, 2)
        other = copied(store, MemoryStore())
        with Publisher(other, stream=STREAM, signer=signer) as forger:
            publish(forger, Trainer(2), 2)
        for name, data in objects(other).items():
            if name not in objects(store):
                store.put(name, data)
        assert shown(store) == trainer.root
        publish(publisher, trainer)
    assert shown(store) == trainer.root


def test_a_stream_of_another_name_cannot_be_replayed() -> None:
    trainer, other, store = Trainer(1), MemoryStore(), MemoryStore()
    with Publisher(other, stream="other", signer=OURS) as publisher:
        publish(publisher, trainer, 3)
    for info in other.list("other"):
        store.put(info.name.replace("other/", f"{STREAM}/", 1), other.get(info.name))
    assert shown(store) is None


def test_an_older_version_cannot_be_shown_as_a_newer_one() -> None:
    store, trainer = MemoryStore(), Trainer(1)
    with Publisher(store, stream=STREAM, signer=OURS) as publisher:
        roots = publish(publisher, trainer, 3)
    (first,) = [
        name
        for name in objects(store)
        if "/versions/" in name and int(name.rpartition("/")[2][:12]) == 0
    ]
    for number in (1, 2, 3, 9):
        store.put(first.replace("0" * 12, f"{number:012d}"), store.get(first))
    assert shown(store) == roots[0]
