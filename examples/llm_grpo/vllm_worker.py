"""A rollout worker whose language model is a live vLLM server."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..grpo.run import Alarm, RunFolder, run_role
from ..grpo.vllm_worker import VllmWorker, complete
from .settings import Settings
from .worker import LanguageWorker


class VllmLanguageWorker(LanguageWorker, VllmWorker):
    def sample(
        self, prompts: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seed = int(torch.randint(2**31, (), generator=generator))
        asked = {"n": self.group, "seed": seed, "temperature": 1.0}
        return self._complete(prompts, self.task.answer_tokens, **asked)

    def likeliest(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        return self._complete(prompts, tokens, temperature=0.0)[0]

    def _complete(
        self, prompts: torch.Tensor, tokens: int, **sampling: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers of exactly so many tokens, whatever ends them, and their log-probabilities."""
        fixed = {"max_tokens": tokens, "ignore_eos": True}
        choices = complete(self.url, prompts.tolist(), **fixed, **sampling)
        answers = torch.tensor([choice["token_ids"] for choice in choices])
        return answers, torch.tensor([one["logprobs"]["token_logprobs"] for one in choices])


def work(settings: Settings, folder: RunFolder, alarm: Alarm, name: str, port: str) -> None:
    torch.set_num_threads(1)
    worker = VllmLanguageWorker(folder, name, alarm, settings, url=f"http://127.0.0.1:{port}")
    with worker.handle:
        worker.run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "name", "port"))
