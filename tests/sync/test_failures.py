"""Failures that recur among similar systems, one test each, named after the failure.

Elsewhere: outages at every store call (test_outages), damaged and missing objects (test_damage),
flipped bits and hostile sizes in files (test_patch_file, test_codecs, test_checkpoint), two
publishers (test_two_publishers), a store that ignores If-None-Match or deletes 300 along with 30
(test_check, test_store_conformance), and kills at random moments (test_kill).
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import Bits, LocalStore, MemoryStore, Publisher, Subscriber, state_root, verify_stream
from pulse_rl.errors import IntegrityError, StoreUnavailable
from pulse_rl.events import Event, FallbackUsed
from tests.support.manifests import manifest_of
from tests.support.states import Rng, history, publish_each, reach
from tests.support.stores import FaultyStore, names


@pytest.mark.parametrize("comes_back", [False, True])
def test_reply_of_a_second_claim_is_lost(comes_back: bool, rng: Rng, faulty: FaultyStore) -> None:
    """A listing that is behind hides the head, so the stream is claimed again: that claim is the
    publisher's own."""
    states = history(rng, 3)
    publisher = Publisher(faulty, stream="policy")
    publish_each(publisher, states[:2])
    (head,) = names(faulty.inner, "policy/versions")[1:]
    content = faulty.inner.get(head)
    faulty.inner.delete(head)
    faulty.fail_on("put_new", "epochs", after=True)
    with pytest.raises(StoreUnavailable):
        publisher.publish(states[2])
    assert len(names(faulty.inner, "policy/epochs")) == 2
    if comes_back:
        faulty.inner.put(head, content)
    done = publisher.publish(states[2])
    reach(Subscriber(faulty, stream="policy"), state_root(states[2]), done.version)


def test_names_from_a_manifest_cannot_escape(tmp_path: Path, rng: Rng) -> None:
    """`../../x` from a manifest was joined to a path and written."""
    (tmp_path / "secret.patch").write_bytes(b"secret")
    inner = LocalStore(tmp_path / "deep" / "store")
    states = history(rng, 2)
    publish_each(Publisher(inner, stream="policy"), states)
    manifest = manifest_of(inner, "policy", 1)
    assert manifest.patch is not None
    digest = manifest.patch.parts[0].sha256
    for escape in ("../../../../secret", "/etc/passwd", "%2e%2e/x", digest[:-1] + "/"):
        data = manifest.to_bytes().replace(digest.encode(), escape.encode())
        inner.put("policy/versions/000000000001.json", data)
        store, events = FaultyStore(inner), list[Event]()
        subscriber = Subscriber(store, stream="policy", on_event=events.append)
        subscriber.sync()
        assert subscriber.version == 0
        assert [e for e in events if isinstance(e, FallbackUsed) and "64 lower-case" in e.reason]
        assert not [name for _, name in store.calls if escape in name]


@pytest.mark.parametrize("create", [False, True], ids=["put", "put_new"])
def test_files_are_synced_before_they_are_named(
    create: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must find the old file or the new one: data, then the name, then the folder's
    entry."""
    store = LocalStore(tmp_path)
    store.put("a/first", b"x")
    done: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def fsync(handle: int) -> None:
        done.append("sync folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "sync file")
        real["fsync"](handle)

    def naming(name: str) -> Any:
        def call(source: Any, target: Any) -> None:
            assert Path(source).read_bytes() == b"data", (
                "the file must be whole before it gets its name"
            )
            done.append("name")
            real[name](source, target)

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", naming("replace"))
    monkeypatch.setattr(os, "link", naming("link"))
    if create:
        store.put_new("a/b", b"data")
    else:
        store.put("a/b", [b"da", b"ta"])
    assert done == ["sync file", "name", "sync folder"]


@pytest.mark.slow
def test_a_trainer_that_writes_during_publish_leaves_every_version_restorable() -> None:
    """Versions were committed under roots of what the tensors held a moment later: nobody could
    restore them, nor the twenty that followed."""
    weights = np.zeros(3_000_000, np.uint16)
    state, store, stop = {"w": Bits(weights, "BF16")}, MemoryStore(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            weights[np.random.default_rng().integers(0, len(weights), 50)] += 1
            time.sleep(
                0.005
            )  # so that some fall between the proof and the hash, where they once did harm

    publisher = Publisher(store, stream="policy", threads=2)
    publisher.publish(state)
    trainer = threading.Thread(target=write)
    trainer.start()
    committed, refused = 0, 0
    try:
        while committed < 15 and refused < 200:
            try:
                publisher.publish(state)
                committed += 1
            except IntegrityError:  # told, and nothing was committed
                refused += 1
    finally:
        stop.set()
        trainer.join()
    publisher.publish(state)
    assert committed > 5
    assert [report.problems for report in verify_stream(store, "policy")] == [()] * (committed + 2)
