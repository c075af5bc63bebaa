"""Does it learn as well: held-out reward and loss by method, over seeds, from one warm-started checkpoint."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.loco.jobs import SYNC_EVERY, TRAINERS, Job, JobResult
from benchmarks.loco.methods import DDP, DILOCO, METHODS, PULSE, TOP_K
from benchmarks.loco.processes import TrainerProcesses
from benchmarks.loco.tasks import ARITHMETIC, HELD_OUT

SEEDS = (0, 1, 2, 3)
TUNING_SEED = 100
"""The learning rates were chosen on it and top-k's fraction is; it is in no table."""

# Of 1e-5, 3e-5, 1e-4 and 3e-4 those with DiLoCo's and DDP's lowest loss after 32 rounds on the tuning seed. DiLoCo's
# outer momentum makes its steps some seven times as long, so that it wants a lower one.
LR = 3e-5
LR_DDP = 1e-4
WARM_UP = 20
ROUNDS = 32
LAST = 5
"""The final reward and loss are means over so many last rounds."""


@dataclass(frozen=True)
class Curve:
    """One run: means over trainers after each round. ``payloads`` and ``links``: bytes of one trainer's messages, and
    what left its process, in each round. ``density`` is that of the whole run."""

    method: str
    seed: int
    rewards: list[float]
    losses: list[float]
    payloads: list[float]
    links: list[float]
    density: float

    @property
    def payload_bytes(self) -> float:
        return sum(self.payloads)

    @property
    def reward(self) -> float:
        return fmean(self.rewards[-LAST:])

    @property
    def loss(self) -> float:
        return fmean(self.losses[-LAST:])


def job(method: str, seed: int, rounds: int, fraction: float | None = None) -> Job:
    lr = LR_DDP if method == DDP else LR
    return Job(ARITHMETIC, method, lr, rounds, seed, WARM_UP, fraction if method == TOP_K else None, evaluate=True)


def curve(job: Job, result: JobResult) -> Curve:
    rounds = list(zip(*result, strict=True))
    records = [r for of_trainer in result for r in of_trainer]
    return Curve(
        method=job.method,
        seed=job.seed,
        rewards=[fmean(r.held_out_reward or 0.0 for r in of_round) for of_round in rounds],
        losses=[fmean(r.held_out_loss or 0.0 for r in of_round) for of_round in rounds],
        payloads=[fmean(r.payload_bytes for r in of_round) for of_round in rounds],
        links=[fmean(r.sent_bytes for r in of_round) for of_round in rounds],
        density=fmean(r.density for r in records),
    )


def matching_fraction(trainers: TrainerProcesses, rounds: int) -> float:
    """The fraction at which top-k's messages are as long as PULSELoCo's with FP32 values, found on the tuning seed."""
    pulse = curve(*_run(trainers, job(PULSE, TUNING_SEED, rounds)))
    top_k = curve(*_run(trainers, job(TOP_K, TUNING_SEED, rounds, pulse.density)))
    return pulse.density * pulse.payload_bytes / top_k.payload_bytes


def run(trainers: TrainerProcesses, methods: Sequence[str], rounds: int, seeds: Sequence[int]) -> Iterator[Curve]:
    """The methods on all seeds, seed by seed, so that a change of the machine's load meets all methods."""
    fraction = matching_fraction(trainers, rounds) if TOP_K in methods else None
    return (curve(*_run(trainers, job(method, seed, rounds, fraction))) for seed in seeds for method in methods)


