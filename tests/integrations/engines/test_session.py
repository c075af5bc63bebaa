"""A session without an engine: a model with its ways of loading, one worker, a real store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pulse_rl
from pulse_rl import InputError, PulseError, State, StateMismatch
from pulse_rl.integrations.engines.live import LiveWeights
from pulse_rl.integrations.engines.node import Node
from pulse_rl.integrations.engines.session import Learnt, Session
from pulse_rl.state.checkpoint import save

SHAPES = {"gate": (4, 6), "up": (4, 6), "embed": (7, 6)}
Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """ "gate" and "up" are fused, "embed" is padded by a row, and its other name is "head"."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16))
        self.embed = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "embed":
                self.embed.data[:7].copy_(weight)
                self.embed.data[7:].zero_()
            elif name != "head":
                first = {"gate": 0, "up": 4}[name]
                self.fused.data.narrow(0, first, 4).copy_(weight)


class World:
    """A trainer with its stream, and a worker that has loaded version 0."""

    def __init__(self, folder: Path) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.tensors: Tensors = {n: torch.randn(s, generator=self.generator).bfloat16() for n, s in SHAPES.items()}
        self.store = str(folder / "store")
        self.publisher = pulse_rl.Publisher(self.store, stream="policy", threads=1)
        self.base = folder / "base.safetensors"
        save(self.base, State.of(self.tensors))
        self.publish()
        self.model = Model()
        self.model.load_weights(self.tensors.items())
        self.learnt = Learnt()
        self.sessions: list[Session] = []

    def publish(self) -> int:
        tensors = self.tensors | {"head": self.tensors["embed"]}
        return self.publisher.publish(tensors).version

    def step(self) -> int:
        for name, weight in self.tensors.items():
            chosen = torch.rand(weight.shape, generator=self.generator) < 0.2
            chosen.view(-1)[0] = True
            self.tensors[name] = torch.where(chosen, weight + 1, weight)
        return self.publish()

    def session(self, *, follow: bool = False, audit_every: int = 100) -> Session:
        info: Any = SimpleNamespace(
            store=self.store, stream="policy", cache=None, trusted_keys=None, follow=follow, audit_every=audit_every
        )
        session = Session(self.model, info, Node(None), self.learnt, str(self.base), nullcontext)
        self.sessions.append(session)
        stage(session)
        return session

    def live(self) -> bool:
        """Whether the model holds what the trainer published last."""
        fresh = Model()
        fresh.load_weights(self.tensors.items())
        return all(torch.equal(a, b) for a, b in zip(fresh.parameters(), self.model.parameters(), strict=True))


def stage(session: Session, version: int | None = None) -> None:
    session.staging.ask(version)
    asked = session.staging.state.asked
    deadline = time.monotonic() + 30
    while session.staging.state.answered < asked:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if session.staging.state.error is not None:
        raise session.staging.state.error


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for session in made.sessions:
        session.close()


def test_updates_are_sparse_from_the_checkpoint_on(world: World) -> None:
    session = world.session()
    for number in range(1, 5):
        world.step()
        stage(session)
        session.update(None)
        report = session.live.report
        assert (report["version"], report["previous"], report["full"]) == (number, number - 1, False)
        assert (report["audit_seconds"] is not None) == (number == 1)
        assert world.live()
    session.update(None)
    assert session.audit() == []


def test_many_versions_are_one_update(world: World) -> None:
    session = world.session()
    for _ in range(5):
        world.step()
        stage(session)
    session.update(None)
    assert (session.live.report["previous"], session.live.report["full"]) == (0, False)
    assert world.live()


def test_a_failed_update_leaves_the_bits_and_the_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    session = world.session()
    world.step()
    stage(session)
    session.update(None)
    before = [weight.clone() for weight in world.model.parameters()]
    world.step()
    stage(session)
    put, calls = LiveWeights.put, []

    def failing(self: LiveWeights, change: Any) -> None:
        calls.append(change)
        if len(calls) == 2:
            raise RuntimeError("lost")
        put(self, change)

    monkeypatch.setattr(LiveWeights, "put", failing)
    with pytest.raises(PulseError, match="lost"):
        session.update(None)
    assert all(torch.equal(a, b) for a, b in zip(before, world.model.parameters(), strict=True))
    assert session.live.version == 1
    session.update(None)
    assert (session.live.version, world.live()) == (2, True)


def test_a_difference_is_named_and_the_next_update_writes_all(world: World) -> None:
    session = world.session()
    world.step()
    stage(session)
    session.update(None)
    world.model.fused.data.view(torch.int16)[5, 1] ^= 1
    assert session.audit() == ["up"]
    with pytest.raises(InputError, match="no version is live"):
        session.audit()
    session.update(None)
    assert session.live.report["full"]
    assert (world.live(), session.audit()) == (True, [])


def test_an_update_that_does_not_lead_to_the_version_is_undone(world: World) -> None:
    """Someone else has written to the model, and the audit is due."""
    session = world.session(audit_every=1)
    world.step()
    stage(session)
    session.update(None)
    world.step()
    stage(session)
    world.model.embed.data.view(torch.int16)[3, 3] ^= 1
    before = [weight.clone() for weight in world.model.parameters()]
    with pytest.raises(StateMismatch, match="1 live tensors are not those of version 2: embed"):
        session.update(None)
    assert all(torch.equal(a, b) for a, b in zip(before, world.model.parameters(), strict=True))


def test_a_second_session_does_not_believe_the_checkpoint(world: World) -> None:
    first = world.session()
    world.step()
    stage(first)
    first.update(None)
    first.close()
    world.step()
    second = world.session()
    second.update(None)
    assert second.live.report["full"]
    assert (second.live.version, world.live()) == (2, True)


def test_a_stream_that_is_begun_anew_is_followed(world: World) -> None:
    session = world.session()
    for _ in range(3):
        world.step()
    stage(session)
    session.update(None)
    for file in sorted(Path(world.store).rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    world.publisher = pulse_rl.Publisher(world.store, stream="policy", threads=1)
    world.step()
    stage(session)
    session.update(None)
    assert (session.live.version, world.live()) == (0, True)


def test_another_version_than_the_staged_one_is_refused(world: World) -> None:
    session = world.session()
    world.step()
    world.step()
    stage(session, 1)
    with pytest.raises(StateMismatch, match="version 1 is staged, not 2"):
        session.update(2)
    session.update(1)
    assert session.live.version == 1
    stage(session, 2)
    session.update(2)
    assert world.live()
