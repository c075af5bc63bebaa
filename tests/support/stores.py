"""Stores for tests: clients of an S3 server and of none, and a wrapper that fails exactly where a
test wants it to."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from pulse_rl import MemoryStore, Store, open_store
from pulse_rl.errors import StoreUnavailable
from pulse_rl.store import Data, ObjectInfo

T = TypeVar("T")
KEYS: dict[str, Any] = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


def s3_store(endpoint: str, prefix: str) -> Store:
    """Objects below ``prefix`` in the bucket of the ``s3`` fixture."""
    return open_store(
        f"s3://bucket/{prefix}", endpoint=endpoint, client_options={"allow_http": True}, **KEYS
    )


def unreachable_store(**keys: str) -> Store:
    """A client of an address on loopback at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    options: dict[str, Any] = {"client_options": {"allow_http": True}, "retry_config": retry}
    return open_store(
        "s3://bucket/x",
        endpoint=f"http://127.0.0.1:{port}",
        retry_timeout=0.1,
        **(KEYS | keys),
        **options,
    )


def names(store: Store, folder: str, start_after: str | None = None) -> list[str]:
    return [info.name for info in store.list(folder, start_after)]


def digest_of(name: str) -> str | None:
    """The SHA-256 that the name of a payload promises."""
    folder, _, last = name.rpartition("/")
    return last.partition(".")[0] if folder.endswith("/payloads") else None


class GatedStore(MemoryStore):
    """Writes of payloads wait while the gate is shut, and say so; it can also be away."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.gate.set()
        self.away = False

    def put(self, name: str, data: Data) -> None:
        if "/payloads/" in name and not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(20)
        self._reach()
        super().put(name, data)

    def list(self, *args: Any, **settings: Any) -> Any:
        self._reach()
        return super().list(*args, **settings)

    def _reach(self) -> None:
        if self.away:
            raise StoreUnavailable("away")


class FaultyStore:
    """A store whose calls are counted and fail on demand.

    ``calls`` lists (call, name) since the last `fail`; ``fired`` tells whether that failure came.
    ``damage`` gets every (name, bytes) that is read and answers what arrives. ``hidden`` are names
    that no list shows.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self.damage: Callable[[str, bytes], bytes] = lambda name, data: data
        self.hidden: set[str] = set()
        self.fired = False
        self._fail_at: int | None = None
        self._fail_on: tuple[str, str] | None = None
        self._after = False

    def fail(self, at: int, *, after: bool = False) -> None:
        """The call number ``at`` from now on (0: the next) raises StoreUnavailable, once: before it
        has any effect, or ``after`` it took effect, as when the reply is lost."""
        self.calls.clear()
        self._fail_at, self._fail_on, self._after, self.fired = at, None, after, False

    def fail_on(self, call: str, folder: str, *, after: bool = False) -> None:
        """Like `fail`, for the next such call on a name with ``folder`` in it."""
        self.calls.clear()
        self._fail_at, self._fail_on, self._after, self.fired = (
            None,
            (call, f"/{folder}/"),
            after,
            False,
        )

    def heal(self) -> None:
        """The failure that did not come yet does not come any more."""
        self._fail_at = self._fail_on = None

    def _due(self, call: str, name: str) -> bool:
        if self._fail_on:
            return call == self._fail_on[0] and self._fail_on[1] in name
        return self._fail_at is not None and len(self.calls) > self._fail_at

    def _call(self, call: str, name: str, act: Callable[[], T]) -> T:
        self.calls.append((call, name))
        if not self._due(call, name):
            return act()
        self._fail_at, self._fail_on, self.fired = None, None, True
        if self._after:
            act()
        raise StoreUnavailable(f"{call} {name}: the connection broke")

    def put(self, name: str, data: Data) -> None:
        self._call("put", name, lambda: self.inner.put(name, data))

    def put_new(self, name: str, data: bytes) -> None:
        self._call("put_new", name, lambda: self.inner.put_new(name, data))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._call("get", name, lambda: self.damage(name, self.inner.get(name, start, stop)))

    def head(self, name: str) -> ObjectInfo:
        return self._call("head", name, lambda: self.inner.head(name))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        found = self._call("list", folder, lambda: tuple(self.inner.list(folder, start_after)))
        return (info for info in found if info.name not in self.hidden)

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda: self.inner.delete(name))


def requests(store: FaultyStore, reader: Any) -> Counter[str]:
    """What a ``sync`` asks of the store: how often each call, and on which folder of the stream."""
    store.calls.clear()
    reader.sync()
    return Counter(f"{call} {name.split('/')[1]}" for call, name in store.calls)
