"""A patch or an anchor by the publisher's own choice: each way a worker follows, and the event says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pulse_rl import Bits, InputError, MemoryStore, Publisher, Subscriber, state_root, verify_stream
from pulse_rl.errors import StoreUnavailable
from pulse_rl.events import PathFailed, Published
from pulse_rl.plan import Scenario, make_plan
from tests.support.states import Live, Rng, Tensors, roots, weights

FAST, SLOW = 1e15, "50Mbit"
ELEMENTS = 200_000


def changed(state: Tensors, share: float, rng: Rng) -> Tensors:
    """The state with every so many weights one rounding step up or down."""
    after = {name: Bits(tensor.array.copy(), tensor.dtype) for name, tensor in state.items()}
    flat = after["w"].array.reshape(-1)
    at = rng.choice(len(flat), round(share * len(flat)), replace=False)
    flat[at] ^= np.uint16(1)
    return after


def states(rng: Rng, *shares: float) -> list[Tensors]:
    chain: list[Tensors] = [{"w": weights(rng, ELEMENTS // 100, 100), "b": weights(rng, 7)}]
    for share in shares:
        chain.append(changed(chain[-1], share, rng))
    return chain


def publish_all(chain: list[Tensors], store: MemoryStore, **options: Any) -> list[Published]:
    publisher = Publisher(store, stream="s", threads=1, **options)
    return [publisher.publish(state) for state in chain]


def follow(store: MemoryStore, *versions: int) -> Live:
    """A live model that went to each of these versions."""
    subscriber, live = Subscriber(store, stream="s", threads=1), Live()
    for version in versions:
        update = subscriber.sync(version)
        assert update is not None
        live.apply(update)
        assert live.root == subscriber.root
    return live


def test_each_version_by_its_density(rng: Rng) -> None:
    """A fast link: few changes make a patch, many an anchor, and workers at any version follow across both."""
    chain, store = states(rng, 0.01, 0.9, 0.01, 0.9), MemoryStore()
    done = publish_all(chain, store, mode="auto", bandwidth=FAST)
    assert [d.changed is None for d in done] == [True, False, True, False, True]
    assert [d.anchored for d in done] == [True, False, True, False, True]
    assert [d.reason.partition(":")[0] for d in done] == ["", "patch", "anchor", "patch", "anchor"]
    assert "density 89.9" in done[2].reason
    assert "choose" in done[2].phases
    assert [r.problems for r in verify_stream(store, "s")] == [()] * 5
    wanted = roots(chain)
    for way in ([0, 1, 2, 3, 4], [0, 4], [1, 3], [2, 3, 4], [4], [0, 1, 4]):
        assert follow(store, *way).root == wanted[way[-1]]


def test_a_slow_link_always_gets_patches(rng: Rng) -> None:
    done = publish_all(states(rng, 0.01, 1.0), MemoryStore(), mode="auto", bandwidth=SLOW, anchor_ratio=9.0)
    assert [d.patch_bytes > 0 for d in done] == [False, True, True]
    assert "50 Mbit/s" in done[2].reason


def test_the_choice_is_the_planners(rng: Rng) -> None:
    """The publisher changes its mind at the density at which the planner says that a full sync wins."""
    chain = states(rng)
    scenario = Scenario(params=ELEMENTS + 7, density=0.01, step_seconds=1, bandwidth=FAST, cores=1)
    where = make_plan(scenario).full_wins.density
    assert where is not None
    for share, anchored in ((0.98 * where, False), (1.02 * where, True)):
        done = publish_all([chain[0], changed(chain[0], share, rng)], MemoryStore(), mode="auto", bandwidth=FAST)
        assert (done[1].changed is None) == anchored


@pytest.mark.parametrize("codec", ["context", "history", "zstd"])
def test_the_reason_names_the_seconds_of_the_codec(rng: Rng, codec: str) -> None:
    done = publish_all(states(rng, 0.01), MemoryStore(), mode="auto", bandwidth=SLOW, codec=codec)
    scenario = Scenario(params=ELEMENTS + 7, density=2000 / (ELEMENTS + 7), step_seconds=1, bandwidth=50e6, cores=1)
    seconds = make_plan(scenario).methods[codec].sync_seconds
    assert f"a patch is expected to take {seconds:.3g} s" in done[1].reason


def test_anchor_mode_and_a_failed_commit(rng: Rng) -> None:
    """The baseline of a version without a patch, too, moves only after the commit."""

    class Failing(MemoryStore):
        fail = False

        def put_new(self, name: str, data: bytes) -> None:
            if self.fail and "/versions/" in name:
                raise StoreUnavailable("the store is away")
            super().put_new(name, data)

    chain, store = states(rng, 0.01, 0.01), Failing()
    publisher = Publisher(store, stream="s", mode="anchor", threads=1)
    assert publisher.publish(chain[0]).changed is None
    store.fail = True
    with pytest.raises(StoreUnavailable):
        publisher.publish(chain[1])
    store.fail = False
    done = publisher.publish(chain[2])  # the pending version is committed first
    assert (done.version, done.changed, done.reason) == (2, None, "")
    assert follow(store, 0, 1, 2).root == state_root(chain[2])


def test_a_restarted_publisher_goes_on_with_patches(rng: Rng) -> None:
    chain, store = states(rng, 0.01, 0.01), MemoryStore()
    publish_all(chain[:2], store, mode="anchor")
    done = publish_all(chain[2:], store)
    assert done[0].changed == round(0.01 * ELEMENTS)
    assert follow(store, 0, 2).root == state_root(chain[2])


def test_equal_states_make_an_empty_patch(rng: Rng) -> None:
    (state,) = states(rng)
    done = publish_all([state, state], MemoryStore(), mode="auto", bandwidth=FAST)
    assert done[1].changed == 0


def test_the_default_neither_compares_nor_explains(rng: Rng) -> None:
    done = publish_all(states(rng, 0.9), MemoryStore())
    assert done[1].reason == ""
    assert "choose" not in done[1].phases


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"mode": "auto"}, "needs a bandwidth"),
        ({"bandwidth": "50Mbit"}, "takes no bandwidth"),
        ({"mode": "auto", "bandwidth": "50"}, "not a bandwidth"),
        ({"mode": "auto", "bandwidth": 0}, "above 0"),
        ({"mode": "auto", "bandwidth": 1e6, "codec": "dense"}, "costs of codec 'dense'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Publisher(MemoryStore(), stream="s", **options)


def test_a_version_without_a_patch_is_reached_by_its_own_anchor() -> None:
    """A newcomer once fetched every anchor of a stream without patches, the oldest first."""

    class Counting(MemoryStore):
        shards = 0

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            self.shards += name.endswith(".safetensors") and start == 0
            return super().get(name, start, stop)

    store, weights = Counting(), np.zeros(1000, np.float32)
    publisher = Publisher(store, stream="s", mode="anchor")
    follower = Subscriber(store, stream="s")
    for i in range(12):
        weights[i] = 1
        publisher.publish({"w": weights})
        if i == 0:
            follower.sync()
    store.shards = 0
    events: list[object] = []
    Subscriber(store, stream="s", on_event=events.append).sync()
    follower.sync()
    assert store.shards == 2
    assert not any(isinstance(event, PathFailed) for event in events)
