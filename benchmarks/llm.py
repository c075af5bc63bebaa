"""GRPO on SmolLM2-135M, recorded: what a step changes, what it costs to send, and what is trained.

    python -m benchmarks.llm train --lr 3e-6 --seed 0 --json benchmarks/results/llm/3e-6-0.jsonl
    python -m benchmarks.llm train --lr 3e-6 --seed 0 --without-pulse --json FILE

One process and one thread, so that a run repeats bit for bit. Each step samples 8 answers to 8
problems with a second model that has its weights from a store (``--without-pulse``: copied), takes
one AdamW step on FP32 masters, and publishes. ``--store DIR`` keeps the stream for ``pulse study``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pulse_rl
from examples.grpo.grpo import clipped_loss, group_advantages
from examples.grpo.policy import MasterWeights, seeded
from examples.llm_grpo import model as llm
from examples.llm_grpo.task import Additions
from pulse_rl.frameworks.torch import apply_

from .results import machine, revision

PROMPTS, GROUP = 8, 8
TASKS = {
    "two terms": {"terms": 2},
    "three terms": {"terms": 3},
}


class Muon(MasterWeights):
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""

    def forget_moments(self) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        pairs = list(zip(names, self._masters, strict=True))
        matrices = [one for name, one in pairs if one.ndim == 2 and "embed" not in name]
        rest = [one for name, one in pairs if one.ndim != 2 or "embed" in name]
        # With the RMS of AdamW's updates, a learning rate means the same for both.
        muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(rest, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
        self._optimizer = _Both(muon, adam)  # type: ignore[assignment]


class Half(MasterWeights):
    """FP16 weights. A CPU multiplies them slowly, so the model holds their values in FP32."""

    @torch.no_grad()
    def _cast(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master.half())


class _Both:
    """Two optimizers as one, as far as `MasterWeights` asks."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self) -> None:
        for one in self._optimizers:
            one.step()


