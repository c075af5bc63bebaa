"""What a rank may hold, send and store: its share, little but hashes, and no more bytes than one
publisher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

from pulse_rl import LocalStore, MemoryStore, Publisher
from pulse_rl.frameworks.fsdp import ShardedPublisher
from tests.support.sharded import followed, gathered
from tests.support.trainers import Trainer, together

pytestmark = pytest.mark.slow

MIB = 1 << 20
#: Of the documents: blocks and their code in flight, chunks of columns.
CONSTANT = 48 * MIB


def weights(
    trainer: Trainer, rows: int, columns: int, tensors: int, *placements: Placement
) -> dict[str, DTensor]:
    """BF16 weights, ``rows`` by ``columns`` on each rank, with the spread of a trained layer."""
    mesh = init_device_mesh("cpu", (trainer.size,))
    generator = torch.Generator().manual_seed(trainer.rank)
    return {
        f"layers.{k}.weight": DTensor.from_local(
            (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16(),
            mesh,
            [placements[k % len(placements)]],
        )
        for k in range(tensors)
    }


def train(state: dict[str, DTensor], seed: int) -> None:
    """A hundredth of all weights moves by a step or two, as an optimizer's small update has it."""
    for k, tensor in enumerate(state.values()):
        flat = tensor.to_local().reshape(-1).view(torch.int16)
        generator = torch.Generator().manual_seed(1000 * seed + 10 * k + dist.get_rank())
        chosen = torch.randint(len(flat), (len(flat) // 100,), generator=generator)
        flat[chosen] += 1


def status(key: str) -> int:
    """Bytes of this process, as the system counts them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most bytes that the process has held within it, above those at its beginning."""
    found: list[int] = []
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    yield found
    found.append(status("VmHWM") - before)


def memory(trainer: Trainer) -> None:
    trainer.connect("memory")
    state = weights(trainer, 2048, 2048, 12, Shard(0), Shard(1))
    share = sum(tensor.to_local().nbytes for tensor in state.values())
    store = LocalStore(trainer.folder / "store")
    with peak() as most, ShardedPublisher(store, stream="policy", threads=1) as publisher:
        for seed, anchor in enumerate((True, False, True)):
            train(state, seed)
            publisher.publish(state, anchor=anchor)
    assert most[0] <= 1.2 * share + CONSTANT, (
        f"{most[0] / MIB:.0f} MiB for a share of {share / MIB:.0f} MiB"
    )
    assert most[0] >= share, "the measure sees nothing"
    with peak() as most, ShardedPublisher(store, stream="policy", threads=1) as publisher:
        train(state, 4)
        published = publisher.publish(state)
        assert published.changed
    assert most[0] <= 1.2 * share + CONSTANT, (
        f"{most[0] / MIB:.0f} MiB to resume with {share / MIB:.0f} MiB"
    )


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read as Linux tells it"
)
def test_a_rank_holds_its_share() -> None:
    together(memory, 2, seconds=90)


def nothing_gathered(trainer: Trainer) -> None:
    """Rows are sent to nobody: what ranks tell each other of 8 MiB of weights is hashes and
    sizes."""
    trainer.connect("messages")
    state = weights(trainer, 1000, 1001, 2, Shard(0))
    sent: Counter[str] = Counter()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were gathered")

    def counted(name: str, place: int) -> Any:
        real = getattr(dist, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            sent[name] += arguments[place].nbytes
            return real(*arguments, **settings)

        return call

    DTensor.full_tensor = DTensor.redistribute = refuse  # type: ignore[method-assign]
    dist.all_gather_into_tensor = dist.all_to_all_single = dist.broadcast = refuse
    dist.all_gather, dist.isend = counted("all_gather", 1), counted("isend", 0)
    with ShardedPublisher(
        LocalStore(trainer.folder / "store"), stream="policy", threads=1
    ) as publisher:
        for seed in range(3):
            train(state, seed)
            publisher.publish(state)
    assert 0 < sent["isend"] < 3000
    assert 0 < sent["all_gather"] < 30_000


def test_nothing_is_gathered() -> None:
    together(nothing_gathered, 2)


def bytes_of_patches(trainer: Trainer) -> None:
    """Of the same versions, by the ranks and by one publisher."""
    trainer.connect("bytes")
    state = weights(trainer, 512, 2048, 4, Shard(0))
    store, plain = LocalStore(trainer.folder / "store"), MemoryStore()
    with (
        ShardedPublisher(store, stream="policy", threads=1) as publisher,
        Publisher(plain, stream="policy") as one,
    ):
        for seed in range(3):
            train(state, seed)
            published, whole = publisher.publish(state), gathered(state)
            if trainer.rank == 0:
                alone = one.publish(whole)
                assert published.root == alone.root
                assert published.changed == alone.changed
                assert published.patch_bytes <= 1.03 * alone.patch_bytes
                assert published.anchor_bytes <= 1.001 * alone.anchor_bytes
                assert seed == 0 or alone.patch_bytes
    reader = followed(store)
    reader.sync()
    assert reader.root == published.root


def test_patches_are_as_small_as_those_of_one_publisher() -> None:
    together(bytes_of_patches, 4, seconds=60)
