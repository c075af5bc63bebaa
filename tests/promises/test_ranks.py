"""Ranks that hold slices publish the state that they are slices of; real processes over gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pulse_rl import Bits, LocalStore, Subscriber, state_root, verify_stream
from pulse_rl.errors import PulseError
from pulse_rl.frameworks.fsdp import ShardedPublisher
from tests.support.stores import FaultyStore
from tests.support.trainers import Trainer as Rank
from tests.support.trainers import together

from .oracle import STREAM, Worker, root_of
from .test_history import states

pytestmark = pytest.mark.slow
VERSIONS = 4


def whole(step: int) -> dict[str, torch.Tensor]:
    """The state after so many steps, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    state = {
        "a": torch.randn(37, 50, generator=generator).bfloat16(),
        "b": torch.randn(1501, 70, generator=generator),
        "c": torch.randn(9, generator=generator).bfloat16(),
    }
    for k in range(step):
        generator = torch.Generator().manual_seed(100 + k)
        for tensor in state.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.03] *= 1.01
    return state


def root(step: int) -> str:
    kinds: dict[torch.dtype, Any] = {
        torch.bfloat16: (np.uint16, "BF16"),
        torch.float32: (np.uint32, "F32"),
    }
    return root_of(
        {
            name: Bits(
                tensor.contiguous()
                .view(torch.uint8)
                .numpy()
                .view(kinds[tensor.dtype][0])
                .reshape(tensor.shape),
                kinds[tensor.dtype][1],
            )
            for name, tensor in whole(step).items()
        }
    )


def sharded(step: int, mesh: Any) -> dict[str, Any]:
    """Rows, columns, and the same on all."""
    state = whole(step)
    places = {"a": Shard(0), "b": Shard(1), "c": Replicate()}
    return {name: distribute_tensor(state[name], mesh, [places[name]]) for name in state}


def publishing(rank: Rank, folder: str, steps: range, **settings: Any) -> list[tuple[int, str]]:
    rank.connect(f"world-{steps.start}")
    mesh = init_device_mesh("cpu", (rank.size,))
    done = []
    with ShardedPublisher(LocalStore(folder), stream=STREAM, threads=1, **settings) as publisher:
        for step in steps:
            published = publisher.publish(sharded(step, mesh), metadata={"step": step})
            done.append((published.version, published.root))
    return done


def test_old_versions_go_while_ranks_publish(tmp_path: Any) -> None:
    together(partial(publishing, anchor_ratio=0.0, keep=1), 2, str(tmp_path), range(VERSIONS))
    assert [report.version for report in verify_stream(LocalStore(tmp_path), STREAM)] == [
        VERSIONS - 1
    ]


def failing(rank: Rank, folder: str) -> list[str]:
    """The store of one rank fails at one call after another: no rank goes on alone, and all go on
    together."""
    rank.connect("world")
    mesh = init_device_mesh("cpu", (rank.size,))
    store = FaultyStore(LocalStore(folder))
    roots = []
    with ShardedPublisher(store, stream=STREAM, threads=1) as publisher:
        publisher.publish(sharded(0, mesh))
        for step in range(1, 11):
            if rank.rank == step % rank.size:
                store.fail(step - 1)
            try:
                publisher.publish(sharded(step, mesh))
            except PulseError:
                store.heal()
                publisher.publish(sharded(step, mesh))
            store.heal()
            head = publisher.head()
            roots.append(head.root)
    return roots


def test_a_rank_whose_store_fails_fails_on_all_and_the_next_try_is_of_all(tmp_path: Any) -> None:
    results = together(failing, 2, str(tmp_path))
    assert results == [[root(step) for step in range(1, 11)]] * 2
    reports = list(verify_stream(LocalStore(tmp_path), STREAM))
    assert all(not report.problems for report in reports)
    assert {report.root for report in reports} == {root(step) for step in range(11)}


def recurring(rank: Rank, folder: str, steps: range) -> list[tuple[int, int, str]]:
    """Bytes, remembered versions and root of versions in which the same weights change again and
    again."""
    rank.connect(f"world-{steps.start}")
    mesh, given, done = init_device_mesh("cpu", (rank.size,)), states(recurs=True, rows=400), []
    with ShardedPublisher(
        LocalStore(folder), stream=STREAM, anchor_ratio=1e9, threads=1
    ) as publisher:
        for step in range(steps.stop):
            weight = torch.from_numpy(next(given)["weight"].array.view(np.int16)).view(
                torch.bfloat16
            )
            if step in steps:
                published = publisher.publish(
                    {"weight": distribute_tensor(weight, mesh, [Shard(0)])}
                )
                head = publisher.head()
                done.append((published.patch_bytes, head.remembers, published.root))
    return done


def test_ranks_code_by_what_changed_before(tmp_path: Any) -> None:
    """By themselves, as one process does, though most of what changes is one rank's, and in as many
    bytes but for each file's own (of patches of 2 kB here); ranks and processes that come after
    them know what they remembered."""
    store, given = LocalStore(tmp_path / "ranks"), states(recurs=True, rows=400)
    alone = together(recurring, 1, str(tmp_path / "alone"), range(14))[0]
    follower, part = Worker(store), Subscriber(store, stream=STREAM, select="weight")
    seen: list[int] = []
    for size, steps in ((3, range(14)), (2, range(14, 18)), (1, range(18, 22))):
        for done in together(recurring, size, str(tmp_path / "ranks"), steps):
            seen = [remembered for _, remembered, _ in done]
            assert all(seen[9:] if size == 3 else seen), "from the first patch on where it goes on"
            follower.sync(steps[-1])
            part.sync(steps[-1])
            assert follower.root == part.root == done[-1][2]
        if size == 3:
            assert [each[1:] for each in done] == [each[1:] for each in alone]
            assert sum(nbytes for nbytes, *_ in done[8:]) < 1.2 * sum(
                nbytes for nbytes, *_ in alone[8:]
            )
            assert sum(nbytes for nbytes, *_ in done[8:]) < 0.8 * 6 * done[1][0]
    assert [state_root(next(given)) for _ in range(22)][-1] == follower.root
    assert all(not report.problems for report in verify_stream(store, STREAM))
