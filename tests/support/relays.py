"""Relays under test: what they read, and what they show."""

from __future__ import annotations

from benchmarks.counted import CountedStore
from pulse_rl import MemoryStore, Store, Subscriber, verify_stream


class Counted(CountedStore):
    """A store in memory that counts what is read of it."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())


def newest_root(store: Store, stream: str = "policy", **options: object) -> str:
    reader = Subscriber(store, stream=stream, threads=1, **options)  # type: ignore[arg-type]
    reader.sync()
    return reader.root


def assert_whole(store: Store, stream: str = "policy") -> None:
    """Every version that is shown can be reached, and every manifest that is there is right."""
    reports = list(verify_stream(store, stream, threads=1))
    assert reports
    assert [report.problems for report in reports if not report.ok] == []
