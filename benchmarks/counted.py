"""What is asked of a store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from pulse_rl import Store
from pulse_rl.store import Data, ObjectInfo


class CountedStore:
    """``store``; ``count``: requests by call, the "bytes" that were read and the names "listed";
    ``read``: the bytes of each object."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.count, self.read = Counter[str](), Counter[str]()
        self.lock = threading.Lock()

    def _note(self, call: str) -> None:
        with self.lock:
            self.count[call] += 1

    def put(self, name: str, data: Data) -> None:
        self._note("put")
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self._note("put")
        self.store.put_new(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self.store.get(name, start, stop)
        with self.lock:
            self.count.update({"get": 1, "bytes": len(data)})
            self.read[name] += len(data)
        return data

    def head(self, name: str) -> ObjectInfo:
        self._note("head")
        return self.store.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        self._note("list")
        return map(self._listed, self.store.list(folder, start_after))

    def _listed(self, info: ObjectInfo) -> ObjectInfo:
        self._note("listed")
        return info

    def delete(self, name: str) -> None:
        self._note("delete")
        self.store.delete(name)

    def reset(self) -> None:
        self.count.clear()
        self.read.clear()

    @property
    def requests(self) -> int:
        """Of all calls."""
        return sum(self.count[call] for call in ("put", "get", "head", "list", "delete"))

    def payloads_read(self) -> dict[str, int]:
        """The bytes read of each payload."""
        return {name: nbytes for name, nbytes in self.read.items() if "/payloads/" in name}

    def payload_bytes(self) -> int:
        return sum(self.payloads_read().values())
