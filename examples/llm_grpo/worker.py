"""The rollout worker of `examples.grpo` on a language model. It also answers the held-out problems:
with the weights that came through the store, so the patches carry the training."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import torch

import pulse_rl

from ..grpo.run import Alarm, Journal, RunFolder, run_role
from ..grpo.worker import AHEAD, TorchWorker
from .model import held_out_accuracy, load_model, load_tokenizer, sample
from .settings import Settings
from .task import Additions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LanguageWorker(TorchWorker):
    def __init__(self, folder: RunFolder, name: str, alarm: Alarm, settings: Settings) -> None:
        self.settings = settings
        self.task = Additions(load_tokenizer(settings.folder))
        self.journal = Journal(folder.journal(name))
        self.evaluated = -1
        sizes = {"seed": settings.seed, "prompts": settings.prompts, "group": settings.group}
        super().__init__(folder, name, alarm, inboxes={"trainer": AHEAD}, **sizes)

    def first_model(self) -> PreTrainedModel:
        return load_model(self.settings.folder)

    def see(self, update: pulse_rl.Update) -> None:
        step = int(update.metadata["step"] or 0)
        due = step // self.settings.evaluate_every
        if self.name == self.settings.worker_names[0] and (due > self.evaluated or self.ended):
            self.evaluated = due
            accuracy = held_out_accuracy(self.model, self.task)
            self.journal.write("held-out", step=step, accuracy=accuracy)

    def generate(
        self, rng: random.Random, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        problems = self.task.draw(rng, self.prompts)
        prompts = self.task.prompts(problems)
        answers, log_probs = sample(
            self.model, prompts, self.group, self.task.answer_tokens, generator
        )
        tokens = torch.cat([prompts.repeat_interleave(self.group, dim=0), answers], dim=1)
        asked = [problem for problem in problems for _ in range(self.group)]
        return tokens.int(), log_probs, self.task.rewards(asked, answers)


def work(settings: Settings, folder: RunFolder, alarm: Alarm, name: str) -> None:
    torch.set_num_threads(1)  # three processes share the machine's cores
    LanguageWorker(folder, name, alarm, settings).run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "name"))