class Changes:
    """Counts which BF16 weights a step changed, by the kind of layer, and independent of Pulse.

    Weights that are 0 at the start are counted apart: a quantized embedding has 0.24% of them, and
    near 0 every update shows.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {name: one.detach() for name, one in model.named_parameters()}
        self._before = {name: _bits(one).clone() for name, one in self._weights.items()}
        self._zero = {name: one == 0 for name, one in self._weights.items()}

    def sizes(self) -> dict[str, Any]:
        """Of the model: all elements, those that are 0, and the elements of each kind."""
        kinds: Counter[str] = Counter()
        for name, weight in self._weights.items():
            kinds[_kind(name)] += weight.numel()
        zeros = sum(int(one.sum()) for one in self._zero.values())
        return {"elements": kinds.total(), "zeros": zeros, "kinds": kinds}

    def count(self) -> dict[str, Any]:
        """Counts since the last call: ``changed``, ``zeros_changed``, and ``kinds``."""
        changed, zeros, kinds = 0, 0, dict.fromkeys(("embedding", "attention", "mlp", "norm"), 0)
        for name, weight in self._weights.items():
            now = _bits(weight)
            different = now != self._before[name]
            number = int(different.sum())
            changed, kinds[_kind(name)] = changed + number, kinds[_kind(name)] + number
            zeros += int((different & self._zero[name]).sum())
            self._before[name].copy_(now)
        return {"changed": changed, "zeros_changed": zeros, "kinds": kinds}


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """Of BF16 weights, or of FP16 weights whose values are held in FP32."""
    return (weight if weight.dtype == torch.bfloat16 else weight.half()).view(torch.int16)


def _kind(name: str) -> str:
    for part, kind in (("embed", "embedding"), ("self_attn", "attention"), ("mlp", "mlp")):
        if part in name:
            return kind
    return "norm"


def train(args: argparse.Namespace, store: Path) -> None:
    """One run. Writes a row for each step and each evaluation, the settings first."""
    torch.set_num_threads(1)
    folder = llm.prepare(args.model)
    task = Additions(llm.load_tokenizer(folder), **TASKS[args.task])
    trained, generating = llm.load_model(folder), llm.load_model(folder)
    received = generating
    how: type[MasterWeights] = Muon if args.optimizer == "muon" else MasterWeights
    if args.dtype == "F16":
        trained, received = trained.half().float(), generating.half()
        generating, how = llm.load_model(folder).float(), Half
    weights = how(trained)
    changes = Changes(trained)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    file = args.json.open("w", buffering=1)

    def write(**row: Any) -> None:
        rounded = {key: _rounded(value) for key, value in row.items()}
        file.write(json.dumps(rounded) + "\n")
        if ("reward" in row and row["step"] % 10 == 0) or "held_out" in row:
            print({key: rounded[key] for key in rounded if key != "kinds"}, flush=True)

    chosen = {key: getattr(args, key) for key in ("lr", "seed", "task", "optimizer", "dtype")}
    write(
        command="python -m benchmarks.llm train …",
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        revision=revision(),
        machine=machine(),
        settings=chosen,
        pulse=not args.without_pulse,
        **changes.sizes(),
    )
    publisher = pulse_rl.Publisher(str(store), stream="policy", threads=1)
    subscriber = pulse_rl.Subscriber(str(store), stream="policy", threads=1)

    def send() -> dict[str, Any]:
        """Brings the trained weights into the generating model."""
        if args.without_pulse:
            with torch.no_grad():
                for to, of in zip(generating.parameters(), trained.parameters(), strict=True):
                    to.copy_(of)
            return {}
        started = time.perf_counter()
        published = publisher.publish(trained, dtype=args.dtype)
        at = time.perf_counter()
        update = subscriber.sync()
        assert update is not None
        synced = time.perf_counter()
        apply_(received, update)
        if received is not generating:
            generating.load_state_dict(received.state_dict())
        done = time.perf_counter()
        return {
            "patch_bytes": published.patch_bytes,
            "published_changed": published.changed,
            "publish_s": at - started,
            "sync_s": synced - at,
            "apply_s": done - synced,
        }

    answer = partial(llm.likeliest, generating)
    send()
    write(step=0, held_out=task.accuracy(answer))
    for step in range(1, args.steps + 1):
        rng, generator = seeded(args.seed, step)
        problems = task.draw(rng, PROMPTS)
        prompts = task.prompts(problems)
        started = time.perf_counter()
        answers, old = llm.sample(generating, prompts, GROUP, task.answer_tokens, generator)
        rewards = task.rewards([one for one in problems for _ in range(GROUP)], answers)
        generated = time.perf_counter()
        log_probs, entropy = llm.log_probabilities(trained, prompts, answers)
        mask = task.counted(answers)
        loss = clipped_loss(log_probs, old, group_advantages(rewards, GROUP), mask)
        torch.autograd.backward(loss)
        norm = weights.step(args.lr)
        updated = time.perf_counter()
        write(
            step=step,
            reward=float(rewards.mean()),
            entropy=float((entropy * mask).sum() / mask.sum()),
            norm=norm,
            generate_s=generated - started,
            train_s=updated - generated,
            **changes.count(),
            **send(),
        )
        if step % args.evaluate_every == 0 or step == args.steps:
            write(step=step, held_out=task.accuracy(answer))
    roots = [
        pulse_rl.state_root(one.to(received.dtype).state_dict()) for one in (trained, generating)
    ]
    write(trained_root=roots[0], generating_root=roots[1])
    if roots[0] != roots[1]:
        raise SystemExit("the generating model does not hold the trained weights")


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm", description=__doc__)
    parser.add_argument("what", choices=["train"])
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--task", choices=TASKS, default="two terms")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--dtype", choices=["BF16", "F16"], default="BF16")
    parser.add_argument("--evaluate-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--without-pulse", action="store_true")
    parser.add_argument("--model", type=Path, default=llm.FOLDER)
    parser.add_argument("--store", type=Path, help="kept; without it the stream is temporary")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        train(args, args.store or Path(aside))
    return 0


if __name__ == "__main__":
    sys.exit(main())
