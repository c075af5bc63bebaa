"""A subscriber with a cache folder downloads each payload once, whatever happens to the folder."""

from __future__ import annotations

from pathlib import Path

from pulse_rl import Publisher, Subscriber, state_root
from pulse_rl.store import CachedStore
from pulse_rl.stream.names import payload_digest
from tests.support.relays import Counted
from tests.support.states import TinyTrainer


def stream(versions: int = 5) -> tuple[Counted, TinyTrainer, Publisher]:
    store, trainer = Counted(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    for _ in range(versions):
        trainer.step()
        publisher.publish(trainer.state)
    store.read.clear()
    return store, trainer, publisher


def test_a_restart_downloads_only_what_is_new(tmp_path: Path) -> None:
    store, trainer, publisher = stream()
    Subscriber(store, stream="s", cache=tmp_path, threads=1).sync()
    once = store.payload_bytes()
    trainer.step()
    new = publisher.publish(trainer.state).patch_bytes
    again = Subscriber(store, stream="s", cache=tmp_path, threads=1)
    again.sync()
    assert again.root == state_root(trainer.state)
    assert store.payload_bytes() == once + new


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    store, trainer, _ = stream()
    Subscriber(store, stream="s", cache=tmp_path, threads=1).sync()
    once = store.payload_bytes()
    damaged = sorted((tmp_path / "s/payloads").iterdir())
    damaged[0].write_bytes(damaged[0].read_bytes()[:-1] + b"?")
    damaged[1].write_bytes(b"")
    sizes = sum(store.head(f"s/payloads/{path.name}").nbytes for path in damaged[:2])
    again = Subscriber(store, stream="s", cache=tmp_path, threads=1)
    again.sync()
    assert again.root == state_root(trainer.state)
    assert store.payload_bytes() == once + sizes


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    store, _, _ = stream()
    names = [info.name for info in store.list("s/payloads")]
    sizes = {name: store.head(name).nbytes for name in names}
    limit = sum(sizes.values()) - 1
    cached = CachedStore(store, tmp_path, payload_digest, max_bytes=limit)
    for name in names:
        assert cached.get(name) == store.store.get(name)
        assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= limit
    tiny = CachedStore(store, tmp_path / "tiny", payload_digest, max_bytes=10)
    assert tiny.get(names[0], 3, 9) == store.store.get(names[0])[3:9]


def test_a_payload_that_is_not_its_name_is_not_kept(tmp_path: Path) -> None:
    store = Counted()
    name = f"s/payloads/{'0' * 64}.patch"
    store.put(name, b"wrong")
    assert CachedStore(store, tmp_path, payload_digest).get(name) == b"wrong"
    assert not list((tmp_path / "s").rglob("*.patch"))
