"""A subscriber with a cache folder downloads each payload once, whatever happens to the folder. And
what a store is to Pulse beside its six calls: created or found to be there."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from pulse_rl import MemoryStore, Publisher, Store, Subscriber, open_store, state_root
from pulse_rl.store import ObjectInfo
from pulse_rl.store.base import create_or_confirm
from pulse_rl.stores.cached import CachedStore
from tests.store.test_conformance import OwnStore
from tests.support.relays import Counted
from tests.support.states import TinyTrainer, reach
from tests.support.stores import digest_of, s3_store

counter = itertools.count()


class TestCachedStore(OwnStore):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.root = tmp_path
        self.inner = MemoryStore()

    def new_store(self) -> Store:
        return CachedStore(self.inner, self.root / "cache", digest_of)

    def peer_of(self, store: Store) -> Store:
        return CachedStore(self.inner, self.root / f"cache-{next(counter)}", digest_of)


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.slow), "folder"])
def test_create_or_confirm(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = (
        s3_store(request.getfixturevalue("s3"), "confirmed")
        if kind == "s3"
        else open_store(tmp_path)
    )
    store = open_store("memory://") if kind == "memory" else store
    assert create_or_confirm(store, "a/b", b"mine")
    assert create_or_confirm(store, "a/b", b"mine"), "its own object is success"
    assert not create_or_confirm(store, "a/b", b"other")
    assert store.get("a/b") == b"mine"


def stream(versions: int = 5) -> tuple[Counted, TinyTrainer, Publisher]:
    store, trainer = Counted(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    trainer.publish(publisher, versions)
    store.read.clear()
    return store, trainer, publisher


def test_a_restart_downloads_only_what_is_new(tmp_path: Path) -> None:
    store, trainer, publisher = stream()
    Subscriber(store, stream="s", cache=tmp_path, threads=1).sync()
    once = store.payload_bytes()
    new = trainer.publish(publisher).patch_bytes
    reach(Subscriber(store, stream="s", cache=tmp_path, threads=1), state_root(trainer.state))
    assert store.payload_bytes() == once + new


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    store, trainer, _ = stream()
    Subscriber(store, stream="s", cache=tmp_path, threads=1).sync()
    once = store.payload_bytes()
    damaged = sorted((tmp_path / "pulse-cache/s/payloads").iterdir())
    damaged[0].write_bytes(damaged[0].read_bytes()[:-1] + b"?")
    damaged[1].write_bytes(b"")
    sizes = sum(store.head(f"s/payloads/{path.name}").nbytes for path in damaged[:2])
    reach(Subscriber(store, stream="s", cache=tmp_path, threads=1), state_root(trainer.state))
    assert store.payload_bytes() == once + sizes


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    store, _, _ = stream()
    names = [info.name for info in store.list("s/payloads")]
    sizes = {name: store.head(name).nbytes for name in names}
    limit = sum(sizes.values()) - 1
    cached = CachedStore(store, tmp_path, digest_of, max_bytes=limit)
    for name in names:
        cached.expect(name, sizes[name])
        assert cached.get(name) == store.store.get(name)
        assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= limit
        assert (tmp_path / "pulse-cache" / name).is_file()
    tiny = CachedStore(store, tmp_path / "tiny", digest_of, max_bytes=10)
    tiny.expect(names[0], sizes[names[0]])
    assert tiny.get(names[0], 3, 9) == store.store.get(names[0])[3:9]


def test_a_payload_that_is_not_its_name_is_not_kept(tmp_path: Path) -> None:
    store = Counted()
    name = f"s/payloads/{'0' * 64}.patch"
    store.put(name, b"wrong")
    cached = CachedStore(store, tmp_path, digest_of)
    cached.expect(name, 5)
    assert cached.get(name) == b"wrong"
    assert not list(tmp_path.rglob("*.patch"))


def test_what_is_not_ours_in_the_folder_is_neither_deleted_nor_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user gave a folder with data of his own, on a disk that was just mounted."""
    monkeypatch.setattr("pulse_rl.stores.cached.DEFAULT_MAX_BYTES", 1000)
    monkeypatch.setattr(CachedStore.__init__, "__defaults__", (1000,))
    mine = [
        tmp_path / name
        for name in ("a/b/model.bin", "lost+found/x", "my data/y", f"s/payloads/{'0' * 64}.patch")
    ]
    mine += [
        tmp_path / "pulse-cache" / name
        for name in ("lost+found/x", "my data/y", "s/payloads/notes.txt")
    ]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2000))
        os.utime(path, (1, 1))
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{'1' * 64}.patch").write_bytes(bytes(2000))
    (tmp_path / "pulse-cache" / "t").mkdir()
    (tmp_path / "pulse-cache" / "t" / "payloads").symlink_to(other)
    store, trainer, _ = stream()
    reach(Subscriber(store, stream="s", cache=tmp_path, threads=1), state_root(trainer.state))
    assert all(path.read_bytes() == bytes(2000) for path in mine)
    assert list(other.iterdir())


def test_a_folder_that_is_somebody_elses_link_is_not_used(tmp_path: Path) -> None:
    """A link in the place of a stream's folder: nothing is deleted behind it, and the worker goes
    on."""
    store, trainer, _ = stream()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "pulse-cache").mkdir()
    (tmp_path / "pulse-cache" / "s").symlink_to(outside)
    damaged = outside / "payloads"
    damaged.mkdir()
    for info in store.list("s/payloads"):
        (damaged / info.name.rpartition("/")[2]).write_bytes(b"theirs")
    reach(Subscriber(store, stream="s", cache=tmp_path, threads=1), state_root(trainer.state))
    assert {path.read_bytes() for path in damaged.iterdir()} == {b"theirs"}


class Growing(Counted):
    """Says at every second look that an object is a hundred times as long, and sends that much."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: dict[str, int] = {}

    def head(self, name: str) -> ObjectInfo:
        info = super().head(name)
        self.looks[name] = self.looks.get(name, 0) + 1
        return info._replace(nbytes=info.nbytes * (100 if self.looks[name] % 2 == 0 else 1))


def test_a_server_that_names_another_length_later_does_not_make_a_cache_read_more(
    tmp_path: Path,
) -> None:
    store, trainer = Growing(), TinyTrainer()
    Publisher(store, stream="s", threads=1).publish(trainer.state)
    store.read.clear()
    store.looks.clear()
    reach(Subscriber(store, stream="s", cache=tmp_path, threads=1), state_root(trainer.state))
    assert store.payload_bytes() == sum(info.nbytes for info in store.list("s/payloads"))
