"""A rollout worker: ``python -m examples.loco.worker DIR --name worker-0``.

It follows theta, which the trainers have in common after each round, and keeps every trainer's folder filled.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch

import pulse_rl
from pulse_rl.events import Applied
from pulse_rl.integrations.torch import apply_
from pulse_rl.metrics import JsonLines

from ..grpo import policy, task
from ..grpo.processes import GAVE_UP, POLL_SECONDS, Alarm, PeerVanished
from ..grpo.rollouts import Origin, Rollouts, reports_of
from ..grpo.settings import STREAM
from .inbox import put, waiting
from .settings import RunFolder, Settings

AHEAD = 1
"""Batches for each trainer beyond what a round takes: what it begins with while the next version is on its way."""


class Worker:
    def __init__(self, settings: Settings, folder: RunFolder, name: str, alarm: Alarm) -> None:
        self.settings = settings
        self.name = name
        self.alarm = alarm
        self.places = math.ceil(settings.sync_every / settings.workers) + AHEAD
        self.store = pulse_rl.open_store(folder.store_address)
        self.events = JsonLines(folder.events(name))
        self.subscriber = pulse_rl.Subscriber(self.store, stream=STREAM, threads=1, on_event=self.events)
        self.model = policy.build_model(settings.seed + 1)
        self.origin: Origin | None = None
        self.made = 0

    def run(self) -> None:
        """Follows and generates until theta of the last round is live and reported."""
        number = -1
        while number < self.settings.rounds:
            update = self.subscriber.sync()
            if update is not None:
                self._go_live(update)
                number = int(update.metadata["round"])
            elif self.origin is None or not self._fill_a_place(self.origin):
                self.alarm.check("theta of another round")
                time.sleep(POLL_SECONDS)
        self._report()

    def _go_live(self, update: pulse_rl.Update) -> None:
        started = time.perf_counter()
        apply_(self.model, update)
        pause = time.perf_counter() - started
        self.events(Applied(STREAM, update.version, pause))
        root = pulse_rl.state_root(self.model.state_dict())
        self.origin = Origin(self.name, STREAM, update.version, root, update.seconds * 1e3, pause * 1e3)
        self.made = 0
        self.alarm.reset()

    def _fill_a_place(self, origin: Origin) -> bool:
        """Generates one batch for the trainer that has the fewest; returns whether there was a place for one."""
        filled = [waiting(self.store, rank, self.name) for rank in range(self.settings.trainers)]
        rank = filled.index(min(filled))
        if filled[rank] >= self.places:
            return False
        rng, generator = policy.seeded(self.settings.seed, self.name, origin.version, self.made)
        drawn = task.draw_problems(rng, self.settings.prompts)
        problems = [problem for problem in drawn for _ in range(self.settings.group)]
        prompts = task.prompt_tokens(problems)
        answers, log_probs = policy.sample(self.model, prompts, generator)
        tokens = torch.cat([prompts, answers], dim=1).to(torch.uint8)
        put(self.store, rank, self.made, Rollouts(origin, tokens, log_probs, task.rewards(problems, answers)))
        self.made += 1
        return True

    def _report(self) -> None:
        """Says what is live at the end: the root of the model's own tensors, hashed once more."""
        assert self.origin is not None
        report = {"version": self.origin.version, "root": pulse_rl.state_root(self.model.state_dict())}
        self.store.put(f"{reports_of(self.name)}/{self.origin.version:012d}.json", json.dumps(report).encode())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.loco.worker", description=__doc__)
    parser.add_argument("run", type=Path, metavar="DIR", help="the run's folder, with settings.json")
    parser.add_argument("--name", required=True)
    parser.add_argument("--parent", type=int, help="the process without which this one must not go on")
    arguments = parser.parse_args()
    folder = RunFolder(arguments.run.absolute())
    settings = Settings.load(folder.settings)
    torch.set_num_threads(1)
    try:
        Worker(settings, folder, arguments.name, Alarm(settings.patience, arguments.parent)).run()
    except PeerVanished as error:
        print(f"{arguments.name}: {error}", file=sys.stderr)
        return GAVE_UP
    return 0


if __name__ == "__main__":
    sys.exit(main())
