"""The files beside the weights: a version carries them, stored once, and readers, relays and upkeep
keep them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    LocalStore,
    MemoryStore,
    Publisher,
    Relay,
    Subscriber,
    fold_stream,
    gc_stream,
    verify_stream,
)
from pulse_rl.errors import DigestMismatch, InputError, NotFound
from pulse_rl.events import Event, FallbackUsed
from tests.support.publishers import anchor_stream
from tests.support.states import Rng, history

CONFIG, TOKENS = b'{"model_type": "tiny"}', bytes(range(256)) * 40
FILES = {"config.json": CONFIG, "tokenizer/vocab.txt": TOKENS, "empty.txt": b""}


class Counted(MemoryStore):
    """Counts the payloads of files that are written and read."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.read = Counter[str](), Counter[str]()

    def put(self, name: str, data: Any) -> None:
        self.written[name] += name.endswith(".file")
        super().put(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self.read[name] += name.endswith(".file")
        return super().get(name, start, stop)


def payloads(store: Any) -> list[str]:
    return sorted(
        info.name for info in store.list("policy/payloads") if info.name.endswith(".file")
    )


def newest(store: Any, **options: Any) -> dict[str, bytes]:
    with Subscriber(store, stream="policy", threads=1, **options) as reader:
        reader.sync()
        return reader.files()


def test_files_stay_until_others_come_and_are_stored_once(rng: Rng, tmp_path: Path) -> None:
    store, states = Counted(), history(rng, 8)
    (tmp_path / "vocab").write_bytes(TOKENS)
    worker = Subscriber(store, stream="policy")
    seen = []
    given: list[Any] = [
        None,
        FILES,
        None,
        FILES | {"tokenizer/vocab.txt": tmp_path / "vocab"},
        {"a": CONFIG},
        None,
        {},
        None,
    ]
    with Publisher(store, stream="policy") as publisher:
        for state, files in zip(states, given, strict=True):
            publisher.publish(state, files=files)
            worker.sync()
            seen.append(worker.files())
    assert seen == [{}, FILES, FILES, FILES, {"a": CONFIG}, {"a": CONFIG}, {}, {}]
    assert max(store.written.values()) == 1
    assert sum(store.written.values()) == 3
    assert max(store.read.values()) == 1, "a reader fetches each once while it does not change"
    assert all(report.ok for report in verify_stream(store, "policy"))


def test_another_publisher_keeps_them_and_stores_none_again(rng: Rng) -> None:
    store, states = Counted(), history(rng, 4)
    Publisher(store, stream="policy").publish(states[0], files=FILES)
    Publisher(store, stream="policy").publish(states[1])
    Publisher(store, stream="policy").submit(states[2], files=FILES).result()
    anchor_stream(store, "policy")
    assert newest(store) == FILES
    assert max(store.written.values()) == 1


def test_what_the_store_has_lost_is_stored_again(rng: Rng) -> None:
    store, states, events = Counted(), history(rng, 4), list[Event]()
    Publisher(store, stream="policy").publish(states[0], files=FILES)
    lost = payloads(store)[0]
    store.delete(lost)
    (report,) = verify_stream(store, "policy")
    assert [lost in problem for problem in report.problems] == [True]
    reader = Subscriber(store, stream="policy")
    assert reader.sync() is not None, "weights do not wait for it"
    with pytest.raises(NotFound):
        reader.files()
    with Publisher(store, stream="policy", on_event=events.append) as publisher:
        publisher.publish(states[1])
        publisher.publish(states[2])
    (said,) = [event for event in events if isinstance(event, FallbackUsed)]
    assert said.kind == "not_found"
    rest = newest(store)
    assert len(rest) == 2
    assert said.link not in rest
    publisher.publish(states[3], files=FILES)
    assert newest(store) == FILES


def test_a_stream_that_was_deleted_gets_all_files_again(rng: Rng) -> None:
    store, states = Counted(), history(rng, 2)
    with Publisher(store, stream="policy") as publisher:
        publisher.publish(states[0], files=FILES)
        for info in [*store.list("policy/versions"), *store.list("policy/payloads")]:
            store.delete(info.name)
        publisher.publish(states[1], files=FILES)
    assert newest(store) == FILES


def test_a_damaged_file_is_refused_and_named(rng: Rng, store: MemoryStore) -> None:
    Publisher(store, stream="policy").publish(history(rng, 1)[0], files=FILES)
    (name,) = [name for name in payloads(store) if len(store.get(name)) == len(TOKENS)]
    for damage in (TOKENS[:-1] + b"x", TOKENS + b"x", b""):
        store.put(name, damage)
        reader = Subscriber(store, stream="policy")
        reader.sync()
        with pytest.raises(DigestMismatch):
            reader.files()
        (report,) = verify_stream(store, "policy")
        assert len(report.problems) == 1
        assert report.problems[0].startswith("tokenizer/vocab.txt: ")


def test_a_relay_copies_them_once_and_folds_lead_to_their_versions_files(rng: Rng) -> None:
    source, target = Counted(), Counted()
    relay = Relay(source, target, stream="policy", threads=1)
    late = Subscriber(source, stream="policy")
    with Publisher(source, stream="policy") as publisher:
        for version, state in enumerate(history(rng, 20)):
            publisher.publish(state, files=FILES if version < 12 else {"config.json": CONFIG})
            if version in (0, 1, 2, 17):
                relay.sync()
            if version == 0:
                late.sync()
    list(fold_stream(source, "policy", (8,)))
    assert newest(target) == {"config.json": CONFIG}
    assert max(target.written.values()) == 1
    late.sync(target=9)
    assert late.files() == FILES
    late.sync()
    assert late.files() == {"config.json": CONFIG}
    for name in payloads(source):
        source.delete(name)
    Publisher(source, stream="policy").publish(
        history(rng, 1)[0], files={"new.txt": b"new", "config.json": b"{}"}
    )
    source.delete(next(name for name in payloads(source) if source.get(name) == b"new"))
    assert relay.sync() is not None, "a lost file holds no weights up"
    assert relay.version == 20


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ([("config.json", b"{}")], "must map names"),
        ({"config.json": 5}, "must be bytes or a path"),
        ({3: b""}, "must be bytes or a path"),
        ({"../config.json": b"{}"}, "plain relative name"),
        ({"/config.json": b"{}"}, "plain relative name"),
        ({"a/../b": b""}, "plain relative name"),
        ({".hidden": b""}, "plain relative name"),
        ({"model.safetensors": b""}, "for weights"),
        ({"training_args.bin": b""}, "for weights"),
        ({"pulse.history": b""}, "pulse's own"),
        ({"A": b"", "a": b""}, "apart from capitals"),
        ({"a": b"", "a/b": b""}, "apart from capitals"),
        ({str(k): b"" for k in range(257)}, "more than 256"),
        ({"a": bytes(64 << 20), "b": bytes((64 << 20) + 1)}, "more than"),
        ({"a": "/dev/zero"}, "regular file"),
        ({"a": "/nowhere/at/all"}, "cannot read"),
        ("/nowhere/at/all", "cannot read"),
    ],
)
def test_files_that_no_reader_may_write_are_refused_at_the_call(files: Any, match: str) -> None:
    store = MemoryStore()
    for call in (
        Publisher(store, stream="policy").publish,
        Publisher(store, stream="policy").submit,
    ):
        with pytest.raises(InputError, match=match):
            call({"w": np.zeros(3, np.float32)}, files=files)
    assert not list(store.list("policy"))


