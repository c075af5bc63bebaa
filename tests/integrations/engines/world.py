"""A session without an engine: a model with its ways of loading, one worker, a real store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import pulse_rl
from pulse_rl import State
from pulse_rl.engines.derived_params import PostLoadLayers
from pulse_rl.engines.node import Node
from pulse_rl.engines.self_check import Fresh
from pulse_rl.engines.session import Session, VerifiedMap
from pulse_rl.engines.transport import InitInfo
from pulse_rl.follow.checkpoint import save

SHAPES = {"gate": (4, 6), "up": (4, 6), "embed": (7, 6)}
Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """ "gate" and "up" are fused, "embed" is padded by a row, and its other name is "head"."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16))
        self.embed = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16))

    def forms(self) -> PostLoadLayers:
        return PostLoadLayers()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "embed":
                self.embed.data[:7].copy_(weight)
                self.embed.data[7:].zero_()
            elif name != "head":
                first = {"gate": 0, "up": 4}[name]
                self.fused.data.narrow(0, first, 4).copy_(weight)


class World:
    """A trainer with its stream, and a worker that has loaded version 0; it reads the store at
    ``address`` if set."""

    def __init__(self, folder: Path, make: Callable[[], Model] = Model) -> None:
        self.make = make
        self.generator = torch.Generator().manual_seed(3)
        self.tensors: Tensors = {
            n: torch.randn(s, generator=self.generator).bfloat16() for n, s in SHAPES.items()
        }
        self.store = str(folder / "store")
        self.address: str | None = None
        self.publisher = pulse_rl.Publisher(self.store, stream="policy", threads=1)
        self.base = folder / "base.safetensors"
        save(self.base, State.of(self.tensors))
        self.publish()
        self.model = make()
        self.model.load_weights(self.tensors.items())
        self.map = VerifiedMap()
        self.fresh: Fresh | None = None
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

    def step_staged(self, session: Session) -> None:
        self.step()
        stage(session)

    def update(self, session: Session) -> None:
        self.step_staged(session)
        session.update(None)

    def start_over(self) -> None:
        """The stream is deleted, and another one of its name begins with what the trainer has
        now."""
        self.publisher.close()
        shutil.rmtree(self.store)
        self.publisher = pulse_rl.Publisher(self.store, stream="policy", threads=1)
        self.publish()

    def session(self, *, follow: bool = False, audit_every: int = 100, **settings: Any) -> Session:
        info = InitInfo(
            self.address or self.store, "policy", follow=follow, audit_every=audit_every, **settings
        )
        forms, base = self.model.forms(), str(self.base)
        session = Session(
            self.model, info, Node(None), self.map, base, nullcontext, forms, fresh=self.fresh
        )
        self.sessions.append(session)
        stage(session)
        return session

    def live(self) -> bool:
        """Whether the model holds what the trainer published last."""
        fresh = self.make()
        fresh.load_weights(self.tensors.items())
        return all(
            torch.equal(a, b)
            for a, b in zip(fresh.parameters(), self.model.parameters(), strict=True)
        )


def stage(session: Session, version: int | None = None) -> None:
    session.staging.ask(version)
    asked = session.staging.asked
    deadline = time.monotonic() + 30
    while session.staging.answered < asked:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if session.staging.error is not None:
        raise session.staging.error
