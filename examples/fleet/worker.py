"""A rollout worker of a region: follows both policies, generates with both, sends what it made to the origin.

It reads the region's own store, which a relay keeps, and the origin only if that stays behind. While the region is cut
off it goes on generating with what it has.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import pulse_rl
from pulse_rl.integrations.torch import apply_
from pulse_rl.metrics import JsonLines

from ..grpo import policy, task
from ..grpo.processes import Alarm, Journal
from .batches import Batch, Made, send
from .links import link
from .policies import judge, verdict_rewards
from .settings import POLICIES, RunFolder, Settings

PATIENCE_SECONDS = 10.0
PAUSE_SECONDS = 0.05
A_VERSION = 3
"""Batches that a worker makes with one version before it waits for the next one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--region", required=True)
    parser.add_argument("--parent", type=int)
    args = parser.parse_args()
    folder = RunFolder(args.run)
    settings = Settings.load(folder.settings)
    torch.set_num_threads(1)
    Worker(settings, folder, args.name, args.region, Alarm(settings.patience, args.parent)).run()


class Worker:
    def __init__(self, settings: Settings, folder: RunFolder, name: str, region: str, alarm: Alarm) -> None:
        self.settings, self.name, self.alarm = settings, name, alarm
        self.origin = link(folder, region)
        stores = [pulse_rl.LocalStore(folder.near(region)), self.origin]
        events = JsonLines(folder.events(name))
        self.followed = {
            each: pulse_rl.Subscriber(
                stores, stream=each, threads=1, patience_seconds=PATIENCE_SECONDS, on_event=events
            )
            for each in POLICIES
        }
        self.models = {each: policy.build_model(settings.seed + 7) for each in POLICIES}
        self.roots: dict[str, str] = {}
        self.ended: dict[str, bool] = dict.fromkeys(POLICIES, False)
        self.journal = Journal(folder.journal(name))
        self.sequence = self.made = self.unsent = 0

    def run(self) -> None:
        while not all(self.ended.values()):
            moved = [each for each in POLICIES if self._follow(each)]
            if moved:
                self.alarm.reset()
                self.made = 0
                self._note("versions")
            if len(self.roots) == len(POLICIES) and self.made < A_VERSION:
                self._generate()
            else:
                self.alarm.check("new versions")
                time.sleep(PAUSE_SECONDS)
        self._report()

    def _follow(self, name: str) -> bool:
        try:
            update = self.followed[name].sync()
        except pulse_rl.EmptyStream:
            return False
        except pulse_rl.StoreUnavailable:
            return False
        if update is None:
            return False
        apply_(self.models[name], update)
        update.acknowledge()
        self.roots[name] = pulse_rl.state_root(self.models[name].state_dict())
        if self.roots[name] != update.root:
            raise SystemExit(f"{self.name}: the live {name} is not version {update.version}")
        self.ended[name] = bool(update.metadata["last"])
        return True

    def _generate(self) -> None:
        rng, generator = policy.seeded(self.settings.seed, self.name, self.sequence)
        problems = [p for p in task.draw_problems(rng, self.settings.prompts) for _ in range(self.settings.group)]
        prompts = task.prompt_tokens(problems)
        answers, log_probs = policy.sample(self.models["solver"], prompts, generator)
        right = task.rewards(problems, answers)
        solved = torch.cat([prompts, answers], dim=1)
        verdicts, verdict_log_probs = judge(self.models["verifier"], solved, generator)
        judged = torch.cat([solved, verdicts], dim=1)
        self._send("solver", solved, log_probs, right)
        self._send("verifier", judged, verdict_log_probs, verdict_rewards(verdicts, right))
        self.sequence += 1
        self.made += 1

    def _send(self, name: str, tokens: torch.Tensor, log_probs: torch.Tensor, rewards: torch.Tensor) -> None:
        version = self.followed[name].version
        assert version is not None
        batch = Batch(Made(self.name, version), tokens.to(torch.uint8), log_probs, rewards)
        try:
            send(self.origin, name, self.sequence, batch)
        except pulse_rl.StoreUnavailable:  # cut off: they would be too old by the time
            self.unsent += 1
            self._note("unsent")

    def _note(self, event: str) -> None:
        versions = {each: subscriber.version for each, subscriber in self.followed.items()}
        self.journal.write(event, versions=versions, made=self.sequence, unsent=self.unsent)

    def _report(self) -> None:
        """The roots of both live models, once more from their tensors."""
        roots = {each: pulse_rl.state_root(model.state_dict()) for each, model in self.models.items()}
        self._note("versions")
        self.journal.write("result", roots=roots)
        self.origin.put(f"reports/{self.name}", json.dumps(roots).encode())


if __name__ == "__main__":
    main()
