"""verl's real manager and workers under a real Ray, with the checkpoint engine of this package in
its registry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

import pulse_rl

from .stand_ins import Fleet


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def fleet(cluster: None, store: str) -> Iterator[Fleet]:
    return Fleet(store)


def step(fleet: Fleet, count: int) -> dict[str, float]:
    """One step of the actor and one update; every rollout worker must hold the actor's weights,
    cast."""
    fleet.actor.train()
    began = time.perf_counter()
    metrics = fleet.update(count)
    print(f"update {count}: {time.perf_counter() - began:.3f} s, {metrics}")
    assert fleet.held() == [(fleet.root(), count)] * len(fleet.manager.replicas)
    return metrics


def test_every_update_gives_all_workers_the_actors_bits_for_few_bytes(
    fleet: Fleet, store: str
) -> None:
    first = fleet.update(None)
    print(f"first update: {first}")
    assert fleet.held() == [(fleet.root(), None)] * 2
    roots = {fleet.root()}
    for count in range(1, 5):
        metrics = step(fleet, count)
        assert metrics["pulse/version"] == count
        assert metrics["pulse/density"] < 0.05
        assert metrics["pulse/bytes"] < first["pulse/bytes"] / 20
        roots.add(fleet.root())
    assert len(roots) == 5
    with pulse_rl.Subscriber(store, stream="policy") as follower:
        follower.sync()
        assert follower.manifest.metadata["global_steps"] == 4
        assert follower.root == fleet.root()


def test_a_worker_that_replaces_another_one_has_the_next_version(fleet: Fleet) -> None:
    fleet.lose(0)
    step(fleet, 5)
    fleet.join()
    step(fleet, 6)
    assert len(fleet.manager.replicas) == 2


def test_a_failed_update_is_an_error_in_the_driver_and_the_next_one_works(fleet: Fleet) -> None:
    fleet.actor.add({"strange": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(pulse_rl.errors.UnsupportedTensor, match="strange") as failed:
        fleet.update(7)
    assert pulse_rl.errors.UnsupportedTensor.default_hint in str(
        failed.value
    )  # the traceback that Ray shows
    fleet.actor.add({})
    step(fleet, 8)


def test_an_actor_that_restarts_takes_the_workers_back_to_its_checkpoint(fleet: Fleet) -> None:
    before = fleet.root()
    fleet.restart_actor()
    fleet.update(0)
    assert fleet.root() != before
    assert fleet.held() == [(fleet.root(), 0)] * 2
    assert step(fleet, 1)["pulse/density"] < 0.05


def test_a_killed_worker_that_is_still_asked_for_is_an_error_and_not_a_hang(fleet: Fleet) -> None:
    ray.kill(fleet.manager.replicas[0].workers[0])
    with pytest.raises(ray.exceptions.RayActorError):
        fleet.update(2)
    fleet.manager.remove_replicas(fleet.manager.replicas[:1])
    step(fleet, 3)


def test_the_store_holds_small_patches_and_one_full_state(fleet: Fleet, store: str) -> None:
    sizes = sorted(path.stat().st_size for path in Path(store).rglob("*") if path.is_file())
    assert sum(size > 100_000 for size in sizes) == 1
