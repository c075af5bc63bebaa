"""What the leader of a node stages is what the other workers read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl.integrations.engines.staged import Staged, newest


def test_a_staged_update_survives_the_file(tmp_path: Path) -> None:
    store = MemoryStore()
    publisher = Publisher(store, stream="policy")
    state = {"odd": np.arange(7, dtype=np.uint8), "wide": np.arange(9.0), "same": np.zeros(3)}
    publisher.publish(state)
    subscriber = Subscriber(store, stream="policy")
    first = subscriber.sync()
    assert first is not None
    Staged.of(first, 1).save(tmp_path)
    whole = newest(tmp_path)
    assert whole is not None
    assert (whole.sequence, whole.version, whole.previous, whole.changes) == (1, 0, None, {})
    state["odd"][2:5] = 9
    state["wide"][8] = -1
    publisher.publish(state)
    update = subscriber.sync()
    assert update is not None
    Staged.of(update, 2).save(tmp_path)
    read = newest(tmp_path)
    assert read is not None
    assert (read.sequence, read.version, read.previous) == (2, 1, 0)
    assert {name: (i.tolist(), v.tolist()) for name, (i, v) in read.changes.items() if i is not None} == {
        tensor.spec.name: (tensor.indices.tolist(), tensor.values.tolist())
        for tensor in update.tensors
        if tensor.indices is not None
    }
    assert len(list(tmp_path.iterdir())) == 1


def test_whole_tensors_are_copied_because_the_host_state_moves_on(tmp_path: Path) -> None:
    store = MemoryStore()
    weight = np.arange(6, dtype=np.uint16)
    publisher = Publisher(store, stream="policy")
    publisher.publish({"a": weight, "c": np.zeros(2)})
    subscriber = Subscriber(store, stream="policy", base={"a": weight, "c": np.zeros(2)})
    publisher.publish({"a": weight, "b": weight, "c": np.ones(2)})
    update = subscriber.sync()
    assert update is not None
    staged = Staged.of(update, 1)
    assert staged.changes["a"][0] is None
    staged.save(tmp_path)
    read = newest(tmp_path)
    assert read is not None
    assert read.changes["a"][0] is None
    assert read.changes["a"][1].tolist() == [0, 1, 2, 3, 4, 5]
    assert not np.shares_memory(staged.changes["a"][1], subscriber.state.read("a"))
