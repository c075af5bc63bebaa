"""The short version of `make faults`: a hypothesis state machine over the World, and seeded random sequences."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pulse_rl import MemoryStore, Publisher, Subscriber

from .driver import repeatable, run
from .model import Violation
from .store import FAULTS, Client, CrashNow, Disk, Fault, Net
from .trainer import Trainer
from .world import World

_SEED = 20260203
chance = st.integers(0, 2**32 - 1).map(Random)


class Streams(RuleBasedStateMachine):
    """What may happen to a stream, in any order; hypothesis looks for a short one that breaks a promise."""

    @initialize(rng=chance)
    def start(self, rng: Random) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(repeatable(rng))
        self.world = World(rng)
        self.stack.callback(self.world.close)

    @rule(rng=chance)
    def publish(self, rng: Random) -> None:
        self.step("publish", rng)

    @rule(rng=chance)
    def burst(self, rng: Random) -> None:
        self.step("burst", rng)

    @rule(rng=chance)
    def restart_publisher(self, rng: Random) -> None:
        self.step("restart_publisher", rng)

    @rule(rng=chance)
    def join(self, rng: Random) -> None:
        self.step("join", rng)

    @precondition(lambda self: self.world.workers)
    @rule(rng=chance)
    def sync(self, rng: Random) -> None:
        self.step("sync", rng)

    @precondition(lambda self: self.world.workers)
    @rule(rng=chance)
    def sync_to(self, rng: Random) -> None:
        self.step("sync_to", rng)

    @precondition(lambda self: self.world.workers)
    @rule(rng=chance)
    def restart_worker(self, rng: Random) -> None:
        self.step("restart_worker", rng)

    @precondition(lambda self: self.world.model.versions)
    @rule(rng=chance)
    def fold(self, rng: Random) -> None:
        self.step("fold", rng)

    @precondition(lambda self: self.world.model.versions)
    @rule(rng=chance)
    def gc(self, rng: Random) -> None:
        self.step("gc", rng)

    @precondition(lambda self: self.world.model.versions)
    @rule(rng=chance)
    def destroy(self, rng: Random) -> None:
        self.step("destroy", rng)

    @rule(rng=chance)
    def lie(self, rng: Random) -> None:
        self.step("lie", rng)

    @precondition(lambda self: self.world.workers)
    @rule(rng=chance)
    def audit(self, rng: Random) -> None:
        self.step("audit", rng)

    def step(self, name: str, rng: Random) -> None:
        getattr(self.world, name)(rng)
        self.world.settled(rng)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.stack:
            self.world.finish(Random(_SEED))


@pytest.mark.slow
def test_a_state_machine_of_faults() -> None:
    run_state_machine_as_test(
        Streams,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_random_sequences_of_faults(part: int) -> None:
    for k in range(25):
        outcome = run(_SEED * 1000 + part * 25 + k)
        replay = f"python -m tests.faults --only {outcome.seed}"
        assert not outcome.violation, "\n".join([*outcome.trace, outcome.violation, replay])


def test_a_sequence_is_a_function_of_its_seed() -> None:
    assert run(7) == run(7)
    assert run(7).trace != run(8).trace


# The harness itself: faults that it claims to inject happen, and a library that lies is caught.


def _client(*faults: Fault) -> Client:
    client = Client(Net(Disk(lambda name, data: None)))
    client.expect(list(faults))
    return client


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_befalls_a_call(kind: str) -> None:
    client = _client(Fault(kind, 0, 0.6))
    client.net.disk.put("s/payloads/a", b"0123456789")
    try:
        client.put_new("s/payloads/b", b"0123456789")
        read = client.get("s/payloads/a")
        listed = len(list(client.list("s/payloads")))
    except (CrashNow, Exception):
        assert kind in ("drop", "lost_reply", "late", "crash", "interrupt", "twice")
    else:
        assert (read != b"0123456789") == (kind in ("truncate", "flip"))
        assert (listed < 2) == (kind == "stale")
    assert client.net.injected == {kind: 1}
    assert client.dead == (kind == "crash")
    stored = client.net.disk.peek("s/payloads/b") is not None
    assert stored == (kind not in ("drop", "late"))
    client.net.flush()
    assert (client.net.disk.peek("s/payloads/b") is not None) == (kind != "drop")


def test_a_wrong_bit_in_a_live_model_is_noticed() -> None:
    rng = Random(1)
    with repeatable(rng):
        world = World(rng)
        world.publish(rng)
        world.burst(rng)
        world.join(rng)
        worker = world.workers[0]
        worker.sync([], None)
        next(iter(worker.live.tensors.values())).array.reshape(-1)[0] ^= 1
        with pytest.raises(Violation):
            worker.sync([], None)


def test_a_publisher_that_reuses_a_version_is_noticed() -> None:
    rng = Random(2)
    with repeatable(rng):
        world = World(rng)
        for _ in range(3):
            world.burst(rng)
        world.disk.delete(f"s/versions/{world.model.head:012d}.json")
        world.publishers = [None, None]
        with pytest.raises(Violation, match="used twice"):
            world._publish(rng, 0, [])


def test_the_model_knows_what_can_be_reached() -> None:
    """A path that only a search over all links finds, and none once an anchor is gone."""
    rng = Random(3)
    world, trainer = World(rng), Trainer(rng)
    publisher = Publisher(world.disk, stream="s", anchor_ratio=1e9, threads=1)
    for _ in range(4):
        state = trainer.step(rng)
        world.model.offer(state)
        publisher.publish(state)
    assert set(world.model.reach(world.disk).values()) == {"must"}
    Subscriber(world.disk, stream="s", threads=1).sync()
    for name in world.disk.names("s/payloads"):
        if name.endswith(".safetensors"):
            world.disk.delete(name)
    assert world.model.reach(world.disk)[0] == "gap"
    assert isinstance(world.disk, MemoryStore)