def test_a_large_file_on_disk_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="too large"):
        Publisher(MemoryStore(), stream="policy").publish(
            {"w": np.zeros(3, np.float32)}, files={"a": tmp_path / "a"}
        )


def test_a_folder_gives_what_a_loader_needs(tmp_path: Path) -> None:
    taken = (
        "config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "modeling_own.py",
    )
    left = (
        "README.md",
        "optimizer.pt",
        "trainer_state.json",
        "pytorch_model.bin.index.json",
        ".hidden.json",
        "x.png",
    )
    for name in (
        *taken,
        *left,
        "model.safetensors",
        "additional_chat_templates/tools.jinja",
        "sub/other.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    store = LocalStore(tmp_path / "store")
    Publisher(store, stream="policy").publish({"w": np.zeros(3, np.float32)}, files=tmp_path)
    assert newest(store) == {
        n: n.encode() for n in (*taken, "additional_chat_templates/tools.jinja")
    }


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_to_a_stream_each_version_has_its_own_files(
    seed: int, tmp_path: Path
) -> None:
    """Publishers that restart, collection, folds, relays, late and new readers: against a
    dictionary of versions."""
    rng = np.random.default_rng(seed)
    source, target = MemoryStore(), LocalStore(tmp_path)
    state = {"w": np.zeros(3000, np.float32)}
    expected: dict[int, dict[str, bytes]] = {}
    publisher = Publisher(source, stream="policy", anchor_ratio=0.5)
    relay = Relay(source, target, stream="policy", keep=6, threads=1)
    late = Subscriber(source, stream="policy")

    def publish() -> None:
        choice = [
            None,
            None,
            {},
            {f"{k}.txt": bytes([rng.integers(3)]) * 9 for k in range(rng.integers(4))},
        ]
        files = choice[rng.integers(4)]
        state["w"][rng.integers(3000, size=20)] += 1
        send = (
            publisher.publish
            if rng.random() < 0.5
            else lambda *a, **k: publisher.submit(*a, **k).result()
        )
        version = send(state, files=files).version
        expected[version] = expected.get(version - 1, {}) if files is None else files

    def restart() -> None:
        nonlocal publisher
        publisher = Publisher(source, stream="policy", anchor_ratio=0.5)

    def collect() -> None:
        plan = gc_stream(source, "policy", keep=int(rng.integers(1, 5)), grace_seconds=0)
        kept = [content for version, content in expected.items() if version >= plan.oldest]
        assert len(payloads(source)) == len({data for content in kept for data in content.values()})

    def look() -> None:
        for store, held in ((source, late), (source, None), (target, None)):
            reader = held or Subscriber(store, stream="policy")
            reader.sync()
            if reader.version is not None:
                assert reader.files() == expected[reader.version]

    publish()
    actions = [
        publish,
        publish,
        publish,
        restart,
        collect,
        relay.sync,
        lambda: list(fold_stream(source, "policy", (4,))),
        look,
    ]
    for _ in range(60):
        actions[rng.integers(len(actions))]()
    for store in (source, target):
        assert all(report.ok for report in verify_stream(store, "policy"))
    assert len(expected) > 10


def test_a_link_out_of_a_checkpoint_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "merges.txt").write_text("a b")
    (sent / "vocab.txt").symlink_to("merges.txt")
    with Publisher(MemoryStore(), stream="policy") as publisher:
        state = {"w": np.ones(2, np.float32)}
        publisher.publish(state, files=sent)
        (sent / "notes.txt").symlink_to("../secret")
        with pytest.raises(InputError, match=r"notes\.txt is a link"):
            publisher.publish(state, files=sent)
