"""verl's checkpoint engine by itself: an actor's and a worker's, in one process, without Ray."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl
from tests.support.framework_stubs import integration

PulseCheckpointEngine = integration().PulseCheckpointEngine
Registry = integration().CheckpointEngineRegistry
Engine = Any
Weights = dict[str, torch.Tensor]


def engine(store: Path | str, *, master: bool = False, **others: Any) -> Engine:
    """As verl makes it."""
    role = {"is_master": True} if master else {}
    return Registry.new(
        "pulse", bucket_size=1 << 20, **role, store=str(store), stream="policy", **others
    )


def connect(actor: Engine, *workers: Engine) -> None:
    """What verl's manager does before an update."""
    metadata = [actor.prepare(), *(worker.prepare() for worker in workers)]
    actors, rollouts = PulseCheckpointEngine.build_topology(1, len(workers), metadata)
    actor.init_process_group(**{key: values[0] for key, values in actors.items()})
    for rank, worker in enumerate(workers):
        worker.init_process_group(**{key: values[rank] for key, values in rollouts.items()})


async def received(worker: Engine) -> Weights:
    return {name: tensor async for name, tensor in worker.receive_weights(global_steps=1)}


def update(weights: Weights, actor: Engine, *workers: Engine) -> list[Weights]:
    async def all_at_once() -> list[Any]:
        sending = actor.send_weights(iter(weights.items()), global_steps=1)
        return await asyncio.gather(*(received(worker) for worker in workers), sending)

    connect(actor, *workers)
    return asyncio.run(all_at_once())[:-1]


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and pulse_rl.state_root(one) == pulse_rl.state_root(other)


WEIGHTS = {
    "a": torch.randn(64, 8, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(8, generator=torch.Generator().manual_seed(1)).to(torch.float16),
    "ids": torch.arange(5),
}


def test_floats_wider_than_the_dtype_are_cast_and_nothing_else(tmp_path: Path) -> None:
    (got,) = update(WEIGHTS, engine(tmp_path, master=True), engine(tmp_path))
    assert same(got, WEIGHTS | {"a": WEIGHTS["a"].to(torch.bfloat16)})


def test_without_a_dtype_weights_are_sent_as_they_are(tmp_path: Path) -> None:
    (got,) = update(
        WEIGHTS, engine(tmp_path, master=True, dtype=None), engine(tmp_path, dtype=None)
    )
    assert same(got, WEIGHTS)


def test_a_generator_may_reuse_its_tensor(tmp_path: Path) -> None:
    def reusing() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4, dtype=torch.bfloat16)
        for number in range(3):
            yield f"layer.{number}", buffer.fill_(number)

    actor, worker = engine(tmp_path, master=True), engine(tmp_path)
    connect(actor, worker)
    asyncio.run(actor.send_weights(reusing()))
    got = asyncio.run(received(worker))
    assert [tensor[0].item() for tensor in got.values()] == [0, 1, 2]


def test_the_other_actor_ranks_take_all_tensors_and_publish_none(tmp_path: Path) -> None:
    taken = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            taken.append(name)
            yield name, tensor

    other = engine(tmp_path)
    other.init_process_group(sync="1")
    assert asyncio.run(other.send_weights(gathered())) == {}
    assert taken == list(WEIGHTS)
    assert not list(tmp_path.rglob("*"))


def test_what_is_received_is_the_callers_own(tmp_path: Path) -> None:
    actor, worker = engine(tmp_path, master=True), engine(tmp_path)
    (got,) = update(WEIGHTS, actor, worker)
    kept = {name: tensor.clone() for name, tensor in got.items()}
    update({**WEIGHTS, "a": WEIGHTS["a"] + 1}, actor, worker)
    assert same(got, kept)


def test_a_rollout_with_an_accelerator_gets_its_tensors_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = torch.device("meta")  # stands in for one, on any machine
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: accelerator
    )
    (got,) = update(WEIGHTS, engine(tmp_path, master=True), engine(tmp_path))
    assert {tensor.device for tensor in got.values()} == {accelerator}


def test_a_later_update_ends_the_wait_for_an_earlier_one(tmp_path: Path) -> None:
    actor, worker = engine(tmp_path, master=True), engine(tmp_path)

    async def program() -> Weights:
        connect(actor, worker)  # the actor fails before it has published
        early = asyncio.create_task(received(worker))
        await asyncio.sleep(0.2)
        connect(actor, worker)
        late = asyncio.create_task(received(worker))
        await actor.send_weights(iter(WEIGHTS.items()))
        with pytest.raises(pulse_rl.errors.EngineError, match="another weight update"):
            await early
        return await late

    assert asyncio.run(program()).keys() == WEIGHTS.keys()


