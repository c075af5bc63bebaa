"""Suites for what moves weights through a stream: a trainer that publishes, an engine that
follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from typing import Any, ClassVar

import numpy as np

from ..errors import PulseError
from ..maintenance.verify import verify_stream
from ..state.checkpoint import as_state
from ..state.digest import state_digest
from ..state.tensors import Bits
from ..store import MemoryStore, Store
from ..sync.publisher import Publisher
from ..sync.subscriber import Subscriber

STREAM = "policy"


def _holds(held: bool, seen: str) -> None:
    if not held:
        raise AssertionError(seen)


def _root(weights: Any) -> str:
    return state_digest(as_state(weights)).root


class TrainerConformance(ABC):
    """Tests of a trainer that publishes. A subclass says how to make one, and to train a step; each
    test makes its own. Failures are AssertionErrors that say what was seen."""

    steps: ClassVar[int] = 3
    """That a test trains. Each must change some weights."""

    def new_store(self) -> Store:
        """An empty store; one in this process's memory, unless a subclass has another."""
        return MemoryStore()

    @abstractmethod
    def new_trainer(self, store: Store, stream: str) -> Any:
        """A trainer that publishes to ``stream`` in ``store``. With a store that has the stream
        already it is the same run, started again."""

    @abstractmethod
    def step(self, trainer: Any) -> None:
        """Trains ``trainer`` one step, and publishes its weights, or submits them."""

    @abstractmethod
    def weights(self, trainer: Any) -> Any:
        """What a worker must hold after the step of ``trainer``, by the names of the checkpoint
        that engines load and in the dtypes in which they compute: best made without this library,
        as by a checkpoint that is saved. None of it changes with the next step."""

    def finish(self, trainer: Any) -> None:
        """Ends ``trainer``, and returns when everything is published."""
        trainer.close()

    def test_workers_hold_what_was_trained(self) -> None:
        store = self.new_store()
        trained = self._run(store, self.steps)
        with closing(Subscriber(store, stream=STREAM)) as worker:
            found = []
            for version in worker.stream.versions():
                update = worker.sync(version)
                _holds(update is not None, f"version {version} is nothing new to a worker")
                found.append(worker.root)
        _holds(
            found[-1] == trained[-1],
            f"the newest version is not the last step: {found[-1]}, not {trained[-1]}",
        )
        # A trainer may leave out steps, and publish what it starts from; an unknown state it may
        # not.
        unknown = [
            version for version, root in enumerate(found) if version > 0 and root not in trained
        ]
        _holds(not unknown, f"versions {unknown} are of no step")
        _holds(len(set(found)) > 1, "no step changed what is published")

    def test_workers_go_on_by_patches(self) -> None:
        store = self.new_store()
        self._run(store, self.steps)
        with closing(Subscriber(store, stream=STREAM)) as worker:
            first = worker.sync(worker.stream.versions()[0])
            _holds(first is not None, "there is no first version")
            assert first is not None
            first.acknowledge()
            update = worker.sync()
            _holds(update is not None, "there is one version only")
            _holds(
                update is not None and not update.full,
                "the newest version is new as a whole: names or shapes changed",
            )

    def test_a_run_that_is_started_again_goes_on(self) -> None:
        store = self.new_store()
        self._run(store, 1)
        with closing(Subscriber(store, stream=STREAM)) as worker:
            before = worker.stream.versions()
            trained = self._run(store, 1)
            after = worker.stream.versions()
            worker.sync()
            _holds(
                after[: len(before)] == before and len(after) > len(before),
                f"versions {before} became {after}",
            )
            _holds(
                worker.root == trained[-1],
                "the newest version is not what was trained after the start",
            )

    def test_all_versions_can_be_verified(self) -> None:
        store = self.new_store()
        self._run(store, self.steps)
        for report in verify_stream(store, STREAM):
            _holds(not report.problems, f"version {report.version}: {report.problems}")

    def _run(self, store: Store, steps: int) -> list[str]:
        """The roots after each of so many steps of a trainer."""
        trainer = self.new_trainer(store, STREAM)
        roots = []
        try:
            for _ in range(steps):
                self.step(trainer)
                roots.append(_root(self.weights(trainer)))
        finally:
            self.finish(trainer)
        return roots


