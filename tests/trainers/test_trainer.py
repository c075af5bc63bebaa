"""Hugging Face's Trainer: what its callback publishes is what the forward pass uses, sparse with
the defaults."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback

from pulse_rl import LocalStore, MemoryStore, Published, Subscriber
from pulse_rl.errors import StoreError, StoreUnavailable
from pulse_rl.frameworks.transformers import PulseCallback
from pulse_rl.store import Data
from tests.trainers.support import Witness, arguments, collect, followed, sentences, tiny


def trained(
    folder: Path, callback: PulseCallback, *others: TrainerCallback, **settings: Any
) -> Trainer:
    model = settings.pop("model", None) or tiny()
    trainer = Trainer(
        model,
        arguments(folder, **settings),
        train_dataset=sentences(),
        callbacks=[callback, *others],
    )
    trainer.train()
    return trainer


def test_an_fp32_model_is_followed_bit_for_bit_by_small_patches(tmp_path: Path) -> None:
    store, witness, published = MemoryStore(), Witness(), list[Published]()

    callback = PulseCallback(store, stream="policy", replace=False, on_event=collect(published))
    trainer = trained(tmp_path, callback, witness)
    assert trainer.model.dtype == torch.float32
    assert followed(store) == witness.roots
    assert sorted(witness.roots) == [0, 1, 2, 3, 4]
    assert all(0 < p.density < 0.05 for p in published[1:])
    assert callback.error is None
    assert callback.published == published[-1]


def test_metrics_become_metadata_and_ours_go_into_the_log(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer = trained(tmp_path, callback := PulseCallback(store, stream="policy", replace=False))
    facts = callback.published.metadata
    assert (facts["step"], facts["logged_step"]) == (4, 3)
    third = next(row for row in trainer.state.log_history if row["step"] == 3)
    assert (facts["loss"], facts["learning_rate"]) == (third["loss"], third["learning_rate"])
    # What a row has been told of depends on how far the thread is that publishes: of nothing new,
    # or of two versions.
    rows = [row for row in trainer.state.log_history if "pulse/version" in row]
    versions = [row["pulse/version"] for row in rows]
    assert versions == sorted(versions)
    assert len(set(versions)) > 1
    news = [row for before, row in pairwise(rows) if row["pulse/version"] > before["pulse/version"]]
    assert news
    assert all(0 < row["pulse/density"] < 0.05 for row in news)
    assert all(row["pulse/bytes"] < callback.published.dense_bytes / 20 for row in news)
    assert all(
        row["pulse/blocked_seconds"] > 0 for row in rows if row["step"] == 4 and "loss" in row
    )
    assert not any(name.startswith("pulse/") for name in facts)


def reported(folder: Path) -> dict[str, list[float]]:
    """What TensorBoard would show of the runs below ``folder``."""
    runs = {file.parent for file in folder.rglob("events.out.tfevents.*")}
    (run,) = (EventAccumulator(str(path)).Reload() for path in runs)
    return {tag: [point.value for point in run.Scalars(tag)] for tag in run.Tags()["scalars"]}


def test_our_figures_are_reported_as_the_trainers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reporters come before a user's callbacks, and had reported the log before ours were added."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = PulseCallback(MemoryStore(), stream="policy", replace=False)
    trained(tmp_path, callback, report_to="tensorboard")
    shown = reported(tmp_path / "board")
    assert {
        "train/loss",
        "train/pulse/version",
        "train/pulse/density",
        "train/pulse/bytes",
    } <= shown.keys()
    assert len(shown["train/pulse/version"]) == len(shown["train/loss"]) + 1  # of the last log, too


def test_two_callbacks_have_figures_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    store = MemoryStore()
    half, full = (
        PulseCallback(store, stream=name, dtype=dtype)
        for name, dtype in (("half", "BF16"), ("full", None))
    )
    trained(tmp_path, half, full, report_to="tensorboard")
    shown = reported(tmp_path / "board")
    assert max(shown["train/pulse/half/density"]) < 0.05 < min(shown["train/pulse/full/density"])
    assert {"train/pulse/half/version", "train/pulse/full/version"} <= shown.keys()


def test_every_second_step_and_the_end(tmp_path: Path) -> None:
    store, witness = MemoryStore(), Witness()
    trained(
        tmp_path,
        PulseCallback(store, stream="policy", every=2, replace=False),
        witness,
        max_steps=3,
    )
    assert followed(store) == {step: witness.roots[step] for step in (0, 2, 3)}


def test_a_run_that_is_resumed_continues_the_stream(tmp_path: Path) -> None:
    address = str(tmp_path / "store")
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path, PulseCallback(address, stream="policy", replace=False), max_steps=2, **saving)
    callback = PulseCallback(address, stream="policy", replace=False)
    trainer = Trainer(
        tiny(), arguments(tmp_path, **saving), train_dataset=sentences(), callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=True)
    assert (callback.published.version, callback.published.metadata["step"]) == (5, 4)
    assert callback.published.changed is not None


class Death(TrainerCallback):
    """The process dies at the end of ``step``; ``found`` is what it began with: the optimizer's own
    count of its steps, and the scheduler's."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.found = (0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        counted = {int(each["step"]) for each in kwargs["optimizer"].state_dict()["state"].values()}
        self.found = max(counted, default=0), kwargs["lr_scheduler"].last_epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError


