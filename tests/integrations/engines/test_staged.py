"""What the leader of a node stages is what the other workers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import MemoryStore, Publisher, State, Subscriber
from pulse_rl.engines import node as staged
from pulse_rl.engines.node import Staged, newest, publish_staged
from tests.support.states import present


def test_a_staged_update_survives_the_file(tmp_path: Path, store: MemoryStore) -> None:
    publisher = Publisher(store, stream="policy")
    state = {"odd": np.arange(7, dtype=np.uint8), "wide": np.arange(9.0), "same": np.zeros(3)}
    publisher.publish(state)
    subscriber = Subscriber(store, stream="policy")
    first = present(subscriber.sync())
    publish_staged(Staged.of(first, 1).write(tmp_path))
    first.acknowledge()
    whole = present(newest(tmp_path))
    assert (whole.sequence, whole.version, whole.previous, whole.changes) == (1, 0, None, {})
    state["odd"][2:5] = 9
    state["wide"][8] = -1
    publisher.publish(state)
    update = present(subscriber.sync())
    file = Staged.of(update, 2).write(tmp_path)
    before, aside = newest(tmp_path), Staged.load(file)
    assert before is not None
    assert (before.sequence, aside.sequence) == (1, 2)
    publish_staged(file)
    read = present(newest(tmp_path))
    assert (read.sequence, read.version, read.previous) == (2, 1, 0)
    assert {
        name: (i.tolist(), v.tolist()) for name, (i, v) in read.changes.items() if i is not None
    } == {
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
    update = present(subscriber.sync())
    whole = Staged.of(update, 1)
    assert whole.changes["a"][0] is None
    publish_staged(whole.write(tmp_path))
    read = present(newest(tmp_path))
    assert read.changes["a"][0] is None
    assert read.changes["a"][1].tolist() == [0, 1, 2, 3, 4, 5]
    assert not np.shares_memory(whole.changes["a"][1], subscriber.state.read("a"))


def test_of_a_tensor_with_a_new_name_what_differs_from_the_checkpoint_is_staged(
    monkeypatch: Any, store: MemoryStore
) -> None:
    """Checkpoints have tied tensors under one name; the trainer's states have them under all."""
    publisher = Publisher(store, stream="policy")
    monkeypatch.setattr(staged, "_PIECE_ELEMENTS", 4)
    weight = np.arange(11, dtype=np.uint16)
    base = {"a": weight.copy(), "other": weight[:5].copy()}
    publisher.publish(base)
    subscriber = Subscriber(store, stream="policy", base=base)
    now = weight.copy()
    now[[0, 3, 4, 10]] += 7
    publisher.publish({"a": now, "tied": now, "other": weight[:5]})
    update = present(subscriber.sync())
    assert update.tensors[0].indices is None
    found = Staged.of(update, 1, State.of(base))
    ((name, (indices, values)),) = found.changes.items()
    assert indices is not None
    assert (name, indices.tolist()) == ("a", [0, 3, 4, 10])
    assert values.tolist() == now[[0, 3, 4, 10]].tolist()
    assert Staged.of(update, 1, State.of({"a": weight[:3]})).changes["a"][0] is None, (
        "it is another tensor"
    )


def test_a_full_memory_is_not_filled_by_what_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Staged(1, 1, 0, {"w": (np.arange(4), np.zeros(4, np.uint16))})

    real = Path.open

    class Full:
        def __init__(self, path: Path, mode: str) -> None:
            self.file = real(path, mode)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode))
    with pytest.raises(OSError, match="No space left"):
        update.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
