"""A rollout worker of a region: follows both policies, generates with both, sends what it made to
the origin.

It reads the region's own store, which a relay keeps, and the origin only if that stays behind.
While the region is cut off it goes on generating with what it has.
"""

from __future__ import annotations

import sys
import time

import torch

import pulse_rl
from pulse_rl.frameworks.torch import apply_
from pulse_rl.metrics import JsonLines

from ..grpo import policy, task
from ..grpo.rollouts import Origin, put, put_report
from ..grpo.run import Alarm, Journal, RunFolder, run_role
from .links import link, near
from .policies import Judged, verdict_rewards
from .settings import HOMES, POLICIES, Settings

PATIENCE_SECONDS = 20.0
PAUSE_SECONDS = 0.05
#: Batches that a worker makes with one version at once; then it waits for the next one, and makes
#: one now and then.
A_VERSION = 2
NOW_AND_THEN_SECONDS = 3.0


class Worker:
    def __init__(self, settings: Settings, folder: RunFolder, name: str, alarm: Alarm) -> None:
        self.settings, self.name, self.alarm = settings, name, alarm
        region = HOMES[name]
        self.origin = link(folder, region)
        stores = [near(folder, region), self.origin]
        events = JsonLines(folder.events(name))
        self.followed = {
            each: pulse_rl.Subscriber(stores, stream=each, threads=1, on_event=events)
            for each in POLICIES
        }
        for subscriber in self.followed.values():
            subscriber.patience_seconds = PATIENCE_SECONDS
        self.models = {each: policy.build_model(settings.seed + 7) for each in POLICIES}
        self.roots: dict[str, str] = {}
        self.ended: dict[str, bool] = dict.fromkeys(POLICIES, False)
        self.journal = Journal(folder.journal(name))
        self.sequence = self.made = self.unsent = 0
        self.generated = 0.0

    def run(self) -> None:
        while not all(self.ended.values()):
            moved = [each for each in POLICIES if self._follow(each)]
            if moved:
                self.alarm.reset()
                self.made = 0
                self._note("versions")
            due = self.made < A_VERSION or time.monotonic() > self.generated + NOW_AND_THEN_SECONDS
            if len(self.roots) == len(POLICIES) and due:
                self._generate()
                self.generated = time.monotonic()
            else:
                self.alarm.check("new versions")
                time.sleep(PAUSE_SECONDS)
        self._report()

    def _follow(self, name: str) -> bool:
        try:
            update = self.followed[name].sync()
        except (pulse_rl.errors.EmptyStream, pulse_rl.errors.StoreUnavailable):
            return False
        if update is None:
            return False
        previous = update.previous
        apply_(self.models[name], update)
        update.acknowledge()
        self.roots[name] = pulse_rl.state_root(self.models[name].state_dict())
        if self.roots[name] != update.root:
            raise SystemExit(f"{self.name}: the live {name} is not version {update.version}")
        self.ended[name] = bool(update.metadata["last"])
        facts = {"version": update.version, "previous": previous, "seconds": update.seconds}
        self.journal.write("synced", policy=name, **facts)
        return True

    def _generate(self) -> None:
        rng, generator = policy.seeded(self.settings.seed, self.name, self.sequence)
        problems = [
            p
            for p in task.draw_problems(rng, self.settings.prompts)
            for _ in range(self.settings.group)
        ]
        prompts = task.prompt_tokens(problems)
        answers, log_probs = policy.sample(self.models["solver"], prompts, generator)
        right = task.rewards(problems, answers)
        sums, sum_log_probs = policy.sample(self.models["verifier"], prompts, generator)
        self._send("solver", torch.cat([prompts, answers], dim=1), log_probs, right.clone(), right)
        judged = verdict_rewards(sums, answers, right)
        self._send("verifier", torch.cat([prompts, sums], dim=1), sum_log_probs, judged, right)
        self.sequence += 1
        self.made += 1

    def _send(
        self,
        name: str,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        rewards: torch.Tensor,
        right: torch.Tensor,
    ) -> None:
        version = self.followed[name].version
        assert version is not None
        origin = Origin(self.name, version, self.roots[name])
        try:
            put(
                self.origin,
                name,
                self.sequence,
                Judged(origin, tokens.to(torch.uint8), log_probs, rewards, right),
            )
        except pulse_rl.errors.StoreUnavailable:  # cut off: they would be too old by the time
            self.unsent += 1
            self._note("unsent")

    def _note(self, event: str) -> None:
        versions = {each: subscriber.version for each, subscriber in self.followed.items()}
        self.journal.write(event, versions=versions, made=self.sequence, unsent=self.unsent)

    def _report(self) -> None:
        """The roots of both live models, once more from their tensors."""
        self._note("versions")
        for each, model in self.models.items():
            version = self.followed[each].version
            assert version is not None
            put_report(
                self.origin, f"{self.name}-{each}", version, pulse_rl.state_root(model.state_dict())
            )


def work(settings: Settings, folder: RunFolder, alarm: Alarm, name: str) -> None:
    torch.set_num_threads(1)
    Worker(settings, folder, name, alarm).run()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "name"))
