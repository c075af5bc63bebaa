"""The short version of `make faults`: a hypothesis state machine over the World, and seeded random
sequences."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from importlib import import_module
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pulse_rl import Bits, MemoryStore, Publisher, State, Subscriber
from pulse_rl.errors import ChainGap
from tests.support.interrupts import Interrupter
from tests.support.publishers import FoldingPublisher

from .driver import WORLDS, described, repeatable, run, search, shrunk
from .model import GAP, MUST, Model, Violation, check
from .modes import INLINE, STEADY
from .store import FAULTS, Client, CrashNow, Disk, Fault, Net
from .trainer import Trainer
from .world import RULES, SIGNER, THREADED, World

_SEED = 20260203
chance = st.integers(0, 2**32 - 1).map(Random)


class Streams(RuleBasedStateMachine):
    """What may happen to a stream, in any order; hypothesis looks for a short one that breaks a
    promise."""

    @initialize(rng=chance, threads=st.sampled_from((INLINE, INLINE, STEADY)))
    def start(self, rng: Random, threads: str) -> None:
        self.stack = ExitStack()
        interrupter = self.stack.enter_context(Interrupter())
        self.stack.enter_context(repeatable(rng))
        self.world = World(rng, threads, interrupter)
        self.stack.callback(self.world.close)

    @rule(rng=chance, name=st.sampled_from(["publish", "burst", "join", "sync"]))
    def go_on(self, rng: Random, name: str) -> None:
        self.step(name, rng)

    @precondition(lambda self: self.world.model.versions)
    @rule(rng=chance, name=st.sampled_from(sorted(RULES)))
    def anything(self, rng: Random, name: str) -> None:
        self.step(name, rng)

    @precondition(lambda self: self.world.threads == STEADY)
    @rule(rng=chance, name=st.sampled_from(sorted(THREADED)))
    def disturb(self, rng: Random, name: str) -> None:
        self.step(name, rng)

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
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def searched(kind: str, sequences: int) -> Counter[str]:
    """What so many sequences came to, on all cores; fails with the first that breaks a promise,
    shrunk."""
    counts: Counter[str] = Counter()
    for outcome in search(kind, [_SEED * 10_000 + k for k in range(sequences)]):
        assert not outcome.violation, described(outcome)
        counts += outcome.counts + outcome.injected
        counts["sequences"] += 1
    assert counts["sequences"] == sequences
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sequences"), [("streams", 90), ("fleet", 40), ("rounds", 40)])
def test_random_sequences(kind: str, sequences: int) -> None:
    counts = searched(kind, sequences)
    assert set(FAULTS) <= set(counts), "each fault befell somebody"
    if kind == "rounds":
        assert {f"lie: {lie}" for lie in import_module("tests.faults.rounds").LIES} <= set(counts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORLDS)
def test_a_sequence_is_a_function_of_its_seed(kind: str) -> None:
    """With threads or without, hostile or not; and each is another."""
    outcomes = [run(seed, kind) for seed in range(40, 48)]
    assert [run(seed, kind) for seed in range(40, 48)] == outcomes
    assert not [described(outcome) for outcome in outcomes if outcome.violation]
    assert len({tuple(outcome.trace) for outcome in outcomes}) == len(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed", "steps"),
    [
        # One that lost its checkpoint takes a snapshot, and what its name withheld before is lost.
        ("rounds", 1000000486, (0, 3, 5, 8, 10, 11, 13, 15, 25)),
        ("rounds", 3000000027, (3, 4, 6, 9, 14, 20, 23, 24, 27)),
        ("rounds", 7711000000556, (5, 17, 19, 21, 23, 25, 26, 27)),
        ("rounds", 8806000000034, (6, 8, 10, 12, 13, 14, 16, 18)),
        # One whose joining was interrupted has looked at posts before it knew the shares.
        ("rounds", 11000000226, (1, 2, 12, 13, 14, 31, 33, 35)),
        # The manifest of the version that a worker has is damaged, or is of another stream, later.
        ("streams", 1000000201, (3, 7, 16, 23, 26, 27, 28)),
        ("streams", 1000000460, (4, 10, 13, 16, 17)),
        # A publisher with a given stream ID, whose claim fails, finds no manifest that it can read.
        ("streams", 1000006925, (1, 12, 16, 21, 22, 23)),
        # The source shows the relay other objects in the place of digests, twice the same.
        ("fleet", 1000001036, (1, 7, 8, 11, 13)),
        ("fleet", 77000000184, (1, 8, 10, 12, 25)),
        # A false fold leads to a version whose patch has no base any more, as an anchor does.
        ("streams", 71000002045, (4, 5, 11, 13)),
    ],
)
def test_sequences_that_once_broke_a_promise(kind: str, seed: int, steps: tuple[int, ...]) -> None:
    outcome = run(seed, kind, only=steps)
    assert not outcome.violation, described(outcome)


@pytest.mark.slow
def test_what_breaks_a_promise_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A promise that two workers break by their mere being: what is left of a long sequence is that
    they join."""
    monkeypatch.setattr(
        World, "settled", lambda world, _: check(len(world.workers) < 2, "two workers joined")
    )
    found = next(
        outcome
        for seed in range(100)
        if (outcome := run(seed)).violation and len(outcome.steps) > 8
    )
    shorter = shrunk(found)
    assert [line.partition(": ")[2] for line in shorter.trace if line[0].isdigit()] == [
        "join",
        "join",
    ]
    assert run(found.seed, only=shorter.steps).violation
    assert f"--only {found.seed} --steps {shorter.steps[0]},{shorter.steps[1]}" in described(
        shorter
    )


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
        world._publish(rng, 0, [])
        world.burst(rng)
        world.join(rng)
        worker = world.workers[0]
        worker.restart("cold", None)
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


def test_the_model_knows_that_an_unsigned_fold_leads_nowhere() -> None:
    model = Model()
    disk = model.disk = Disk(model.created)
    model.signed = True
    with FoldingPublisher(
        disk, stream="s", anchor_ratio=1e9, folds=(2,), signer=SIGNER, threads=1
    ) as publisher:
        for k in range(3):
            state = State.of(
                {"a": Bits(np.r_[np.full(500, k), np.zeros(5000)].astype(np.uint16), "BF16")}
            )
            model.offer(state)
            publisher.publish(state)
    assert model.versions[2].patch
    disk.delete(f"s/payloads/{model.versions[2].patch[0]}.patch")
    assert model.reach(disk)[2] == MUST
    link = next(name for name in disk.names("s/links") if "anchor" not in name)
    disk.put(link, (disk.peek(link) or b"").rpartition(b"\n")[0] + b"\n")
    assert model.reach(disk)[2] == GAP
    with pytest.raises(ChainGap, match="not signed"):
        Subscriber(disk, stream="s", trusted_keys=[SIGNER.public_key], threads=1).sync()
