"""One rank of a policy's trainer: FSDP2, GRPO on the batches that arrive, each optimizer step
published in parts.

No rank ever holds the whole model: each publishes the rows that it owns.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pulse_rl
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.metrics import JsonLines

from ..grpo import policy as model_of
from ..grpo.rollouts import folder_of, version_of
from ..grpo.run import Alarm, Journal, RunFolder, run_role, wait_for
from .links import origin
from .policies import Judged, advantages, loss_of
from .settings import Settings

#: No further full state in a run: whoever joins late, or was cut off, comes by patches.
ANCHOR_RATIO = 100.0


class Trainer:
    def __init__(
        self, settings: Settings, folder: RunFolder, name: str, rank: int, alarm: Alarm
    ) -> None:
        self.settings, self.name, self.rank, self.alarm = settings, name, rank, alarm
        self.store = origin(folder)
        self.model = self._sharded(folder)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, weight_decay=0.0
        )
        self.journal = Journal(folder.journal(f"trainer-{name}")) if rank == 0 else None
        listener = JsonLines(folder.events(f"trainer-{name}")) if rank == 0 else None
        self.publisher = ShardedPublisher(
            self.store,
            stream=name,
            anchor_ratio=ANCHOR_RATIO,
            threads=1,
            on_event=listener,
        )
        self.newest = -1
        self.used = ""

    def _sharded(self, folder: RunFolder) -> torch.nn.Module:
        """The policy's FP32 weights, each rank with its rows of every tensor; computed with in
        BF16."""
        model = model_of.build_model(self.settings.seed).float()
        for weight, start in zip(
            model.parameters(), torch.load(folder.checkpoint(self.name)), strict=True
        ):
            weight.data.copy_(start)
        mesh = init_device_mesh("cpu", (self.settings.ranks,))
        precision = MixedPrecisionPolicy(param_dtype=model_of.ARITHMETIC)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        return model

    def run(self) -> None:
        self._publish(0)
        for step in range(1, self.settings.steps + 1):
            began = time.perf_counter()
            names = self._next_batches()
            waited = time.perf_counter() - began
            batch = Judged.from_bytes(self.store.get(names[self.rank]))
            counted = torch.ones_like(batch.right) if self.name == "solver" else batch.right
            advantage = advantages(batch.rewards, counted, self.settings.group)
            torch.autograd.backward(
                loss_of(self.model, batch.tokens.long(), batch.log_probs, advantage)
            )
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            wrong = 1 - batch.right
            sums = torch.stack(
                [batch.rewards.mean(), *(_share(batch.rewards, of) for of in (batch.right, wrong))]
            )
            dist.all_reduce(sums)
            reward, of_right, of_wrong = (sums / self.settings.ranks).tolist()
            published = self._publish(step, reward=reward)
            if self.journal:
                self.journal.write(
                    "step",
                    step=step,
                    version=published.version,
                    reward=reward,
                    of_right=of_right,
                    of_wrong=of_wrong,
                    lag=self.newest - 1 - min(version_of(name) for name in names),
                    changed=published.changed,
                    patch_bytes=published.patch_bytes,
                    dense_bytes=published.dense_bytes,
                    publish_ms=published.seconds * 1e3,
                    waited_ms=waited * 1e3,
                    step_ms=(time.perf_counter() - began) * 1e3,
                )
        self._report()

    def _publish(self, step: int, **facts: float) -> pulse_rl.Published:
        metadata = {"step": step, "last": step == self.settings.steps, **facts}
        published = self.publisher.publish(self.model.state_dict(), metadata=metadata, dtype="BF16")
        self.newest = published.version
        return published

    def _next_batches(self) -> list[str]:
        """The names of one batch for each rank, as rank 0 chooses them; what is too old is
        deleted."""
        found: list[list[str]] = [[]]
        if self.rank == 0:
            found = [wait_for(self._ready, self.alarm, f"batches for the {self.name}")]
        dist.broadcast_object_list(found)
        return found[0]

    def _ready(self) -> list[str] | None:
        names = [info.name for info in self.store.list(folder_of(self.name))]
        for name in [
            n
            for n in names
            if n <= self.used or self.newest - version_of(n) > self.settings.max_lag
        ]:
            self.store.delete(name)
            names.remove(name)
        if len(names) < self.settings.ranks:
            return None
        chosen = names[-self.settings.ranks :]  # the newest
        self.used = chosen[-1]
        return chosen

    def _report(self) -> None:
        """The root of the whole model as the trainer has it, gathered this once."""
        whole = {
            name: weight.full_tensor() for name, weight in self.model.named_parameters()
        }  # tied ones once
        if self.journal:
            root = pulse_rl.state_root(
                {name: weight.to(torch.bfloat16) for name, weight in whole.items()}
            )
            self.journal.write("result", version=self.newest, root=root)


def _share(rewards: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The mean reward of those sequences, one half where there are none."""
    return (rewards * of).sum() / of.sum() if of.any() else torch.tensor(0.5)


def work(settings: Settings, folder: RunFolder, alarm: Alarm, policy: str, rank: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder.root}/meeting-{policy}",
        rank=int(rank),
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.patience),
    )
    Trainer(settings, folder, policy, int(rank), alarm).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "policy", "rank"))
