"""Every store of this library against the suite that it offers to others, and what is built on any
store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from pulse_rl import LocalStore, MemoryStore, Store, open_store
from pulse_rl.stores.server import FolderServer
from pulse_rl.testing import StoreConformance
from tests.support.http import ServedStore
from tests.support.stores import s3_store

counter = itertools.count()


class OwnStore(StoreConformance):
    many_objects: ClassVar[int] = 103  # a store in this process has no pages

    def test_put_takes_the_memory_of_arrays(self) -> None:
        store = self.new_store()
        store.put("a/b", [np.arange(3, dtype="u1").data, np.arange(2, dtype="<u2").view("u1").data])
        assert store.get("a/b") == bytes([0, 1, 2, 0, 0, 1, 0])


class TestLocalStore(OwnStore):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def new_store(self) -> Store:
        store = open_store(self.root / f"store-{next(counter)}")
        assert isinstance(store, LocalStore)
        return store

    def peer_of(self, store: Store) -> Store:
        assert isinstance(store, LocalStore)
        return LocalStore(store.root)


class TestMemoryStore(OwnStore):
    def new_store(self) -> Store:
        store = open_store("memory://")
        assert isinstance(store, MemoryStore)
        return store


@pytest.mark.slow
class TestServedStore(OwnStore):
    """A folder that is read over HTTP."""

    many_objects: ClassVar[int] = 1003

    @pytest.fixture(autouse=True)
    def server(self, tmp_path: Path) -> Iterator[None]:
        self.root = tmp_path
        with FolderServer(tmp_path) as server:
            self.url = server.url
            yield

    def new_store(self) -> Store:
        folder = f"store-{next(counter)}"
        reader = open_store(f"{self.url}/{folder}/")
        assert repr(reader).startswith("HttpStore")
        return ServedStore(LocalStore(self.root / folder), reader)

    def peer_of(self, store: Store) -> Store:
        assert isinstance(store, ServedStore)
        return ServedStore(store.folder, open_store(f"{self.url}/{store.folder.root.name}"))


@pytest.mark.slow
class TestObjectStore(OwnStore):
    """S3's protocol."""

    many_objects: ClassVar[int] = 1003

    @pytest.fixture(autouse=True)
    def server(self, s3: str) -> None:
        self.endpoint = s3
        self.prefix = f"conformance/{next(counter)}"

    def new_store(self) -> Store:
        store = s3_store(self.endpoint, self.prefix)
        assert repr(store).startswith("ObjectStore")
        return store

    def peer_of(self, store: Store) -> Store:
        return s3_store(self.endpoint, self.prefix)
