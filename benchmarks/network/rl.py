"""Trainer and worker of a real RL run over the network, nothing replayed and nothing scaled: reward over wall-clock.

The policy is the 22.6 M pretrained weights of `benchmarks.trace`, the task its cloze prompts, the method on-policy
GRPO: a step takes from each worker the batch that was made with the newest version (lag 0), so that the fleet is as
fast as its slowest link.

Reward is measured on held-out prompts and has no sampling noise: it is the expectation under the policy. The trainer
keeps copies of its weights while the clock runs and evaluates them afterwards.

    python -m benchmarks.network.rl trainer|worker SPEC.json NAME
"""

from __future__ import annotations

import io
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from benchmarks import trace
from benchmarks.network import methods
from benchmarks.network.methods import Weights
from benchmarks.network.spec import POLL_SECONDS, Log, Spec, Stop
from pulse_rl import Store
from pulse_rl.errors import NotFound

LR, WARMUP = 1e-5, 10
PROMPTS, GROUP = 8, 16  # of one worker, a step
KEPT_EVERY_SECONDS = 5.0
HELD_OUT, HELD_OUT_SEED = 128, 777


def start(spec: Spec) -> trace.Policy:
    """The policy with the FP32 weights that the recorded runs started from."""
    torch.set_num_threads(1)
    policy = trace.Policy()
    trace.load_start(policy, Path(spec.trace) / "start.pt", 0)
    return policy


def load(policy: trace.Policy, bits: np.ndarray) -> None:
    """Makes these BF16 bits [elements] uint16 the weights that the policy computes with."""
    policy.flat.copy_(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))


def rewards(policy: trace.Policy, answers: list[str]) -> torch.Tensor:
    """[prompts, vocabulary]: what each token would earn, 1 if right and 0.3 if only its first letter is."""
    right = torch.tensor(policy.tokenizer.convert_tokens_to_ids(answers))
    near = policy.initial[None] == policy.initial[right][:, None]
    return (0.3 * near.float()).scatter_(1, right[:, None], 1.0)


def batch_name(worker: str, version: int) -> str:
    return f"batches/{worker}/{version:012d}"


def work(spec: Spec, name: str, log: Log, stop: Stop) -> None:
    """One batch for each version that it sees."""
    policy, store = start(spec), spec.open_store()
    policy.flat.copy_(policy.flat.bfloat16())
    weights = Weights(policy.bits().copy(), policy.shapes)
    worker = methods.worker(spec.method, store, weights)
    seed = spec.workers.index(name)
    prompts = trace.Prompts(policy.vocabulary, 100 + seed)
    generator = torch.Generator().manual_seed(seed)
    made = -1
    log.write("ready")
    stop.wait_for(spec.go)
    while not stop:
        since, previous = time.monotonic(), worker.version
        worker.sync()
        if worker.version == made:
            time.sleep(POLL_SECONDS)
            continue
        load(policy, weights.flat)
        synced = time.monotonic()
        texts, answers = prompts.batch(PROMPTS)
        with torch.inference_mode():
            chances = policy.log_probabilities(texts).exp()
            sample = torch.multinomial(chances, GROUP, replacement=True, generator=generator)
            reward = rewards(policy, answers).gather(1, sample)
        data = io.BytesIO()
        np.savez(data, texts=texts, sample=sample, reward=reward)
        store.put(batch_name(name, worker.version), data.getvalue())
        made = worker.version
        log.write(
            "batch",
            sync_seconds=synced - since,
            seconds=time.monotonic() - synced,
            previous=previous,
            version=made,
        )


def train(spec: Spec, log: Log, stop: Stop) -> None:
    spec.make_bucket()
    policy, store = start(spec), spec.open_store()
    adam = trace.AdamW(policy, trace.Run("network", LR, warmup=WARMUP))  # keeps FP32 masters, rounds the policy to BF16
    weights = Weights(policy.bits().copy(), policy.shapes)
    trainer = methods.trainer(spec.method, store, weights)
    version = trainer.publish().version
    log.write("ready")
    stop.wait_for(spec.go)
    started = kept_at = time.monotonic()
    kept = [(0.0, weights.flat.copy())]
    while not stop:
        batches = take_batches(spec, store, version, stop)
        if batches is None:
            break
        waited = time.monotonic()
        reward = learn(policy, adam, batches)
        weights.flat[:] = policy.bits()
        learnt = time.monotonic()
        done = trainer.publish()
        version = done.version
        log.write(
            "step",
            step=version,
            reward=reward,
            density=done.density,
            bytes=done.bytes,
            learn_seconds=learnt - waited,
            publish_seconds=time.monotonic() - learnt,
        )
        if learnt > kept_at + KEPT_EVERY_SECONDS:
            kept.append((learnt - started, weights.flat.copy()))
            kept_at = learnt
    kept.append((time.monotonic() - started, weights.flat.copy()))
    for seconds, bits in kept:
        log.write("evaluated", seconds=seconds, reward=evaluate(policy, bits))


def take_batches(spec: Spec, store: Store, version: int, stop: Stop) -> list[dict[str, np.ndarray]] | None:
    """The batch of each worker that was made with ``version``; None once it is time to stop."""
    batches = []
    for worker in spec.workers:
        while True:
            if stop:
                return None
            with suppress(NotFound):
                with np.load(io.BytesIO(store.get(batch_name(worker, version)))) as arrays:
                    batches.append(dict(arrays))
                break
            time.sleep(POLL_SECONDS)
    return batches


def learn(policy: trace.Policy, adam: trace.AdamW, batches: list[dict[str, np.ndarray]]) -> float:
    """One GRPO step on all batches; the mean reward of their samples."""
    texts = [str(text) for batch in batches for text in batch["texts"]]
    sample, reward = (
        torch.from_numpy(np.concatenate([batch[key] for batch in batches])) for key in ("sample", "reward")
    )
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    policy.backward(-(advantage * policy.log_probabilities(texts).gather(1, sample)).mean())
    adam.step()
    return float(reward.mean())


@torch.inference_mode()
def evaluate(policy: trace.Policy, bits: np.ndarray) -> float:
    """The expected reward on the held-out prompts."""
    load(policy, bits)
    texts, answers = trace.Prompts(policy.vocabulary, HELD_OUT_SEED).batch(HELD_OUT)
    return float((policy.log_probabilities(texts).exp() * rewards(policy, answers)).sum(1).mean())


def main() -> None:
    role, path, name = sys.argv[1:]
    spec, stop = Spec.load(path), Stop()
    log = Log(spec.log(name))
    if role == "trainer":
        train(spec, log, stop)
    else:
        work(spec, name, log, stop)


if __name__ == "__main__":
    main()
