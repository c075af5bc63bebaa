"""Stores of the Hugging Face Hub: a repository that is read, and a bucket behind its S3 gateway."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pulse_rl import LocalStore, Publisher, Store, Subscriber, open_store
from pulse_rl.errors import AlreadyExists, InputError, StoreError, StoreUnavailable
from pulse_rl.stores.hub import HubStore
from pulse_rl.testing import StoreConformance
from tests.support.http import ServedStore
from tests.support.hub import TOKEN, gateway, repository, send, serving
from tests.support.stores import KEYS

counter = itertools.count()


class TestRepository(StoreConformance):
    """What others write into the repository's folder."""

    many_objects: ClassVar[int] = 103
    test_the_time_of_writing: Any = None

    @pytest.fixture(autouse=True)
    def server(self, tmp_path: Path) -> Iterator[None]:
        self.root = tmp_path
        with serving(repository(tmp_path)) as self.url:
            yield

    def new_store(self) -> Store:
        return self._of(f"store-{next(counter)}")

    def peer_of(self, store: Store) -> Store:
        assert isinstance(store, ServedStore)
        return self._of(store.folder.root.name)

    def _of(self, folder: str) -> Store:
        reader: Any = open_store(f"hf://team/policy/{folder}", endpoint=self.url, token=TOKEN)
        assert repr(reader).startswith("HubStore")
        return ServedStore(LocalStore(self.root / folder), reader)

    def test_a_stream_is_followed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", self.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        state = {"w": np.arange(5000, dtype=np.float16)}
        address = "hf://models/team/policy@main/run"
        with (
            Publisher(self.root / "run", stream="s") as publisher,
            Subscriber(address, stream="s") as worker,
        ):
            for step in range(3):
                state["w"][step] += 100
                publisher.publish(state)
                update = worker.sync()
                assert update.version == step
                update.acknowledge()
            with pytest.raises(StoreError, match="for readers"):
                Publisher(address, stream="s").publish(state)
        with pytest.raises(StoreError, match="is not there"):
            Subscriber("hf://team/other/run", stream="s").sync()
        monkeypatch.setenv("HF_TOKEN", "another")
        with pytest.raises(StoreError, match="not allowed"):
            Subscriber(address, stream="s").sync()


@pytest.mark.slow
def test_a_bucket_is_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_access_key"])
    with serving(gateway(s3)) as endpoint:
        address = f"hf://buckets/team/bucket/hub/run?endpoint={endpoint}"
        with Publisher(address, stream="s") as publisher, Subscriber(address, stream="s") as worker:
            publisher.publish({"w": np.ones(100, np.float16)})
            worker.sync()
            assert worker.version == 0
        store = open_store(address)
        with pytest.raises(AlreadyExists):
            store.put_new("s/versions/000000000000.json", b"another")
        assert {each.name.partition("/")[0] for each in store.list("")} == {"s"}


@pytest.mark.parametrize(
    "address", ["hf://team", "hf://spaces/team/x", "hf://buckets/team", "hf:/team/policy", "hf://"]
)
def test_addresses_that_are_refused(address: str) -> None:
    with pytest.raises(InputError):
        open_store(address)


def test_an_endpoint_holds_no_call_for_long(tmp_path: Path) -> None:
    """It drips a listing, lists pages without end, nests JSON, and has lengths of 400 digits."""
    entry = f'[{{"type": "file", "path": "a", "size": {"9" * 400}}}]'.encode()

    def drip(request: Any) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n")
        with suppress(OSError):
            while True:
                request.wfile.write(b" ")
                time.sleep(0.02)

    for answer, outcome in (
        (drip, StoreUnavailable),
        (
            lambda r: send(r, 200, b'[{"type": "directory"}]', Link='<?a>; rel="next"'),
            StoreUnavailable,
        ),
        (lambda r: send(r, 200, b"[" * 100_000), StoreError),
        (lambda r: send(r, 200, entry, X_Linked_Size="9" * 400), None),
        (lambda r: send(r, 302, Location="ftp://127.0.0.1:9/"), StoreUnavailable),
        (lambda r: send(r, 302, Location="http://[x"), StoreUnavailable),
    ):
        with serving(answer) as url:
            # What ends of itself gets time, however busy the machine is.
            seconds = 0.2 if outcome is StoreUnavailable else 60.0
            store = HubStore(
                "hf://team/policy", endpoint=url, timeout_seconds=seconds, retry_timeout=seconds
            )
            if outcome is None:
                assert list(store.list("")) == []
                with pytest.raises(StoreError, match="how long"):
                    store.head("a")
                continue
            with pytest.raises(outcome):
                list(store.list(""))


def test_a_body_that_breaks_off_is_asked_for_again() -> None:
    asked: list[str] = []

    def answer(request: Any) -> None:
        asked.append(request.path)
        if len(asked) == 1:
            request.close_connection = True
            request.wfile.write(b"HTTP/1.1 206 Partial\r\nContent-Length: 10\r\n\r\n0123")
        else:
            send(request, 206, b"0123456789", X_Linked_Size="99")

    with serving(answer) as url:
        store = HubStore("hf://team/policy", endpoint=url, retry_timeout=20)
        assert store.get("a", 5, 15) == b"0123456789"
    assert len(asked) == 3, "the range, how long the object is, the range again"
