"""The trainer: warm-up, then GRPO on whatever rollouts arrive, every optimizer step published.

It can be killed at any moment. What it needs to go on is one file, replaced at once every few steps
and always before the version of the same step is published; on a restart the stream is moved to
that state by a new version.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch

import pulse_rl
from pulse_rl.events import BaselineRestored, Event, Metadata, Published
from pulse_rl.metrics import JsonLines, tee_listeners

from . import policy
from .grpo import group_advantages, grpo_loss, warm_up
from .rollouts import Inbox, Rollouts
from .run import STREAM, Alarm, Journal, RunFolder, run_role, wait_for, write_file_atomically
from .settings import GrpoSettings, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Trainer:
    """The loop, for whatever model and loss."""

    def __init__(self, settings: GrpoSettings, folder: RunFolder, alarm: Alarm) -> None:
        self.settings = settings
        self.alarm = alarm
        self.checkpoint = folder.checkpoint("trainer")
        self.journal = Journal(folder.journal("trainer"))
        self.model = self.first_model()
        self.weights = policy.MasterWeights(self.model)
        store = pulse_rl.open_store(folder.store_address)
        self.inbox = Inbox(store, "trainer")
        listener = tee_listeners(JsonLines(folder.events("trainer")), self._on_event)
        self.publisher = pulse_rl.Publisher(store, stream=STREAM, threads=1, on_event=listener)
        self.step = 0
        self.roots: dict[int, str] = {}
        self.newest = -1

    def run(self) -> None:
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.step = state.pop("step")
            self.weights.load(state)
        else:
            self.prepare()
            self._save()
        self._take_up_stream()
        while self.step < self.settings.steps:
            self._train_step()
        root = pulse_rl.state_root(self.model.state_dict())
        self.journal.write("result", step=self.step, version=self.newest, root=root)

    def first_model(self) -> PreTrainedModel:
        """The model before training."""
        raise NotImplementedError

    def prepare(self) -> None:
        """What comes before the first version."""

    def loss(self, batches: list[Rollouts], advantages: torch.Tensor) -> torch.Tensor:
        """The loss of one step, of answers with these ``advantages`` [sequences]."""
        raise NotImplementedError

    def _train_step(self) -> None:
        """As many batches as there are workers, one optimizer step, one version."""
        started = time.perf_counter()
        batches = [
            wait_for(self._take_batch, self.alarm, "rollouts") for _ in range(self.settings.workers)
        ]
        waited = time.perf_counter() - started
        lag = self.newest - min(batch.origin.version for batch in batches)

        rewards = torch.cat([batch.rewards for batch in batches])
        loss = self.loss(batches, group_advantages(rewards, self.settings.group))
        torch.autograd.backward(loss)
        self.weights.step(self.settings.lr * min(1.0, (self.step + 1) / 10))
        self.step += 1
        if self.step % self.settings.checkpoint_every == 0 or self.step == self.settings.steps:
            self._save()
        reward = float(rewards.mean())
        published = self._publish(reward=reward)
        self.journal.write(
            "step",
            step=self.step,
            version=published.version,
            reward=reward,
            density=published.density,
            changed=published.changed,
            elements=published.elements,
            patch_bytes=published.patch_bytes,
            dense_bytes=published.dense_bytes,
            publish_ms=published.seconds * 1e3,
            sync_ms=max(batch.origin.sync_ms for batch in batches),
            pause_ms=max(batch.origin.pause_ms for batch in batches),
            live_ms=max(batch.origin.live_ms for batch in batches),
            lag=lag,
            refused=dict(self.inbox.refused),
            waited_ms=waited * 1e3,
            step_ms=(time.perf_counter() - started) * 1e3,
        )
        self.inbox.finish()

    def _take_batch(self) -> Rollouts | None:
        return self.inbox.take(roots=self.roots, newest=self.newest, max_lag=self.settings.max_lag)

    def _publish(self, **facts: float) -> Published:
        """Commits the model's weights as the next version."""
        metadata: Metadata = {
            "step": self.step,
            "last": self.step == self.settings.steps,
            "time": time.time(),
            **facts,
        }
        published = self.publisher.publish(self.model.state_dict(), metadata=metadata)
        self.newest = published.version
        self.roots[self.newest] = published.root
        return published

    def _take_up_stream(self) -> None:
        """Makes the stream's newest version this model's weights, unless it holds them already."""
        head = self.publisher.head()
        if head is not None and head.root == pulse_rl.state_root(self.model.state_dict()):
            self.newest = head.version
            self.roots = {head.version: head.root}
        else:
            self._publish()
        self.journal.write(
            "stream", step=self.step, version=self.newest, root=self.roots[self.newest]
        )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, BaselineRestored):
            self.journal.write("resumed", version=event.version, how=event.how, reason=event.reason)

    def _save(self) -> None:
        state = {"step": self.step, **self.weights.state()}
        write_file_atomically(self.checkpoint, lambda file: torch.save(state, file))


class ArithmeticTrainer(Trainer):
    """Trains the small model from random weights."""

    def __init__(self, settings: Settings, folder: RunFolder, alarm: Alarm) -> None:
        self.sft_steps, self.sft_accuracy = settings.sft_steps, settings.sft_accuracy
        super().__init__(settings, folder, alarm)

    def first_model(self) -> PreTrainedModel:
        return policy.build_model(self.settings.seed)

    def prepare(self) -> None:
        """The supervised warm-up."""

        def report(step: int, loss: float, accuracy: float) -> None:
            self.alarm.check_parent()
            self.journal.write("warm-up", step=step, loss=loss, accuracy=accuracy)

        warm_up(
            self.weights,
            self.settings.seed,
            "warm-up",
            steps=self.sft_steps,
            accuracy=self.sft_accuracy,
            report=report,
        )

    def loss(self, batches: list[Rollouts], advantages: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([batch.tokens for batch in batches]).long()
        log_probs = torch.cat([batch.log_probs for batch in batches])
        return grpo_loss(self.model, tokens, log_probs, advantages)


def work(settings: Settings, folder: RunFolder, alarm: Alarm) -> None:
    torch.set_num_threads(1)  # three processes share the machine's cores
    ArithmeticTrainer(settings, folder, alarm).run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings))
