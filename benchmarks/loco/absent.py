"""What it costs that a trainer is late, slow or away: over a store, trainers as threads of one
process.

    python -m benchmarks.loco.absent [--seeds 0 1 2] [--rounds 32] [--json FILE]

The last of four trainers is late in every third round: that closes without it, and what it has
trained is in the next one. Or it is three times slower than the others, and in every third round.
Or it is killed after round 10 in the middle of its steps, and comes back from its checkpoint five
rounds later. The reward is that of the global weights on held-out problems, over the last five
rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean, stdev

import torch

from benchmarks.loco import tasks
from benchmarks.loco.jobs import LAST, LR, OUTER_LR, OUTER_MOMENTUM, SYNC_EVERY, TRAINERS
from benchmarks.loco.threads import clip_before_steps, in_threads, take_step
from pulse_rl import MemoryStore
from pulse_rl.loco import PulseLoCo, StoreExchange
from pulse_rl.loco.store_rounds import StoreRounds

IN_TIME, LATE, SLOW = "in time", "late in every third round", "three times slower"
AWAY = "killed, away for five rounds"
HOW = (IN_TIME, LATE, SLOW, AWAY)
KILLED, BACK = 10, 15


def is_out(how: str, number: int) -> bool:
    """Whether the last trainer is left out of the round after ``number`` others."""
    if how == SLOW:
        return number % 3 != 2
    return number % 3 == 2 if how == LATE else how == AWAY and KILLED <= number < BACK


def run(how: str, seed: int, rounds: int) -> float:
    """The reward at the end of a training."""
    store, rewards = MemoryStore(), list[float]()

    def wait_until_closed(number: int) -> None:
        while not any(
            True for _ in store.list("loco/closed", f"loco/closed/{number - 1:012d}.json")
        ):
            time.sleep(0.01)

    def train(rank: int) -> None:
        job, last = tasks.TASKS[tasks.ARITHMETIC](seed, rank), rank == TRAINERS - 1
        optimizer = torch.optim.AdamW(job.masters.values(), lr=LR, weight_decay=0.0)
        exchange = StoreExchange(
            store, trainer=f"trainer-{rank}", min_trainers=TRAINERS, grace_seconds=0.0
        )
        loop = PulseLoCo(
            job.masters,
            optimizer,
            sync_every=SYNC_EVERY,
            outer_lr=OUTER_LR,
            outer_momentum=OUTER_MOMENTUM,
            exchange=exchange,
        )
        loop.threads = 1
        step, was_killed = 0, False
        with loop:
            assert isinstance(loop.meeting, StoreRounds)
            clip_before_steps(optimizer, job.masters)
            job.cast()
            while loop.round < rounds:
                number = loop.round
                if last and how == AWAY and number == KILLED and not was_killed:
                    if loop.inner_step == 0:
                        saved = (
                            loop.state_dict(),
                            {k: v.detach().clone() for k, v in job.masters.items()},
                        )
                    elif loop.inner_step == SYNC_EVERY // 2:
                        was_killed = True
                        with torch.no_grad():
                            for name, master in job.masters.items():
                                master.copy_(saved[1][name])
                        loop.load_state_dict(saved[0])
                        wait_until_closed(BACK - 1)
                        loop.rejoin()
                        job.cast()
                        continue
                if loop.inner_step == SYNC_EVERY - 1:
                    if last:
                        if is_out(how, number):
                            back = next(n for n in count(number) if not is_out(how, n))
                            wait_until_closed(min(back, rounds) - 1)
                    else:
                        loop.meeting.exchange = replace(
                            exchange, min_trainers=TRAINERS - is_out(how, number)
                        )
                take_step(job, optimizer, step, LR)
                step += 1
                if loop.inner_step == 0 and loop.round > rounds - LAST:
                    rewards.append(tasks.evaluate_global(loop, job)[0])

    in_threads(train, TRAINERS)
    return fmean(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco.absent", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=HOW, default=HOW, metavar="HOW")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rewards to this file"
    )
    arguments = parser.parse_args()
    tasks.ensure(tasks.ARITHMETIC)
    found: dict[str, list[float]] = {how: [] for how in arguments.only}
    for seed in arguments.seeds:
        for how, rewards in found.items():
            began = time.monotonic()
            rewards.append(run(how, seed, arguments.rounds))
            print(
                f"seed {seed}, {how}: {rewards[-1]:.4f} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    if len(arguments.seeds) > 1:
        for how, rewards in found.items():
            print(f"{how}: {fmean(rewards):.4f} +- {stdev(rewards):.4f}")
    if arguments.json:
        facts = {"rounds": arguments.rounds, "seeds": arguments.seeds, "lr": LR, "rewards": found}
        arguments.json.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
