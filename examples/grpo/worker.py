"""A rollout worker: follows the stream, generates with the live model, sends what it made.

It keeps nothing on disk. A worker that was killed restores a verified state from the store and goes on behind the last
batch that it stored.
"""

from __future__ import annotations

import json
import time

import torch

import pulse_rl
from pulse_rl.events import Applied
from pulse_rl.integrations.torch import apply_
from pulse_rl.metrics import JsonLines

from . import policy, task
from .processes import POLL_SECONDS, Alarm
from .rollouts import Origin, Rollouts, folder_of, reports_of, send, sequence_of
from .settings import STREAM, RunFolder, Settings

AHEAD = 2
"""Batches that may wait for the trainer before the worker pauses; more would only be older when they are used."""


class Worker:
    def __init__(self, settings: Settings, folder: RunFolder, name: str, parent: int | None = None) -> None:
        self.settings = settings
        self.name = name
        self.alarm = Alarm(settings.patience, parent)
        self.store = pulse_rl.open_store(folder.store_address)
        self.events = JsonLines(folder.events(name))
        self.subscriber = pulse_rl.Subscriber(self.store, stream=STREAM, threads=1, on_event=self.events)
        self.model = policy.build_model(settings.seed + 1)
        self.origin = Origin(worker=name, stream=STREAM, version=-1, root="", sync_ms=0.0, pause_ms=0.0)
        self.sequence = 1 + max((sequence_of(i.name) for i in self.store.list(folder_of(name))), default=-1)
        self.taken = -1
        self.made = 0

    def run(self) -> None:
        """Follows and generates until the version of the last step is live and reported."""
        step = -1
        while step < self.settings.steps:
            update = self.subscriber.sync()
            if update is not None:
                self._go_live(update)
                step = int(update.metadata["step"])
                self.taken = sequence_of(str(update.metadata[self.name])) if self.name in update.metadata else -1
            elif self._may_generate():
                self._generate()
            else:
                self.alarm.check("a new version from the trainer")
                time.sleep(POLL_SECONDS)
        self._report()

    def _go_live(self, update: pulse_rl.Update) -> None:
        """Scatters a verified update into the live model, then takes the root of what is now live."""
        started = time.perf_counter()
        apply_(self.model, update)
        pause = time.perf_counter() - started
        self.events(Applied(STREAM, update.version, pause))
        root = pulse_rl.state_root(self.model.state_dict())
        self.origin = Origin(self.name, STREAM, update.version, root, update.seconds * 1e3, pause * 1e3)
        self.made = 0
        self.alarm.reset()

    def _may_generate(self) -> bool:
        """One batch per version always, so that a trainer never starves; more while it is not behind."""
        if self.origin.version < 0:
            return False
        return self.made == 0 or self.sequence - self.taken - 1 < AHEAD

    def _generate(self) -> None:
        rng, generator = policy.seeded(self.settings.seed, self.name, self.sequence)
        group = self.settings.group
        problems = [problem for problem in task.draw_problems(rng, self.settings.prompts) for _ in range(group)]
        prompts = task.prompt_tokens(problems)
        answers, log_probs = policy.sample(self.model, prompts, generator)
        tokens = torch.cat([prompts, answers], dim=1).to(torch.uint8)
        batch = Rollouts(self.origin, tokens, log_probs, task.rewards(problems, answers))
        send(self.store, self.sequence, batch)
        self.sequence += 1
        self.made += 1

    def _report(self) -> None:
        """Says what is live at the end: the root of the model's own state, once more from its tensors."""
        version = self.origin.version
        report = {"worker": self.name, "version": version, "root": pulse_rl.state_root(self.model.state_dict())}
        self.store.put(f"{reports_of(self.name)}/{version:012d}.json", json.dumps(report).encode())
