"""What each setting of PULSELoCo does to what is learnt and sent: trainers as threads of one process, each group of
settings beside DiLoCo with the same ones.

    python -m benchmarks.loco.ablation [--only GROUP ...] [--seeds 0 1] [--rounds 32] [--json FILE]

``heldout`` learns on pretrained weights, by held-out cloze prompts. ``scaling`` (more trainers) and ``sites`` (two of
them) are also parts of ``python -m benchmarks.loco``. 32 rounds of 4 trainers take two to three minutes of a core on
the arithmetic task, ten to twenty on pretrained weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.loco import tasks
from benchmarks.loco.baselines import sparse_loco
from benchmarks.loco.convergence import LAST, LR
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM, PRETRAINED_RATES, STEADY_FROM, SYNC_EVERY, TRAINERS
from benchmarks.loco.threads import Masters, train
from pulse_rl.loco import DiLoCo, Exchange, PulseLoCo
from pulse_rl.loco.exchange import Sites
from pulse_rl.loco.loop import OuterLoop


def one_level(*arguments: Any, **settings: Any) -> PulseLoCo:
    """Knows the sites, and does as if there were none."""
    loop = PulseLoCo(*arguments, **settings)
    loop.reduction.sites = lambda group: Sites.of([""] * group.size)  # type: ignore[method-assign]
    return loop


@dataclass(frozen=True)
class Variant:
    """``settings`` are the loop's and the exchange's. ``sites``: the trainers are in so many, of equal size. With
    another ``sync_every`` the inner steps of a run stay as many."""

    method: Callable[..., OuterLoop] = PulseLoCo
    task: str = tasks.ARITHMETIC
    trainers: int = TRAINERS
    lr: float = LR
    sync_every: int = SYNC_EVERY
    sites: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        facts = [self.method.__name__, "" if self.task == tasks.ARITHMETIC else self.task, f"lr {self.lr:g}"]
        facts += [f"R {self.trainers}" if self.trainers != TRAINERS else ""]
        facts += [f"H {self.sync_every}" if self.sync_every != SYNC_EVERY else ""]
        facts += [f"{name} {str(value).removeprefix('torch.')}" for name, value in self.settings.items()]
        return ", ".join(fact for fact in facts if fact)


@dataclass(frozen=True)
class Group:
    """``rounds`` of a run unless others are asked for; not ``evaluated`` where only bytes are of interest."""

    variants: list[Variant]
    rounds: int = 32
    evaluated: bool = True


def both(**changed: Any) -> list[Variant]:
    """DiLoCo and PULSELoCo with the same change."""
    return [Variant(DiLoCo, **changed), Variant(**changed)]


def pulse(**settings: Any) -> Variant:
    return Variant(settings=settings)


SWEEP = {"wire": "int2", "sweep": 4}
SWEEP_OVER_STORE = {"wire": "int4", "sweep": 4, "gate_sums": False}

GROUPS: dict[str, Group] = {
    "lookahead": Group([Variant(DiLoCo), *(pulse(lookahead=c) for c in (0.0, 1.33, 3.0, 7.0, 14.0))]),
    "gate": Group([pulse(gate_scale=k) for k in (0.25, 0.5, 2.0)]),
    "sums": Group(
        [
            pulse(gate_sums=True),
            pulse(gate_sums=True, wire="BF16"),
            Variant(DiLoCo, trainers=8),
            *(Variant(trainers=8, settings={"gate_sums": gated}) for gated in (False, True)),
        ]
    ),
    "momentum": Group([v for mu in (0.0, 0.5, 0.95) for v in both(settings={"outer_momentum": mu})]),
    "H": Group([v for h in (4, 16, 32) for v in both(sync_every=h)]),
    "lr": Group([v for lr in (1e-5, 1e-4) for v in both(lr=lr)]),
    "low lr": Group([Variant(lr=1e-5, settings={"lookahead": c}) for c in (0.0, 3.0, 14.0)]),
    "data": Group(
        [
            Variant(DiLoCo, task=tasks.APART),
            *(Variant(task=tasks.APART, settings=settings) for settings in ({}, {"gate_sums": True})),
        ]
    ),
    "SparseLoCo": Group(
        [
            Variant(sparse_loco, settings={"fraction": share, "outer_lr": lr})
            for share, lr in ((0.03, 1.0), (0.1, 1.0), (0.1, 3.0))
        ]
    ),
    "heldout": Group(
        [
            Variant(method, task=tasks.PRETRAINED_SPLIT, lr=lr, settings=settings)
            for lr in PRETRAINED_RATES
            for method, settings in (
                *((DiLoCo, {}), (PulseLoCo, {}), (PulseLoCo, {"wire": "int2"})),
                *((PulseLoCo, SWEEP), (PulseLoCo, SWEEP_OVER_STORE)),
            )
        ],
        rounds=16,
    ),
    "scaling": Group(
        [
            Variant(task=tasks.PRETRAINED, lr=lr, trainers=trainers, settings={"gate_sums": gated})
            for lr in PRETRAINED_RATES
            for trainers, gated in ((4, False), (4, True), (8, True))
        ],
        rounds=STEADY_FROM,
        evaluated=False,
    ),
    "sites": Group([Variant(method, trainers=8, sites=2) for method in (DiLoCo, one_level, PulseLoCo)], rounds=16),
}


@dataclass(frozen=True)
class Outcome:
    """Means over trainers. ``density`` and ``summed`` (shares of the parameters), ``payload``, ``link`` and ``between``
    (bytes of a message, bytes that leave a process, and a site): of the last `LAST` rounds, or of the last one where
    nothing is evaluated; ``ring``: what a dense ring all-reduce sends. ``sent``: the links of all rounds. ``rewards``:
    held out, of each round; ``reward``, ``loss`` and ``ahead`` (by the weights that the inner steps start from): of the
    last ones; ``consensus``: after the last one, by the mean of these."""

    title: str
    seed: int
    density: float
    summed: float
    payload: float
    link: float
    between: float
    ring: int
    sent: float
    rewards: list[float]
    reward: float | None
    loss: float | None
    ahead: float | None
    consensus: float | None

    def __str__(self) -> str:
        learnt = (self.reward, self.loss, self.ahead, self.consensus)
        sizes = (self.payload, self.link, self.between, self.sent)
        return (
            f"{self.title:52} {self.seed:4} {self.density:>8.2%} {self.summed:>7.2%} "
            + " ".join(f"{size / 1e6:>8.3f}" for size in sizes)
            + f" {self.ring / self.link:>6.1f} "
            + " ".join(f"{'-' if x is None else f'{x:.4f}':>9}" for x in learnt)
        )


HEADING = (
    "MB of a round: a message, what leaves a process, what leaves a site; of a run; times less than a dense ring\n"
    f"{'method':52} seed  density  summed  payload     link  between      run   less    reward      loss     ahead "
    "consensus"
)


def measure(variant: Variant, seed: int, rounds: int, evaluate: bool) -> Outcome:
    """``rounds`` of `SYNC_EVERY` steps."""
    count = rounds * SYNC_EVERY // variant.sync_every
    members = variant.trainers // variant.sites
    outer = {} if variant.method is sparse_loco else {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}

    def make_loop(rank: int, masters: Masters, optimizer: torch.optim.Optimizer) -> OuterLoop:
        settings = {"sync_every": variant.sync_every, **outer, **variant.settings}
        of_exchange = {name: settings.pop(name) for name in ("gate_sums", "wire", "sweep") if name in settings}
        if variant.sites > 1:
            of_exchange["site"] = f"site {rank // members}"
        loop = variant.method(masters, optimizer, group=Exchange(**of_exchange), **settings)
        loop.threads = 1
        return loop

    done = train(variant.task, variant.trainers, make_loop, lr=variant.lr, rounds=count, seed=seed, evaluate=evaluate)
    last = -max(1, LAST * SYNC_EVERY // variant.sync_every) if evaluate else -1
    steady = [r for trained in done for r in trained.rounds[last:]]
    # A ring of ranks in the order of the sites crosses each site's border once.
    crossing = [r.dense_bytes if variant.method is DiLoCo else members * r.between_bytes for r in steady]
    judges = done[:TRAINERS] if evaluate else []
    held_out = list(zip(*(trained.held_out for trained in judges), strict=True))
    of_last = [found for of_round in held_out[last:] for found in of_round]
    return Outcome(
        title=variant.title,
        seed=seed,
        density=fmean(r.density for r in steady),
        summed=fmean(r.summed / r.parameters for r in steady),
        payload=fmean(r.payload_bytes for r in steady),
        link=fmean(r.sent_bytes for r in steady),
        between=fmean(crossing) if variant.sites > 1 else 0.0,
        ring=steady[0].dense_bytes,
        sent=fmean(sum(r.sent_bytes for r in trained.rounds) for trained in done),
        rewards=[fmean(reward for reward, _ in of_round) for of_round in held_out],
        reward=_mean([reward for reward, _ in of_last]),
        loss=_mean([loss for _, loss in of_last]),
        ahead=_mean([reward for trained in judges for reward, _ in trained.ahead[last:]]),
        consensus=_mean([(trained.consensus or trained.held_out[-1])[0] for trained in judges]),
    )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def run(
    groups: Iterable[str], seeds: list[int], rounds: int | None = None, *, quick: bool = False
) -> Iterator[Outcome]:
    """Each variant of the groups on each seed; prints as it goes. ``quick``: all of it on the arithmetic task."""
    print(HEADING, flush=True)
    for name in groups:
        group = GROUPS[name]
        for variant in group.variants:
            variant = replace(variant, task=tasks.ARITHMETIC) if quick else variant
            tasks.ensure(variant.task)
            for seed in seeds:
                found = measure(variant, seed, rounds or group.rounds, group.evaluated)
                print(found, flush=True)
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loco.ablation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, help="of a run; each group has its own default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    arguments = parser.parse_args()
    found = []
    for outcome in run(arguments.only, arguments.seeds, arguments.rounds):
        found.append(asdict(outcome))
        if arguments.json:  # so far: a run may take hours
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
