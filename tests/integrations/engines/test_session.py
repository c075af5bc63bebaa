"""A session without an engine: a model with its ways of loading, one worker, a real store."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl
from pulse_rl import MemoryStore, Publisher, PulseError, Subscriber
from pulse_rl.engines import node as nodes
from pulse_rl.engines.live import Journal
from pulse_rl.engines.node import Node, Staging
from pulse_rl.engines.session import Session
from pulse_rl.engines.transport import InitInfo
from pulse_rl.errors import InputError, StateMismatch, StreamRecreated, Untrusted
from tests.support.states import present

from .world import Model, World, stage


def test_the_first_update_is_sparse_for_tied_tensors_too(world: World, session: Session) -> None:
    """The checkpoint does not have their other names; the stream does."""
    world.step_staged(session)
    prepared = present(session.staging.prepared)
    assert sorted(prepared.staged.changes) == ["embed", "gate", "up"]
    assert all(indices is not None for indices, _ in prepared.staged.changes.values())
    session.update(None)
    assert world.live()


class WithoutDraft(Model):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(pair for pair in weights if pair[0] != "draft")


@pytest.mark.parametrize("model_class", [WithoutDraft])
def test_tensors_without_a_place_are_named_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.tensors["draft"] = torch.ones(2, 6).bfloat16()
    world.start_over()
    session = world.session()
    for _ in range(2):
        world.update(session)
    assert session.map.unused == ("draft",)
    assert caplog.text.count("1 tensor of the stream without a place: draft") == 1


def test_many_versions_are_one_update(world: World, session: Session) -> None:
    for _ in range(5):
        world.step_staged(session)
    session.update(None)
    assert (session.report["previous"], session.report["full"]) == (0, False)
    assert -0.01 < session.report["lag_seconds"] < 600
    assert world.live()


def test_an_update_that_does_not_lead_to_the_version_is_undone(world: World) -> None:
    """Someone else has written to the model, and the audit is due."""
    session = world.session(audit_every=1)
    world.update(session)
    world.step_staged(session)
    world.model.embed.data.view(torch.int16)[3, 3] ^= 1
    before = [weight.clone() for weight in world.model.parameters()]
    with pytest.raises(StateMismatch, match="1 live tensors are not those of version 2: embed"):
        session.update(None)
    assert all(torch.equal(a, b) for a, b in zip(before, world.model.parameters(), strict=True))
    session.update(None)
    assert session.report["full"]
    assert (session.live_version, world.live()) == (2, True)


def test_a_second_session_does_not_believe_the_checkpoint(world: World) -> None:
    first = world.session()
    world.update(first)
    first.close()
    world.step()
    second = world.session()
    second.update(None)
    assert second.report["full"]
    assert (second.live_version, world.live()) == (2, True)


@pytest.mark.parametrize("followed", [True, False])
def test_a_stream_that_is_recreated(world: World, followed: bool) -> None:
    session = world.session(allow_recreated=followed)
    for _ in range(3):
        world.update(session)
    for file in sorted(Path(world.store).rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    world.publisher = pulse_rl.Publisher(world.store, stream="policy", threads=1)
    world.step()
    if followed:
        stage(session)
        session.update(None)
        assert (session.live_version, world.live()) == (0, True)
        return
    with pytest.raises(StreamRecreated):
        stage(session)
    assert session.live_version == 3


def test_another_stream_of_the_same_name_is_not_followed(world: World) -> None:
    mine = present(world.publisher.head())
    assert world.session(stream_id=mine.stream_id).staging.held is not None
    with pytest.raises(Untrusted, match="another stream of this name"):
        world.session(stream_id="0" * 32)


def test_another_version_than_the_staged_one_is_refused(world: World, session: Session) -> None:
    world.step()
    world.step()
    stage(session, 1)
    with pytest.raises(StateMismatch, match="version 1 is staged, not 2"):
        session.update(2)
    session.update(1)
    assert session.live_version == 1
    stage(session, 2)
    session.update(2)
    assert world.live()


def test_a_version_of_a_history_that_was_lost_is_not_live(world: World, tmp_path: Path) -> None:
    session = world.session(allow_recreated=True)
    shutil.copytree(world.store, tmp_path / "backup")
    world.update(session)
    world.publisher.close()
    shutil.rmtree(world.store)
    shutil.move(tmp_path / "backup", world.store)
    world.publisher = pulse_rl.Publisher(world.store, stream="policy", threads=1)
    world.step_staged(session)
    assert session.live_version is None
    session.update(None)
    assert (session.live_version, world.live()) == (1, True)


def test_a_stream_recreated_is_another_one_where_its_numbers_meet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live version has a number that the new stream has as well; an update that fails leaves it
    that way."""
    session = world.session(allow_recreated=True)
    world.update(session)
    world.start_over()
    world.step_staged(session)
    assert session.staging.held is not None
    assert session.staging.held.number == 1
    assert session.live_version is None
    with pytest.raises(InputError, match="no version is live"):
        session.audit()
    monkeypatch.setattr(Journal, "write", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    with pytest.raises(PulseError, match="lost"):
        session.update(None)
    monkeypatch.undo()
    assert session.live_version is None
    session.update(None)
    assert (session.live_version, session.report["previous"], world.live()) == (1, None, True)


def test_closing_waits_for_no_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    session = world.session()
    gate = threading.Event()
    subscriber = present(session.staging.subscriber)
    monkeypatch.setattr(subscriber, "sync", lambda *_: gate.wait(30))
    session.staging.ask(None)
    time.sleep(0.05)
    begun = time.monotonic()
    session.close()
    assert time.monotonic() - begun < 20
    gate.set()


def test_what_a_late_thread_stages_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: MemoryStore
) -> None:
    """A session may be closed while its thread waits for a store; the node's folder is then another
    session's."""
    Publisher(store, stream="policy").publish({"w": np.zeros(4, np.uint8)})
    node = Node(None)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    gate, asked = threading.Event(), threading.Event()

    class Slow(Subscriber):
        def sync(self, target: int | None = None) -> Any:
            asked.set()
            gate.wait(30)
            return super().sync(target)

    node.folder = first
    monkeypatch.setattr(nodes, "Subscriber", Slow)
    late = Staging(node, InitInfo(store, "policy", follow=False), None, lambda _: None)  # type: ignore[arg-type]
    assert asked.wait(10)
    late.close()
    shutil.rmtree(first)
    node.folder = second
    gate.set()
    late._thread.join(10)
    assert not late._thread.is_alive()
    assert list(second.iterdir()) == []
