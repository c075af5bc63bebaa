"""How many files of the library one call passes through: a reader must follow it, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_rl import Publisher, PulseLoCo, Subscriber
from pulse_rl.frameworks.torch import apply_
from pulse_rl.loco import GroupExchange, StoreExchange
from tests.integrations.engines.world import World, stage
from tests.support.journeys import Journey, journey
from tests.support.states import present
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.slow

#: Files of `pulse_rl` that each of these may enter.
MAX_FILES = {"publish": 30, "sync": 22, "round": 16, "store round": 18, "pause": 9}


def check(name: str, files: set[str]) -> None:
    listed = "\n".join(sorted(files))
    assert len(files) <= MAX_FILES[name], f"{name} passes through {len(files)} files:\n{listed}"


@pytest.fixture
def traced() -> Iterator[Journey]:
    with journey() as made:
        yield made


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()


def step(trained: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.view(-1)[::50] += 1


def test_publish_and_sync(tmp_path: Path, traced: Journey) -> None:
    trained, served = model(), model()
    with (
        Publisher(str(tmp_path), stream="policy") as publisher,
        Subscriber(str(tmp_path), stream="policy") as worker,
    ):
        publisher.publish(trained.state_dict())
        update = present(worker.sync())
        apply_(served, update)
        update.acknowledge()
        step(trained)
        with traced.recorded():
            done = publisher.publish(trained.state_dict(), metadata={"step": 1})
        published = set(traced.files)
        traced.files.clear()
        with traced.recorded():
            update = present(worker.sync())
            apply_(served, update)
            update.acknowledge()
    assert done.changed
    assert not done.anchored
    assert torch.equal(trained[0].weight, served[0].weight)  # type: ignore[index]
    check("publish", published)
    check("sync", traced.files)


def trains(trained: torch.nn.Module, traced: Journey, **where: Any) -> set[str]:
    """The files that the second round of a trainer enters, in the step that makes it."""
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with PulseLoCo(trained, optimizer, sync_every=2, **where) as loop:
        for number in range(4):
            loss = trained(torch.ones(4, 8)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            if number == 3:
                with traced.recorded():
                    optimizer.step()
            else:
                optimizer.step()
        assert loop.round == 2
    return traced.files


def trains_in_a_group(trainer: Trainer) -> set[str]:
    trainer.connect("journey")
    torch.manual_seed(0)
    with journey() as traced:
        return trains(torch.nn.Linear(8, 8), traced, exchange=GroupExchange())


def test_a_round_in_a_group() -> None:
    for files in together(trains_in_a_group, 2):
        check("round", files)


def trains_over_a_store(trainer: Trainer, folder: str) -> set[str]:
    torch.manual_seed(0)
    with journey() as traced:
        over = StoreExchange(folder, trainer=f"t{trainer.rank}", min_trainers=2)
        return trains(torch.nn.Linear(8, 8), traced, exchange=over)


def test_a_round_over_a_store(tmp_path: Path) -> None:
    for files in together(trains_over_a_store, 2, str(tmp_path)):
        check("store round", files)


def test_the_pause_of_an_engine(tmp_path: Path, traced: Journey) -> None:
    world = World(tmp_path)
    session = world.session()
    for number in range(2):
        world.step()
        stage(session)
        if number == 1:
            with traced.recorded():
                session.update(None)
        else:
            session.update(None)
    assert world.live()
    session.close()
    check("pause", traced.files)