def test_a_worker_waits_for_its_own_update_and_not_for_any(tmp_path: Path) -> None:
    actor, worker = engine(tmp_path, master=True), engine(tmp_path, timeout_seconds=0.2)
    update(WEIGHTS, actor)
    connect(actor, worker)
    with pytest.raises(
        pulse_rl.errors.EngineError, match=r"no version for this update within 0\.2 s"
    ) as failed:
        asyncio.run(received(worker))
    assert failed.value.__notes__ == [f"Hint: {failed.value.hint}"]
    assert "all nodes share" in failed.value.hint


def test_a_later_update_ends_the_delivery_of_an_earlier_one(tmp_path: Path) -> None:
    actor, worker = engine(tmp_path, master=True), engine(tmp_path)

    async def program() -> None:
        connect(actor, worker)
        await actor.send_weights(iter(WEIGHTS.items()))
        delivery = worker.receive_weights()
        await anext(delivery)
        connect(
            actor, worker
        )  # whoever loads the tensors is late: the host state is about to move on
        with pytest.raises(pulse_rl.errors.EngineError, match="another weight update"):
            await anext(delivery)

    asyncio.run(program())


def test_a_worker_that_cannot_reach_the_version_says_why(tmp_path: Path) -> None:
    actor, worker = engine(tmp_path, master=True), engine(tmp_path, timeout_seconds=0.3)
    update(WEIGHTS, actor)
    stored = set(tmp_path.rglob("*"))
    connect(actor, worker)
    asyncio.run(actor.send_weights(iter({**WEIGHTS, "ids": WEIGHTS["ids"] + 1}.items())))
    patches = [path for path in set(tmp_path.rglob("*")) - stored if path.suffix == ".patch"]
    assert patches
    for path in patches:
        path.unlink()
    with pytest.raises(pulse_rl.errors.EngineError, match=r"no version for this update.*patch"):
        asyncio.run(received(worker))


def test_signed_updates_are_accepted_and_others_are_not(tmp_path: Path) -> None:
    signer = pulse_rl.Signer.generate()
    signer.save(tmp_path / "key")
    keys = {"trusted_keys": [signer.public_key]}
    actor = engine(tmp_path / "s", master=True, signing_key=str(tmp_path / "key"), **keys)
    worker = engine(tmp_path / "s", cache=str(tmp_path / "cache"), **keys)
    (got,) = update(WEIGHTS, actor, worker)
    assert got.keys() == WEIGHTS.keys()
    assert list((tmp_path / "cache").rglob("*"))

    stranger = engine(tmp_path / "s", master=True)
    other = engine(tmp_path / "s", timeout_seconds=0.2, **keys)
    connect(stranger, other)
    asyncio.run(stranger.send_weights(iter(WEIGHTS.items())))
    with pytest.raises(pulse_rl.errors.EngineError, match="signed"):
        asyncio.run(received(other))


def test_a_stream_that_was_deleted_and_recreated_is_followed(tmp_path: Path) -> None:
    worker = engine(tmp_path)
    actor = engine(tmp_path, master=True)
    update(WEIGHTS, actor, worker)
    shutil.rmtree(tmp_path)
    changed = {**WEIGHTS, "b": WEIGHTS["b"] + 1}
    (got,) = update(changed, engine(tmp_path, master=True, dtype=None), worker)
    assert same({"b": got["b"]}, {"b": changed["b"]})


@pytest.mark.parametrize(
    ("settings", "reason", "hint"),
    [
        ({}, "needs a store and a stream", "engine_kwargs.pulse.store"),
        ({"store": "/s"}, "needs a store and a stream", "engine_kwargs.pulse.store"),
        ({"store": "runs/s", "stream": "p"}, "another place in every process", "absolute path"),
        ({"store": "memory://", "stream": "p"}, "another place in every process", "s3://"),
        ({"store": "/s", "stream": "p", "dtype": "float"}, "float", ""),
        ({"store": "/s", "stream": "p", "timeout_seconds": -1}, "timeout_seconds", ""),
        (
            {"store": "/s", "stream": "p", "trusted_keys": ["0" * 64]},
            "without a signing_key",
            "pulse keygen",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    settings: dict[str, Any], reason: str, hint: str
) -> None:
    with pytest.raises(pulse_rl.errors.InputError, match=reason) as refused:
        Registry.new("pulse", bucket_size=1, is_master=True, **settings)
    assert hint in refused.value.__notes__[0]
