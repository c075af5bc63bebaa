"""What is learnt and what is sent for it, by method, H, trainers and settings: trainers as threads
of one process.

    python -m benchmarks.loco.learning [--only GROUP ...] [--seeds 0 1] [--rounds 32] [--log NAME]

``methods`` are all of them on the arithmetic task, ``heldout`` those of interest on pretrained
weights, by held-out cloze prompts; ``scaling`` (more trainers) and the others change one setting.
Rounds are of `SYNC_EVERY` inner steps; with another H a run has as many steps. 32 of 4 trainers
take two to three minutes of a core on the arithmetic task, ten on pretrained weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from benchmarks import results
from benchmarks.loco import tables, tasks
from benchmarks.loco.baselines import Ddp
from benchmarks.loco.jobs import (
    LAST,
    LR,
    LR_DDP,
    PRETRAINED_RATES,
    STEADY_FROM,
    SYNC_EVERY,
    TRAINERS,
)
from benchmarks.loco.methods import (
    DDP,
    DILOCO,
    E8M0,
    E8M2,
    METHODS,
    PULSE,
    make_loop,
)
from benchmarks.loco.threads import Masters, train
from pulse_rl.loco.loop import OuterLoop


@dataclass(frozen=True)
class Variant:
    """A method with changed ``settings``, the loop's and the exchange's."""

    method: str = PULSE
    task: str = tasks.ARITHMETIC
    trainers: int = TRAINERS
    lr: float = LR
    sync_every: int = SYNC_EVERY
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        facts = [self.method, "" if self.task == tasks.ARITHMETIC else self.task, f"lr {self.lr:g}"]
        facts += [f"R {self.trainers}" if self.trainers != TRAINERS else ""]
        facts += [f"H {self.sync_every}" if self.sync_every != SYNC_EVERY else ""]
        facts += [
            f"{name} {str(value).removeprefix('torch.')}" for name, value in self.settings.items()
        ]
        return ", ".join(fact for fact in facts if fact)


@dataclass(frozen=True)
class Group:
    """``rounds`` of a run unless others are asked for; not ``evaluated`` where only bytes are of
    interest."""

    variants: list[Variant]
    rounds: int = 32
    evaluated: bool = True


def both(**changed: Any) -> list[Variant]:
    """DiLoCo and PULSELoCo with the same change."""
    return [Variant(DILOCO, **changed), Variant(**changed)]


def pulse(**settings: Any) -> Variant:
    return Variant(settings=settings)


SPARSE = "SparseLoCo 3%"

GROUPS: dict[str, Group] = {
    "methods": Group([Variant(m, lr=LR_DDP if m == DDP else LR) for m in METHODS]),
    "H": Group(
        [Variant(m, sync_every=h) for h in (30, 100) for m in (DILOCO, SPARSE, PULSE, E8M2, E8M0)],
        rounds=75,
    ),
    "trainers": Group(
        [Variant(m, trainers=n) for n in (8, 16) for m in (DILOCO, SPARSE, PULSE, E8M2)]
    ),
    "data": Group([Variant(m, task=tasks.APART) for m in (DILOCO, PULSE, E8M2)]),
    "heldout": Group(
        [
            Variant(m, task=tasks.PRETRAINED_SPLIT, lr=lr)
            for lr in PRETRAINED_RATES
            for m in (DILOCO, PULSE, E8M2, E8M0, SPARSE)
        ],
        rounds=16,
    ),
    "lookahead": Group(
        [Variant(DILOCO), *(pulse(lookahead=c) for c in (0.0, 1.33, 3.0, 7.0, 14.0))]
    ),
    "momentum": Group(
        [v for mu in (0.0, 0.5, 0.95) for v in both(settings={"outer_momentum": mu})]
    ),
    "lr": Group([v for lr in (1e-5, 1e-4) for v in both(lr=lr)]),
    "low lr": Group([Variant(lr=1e-5, settings={"lookahead": c}) for c in (0.0, 3.0, 14.0)]),
    "scaling": Group(
        [
            Variant(task=tasks.PRETRAINED, lr=lr, trainers=trainers)
            for lr in PRETRAINED_RATES
            for trainers in (4, 8)
        ],
        rounds=STEADY_FROM,
        evaluated=False,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """A run. Means over trainers: ``payloads`` and ``links``, bytes of its messages and of all that
    left a process, and ``rewards`` and ``losses``, held out, by theta, of each round; ``density``
    and ``summed`` (of all parameters), ``payload`` and ``link`` of a round of the last ones;
    ``ring``: what a dense ring all-reduce sends; ``reward``, ``loss`` and ``ahead`` (by the weights
    that the inner steps start from) of the last ones; ``consensus``: after the last one, by the
    mean of these."""

    title: str
    method: str
    task: str
    lr: float
    trainers: int
    sync_every: int
    seed: int
    density: float
    summed: float
    payload: float
    link: float
    ring: int
    payloads: list[float]
    links: list[float]
    rewards: list[float]
    losses: list[float]
    reward: float | None
    loss: float | None
    ahead: float | None
    consensus: float | None

    def __str__(self) -> str:
        learnt = (self.reward, self.loss, self.ahead, self.consensus)
        sizes = (self.payload, self.link, sum(self.links))
        return (
            f"{self.title:52} {self.seed:4} {self.density:>8.2%} {self.summed:>7.2%} "
            + " ".join(f"{size / 1e6:>8.3f}" for size in sizes)
            + f" {self.ring / self.link:>6.1f} "
            + " ".join(f"{'-' if x is None else f'{x:.4f}':>9}" for x in learnt)
        )


HEADING = (
    "MB of a round: a message, what leaves a process; of a run; times less "
    "than a dense ring\n"
    f"{'method':52} seed  density  summed  payload     link      run   less    reward   "
    "   loss     ahead "
    "consensus"
)


def measure(variant: Variant, seed: int, rounds: int, evaluate: bool) -> Outcome:
    """``rounds`` of `SYNC_EVERY` steps."""

    def make(rank: int, masters: Masters, optimizer: torch.optim.Optimizer) -> Ddp | OuterLoop:
        return make_loop(
            variant.method,
            masters,
            optimizer,
            sync_every=variant.sync_every,
            **variant.settings,
        )

    steps = rounds * SYNC_EVERY
    done = train(
        variant.task,
        variant.trainers,
        make,
        lr=variant.lr,
        steps=steps,
        seed=seed,
        evaluate=evaluate,
    )
    last = -max(1, LAST * SYNC_EVERY // variant.sync_every) if evaluate else -1
    steady = [r for trained in done for r in trained.rounds[last:]]
    count = done[0].loop.parameters.count
    ring = 2 * (variant.trainers - 1) * 4 * count // variant.trainers
    judges = done[:TRAINERS] if evaluate else []
    held_out = list(zip(*(trained.held_out for trained in judges), strict=True))
    of_last = [found for of_round in held_out[last:] for found in of_round]

    def means(name: str) -> list[float]:
        return [
            fmean(of_round)
            for of_round in zip(*(getattr(trained, name) for trained in done), strict=True)
        ]

    payloads, links = means("payloads"), means("links")
    return Outcome(
        title=variant.title,
        method=variant.method,
        task=variant.task,
        lr=variant.lr,
        trainers=variant.trainers,
        sync_every=variant.sync_every,
        seed=seed,
        density=fmean(r.density for r in steady) if steady else 1.0,
        summed=fmean(r.summed / r.parameters for r in steady) if steady else 1.0,
        payload=fmean(payloads[last:]),
        link=fmean(links[last:]),
        ring=ring,
        payloads=payloads,
        links=links,
        rewards=[fmean(reward for reward, _ in of_round) for of_round in held_out],
        losses=[fmean(loss for _, loss in of_round) for of_round in held_out],
        reward=_mean([reward for reward, _ in of_last]),
        loss=_mean([loss for _, loss in of_last]),
        ahead=_mean([reward for trained in judges for reward, _ in trained.ahead[last:]]),
        consensus=_mean([(trained.consensus or trained.held_out[-1])[0] for trained in judges]),
    )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def run(
    groups: Iterable[Group], seeds: list[int], rounds: int | None = None, *, quick: bool = False
) -> Iterator[Outcome]:
    """Each variant of the groups on each seed, seed by seed, so that a run that is ended early has
    whole ones; prints as it goes. ``quick``: all of it on the arithmetic task."""
    print(HEADING, flush=True)
    for group in groups:
        for seed in seeds:
            for variant in group.variants:
                variant = replace(variant, task=tasks.ARITHMETIC) if quick else variant
                tasks.ensure(variant.task)
                found = measure(variant, seed, rounds or group.rounds, group.evaluated)
                print(found, flush=True)
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loco.learning", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, help="of a run; each group has its own default")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, metavar="METHOD", help="of a group only these"
    )
    parser.add_argument("--lr", type=float, help="of a group only this learning rate")
    parser.add_argument(
        "--log", metavar="NAME", help="also write a log of that name to benchmarks/results"
    )
    arguments = parser.parse_args()

    def kept(group: Group) -> Group:
        methods, lr = arguments.methods or METHODS, arguments.lr
        return replace(
            group,
            variants=[v for v in group.variants if v.method in methods and lr in (None, v.lr)],
        )

    found: list[Outcome] = []
    for outcome in run(
        [kept(GROUPS[name]) for name in arguments.only], arguments.seeds, arguments.rounds
    ):
        found.append(outcome)
        if arguments.log:  # so far: a run may take hours
            command = " ".join(["python -m benchmarks.loco.learning", *_quoted(sys.argv[1:])])
            results.save(arguments.log, command, map(asdict, found))
    print("\n" + "\n\n".join(tables.text(of_task) for of_task in tables.by_task(found)))


def _quoted(words: list[str]) -> list[str]:
    return [f'"{word}"' if " " in word else word for word in words]


if __name__ == "__main__":
    main()
