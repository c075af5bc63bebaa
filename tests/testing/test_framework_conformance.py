"""The suites for trainers and engines: sound ones pass them, and each of their tests can fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pulse_rl import Publisher, Store, Subscriber, Update
from pulse_rl.errors import StateMismatch
from pulse_rl.testing import EngineConformance, TrainerConformance


class Loop:
    """One that trains by adding, in place."""

    def __init__(self, store: Store, stream: str) -> None:
        self.publisher = Publisher(store, stream=stream)
        self.state = {"w": np.zeros(3000, np.float16), "x": np.zeros(5, np.int8)}
        self.steps = 0

    def publish(self) -> None:
        self.publisher.publish(self.state)

    def step(self) -> None:
        self.state["w"][self.steps :: 100] += 1
        self.steps += 1
        self.publish()

    def close(self) -> None:
        self.publisher.close()


class TestLoop(TrainerConformance):
    kind: type[Loop] = Loop

    def new_trainer(self, store: Store, stream: str) -> Loop:
        return self.kind(store, stream)

    def step(self, trainer: Loop) -> None:
        trainer.step()

    def weights(self, trainer: Loop) -> Any:
        return {name: tensor.copy() for name, tensor in trainer.state.items()}


class OneBehind(Loop):
    def step(self) -> None:
        self.publish()
        self.state["w"] += 1


class OtherBits(Loop):
    def publish(self) -> None:
        self.publisher.publish({**self.state, "w": self.state["w"] + 1})


class OtherNames(Loop):
    def publish(self) -> None:
        self.publisher.publish(
            {f"{name}.{self.steps}": tensor for name, tensor in self.state.items()}
        )


class Frozen(Loop):
    def step(self) -> None:
        self.publish()


class OnceOnly(Loop):
    def publish(self) -> None:
        if self.publisher.head() is None or self.steps > 1:
            super().publish()


class Follower:
    """One that holds arrays, and writes into them."""

    def __init__(self, store: Store, stream: str) -> None:
        self.subscriber = Subscriber(store, stream=stream)
        self.held = {"w": np.zeros((30, 100), np.uint16), "x": np.zeros(50, np.uint8)}

    def sync(self) -> None:
        update = self.subscriber.sync()
        if update is not None:
            self.check(update)
            self.write(update)

    def check(self, update: Update) -> None:
        if any(self.held[each.spec.name].shape != each.spec.shape for each in update.tensors):
            raise StateMismatch("another shape")

    def write(self, update: Update) -> None:
        for name, indices, values in update:
            self.held[name].reshape(-1)[slice(None) if indices is None else indices] = values


class TestFollower(EngineConformance):
    kind: type[Follower] = Follower

    def state(self) -> Any:
        return {"w": np.ones((30, 100), np.uint16), "x": np.ones(50, np.uint8)}

    def new_engine(self, store: Store, stream: str) -> Follower:
        return self.kind(store, stream)

    def sync(self, engine: Follower) -> None:
        engine.sync()

    def weights(self, engine: Follower) -> Any:
        return engine.held


class WholeOnly(Follower):
    def write(self, update: Update) -> None:
        if update.full:
            super().write(update)
        update.acknowledge()


class Deaf(Follower):
    def sync(self) -> None:
        pass


class Unchecked(Follower):
    def check(self, update: Update) -> None:
        update.acknowledge()

    def write(self, update: Update) -> None:
        for name, indices, values in update:
            self.held[name] = self.held[name].reshape(-1).copy() if indices is not None else values
            if indices is not None:
                self.held[name][indices] = values


class Restless(Follower):
    def sync(self) -> None:
        if self.subscriber.version is not None:
            self.held["x"][0] ^= 1
        super().sync()


@pytest.mark.parametrize(
    ("suite", "kind", "test", "said"),
    [
        (TestLoop, OneBehind, "workers_hold_what_was_trained", "not the last step"),
        (TestLoop, OtherBits, "workers_hold_what_was_trained", "not the last step"),
        (TestLoop, Frozen, "workers_hold_what_was_trained", "no step changed"),
        (TestLoop, OtherNames, "workers_go_on_by_patches", "new as a whole"),
        (TestLoop, OnceOnly, "a_run_that_is_started_again_goes_on", "became"),
        (TestFollower, WholeOnly, "it_holds_each_version", "after version 1"),
        (TestFollower, WholeOnly, "it_catches_up_with_several_versions_at_once", "at once"),
        (TestFollower, Deaf, "a_newcomer_starts_at_the_newest", "came late"),
        (TestFollower, Restless, "where_nothing_is_new_nothing_changes", "two calls"),
        (TestFollower, Unchecked, "what_does_not_fit_changes_nothing", "without an error"),
    ],
)
def test_what_is_broken_is_found(suite: Any, kind: type, test: str, said: str) -> None:
    broken = suite()
    broken.kind = kind
    with pytest.raises(AssertionError, match=said):
        getattr(broken, f"test_{test}")()
