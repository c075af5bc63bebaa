"""A rollout worker whose model is a live vLLM server: it drives the server along the stream, and
lets it generate.

What it sends is vLLM's own: the tokens, and the log-probabilities they were sampled with.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import torch

import pulse_rl
from pulse_rl.engines.vllm import EngineHandle, connect
from pulse_rl.errors import ConcurrentUse, EngineUnavailable

from . import task
from .rollouts import Origin
from .run import POLL_SECONDS, STREAM, Alarm, RunFolder, run_role, wait_for
from .settings import Settings
from .worker import AHEAD, Worker, seconds_since_publish


class VllmWorker(Worker):
    """``url`` is the server's, which may die and be replaced at any moment."""

    def __init__(
        self, folder: RunFolder, name: str, alarm: Alarm, url: str, **settings: object
    ) -> None:
        super().__init__(folder, name, alarm, **settings)  # type: ignore[arg-type]
        self.url = url
        self.handle: EngineHandle = wait_for(self._connect, alarm, "the vLLM server")

    def _connect(self) -> EngineHandle | None:
        try:
            return connect(self.url, store=self.address, stream=STREAM, audit_every=1)
        except (EngineUnavailable, ConcurrentUse):
            return None

    def follow(self) -> bool:
        started = time.perf_counter()
        try:
            done = self.handle.sync()
        except (EngineUnavailable, OSError):
            self._rest()
            return False
        if done is not None:
            fetch = time.perf_counter() - started - done.pause_seconds
            self._take_over(done.version, done.root, done.metadata, fetch, done.pause_seconds)
        elif self.origin is None:  # the server had the newest version before this process began
            head = pulse_rl.Publisher(self.store, stream=STREAM).head()
            if head is None or head.version != self.handle.version:
                return False
            self._take_over(head.version, head.root, head.metadata, 0.0, 0.0)
        else:
            return False
        return True

    def _take_over(
        self, version: int, root: str, metadata: Any, fetch: float, pause: float
    ) -> None:
        live = seconds_since_publish(metadata) if pause else 0.0
        self.origin = Origin(self.name, version, root, fetch * 1e3, pause * 1e3, live * 1e3)
        self.ended = bool(metadata["last"])
        self.see(metadata)

    def _rest(self) -> None:
        """The server is gone; another one will come."""
        self.alarm.check("the vLLM server")
        time.sleep(10 * POLL_SECONDS)

    def fill_a_place(self, origin: Origin) -> bool:
        try:
            return super().fill_a_place(origin)
        except OSError:
            self._rest()
            return False

    def answer(
        self, problems: list[task.Problem], generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asked = problems[:: self.group]
        choices = complete(
            self.url,
            task.prompt_tokens(asked).tolist(),
            n=self.group,
            seed=int(torch.randint(2**31, (), generator=generator)),
            temperature=1.0,
            max_tokens=task.ANSWER_TOKENS,
            stop_token_ids=[task.STOP],
            allowed_token_ids=list(range(task.VOCABULARY)),
        )
        answers = torch.full((len(problems), task.ANSWER_TOKENS), task.PAD)
        log_probs = torch.zeros(len(problems), task.ANSWER_TOKENS)
        for row, choice in enumerate(choices):
            found = len(choice["token_ids"])
            answers[row, :found] = torch.tensor(choice["token_ids"])
            log_probs[row, :found] = torch.tensor(choice["logprobs"]["token_logprobs"])
        return answers, log_probs

    def live_root(self) -> str:
        """That of the version which the engine's parameters, read back, are found to be."""
        assert self.origin is not None
        differing = self.handle.audit()
        if differing or self.handle.version != self.origin.version:
            raise SystemExit(f"the server does not hold version {self.origin.version}: {differing}")
        return self.origin.root


def complete(url: str, prompts: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
    """The answers to each prompt, side by side, with their tokens and log-probabilities."""
    fixed = {"model": "policy", "prompt": prompts, "logprobs": 0, "return_token_ids": True}
    body = fixed | sampling
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choices: list[dict[str, Any]] = json.loads(answer.read())["choices"]
    return sorted(choices, key=lambda choice: choice["index"])


def work(settings: Settings, folder: RunFolder, alarm: Alarm, name: str, port: str) -> None:
    torch.set_num_threads(1)
    sizes = {"seed": settings.seed, "prompts": settings.prompts, "group": settings.group}
    worker = VllmWorker(
        folder, name, alarm, f"http://127.0.0.1:{port}", inboxes={"trainer": AHEAD}, **sizes
    )
    with worker.handle:
        worker.run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "name", "port"))
