"""The rollout worker of `examples.grpo` on a language model. It also answers the held-out problems:
with the weights that came through the store, so the patches carry the training."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from pulse_rl.events import Metadata

from ..grpo.run import Alarm, Journal, RunFolder, run_role
from ..grpo.worker import AHEAD, TorchWorker, Worker
from .model import likeliest, load_model, load_tokenizer, sample
from .settings import Settings
from .task import Additions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LanguageWorker(Worker):
    """What does not depend on who generates: `sample` and `likeliest` do."""

    def __init__(
        self, folder: RunFolder, name: str, alarm: Alarm, settings: Settings, **options: Any
    ) -> None:
        self.settings = settings
        self.task = Additions(load_tokenizer(settings.folder))
        self.journal = Journal(folder.journal(name))
        self.evaluated = -1
        sizes = {"seed": settings.seed, "prompts": settings.prompts, "group": settings.group}
        super().__init__(folder, name, alarm, inboxes={"trainer": AHEAD}, **sizes, **options)

    def see(self, metadata: Metadata) -> None:
        """The first worker evaluates the first version, then one of every ``evaluate_every``, and
        the last."""
        step = metadata["step"]
        assert isinstance(step, int)
        due = step // self.settings.evaluate_every
        if self.name == self.settings.worker_names[0] and (due > self.evaluated or self.ended):
            self.evaluated = due
            accuracy = self.task.accuracy(self.likeliest)
            self.journal.write("held-out", step=step, accuracy=accuracy)

    def generate(
        self, rng: random.Random, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        problems = self.task.draw(rng, self.prompts)
        prompts = self.task.prompts(problems)
        answers, log_probs = self.sample(prompts, generator)
        tokens = torch.cat([prompts.repeat_interleave(self.group, dim=0), answers], dim=1)
        asked = [problem for problem in problems for _ in range(self.group)]
        return tokens.int(), log_probs, self.task.rewards(asked, answers)

    def sample(
        self, prompts: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `model.sample` does."""
        raise NotImplementedError

    def likeliest(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        """As `model.likeliest` does."""
        raise NotImplementedError


class TorchLanguageWorker(LanguageWorker, TorchWorker):
    """The live model is in this process."""

    def first_model(self) -> PreTrainedModel:
        return load_model(self.settings.folder)

    def sample(
        self, prompts: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(self.model, prompts, self.group, self.task.answer_tokens, generator)

    def likeliest(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        return likeliest(self.model, prompts, tokens)


def work(settings: Settings, folder: RunFolder, alarm: Alarm, name: str) -> None:
    torch.set_num_threads(1)  # three processes share the machine's cores
    TorchLanguageWorker(folder, name, alarm, settings).run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "name"))
