"""One of the trainers, started by ``torchrun -m examples.loco.trainer DIR``.

What makes it one of several is the ``with`` in `Trainer.run`: the loop inside it is that of a
trainer alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

import pulse_rl
from pulse_rl.events import Published
from pulse_rl.loco import GroupExchange, PulseLoCo, Round
from pulse_rl.metrics import JsonLines

from ..grpo import policy
from ..grpo.grpo import group_advantages, grpo_loss, sampled_accuracy, warm_up
from ..grpo.rollouts import Inbox, Rollouts
from ..grpo.run import STREAM, Alarm, Journal, RunFolder, run_role, wait_for
from .settings import Settings

#: Problems that tell the reward before the first round and after the last one.
EVALUATED = 2048


class Trainer:
    def __init__(self, settings: Settings, folder: RunFolder, alarm: Alarm) -> None:
        self.settings = settings
        self.alarm = alarm
        self.rank = dist.get_rank()
        name = settings.trainer_names[self.rank]
        self.checkpoint = folder.checkpoint(name)
        self.journal = Journal(folder.journal(name))
        store = pulse_rl.open_store(folder.store_address)
        self.inbox = Inbox(store, name)
        self.publisher: pulse_rl.Publisher | None = None
        if self.rank == 0:
            events = JsonLines(folder.events("trainer"))
            self.publisher = pulse_rl.Publisher(store, stream=STREAM, threads=1, on_event=events)
        self.roots: dict[int, str] = {}
        self.rewards: list[float] = []
        self.lags: list[int] = []

        self.served = policy.build_model(settings.seed)
        self.model = policy.build_model(settings.seed).float()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, weight_decay=0.0
        )

    def run(self) -> None:
        settings = self.settings
        saved = torch.load(self.checkpoint, weights_only=True) if self.checkpoint.exists() else None
        if saved is None and self.rank == 0:
            self._warm_up()  # the others get its weights when they meet
        self.loco = PulseLoCo(
            self.model,
            self.optimizer,
            sync_every=settings.sync_every,
            on_round=self._end_round,
            exchange=GroupExchange(timeout_seconds=settings.patience),
        )
        if saved is not None:
            self.loco.load_state_dict(saved["loco"])
            self.optimizer.load_state_dict(saved["optimizer"])

        with self.loco:
            self._start()
            while self.loco.round < settings.rounds:
                batch = wait_for(self._take_batch, self.alarm, "rollouts from the workers")
                advantages = group_advantages(batch.rewards, settings.group)
                loss = grpo_loss(self.model, batch.tokens.long(), batch.log_probs, advantages)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()  # every `sync_every`-th call ends with an outer round
                self.optimizer.zero_grad()
        self._report()

    def _warm_up(self) -> None:
        def report(step: int, loss: float, accuracy: float) -> None:
            self.journal.write("warm-up", step=step, loss=loss, accuracy=accuracy)

        settings, weights = self.settings, policy.MasterWeights(self.served)
        steps, accuracy = settings.sft_steps, settings.sft_accuracy
        warm_up(weights, settings.seed, "warm-up", steps=steps, accuracy=accuracy, report=report)
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), weights.masters, strict=True):
                weight.copy_(master)

    def kill_in(self, number: int) -> None:
        """Has this process killed in the middle of a round, to see the trainers resume."""

        def after_step(*_: object) -> None:
            if (self.loco.round, self.loco.inner_step) == (number, self.settings.sync_every // 2):
                os.kill(os.getpid(), signal.SIGKILL)

        self.optimizer.register_step_post_hook(after_step)

    def _take_batch(self) -> Rollouts | None:
        newest = self.loco.round
        batch = self.inbox.take(roots=self.roots, newest=newest, max_lag=self.settings.max_lag)
        if batch is not None:
            self.rewards.append(float(batch.rewards.mean()))
            self.lags.append(newest - batch.origin.version)
        return batch

    # -- between rounds, when the model holds the global weights

    def _end_round(self, done: Round) -> None:
        """Saves, and only then publishes: a published version is never ahead of all checkpoints."""
        self._save()
        reward = sum(self.rewards) / len(self.rewards)
        published = self._publish({**done.metadata, "reward": reward})
        self.journal.write(
            "round",
            round=done.number,
            reward=reward,
            lag=max(self.lags),
            refused=dict(self.inbox.refused),
            root=done.root,
            density=done.density,
            parameters=done.parameters,
            payload_bytes=done.payload_bytes,
            sent_bytes=done.sent_bytes,
            seconds=done.seconds,
            patch_bytes=published and published.patch_bytes,
            dense_bytes=published and published.dense_bytes,
        )
        self.rewards.clear()
        self.lags.clear()
        self.inbox.finish()

    def _publish(self, facts: Mapping[str, float]) -> Published | None:
        """Rank 0 publishes the global weights in BF16; every trainer notes their root, to know
        rollouts that were made with them."""
        version = self.loco.round
        self.roots[version] = self._serve()
        if self.publisher is None:
            return None
        metadata = {**facts, "last": version == self.settings.rounds}
        published = self.publisher.publish(self.served.state_dict(), metadata=metadata)
        assert (published.version, published.root) == (version, self.roots[version])
        return published

    def _serve(self) -> str:
        """Rounds the model into `served`, and returns the root of that: what a worker's live model
        must have."""
        self.served.load_state_dict(self.model.state_dict())
        return pulse_rl.state_root(self.served.state_dict())

    def _save(self) -> None:
        """Replaces the checkpoint. The model has no place in it: at a round's end it follows from
        the global weights.

        Not synced to disk: this is against killed processes, not against power cuts.
        """
        aside = self.checkpoint.with_suffix(".unfinished")
        torch.save(
            {"loco": self.loco.state_dict(), "optimizer": self.optimizer.state_dict()}, aside
        )
        aside.replace(self.checkpoint)

    def _start(self) -> None:
        """The trainers have met. The global weights become the stream's newest version, unless they
        are that already."""
        if not self.checkpoint.exists():
            self._save()
        with self.loco.global_weights():
            root = self.roots[self.loco.round] = self._serve()
            if self.publisher is not None:
                head = self.publisher.head()
                if head is None or head.root != root:
                    self._publish({"round": self.loco.round})
            reward = self._reward()
        self.journal.write(
            "met", round=self.loco.round, restarts=restarts(), root=root, reward=reward
        )

    def _report(self) -> None:
        """What this trainer's live model is at the end, hashed once more."""
        weights = pulse_rl.state_root(self.model.state_dict())
        self.journal.write(
            "result",
            round=self.loco.round,
            weights=weights,
            root=self._serve(),
            reward=self._reward(),
        )

    def _reward(self) -> float | None:
        return (
            sampled_accuracy(self.model, EVALUATED, self.settings.seed) if self.rank == 0 else None
        )


def restarts() -> int:
    """How often ``torchrun`` has started the trainers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def work(settings: Settings, folder: RunFolder, alarm: Alarm, kill: str) -> None:
    """``kill``: RANK@ROUND, or nothing."""
    torch.set_num_threads(1)  # the trainers share the machine's cores
    dist.init_process_group("gloo")
    try:
        trainer = Trainer(settings, folder, alarm)
        rank, _, number = kill.partition("@")
        if rank == str(trainer.rank) and restarts() == 0:
            trainer.kill_in(int(number))
        trainer.run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "kill"))
