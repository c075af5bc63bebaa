"""Where the same weights change again and again, a publisher codes them by what changed before;
elsewhere it does not. Nobody asks it to, and workers follow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pulse_rl import Bits, MemoryStore, Publisher, Subscriber, state_root

SHAPE = (1000, 1200)


def states(recurs: bool, seed: int = 1, rows: int = SHAPE[0]) -> Iterator[dict[str, Bits]]:
    """Of each one weight in 200 changes: half of the same hundredth, all in the first ``rows``, or
    any."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0x3C00, 0x4000, SHAPE).astype(np.uint16)
    often = (rng.random(SHAPE) < 0.01 * SHAPE[0] / rows) & (np.arange(SHAPE[0]) < rows)[:, None]
    while True:
        yield {"weight": Bits(weight.copy(), "BF16")}
        chosen = often & (rng.random(SHAPE) < 0.5) if recurs else rng.random(SHAPE) < 0.005
        weight[chosen] += np.uint16(1)


def published(
    publisher: Publisher, worker: Subscriber, given: Iterator[dict[str, Bits]], count: int
) -> tuple[list[int], list[tuple[int, ...]]]:
    """The bytes of so many patches, and what is remembered at their versions."""
    sizes, remembered = [], []
    for _ in range(count):
        state = next(given)
        done = publisher.publish(state)
        worker.sync()
        assert worker.root == done.root == state_root(state)
        head = publisher.head()
        assert head is not None
        sizes.append(done.patch_bytes)
        remembered.append(head.remembers)
    return sizes, remembered


@pytest.mark.slow
def test_it_turns_on_where_it_saves_and_off_where_it_does_not() -> None:
    store = MemoryStore()
    with (
        Publisher(store, stream="s", anchor_ratio=1e9) as publisher,
        Subscriber(store, stream="s") as worker,
    ):
        again, ever_others = states(recurs=True), states(recurs=False, seed=2)
        sizes, remembered = published(publisher, worker, again, 16)
        assert not any(remembered[:2])
        assert all(remembered[9:15])
        assert sum(sizes[10:15]) < 0.8 * 5 * sizes[1]
        sizes, remembered = published(publisher, worker, ever_others, 40)
        assert not any(remembered[-8:]), "nothing is saved, nothing is remembered"
        sizes, remembered = published(publisher, worker, again, 40)
        assert all(remembered[-6:-1])
        assert sum(sizes[-4:]) < 0.8 * 4 * sizes[2]
        with Subscriber(store, stream="s") as newcomer:
            newcomer.sync()
            assert newcomer.root == worker.root


@pytest.mark.slow
def test_it_stays_off_where_it_saves_nothing() -> None:
    store = MemoryStore()
    with Publisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
        _, remembered = published(publisher, worker, states(recurs=False), 24)
    assert not any(remembered)


@pytest.mark.slow
def test_a_restarted_publisher_goes_on() -> None:
    store, given = MemoryStore(), states(recurs=True)
    with Subscriber(store, stream="s") as worker:
        with Publisher(store, stream="s", anchor_ratio=1e9) as publisher:
            published(publisher, worker, given, 12)
        with Publisher(store, stream="s", anchor_ratio=1e9) as publisher:
            assert all(published(publisher, worker, given, 2)[1]), (
                "it has found what the one before remembered"
            )
