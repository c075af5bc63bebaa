"""The trainer: warm-up, then GRPO on whatever rollouts arrive, every optimizer step published.

It can be killed at any moment. What it needs to go on is one file, replaced at once every few steps and always before
the version of the same step is published; on a restart the stream is moved to that state by a new version.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

import pulse_rl
from pulse_rl.events import BaselineRestored, Event, Metadata, Published
from pulse_rl.metrics import DriftWatch, JsonLines, fan_out

from . import policy, task
from .grpo import group_advantages, grpo_loss, supervised_loss
from .processes import Alarm, Journal, wait_for, write_file_atomically
from .rollouts import Rollouts, folder_of, refusal, reports_of
from .settings import STREAM, RunFolder, Settings

WARM_UP_LR = 2e-3
WARM_UP_BATCH = 128
ACCURACY_EVERY = 10
ACCURACY_PROBLEMS = 512


@dataclass
class Progress:
    """Where the trainer is. ``cursors`` holds, per worker, the name of the last batch that was taken."""

    warm_up_steps: int = 0
    warm: bool = False
    step: int = 0
    cursors: dict[str, str] = field(default_factory=dict)


class Trainer:
    def __init__(self, settings: Settings, folder: RunFolder, parent: int | None = None) -> None:
        self.settings = settings
        self.folder = folder
        self.alarm = Alarm(settings.patience, parent)
        self.journal = Journal(folder.journal)
        self.progress = Progress()
        self.model = policy.build_model(settings.seed)
        self.weights = policy.MasterWeights(self.model)
        self.store = pulse_rl.open_store(folder.store_address)
        listener = DriftWatch(fan_out(JsonLines(folder.events("trainer")), self._on_event))
        self.publisher = pulse_rl.Publisher(self.store, stream=STREAM, threads=1, on_event=listener)
        self.roots: dict[int, str] = {}
        self.newest = -1
        self.taken = 0
        self.refused: Counter[str] = Counter()

    def run(self) -> bool:
        """The whole job. Returns whether every worker ended with this trainer's weights, bit for bit."""
        if self.folder.checkpoint.exists():
            self._restore()
        while not self.progress.warm:
            self._warm_up_step()
        self._take_up_stream()
        while self.progress.step < self.settings.steps:
            self._train_step()
        return self._compare_with_workers()

    # -- warm-up

    def _warm_up_step(self) -> None:
        """One supervised step; done once the sampled accuracy is such that rewards vary within a group."""
        self.alarm.check_parent()
        step = self.progress.warm_up_steps
        rng, _ = policy.seeded(self.settings.seed, "warm-up", step)
        loss = supervised_loss(self.model, task.draw_problems(rng, WARM_UP_BATCH))
        torch.autograd.backward(loss)
        self.weights.step(WARM_UP_LR * min(1.0, (step + 1) / 30))
        self.progress.warm_up_steps = step = step + 1
        last = step >= self.settings.sft_steps
        if last or step % ACCURACY_EVERY == 0:
            accuracy = self._accuracy()
            self.journal.write("warm-up", step=step, loss=loss.item(), accuracy=accuracy)
            if last or accuracy >= self.settings.sft_accuracy:
                self.progress.warm = True
                self.weights.forget_moments()
            self._save()

    def _accuracy(self) -> float:
        rng, generator = policy.seeded(self.settings.seed, "accuracy", self.progress.warm_up_steps)
        problems = task.draw_problems(rng, ACCURACY_PROBLEMS)
        answers, _ = policy.sample(self.model, task.prompt_tokens(problems), generator)
        return float(task.rewards(problems, answers).mean())

    # -- reinforcement learning

    def _train_step(self) -> None:
        """As many batches as there are workers, one optimizer step, one version."""
        started = time.perf_counter()
        batches, lags = [], []
        self.refused.clear()
        for _ in range(self.settings.workers):
            batches.append(wait_for(self._take_batch, self.alarm, "rollouts from the workers"))
            lags.append(self.newest - batches[-1].origin.version)
        waited = time.perf_counter() - started

        rewards = torch.cat([batch.rewards for batch in batches])
        loss = grpo_loss(
            self.model,
            torch.cat([batch.tokens for batch in batches]).long(),
            torch.cat([batch.log_probs for batch in batches]),
            group_advantages(rewards, self.settings.group),
        )
        torch.autograd.backward(loss)
        self.weights.step(self.settings.lr * min(1.0, (self.progress.step + 1) / 10))
        self.progress.step += 1
        if self.progress.step % self.settings.checkpoint_every == 0 or self.progress.step == self.settings.steps:
            self._save()
        published = self._publish(reward=float(rewards.mean()))
        self.journal.write(
            "step",
            step=self.progress.step,
            version=published.version,
            reward=float(rewards.mean()),
            density=published.density,
            changed=published.changed,
            elements=published.elements,
            patch_bytes=published.patch_bytes,
            dense_bytes=published.dense_bytes,
            ratio=published.ratio,
            publish_ms=published.seconds * 1e3,
            sync_ms=max(batch.origin.sync_ms for batch in batches),
            pause_ms=max(batch.origin.pause_ms for batch in batches),
            lag=max(lags),
            verified=len(batches),
            refused=dict(self.refused),
            waited_ms=waited * 1e3,
            step_ms=(time.perf_counter() - started) * 1e3,
        )

    def _take_batch(self) -> Rollouts | None:
        """The next batch that may be trained on, None while there is none.

        The worker that is asked first alternates, so that none is starved.
        """
        names = self.settings.worker_names
        first = self.taken % len(names)
        for worker in names[first:] + names[:first]:
            for info in self.store.list(folder_of(worker), start_after=self.progress.cursors.get(worker)):
                self.progress.cursors[worker] = info.name
                batch = Rollouts.from_bytes(self.store.get(info.name))
                reason = refusal(batch.origin, roots=self.roots, newest=self.newest, max_lag=self.settings.max_lag)
                if reason is None:
                    self.taken += 1
                    return batch
                self.refused[reason] += 1
        return None

    # -- the stream

    def _publish(self, **facts: float) -> Published:
        """Commits the model's weights as the next version, with what the workers need to pace themselves."""
        metadata: Metadata = {"step": self.progress.step, **self.progress.cursors, **facts}
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
        self.journal.write("stream", step=self.progress.step, version=self.newest, root=self.roots[self.newest])

    def _on_event(self, event: Event) -> None:
        if isinstance(event, BaselineRestored):
            self.journal.write("resumed", version=event.version, how=event.how, reason=event.reason)

    def _compare_with_workers(self) -> bool:
        """Waits for what each worker says of its live model at the last version, and holds it against this model."""
        own = pulse_rl.state_root(self.model.state_dict())
        roots = {}
        for worker in self.settings.worker_names:
            name = f"{reports_of(worker)}/{self.newest:012d}.json"
            report = wait_for(partial(self._get, name), self.alarm, f"the last report of {worker}")
            roots[worker] = json.loads(report)["root"]
        identical = all(root == own for root in roots.values())
        self.journal.write(
            "result", step=self.progress.step, version=self.newest, root=own, workers=roots, identical=identical
        )
        return identical

    def _get(self, name: str) -> bytes | None:
        try:
            return self.store.get(name)
        except pulse_rl.errors.NotFound:
            return None

    # -- the checkpoint

    def _save(self) -> None:
        """Replaces the checkpoint, then drops the batches that no restart will ask for again."""
        state = {"progress": asdict(self.progress), **self.weights.state()}
        write_file_atomically(self.folder.checkpoint, lambda file: torch.save(state, file))
        for worker, last in self.progress.cursors.items():
            for info in self.store.list(folder_of(worker)):
                if info.name < last:
                    self.store.delete(info.name)

    def _restore(self) -> None:
        state = torch.load(self.folder.checkpoint, weights_only=True)
        self.progress = Progress(**state["progress"])
        self.weights.load(state)
