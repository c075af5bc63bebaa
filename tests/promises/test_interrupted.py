"""A store client that repeats a lost request commits every version once. Failing calls, kills and
replaced trainers: tests/sync/test_outages.py."""

from __future__ import annotations

from pulse_rl import MemoryStore, Publisher, verify_stream
from pulse_rl.errors import AlreadyExists

from .oracle import STREAM, Trainer, publish


def test_a_client_that_repeats_a_create_meets_its_own_object() -> None:
    """After a lost reply it reports that the object exists, which is its own."""

    class Repeats(MemoryStore):
        def put_new(self, name: str, data: bytes) -> None:
            super().put_new(name, data)
            raise AlreadyExists(f"{name} already exists")

    store, trainer = Repeats(), Trainer(elements=600)
    with Publisher(store, stream=STREAM, threads=1) as publisher:
        roots = publish(publisher, trainer, 3)
    reports = list(verify_stream(store, STREAM, threads=1))
    assert [(report.root, report.problems) for report in reports] == [(root, ()) for root in roots]
