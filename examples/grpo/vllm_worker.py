"""A rollout worker whose model is a live vLLM server: it drives the server along the stream, and lets it generate.

What it sends is vLLM's own: the tokens, and the log-probabilities they were sampled with.
"""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import torch

import pulse_rl
from pulse_rl.errors import EngineUnavailable
from pulse_rl.integrations.vllm import EngineHandle, connect
from pulse_rl.metrics import JsonLines

from . import policy, task
from .processes import POLL_SECONDS, Alarm, wait_for
from .rollouts import Origin, Rollouts, folder_of, reports_of, send, sequence_of
from .settings import STREAM, RunFolder, Settings
from .worker import AHEAD


class VllmWorker:
    """``url`` is the server's, which may die and be replaced at any moment."""

    def __init__(self, settings: Settings, folder: RunFolder, name: str, url: str, parent: int | None) -> None:
        self.settings = settings
        self.name = name
        self.url = url
        self.store_address = folder.store_address
        self.alarm = Alarm(settings.patience, parent)
        self.store = pulse_rl.open_store(folder.store_address)
        self.events = JsonLines(folder.events(name))
        self.origin = Origin(worker=name, stream=STREAM, version=-1, root="", sync_ms=0.0, pause_ms=0.0)
        self.sequence = 1 + max((sequence_of(i.name) for i in self.store.list(folder_of(name))), default=-1)
        self.taken = -1
        self.made = 0
        self.step = -1

    def run(self) -> None:
        """Follows and generates until the version of the last step is live, proved and reported."""
        with wait_for(self._connect, self.alarm, "the vLLM server") as handle:
            while self.step < self.settings.steps:
                try:
                    self._go_on(handle)
                except (EngineUnavailable, OSError):
                    self.alarm.check("the vLLM server")
                    time.sleep(10 * POLL_SECONDS)
            self._report(handle)

    def _connect(self) -> EngineHandle | None:
        try:
            return connect(self.url, store=self.store_address, stream=STREAM, audit_every=1)
        except (EngineUnavailable, pulse_rl.errors.ConcurrentUse):
            return None

    def _go_on(self, handle: EngineHandle) -> None:
        started = time.perf_counter()
        done = handle.sync()
        if done is not None:
            seconds = time.perf_counter() - started
            self._take_over(done.version, done.root, done.metadata, seconds, done.pause_seconds)
        elif self.origin.version < 0:
            head = pulse_rl.Publisher(self.store, stream=STREAM).head()
            if head is not None and head.version == handle.version:
                self._take_over(head.version, head.root, head.metadata, 0.0, 0.0)
        elif self.made == 0 or self.sequence - self.taken - 1 < AHEAD:
            self._generate()
        else:
            self.alarm.check("a new version from the trainer")
            time.sleep(POLL_SECONDS)

    def _take_over(self, version: int, root: str, metadata: Any, seconds: float, pause: float) -> None:
        self.origin = Origin(self.name, STREAM, version, root, (seconds - pause) * 1e3, pause * 1e3)
        self.step = int(metadata["step"])
        self.taken = sequence_of(str(metadata[self.name])) if self.name in metadata else -1
        self.made = 0
        self.alarm.reset()

    def _generate(self) -> None:
        rng, generator = policy.seeded(self.settings.seed, self.name, self.sequence)
        asked = task.draw_problems(rng, self.settings.prompts)
        seed = int(torch.randint(2**31, (), generator=generator))
        choices = complete(self.url, task.prompt_tokens(asked).tolist(), self.settings.group, seed)
        problems = [problem for problem in asked for _ in range(self.settings.group)]
        answers = torch.full((len(problems), task.ANSWER_TOKENS), task.PAD)
        log_probs = torch.zeros(len(problems), task.ANSWER_TOKENS)
        for row, choice in enumerate(choices):
            found = len(choice["token_ids"])
            answers[row, :found] = torch.tensor(choice["token_ids"])
            log_probs[row, :found] = torch.tensor(choice["logprobs"]["token_logprobs"])
        tokens = torch.cat([task.prompt_tokens(problems), answers], dim=1).to(torch.uint8)
        send(self.store, self.sequence, Rollouts(self.origin, tokens, log_probs, task.rewards(problems, answers)))
        self.sequence += 1
        self.made += 1

    def _report(self, handle: EngineHandle) -> None:
        """Says what is live at the end, after the engine's parameters were read back and found to be that."""
        differing = handle.audit()
        if differing or handle.version != self.origin.version:
            raise SystemExit(f"the server does not hold version {self.origin.version}: {differing}")
        report = {"worker": self.name, "version": self.origin.version, "root": self.origin.root}
        self.store.put(f"{reports_of(self.name)}/{self.origin.version:012d}.json", json.dumps(report).encode())


def complete(url: str, prompts: list[list[int]], count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` answers to each prompt at temperature 1, side by side, with their tokens and log-probabilities."""
    body = {
        "model": "policy",
        "prompt": prompts,
        "n": count,
        "seed": seed,
        "temperature": 1.0,
        "max_tokens": task.ANSWER_TOKENS,
        "logprobs": 0,
        "stop_token_ids": [task.STOP],
        "allowed_token_ids": list(range(task.VOCABULARY)),
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choices: list[dict[str, Any]] = json.loads(answer.read())["choices"]
    return sorted(choices, key=lambda choice: choice["index"])
