"""The trainer of `examples.grpo` on a language model: no warm-up, and a loss with a shared pass
over each prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from ..grpo.grpo import clipped_loss
from ..grpo.rollouts import Rollouts
from ..grpo.run import Alarm, RunFolder, run_role
from ..grpo.trainer import Trainer
from .model import load_model, load_tokenizer, log_probabilities
from .settings import Settings
from .task import Additions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LanguageTrainer(Trainer):
    """The checkpoint can add a little: reinforcement learning starts at once."""

    def __init__(self, settings: Settings, folder: RunFolder, alarm: Alarm) -> None:
        self.checkpoint_folder = settings.folder
        self.task = Additions(load_tokenizer(settings.folder))
        super().__init__(settings, folder, alarm)

    def first_model(self) -> PreTrainedModel:
        return load_model(self.checkpoint_folder)

    def loss(self, batches: list[Rollouts], advantages: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([batch.tokens for batch in batches]).long()
        answers = tokens[:, -self.task.answer_tokens :]
        prompts = tokens[:: self.settings.group, : -self.task.answer_tokens]
        log_probs, _ = log_probabilities(self.model, prompts, answers)
        old = torch.cat([batch.log_probs for batch in batches])
        return clipped_loss(log_probs, old, advantages, self.task.counted(answers))


def work(settings: Settings, folder: RunFolder, alarm: Alarm) -> None:
    torch.set_num_threads(1)  # three processes share the machine's cores
    LanguageTrainer(settings, folder, alarm).run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings))
