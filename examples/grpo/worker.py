"""A rollout worker: follows the stream, generates with the live model, keeps the trainers' inboxes
filled.

It keeps nothing on disk. A worker that was killed restores a verified state from the store and goes
on.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

import pulse_rl
from pulse_rl.events import Metadata
from pulse_rl.frameworks.torch import apply_
from pulse_rl.metrics import JsonLines

from . import policy, task
from .rollouts import Origin, Rollouts, put, put_report, waiting
from .run import POLL_SECONDS, STREAM, Alarm, RunFolder, run_role
from .settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Batches that may wait for the trainer before the worker pauses; more would only be older when
#: they are used.
AHEAD = 2


class Worker:
    """``inboxes``: by trainer, how many of this worker's batches may wait there. ``seed`` is that
    of all that it draws, of ``prompts`` problems a batch, each answered ``group`` times."""

    def __init__(
        self,
        folder: RunFolder,
        name: str,
        alarm: Alarm,
        *,
        inboxes: Mapping[str, int],
        seed: int,
        prompts: int,
        group: int,
    ) -> None:
        self.name, self.alarm, self.inboxes = name, alarm, inboxes
        self.seed, self.prompts, self.group = seed, prompts, group
        self.address = folder.store_address
        self.store = pulse_rl.open_store(self.address)
        self.events = JsonLines(folder.events(name))
        self.origin: Origin | None = None
        self.ended = False
        self.made = 0

    def run(self) -> None:
        """Follows and generates until the last version of the run is live and reported."""
        while not self.ended:
            if self.follow():
                self.made = 0
                self.alarm.reset()
            elif self.origin is None or not self.fill_a_place(self.origin):
                self.alarm.check("new weights from the trainer")
                time.sleep(POLL_SECONDS)
        assert self.origin is not None
        put_report(self.store, self.name, self.origin.version, self.live_root())

    def fill_a_place(self, origin: Origin) -> bool:
        """Generates one batch for the trainer that has the fewest; returns whether there was a
        place for one."""
        filled = {trainer: waiting(self.store, trainer, self.name) for trainer in self.inboxes}
        trainer = min(filled, key=lambda one: filled[one])
        if filled[trainer] >= self.inboxes[trainer]:
            return False
        rng, generator = policy.seeded(self.seed, self.name, origin.version, self.made)
        put(self.store, trainer, self.made, Rollouts(origin, *self.generate(rng, generator)))
        self.made += 1
        return True

    def generate(
        self, rng: random.Random, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, log-probabilities and rewards of one batch, as in `Rollouts`."""
        problems = [
            problem for problem in task.draw_problems(rng, self.prompts) for _ in range(self.group)
        ]
        answers, log_probs = self.answer(problems, generator)
        tokens = torch.cat([task.prompt_tokens(problems), answers], dim=1).to(torch.uint8)
        return tokens, log_probs, task.rewards(problems, answers)

    def follow(self) -> bool:
        """Moves the live model to the newest version; whether there was a newer one."""
        raise NotImplementedError

    def answer(
        self, problems: list[task.Problem], generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers of the live model, and their log-probabilities, as `policy.sample` returns
        them."""
        raise NotImplementedError

    def live_root(self) -> str:
        """The root of what is live, once more from its tensors."""
        raise NotImplementedError

    def see(self, metadata: Metadata) -> None:
        """Called when a version with this ``metadata`` is live."""


class TorchWorker(Worker):
    """The live model is in this process."""

    def __init__(self, folder: RunFolder, name: str, alarm: Alarm, **settings: object) -> None:
        super().__init__(folder, name, alarm, **settings)  # type: ignore[arg-type]
        self.subscriber = pulse_rl.Subscriber(
            self.store, stream=STREAM, threads=1, on_event=self.events
        )
        self.model = self.first_model()

    def first_model(self) -> PreTrainedModel:
        """One that the first version overwrites."""
        return policy.build_model(self.seed + 1)

    def follow(self) -> bool:
        """Scatters a verified update into the live model, then takes the root of what is now
        live."""
        update = self.subscriber.sync()
        if update is None:
            return False
        started = time.perf_counter()
        apply_(self.model, update)
        pause = time.perf_counter() - started
        times = (update.seconds, pause, seconds_since_publish(update.metadata))
        took = [1e3 * seconds for seconds in times]
        self.origin = Origin(self.name, update.version, self.live_root(), *took)
        self.ended = bool(update.metadata["last"])
        self.see(update.metadata)
        return True

    def answer(
        self, problems: list[task.Problem], generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return policy.sample(self.model, task.prompt_tokens(problems), generator)

    def live_root(self) -> str:
        return pulse_rl.state_root(self.model.state_dict())


def seconds_since_publish(metadata: Metadata) -> float:
    """The time since the publish of a version began, by the clock of this machine."""
    began = metadata.get("time")
    return time.time() - began if isinstance(began, float) else 0.0


def work(settings: Settings, folder: RunFolder, alarm: Alarm, name: str) -> None:
    torch.set_num_threads(1)  # three processes share the machine's cores
    sizes = {"seed": settings.seed, "prompts": settings.prompts, "group": settings.group}
    TorchWorker(folder, name, alarm, inboxes={"trainer": AHEAD}, **sizes).run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "name"))