def _run(trainers: TrainerProcesses, job: Job) -> tuple[Job, JobResult]:
    result = trainers.run(job)
    found = curve(job, result)
    print(
        f"  reward {found.reward:.4f}, loss {found.loss:.4f}, density {found.density:.2%}", file=sys.stderr, flush=True
    )
    return job, result


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; that of one seed is NaN."""
    return fmean(values), stdev(values) if len(values) > 1 else math.nan


def text(curves: list[Curve]) -> str:
    """The tables as lines."""
    rounds = len(curves[0].rewards)
    seeds = sorted({c.seed for c in curves})
    lines = [
        f"Convergence on the arithmetic task: {rounds} rounds of {SYNC_EVERY} inner steps, {TRAINERS} trainers, "
        f"seeds {', '.join(map(str, seeds))};",
        f"mean and standard deviation over seeds. Inner lr {LR:g} (DDP {LR_DDP:g}), chosen on another seed.",
        f"Reward (the probability of the right answer) and loss (the cross-entropy of its tokens) on {HELD_OUT}",
        f"held-out problems, mean of the last {min(LAST, rounds)} rounds. MB: one trainer's messages in the whole run.",
        "Behind: how many rounds earlier DiLoCo first had the reward, on the same seed; -: it never had.",
        "",
        f"{'method':18} {'reward':>16} {'loss':>16} {'density':>8} {'MB':>8} {'1/DiLoCo':>8} {'behind':>6}",
    ]
    diloco = {c.seed: c for c in curves if c.method == DILOCO}
    dense = mean_and_deviation([c.payload_bytes for c in curves if c.method == DILOCO])[0]
    for method in (m for m in METHODS if any(c.method == m for c in curves)):
        mine = [c for c in curves if c.method == method]
        reward, loss = mean_and_deviation([c.reward for c in mine]), mean_and_deviation([c.loss for c in mine])
        payload = fmean(c.payload_bytes for c in mine)
        lags = [lag for c in mine if (lag := rounds_behind(c, diloco[c.seed])) is not None]
        behind = f"{fmean(lags):.1f}" if len(lags) == len(mine) else "-"
        lines.append(
            f"{method:18} {reward[0]:>7.4f} ± {reward[1]:.4f} {loss[0]:>7.4f} ± {loss[1]:.4f} "
            f"{fmean(c.density for c in mine):>8.2%} {payload / 1e6:>8.2f} {dense / payload:>8.2f} {behind:>6}"
        )
    return "\n".join([*lines, "", *equal_reward(curves)])


def bytes_until(rewards: Sequence[float], sizes: Sequence[float], level: float) -> float | None:
    """The sum of ``sizes`` until the first round after which the reward is ``level``, the round before it counted in
    part; None if it never is."""
    first = next((i for i, reward in enumerate(rewards) if reward >= level), None)
    if first is None:
        return None
    part = (level - rewards[first - 1]) / (rewards[first] - rewards[first - 1]) if first else 1.0
    return sum(sizes[:first]) + part * sizes[first]


def equal_reward(curves: list[Curve]) -> list[str]:
    """What each method has sent when it is as far as DiLoCo was after a quarter, half, three quarters and all of its
    rounds, as lines. Rewards and bytes are means over seeds."""
    methods = [m for m in METHODS if any(c.method == m for c in curves)]

    def mean_of(method: str, name: str) -> list[float]:
        mine = [getattr(c, name) for c in curves if c.method == method]
        return [fmean(of_round) for of_round in zip(*mine, strict=True)]

    means = {method: [mean_of(method, name) for name in ("rewards", "payloads", "links")] for method in methods}
    rounds = len(curves[0].rewards)
    levels = [means[DILOCO][0][max(0, quarter * rounds // 4 - 1)] for quarter in (1, 2, 3, 4)]
    lines = [
        "Bytes at equal reward: MB of one trainer's messages | MB that left its process, until it first had DiLoCo's",
        f"reward after {', '.join(str(max(1, q * rounds // 4)) for q in (1, 2, 3, 4))} rounds. -: it never had.",
        f"{'method':18} " + " ".join(f"{level:>17.4f}" for level in levels),
    ]
    dense = [_until_each(means[DILOCO], level) for level in levels]
    for method in methods:
        found = [_until_each(means[method], level) for level in levels]
        megabytes = [[None if size is None else size / 1e6 for size in sizes] for sizes in found]
        lines.append(f"{method:18} " + _cells(megabytes, 2))
        if method != DILOCO:
            times = [
                [
                    None if size is None or of_dense is None else of_dense / size
                    for size, of_dense in zip(*both, strict=True)
                ]
                for both in zip(found, dense, strict=True)
            ]
            lines.append(f"{'  times less':18} " + _cells(times, 1))
    return lines


def _until_each(means: Sequence[list[float]], level: float) -> list[float | None]:
    """Payloads and links until that level, of mean rewards, payloads and links."""
    rewards, *sizes = means
    return [bytes_until(rewards, each, level) for each in sizes]


def _cells(pairs: list[list[float | None]], digits: int) -> str:
    texts = [" | ".join("-" if x is None else f"{x:.{digits}f}" for x in pair) for pair in pairs]
    return " ".join(f"{text:>17}" for text in texts)


def rounds_behind(curve: Curve, reference: Curve) -> float | None:
    """How many rounds earlier ``reference`` first had the reward that ``curve`` has: the mean over its last three
    quarters, None where the reference never had one of them."""
    lags = []
    for number in range(len(curve.rewards) // 4, len(curve.rewards)):
        reward, rewards = curve.rewards[number], reference.rewards
        first = next((i for i, r in enumerate(rewards) if r >= reward), None)
        if first is None:
            return None
        between = (rewards[first] - reward) / (rewards[first] - rewards[first - 1]) if first else 0.0
        lags.append(number - (first - between))
    return fmean(lags)
