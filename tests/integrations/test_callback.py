"""The Trainer's callback, called as a Trainer does: which errors end a training, what is said, what
is counted.

`make test-trainers` has the real trainers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl import MemoryStore, Publisher, State, Subscriber, state_root
from pulse_rl.errors import InputError, PublisherConflict, StoreError, StoreUnavailable
from pulse_rl.store import Data
from tests.support.states import present
from tests.support.stores import GatedStore

pytestmark = pytest.mark.slow  # it imports transformers


class Training:
    """A Trainer as its callback sees it: every step adds an ulp to a few weights."""

    def __init__(self, store: Any, *, rank: int = 0, **settings: Any) -> None:
        from transformers import TrainerState

        from pulse_rl.frameworks.transformers import PulseCallback

        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        self.callback = PulseCallback(store, stream="policy", **settings)
        self.state = TrainerState(is_world_process_zero=rank == 0)
        self.args: Any = SimpleNamespace(learning_rate=1e-6, load_best_model_at_end=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def tell(self, event: str, **others: Any) -> None:
        getattr(self.callback, f"on_{event}")(
            self.args, self.state, None, model=self.model, optimizer=self.optimizer, **others
        )

    def begin(self) -> None:
        self.tell("train_begin")

    def step(self) -> None:
        self.state.global_step += 1
        with torch.no_grad():
            self.model.weight[0, :8] *= 1.01
        self.tell("step_end")

    def settle(self) -> None:
        """Time passes until all that was submitted has ended."""
        self.callback._publisher.wait()

    def settled_step(self) -> None:
        self.step()
        self.settle()

    def end(self) -> None:
        self.tell("train_end")

    def log(self, **logs: float) -> dict[str, float]:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.tell("log", logs=logs)
        return logs


def begun(store: Any, **settings: Any) -> Training:
    training = Training(store, **settings)
    training.begin()
    return training


def steps(store: MemoryStore) -> list[Any]:
    """The steps of all versions."""
    found: list[Any] = []
    with Subscriber(store, stream="policy") as last, Subscriber(store, stream="policy") as follower:
        last.sync()
        for version in range((last.version or 0) + 1):
            update = present(follower.sync(version))
            update.acknowledge()
            found.append(update.metadata["step"])
    return found


def test_a_slow_store_holds_nobody_up_and_gets_the_newest() -> None:
    store = GatedStore()
    training = begun(store)
    store.gate.clear()
    training.step()
    assert store.waiting.wait(20)
    for _ in range(4):
        training.step()
    store.gate.set()
    training.end()
    assert steps(store) == [0, 1, 5]
    assert training.log()["pulse/replaced"] == 3


@pytest.mark.parametrize(
    "settings", [{"replace": False}, {"replace": True}, {"replace": False, "every": 3}], ids=str
)
@pytest.mark.parametrize("logs", [False, True])
def test_another_publisher_ends_the_training(settings: dict[str, Any], logs: bool) -> None:
    """What a log has seen is raised all the same, by the next step."""
    store = MemoryStore()
    training = begun(store, **settings)
    for _ in range(3):
        training.settled_step()
        training.log(loss=1.0)
    with Publisher(store, stream="policy") as other:
        other.publish(training.model.state_dict())

    def train() -> None:
        for _ in range(settings.get("every", 1)):
            training.step()
        training.settle()
        if logs:
            training.log(loss=1.0)
        training.step()

    with pytest.raises(PublisherConflict):
        train()
    assert isinstance(training.callback.error, PublisherConflict)


def test_another_publisher_at_the_end_is_kept_for_the_program(
    caplog: pytest.LogCaptureFixture, store: MemoryStore
) -> None:
    training = begun(store)
    training.settle()
    with Publisher(store, stream="policy") as other:
        other.publish(training.model.state_dict())
    training.settled_step()
    training.log(train_loss=1.0)
    training.end()
    assert isinstance(training.callback.error, PublisherConflict)
    assert [r.levelname for r in caplog.records] == ["ERROR"]


def test_a_state_that_cannot_be_published_is_refused_before_the_first_step() -> None:
    training = Training(MemoryStore())
    training.model.weight.ds_id = 1  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="ZeRO-3"):
        training.begin()


def test_a_store_that_is_away_is_found_before_the_first_step() -> None:
    store = GatedStore()
    store.away = True
    with pytest.raises(StoreUnavailable):
        Training(store).begin()


def test_a_store_that_cannot_be_written_is_found_before_the_first_step(store: MemoryStore) -> None:
    def put(name: str, data: Data) -> None:
        raise StoreError("no permission to write")

    store.put = put  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="permission"):
        Training(store).begin()


@pytest.mark.parametrize("rank", [0, 1])
def test_any_error_at_the_end_is_kept_for_the_program(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    training = begun(MemoryStore(), rank=rank)
    lost = RuntimeError("CUDA out of memory")

    def state_dict(**_: Any) -> Any:
        raise lost

    training.model.state_dict = state_dict  # type: ignore[method-assign]
    training.model.weight.full_tensor = None  # type: ignore[attr-defined]
    training.state.global_step = 1
    training.end()
    assert training.callback.error is lost
    assert [r.levelname for r in caplog.records] == ["ERROR"]


def test_failures_are_counted_and_the_last_weights_are_tried_again() -> None:
    store = GatedStore()
    training = begun(store, replace=False)
    training.settle()
    store.away = True
    for _ in range(3):
        training.step()
    training.settle()
    assert training.log()["pulse/failed"] == 3
    assert isinstance(training.callback.error, StoreUnavailable)
    assert "pulse/failed" not in training.log()
    store.away = False
    training.end()
    assert training.callback.error is None
    assert steps(store) == [0, 3]


def test_metadata_are_the_finite_numbers_of_the_last_log(store: MemoryStore) -> None:
    training = begun(store, replace=False)
    training.settled_step()
    said = training.log(loss=0.5, broken=float("nan"), endless=float("inf"), text="no", steps=[1])  # type: ignore[arg-type]
    assert said["pulse/version"] == 1
    training.state.epoch = 1
    training.step()
    training.end()
    assert training.callback.published is not None
    assert training.callback.published.metadata == {
        "loss": 0.5,
        "logged_step": 1,
        "step": 2,
        "epoch": 1.0,
    }


def test_the_best_model_is_published_if_it_is_loaded_at_the_end(store: MemoryStore) -> None:
    training = Training(store, replace=False)
    training.args.load_best_model_at_end = True
    training.begin()
    training.step()
    with torch.no_grad():
        training.model.weight.zero_()
    training.end()
    worker = Subscriber(store, stream="policy")
    worker.sync()
    assert not worker.state.read("weight").any()


def test_other_ranks_publish_nothing(store: MemoryStore) -> None:
    training = begun(store, rank=1)
    training.step()
    assert training.log() == {}
    training.end()
    with Publisher(store, stream="policy") as other:
        assert other.head() is None


def test_no_version_is_committed_twice_at_the_end_and_a_second_training_goes_on() -> None:
    store = MemoryStore()
    training = Training(store, replace=False)
    for _ in range(2):
        training.begin()
        training.step()
        training.end()
    assert steps(store) == [0, 1, 1, 2]


def test_a_run_says_that_it_continues_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    for warnings in (0, 1):
        training = Training(store)
        caplog.clear()
        training.begin()
        training.step()
        training.end()
        assert [("follows step" in record.message) for record in caplog.records] == [
            True
        ] * warnings


@pytest.mark.parametrize(
    "settings", [{"dtype": "F32"}, {"every": 0}, {"every": True}, {"on_event": 3}, {"keep": 0}]
)
def test_settings_that_make_no_sense_are_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Training(MemoryStore(), **settings)


def tied_qwen() -> nn.Module:
    from tests.trainers.support import tiny

    return tiny()


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 64), tied_qwen], ids=["plain", "tied"])
def test_a_publisher_of_the_model_makes_the_same_version(make: Any) -> None:
    from pulse_rl.frameworks.transformers import checkpoint_weights

    by_callback, by_publisher = MemoryStore(), MemoryStore()
    training = Training(by_callback)
    training.model = make()
    training.begin()
    training.settle()
    with Publisher(by_publisher, stream="policy") as publisher:
        done = publisher.publish(training.model, dtype=torch.bfloat16)
    with Subscriber(by_callback, stream="policy") as worker:
        worker.sync()
        assert worker.root == done.root
        names = [spec.name for spec in worker.state.specs]
    assert names == [spec.name for spec in State.of(checkpoint_weights(training.model)).specs]
    assert state_root(training.model) == state_root(checkpoint_weights(training.model))