def test_every_restart_is_at_the_exact_weights_with_the_newest_optimizer(tmp_path: Path) -> None:
    """`tests/integrations/test_restart.py` has twenty of twenty, for a loop of one's own."""
    address, step, saved = str(tmp_path / "store"), 0, 0
    settings = arguments(tmp_path, max_steps=99, save_total_limit=1)
    for life, died in enumerate((3, 5, 6, 9, 15, 16)):
        callback, witness, death = (
            PulseCallback(address, stream="policy", optimizer_every=4, replace=False),
            Witness(),
            Death(died),
        )
        folder = callback.restart(settings.output_dir)
        trainer = Trainer(
            tiny(seed=life),
            settings,
            train_dataset=sentences(),
            callbacks=[callback, witness, death],
        )
        with Subscriber(address, stream="policy") as newest:
            newest.sync()
            with pytest.raises(InterruptedError):
                trainer.train(resume_from_checkpoint=folder)
            assert min(witness.roots) == step
            if life:
                assert witness.roots[step] == newest.root
        assert death.found == (saved, step)
        # A death comes before the save of its step. What the optimizer has lost, it does not count.
        last = (died - 1) // 4 * 4
        saved = saved + last - step if last > step else saved or 1
        callback._publisher.wait()
        step = died
    assert followed(address).keys() == set(range(step + 1))


class Away(LocalStore):
    """A store that is away from one step to another."""

    away = False

    def put(self, name: str, data: Data) -> None:
        if self.away:
            raise StoreUnavailable("no route to the store")
        super().put(name, data)


class Outage(TrainerCallback):
    def __init__(self, store: Away, begins: int, ends: int) -> None:
        self.store, self.begins, self.ends = store, begins, ends

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.begins, self.ends):
            self.store.away = state.global_step == self.begins


def test_the_training_goes_on_while_the_store_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, witness = Away(tmp_path / "store"), Witness()
    callback = PulseCallback(store, stream="policy", replace=False)
    trained(tmp_path, callback, witness, Outage(store, 2, 5), max_steps=8)
    assert callback.error is None
    found = followed(store)
    assert found.items() <= witness.roots.items()
    assert 8 in found
    assert len(found) < 9
    assert [r.levelname for r in caplog.records if "not published" in r.message] == ["WARNING"]
    assert any("published again" in r.message for r in caplog.records)


def test_a_store_that_is_away_at_the_end_is_said_loudly_and_the_model_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Away(tmp_path / "store")
    callback = PulseCallback(store, stream="policy", replace=False)
    trainer = trained(tmp_path, callback, Outage(store, 2, 99))
    assert isinstance(callback.error, StoreUnavailable)
    (said,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "step 4" in said.message
    assert trainer.state.global_step == 4


def test_a_wrong_address_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        PulseCallback(str(tmp_path / "file"), stream="policy")


@pytest.mark.parametrize(
    ("settings", "dtype", "word"),
    [({"learning_rate": 1e-2}, "BF16", "learning rate 0.01"), ({}, None, "FP32"), ({}, "BF16", "")],
)
def test_a_density_that_will_disappoint_is_said_before_the_first_step(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    dtype: str | None,
    word: str,
) -> None:
    said: list[str] = []

    class First(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            said.extend(
                r.message
                for r in caplog.records
                if r.name.startswith("pulse_rl") and not state.global_step
            )

    trained(
        tmp_path,
        PulseCallback(MemoryStore(), stream="policy", dtype=dtype),
        First(),
        max_steps=1,
        **settings,
    )
    assert len(said) == bool(word)
    assert all(word in message for message in said)
