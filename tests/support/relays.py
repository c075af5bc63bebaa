"""Relays under test: what they read, and what they show."""

from __future__ import annotations

from collections import Counter

from pulse_rl import MemoryStore, Store, Subscriber, verify_stream


class Counted(MemoryStore):
    """Counts the bytes that are read of each object."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().get(name, start, stop)
        self.read[name] += len(data)
        return data

    def payload_bytes(self) -> int:
        return sum(self.payloads_read().values())

    def payloads_read(self) -> dict[str, int]:
        return {name: nbytes for name, nbytes in self.read.items() if "/payloads/" in name}


def newest_root(store: Store, stream: str = "policy", **options: object) -> str:
    reader = Subscriber(store, stream=stream, threads=1, **options)  # type: ignore[arg-type]
    reader.sync()
    return reader.root


def assert_whole(store: Store, stream: str = "policy") -> None:
    """Every version that is shown can be reached, and every manifest that is there is right."""
    reports = list(verify_stream(store, stream, threads=1))
    assert reports
    assert [report.problems for report in reports if not report.ok] == []