class EngineConformance(ABC):
    """Tests of an engine, or any model, that follows a stream. A subclass says how to make one, to
    bring it to the newest version, and to read its weights; each test makes its own, and publishes
    what it is to hold. Failures are AssertionErrors that say what was seen."""

    versions: ClassVar[int] = 4
    """That a test publishes."""
    share: ClassVar[float] = 0.05
    """Of all elements, that a version changes."""

    def new_store(self) -> Store:
        """An empty store; one in this process's memory, unless a subclass has another."""
        return MemoryStore()

    @abstractmethod
    def state(self) -> Any:
        """The weights of a checkpoint that the engine can load: what a trainer publishes first."""

    @abstractmethod
    def new_engine(self, store: Store, stream: str) -> Any:
        """An engine that follows ``stream`` in ``store``, with any weights of its own."""

    @abstractmethod
    def sync(self, engine: Any) -> None:
        """Brings ``engine`` to the newest version. Raises PulseError."""

    @abstractmethod
    def weights(self, engine: Any) -> Any:
        """What ``engine`` computes with, by the names and in the dtypes of `state`."""

    def close(self, engine: Any) -> None:  # noqa: B027 (there may be nothing to do)
        """Ends ``engine``."""

    def test_it_holds_each_version(self) -> None:
        """Any bits: NaNs with payloads, infinities and negative zeros among them."""
        with self._following() as world:
            for version in range(self.versions):
                world.publish()
                world.sync()
                _holds(
                    world.is_right(),
                    f"after version {version} it has other bits than were published",
                )

    def test_it_catches_up_with_several_versions_at_once(self) -> None:
        with self._following() as world:
            world.publish()
            world.sync()
            for _ in range(self.versions):
                world.publish()
            world.sync()
            _holds(
                world.is_right(),
                f"after {self.versions} versions at once it has other bits than were published",
            )

    def test_a_newcomer_starts_at_the_newest(self) -> None:
        with self._following() as world:
            for _ in range(self.versions):
                world.publish()
            world.sync()
            _holds(world.is_right(), "it came late, and has other bits than were published")

    def test_where_nothing_is_new_nothing_changes(self) -> None:
        with self._following() as world:
            world.publish()
            world.sync()
            world.sync()
            _holds(
                world.is_right(),
                "after two calls for one version it has other bits than were published",
            )

    def test_what_does_not_fit_changes_nothing(self) -> None:
        with self._following() as world:
            world.publish()
            world.sync()
            right = world.state
            name = right.specs[0].name
            shaped = {
                s.name: Bits(right.read(s.name).reshape(s.shape), s.dtype.name) for s in right.specs
            }
            other = np.zeros(right.spec(name).elements + 1, right.spec(name).dtype.uint)
            world.publisher.publish({**shaped, name: Bits(other, right.spec(name).dtype.name)})
            try:
                world.sync()
            except PulseError:
                _holds(
                    world.is_right(),
                    f"it has refused another shape of {name!r}, and has other weights than before",
                )
            else:
                raise AssertionError(f"it has taken another shape of {name!r} without an error")

    def _following(self) -> _World:
        return _World(self, self.new_store())


class _World:
    """A stream, and an engine that follows it."""

    def __init__(self, suite: EngineConformance, store: Store) -> None:
        self._suite = suite
        self._rng = np.random.default_rng(0)
        self.state = as_state(suite.state()).copy()
        self.publisher = Publisher(store, stream=STREAM)
        self.publisher.publish(self.state)
        self._engine = suite.new_engine(store, STREAM)

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *_: object) -> None:
        self._suite.close(self._engine)
        self.publisher.close()

    def publish(self) -> None:
        for spec in self.state.specs:
            bits = self.state.read(spec.name)
            places = np.flatnonzero(self._rng.random(bits.size) < self._suite.share)
            most = 2 if spec.dtype.name == "BOOL" else 1 << min(8 * spec.dtype.width, 63)
            bits[places] ^= self._rng.integers(1, most, places.size, bits.dtype)
        self.publisher.publish(self.state)

    def sync(self) -> None:
        self._suite.sync(self._engine)

    def is_right(self) -> bool:
        return _root(self._suite.weights(self._engine)) == _root(self.state)
