"""The asynchronous loop in a hundred lines: a trainer and two workers in processes of their own,
joined by a folder.

    python examples/async_grpo.py [STEPS]

Workers generate with the newest weights that they have, and never wait for the trainer; the trainer
learns from rollouts that are a few versions old, drops older ones, and publishes behind the next
step. The task is a toy: eight contexts, each with one right action out of eight. `examples/grpo`
does the same with a language model and restarts.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from queue import Full
from typing import Any

import numpy as np
import torch

import pulse_rl
from pulse_rl.frameworks.torch import apply_

WORKERS, STEPS, GROUP, CONTEXTS, MAX_LAG = 2, 150, 16, 8, 4
PATIENCE = 60.0


def make_policy() -> torch.nn.Module:
    """What is served: BF16. The trainer has FP32 masters of it."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(CONTEXTS, 128), torch.nn.Tanh(), torch.nn.Linear(128, CONTEXTS)
    return torch.nn.Sequential(*layers).bfloat16()


def generate(policy: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """(actions, rewards), both [contexts, group]: the right action is the context's opposite."""
    with torch.no_grad():
        logits = policy(torch.eye(CONTEXTS, dtype=torch.bfloat16)).float()
    actions = torch.distributions.Categorical(logits=logits).sample((GROUP,)).T
    right = CONTEXTS - 1 - torch.arange(CONTEXTS)
    return actions.numpy(), (actions == right[:, None]).float().numpy()


def work(store: str, name: int, rollouts: Queue[Any], roots: Queue[str], ended: Event) -> None:
    """A rollout worker: takes the newest version if there is one, generates, hands over, again."""
    policy = make_policy()
    torch.manual_seed(name)
    with pulse_rl.Subscriber(store, stream="policy") as subscriber:
        while not ended.is_set():
            update = subscriber.sync()
            if update is not None:
                apply_(policy, update)
            if subscriber.version is None:  # the trainer has not published yet
                time.sleep(0.02)
                continue
            with suppress(Full):  # the trainer is slower: look for newer weights
                rollouts.put((subscriber.version, *generate(policy)), timeout=0.1)
        update = subscriber.sync()
        if update is not None:
            apply_(policy, update)
    roots.put(pulse_rl.state_root(policy.state_dict()))


def train(store: str, rollouts: Queue[Any], steps: int) -> str:
    """The trainer. Returns the root of what it served last."""
    served = make_policy()
    masters = [p.detach().float().requires_grad_() for p in served.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-3)
    names = [name for name, _ in served.named_parameters()]
    contexts = torch.eye(CONTEXTS)
    with pulse_rl.Publisher(store, stream="policy") as publisher:
        submitted = publisher.submit(served.state_dict())
        for step in range(1, steps + 1):
            newest = submitted.result().version  # published while the last step was computed
            dropped = 0
            while True:
                version, actions, rewards = rollouts.get(timeout=PATIENCE)
                if version >= newest - MAX_LAG:
                    break
                dropped += 1
            advantages = torch.from_numpy(rewards - rewards.mean(1, keepdims=True))
            logits = torch.func.functional_call(
                served, dict(zip(names, masters, strict=True)), contexts
            )
            chosen = logits.log_softmax(1).gather(1, torch.from_numpy(actions))
            optimizer.zero_grad()
            (-(advantages * chosen).mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(served.parameters(), masters, strict=True):
                    parameter.copy_(master)
            submitted = publisher.submit(served.state_dict(), metadata={"step": step})
            if step % max(1, steps // 10) == 0:
                lag = newest - version
                print(
                    f"step {step}: reward {rewards.mean():.2f}, {lag} versions old, {dropped} "
                    "dropped",
                    flush=True,
                )
        last = submitted.result()
    print(f"version {last.version}: {last.density:.1%} of the weights changed")
    return last.root


def main(steps: int) -> None:
    processes = multiprocessing.get_context("spawn")
    rollouts, roots, ended = (
        processes.Queue(maxsize=2 * WORKERS),
        processes.Queue(),
        processes.Event(),
    )
    with tempfile.TemporaryDirectory() as store:
        workers = [
            processes.Process(target=work, args=(store, name, rollouts, roots, ended), daemon=True)
            for name in range(1, WORKERS + 1)
        ]
        for worker in workers:
            worker.start()
        root = train(store, rollouts, steps)
        ended.set()
        found = {roots.get(timeout=PATIENCE) for _ in workers}
        assert found == {root}, "a worker ended with other weights"
        print(f"{WORKERS} workers are bit-identical, root {root}")
        rollouts.cancel_join_thread()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)
