"""What runs of one task say together: means and deviations over seeds, bytes at equal reward,
rounds behind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from benchmarks.loco.methods import DILOCO

if TYPE_CHECKING:
    from benchmarks.loco.learning import Outcome


def by_task(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Those with the same task, trainers, H and seeds' learning rate beside each other; DDP has a
    rate of its own."""
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.rewards:
            groups.setdefault((outcome.task, outcome.trainers, outcome.sync_every), []).append(
                outcome
            )
    return list(groups.values())


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; that of one seed is NaN."""
    return fmean(values), stdev(values) if len(values) > 1 else math.nan


def text(outcomes: Sequence[Outcome]) -> str:
    """The tables as lines; DiLoCo is what others are compared with, where it is among them."""
    first = outcomes[0]
    seeds = sorted({o.seed for o in outcomes})
    lines = [
        f"{first.task}: {len(first.rewards)} rounds of {first.sync_every} inner steps, "
        f"{first.trainers} trainers, "
        f"seeds {', '.join(map(str, seeds))};",
        "mean and standard deviation over seeds of the last rounds' reward and loss on held-out "
        "problems. MB: all that",
        "left a process in the run. Behind: how many rounds earlier DiLoCo first had the reward, "
        "on the same seed.",
        "",
        f"{'method':44} {'reward':>16} {'loss':>16} {'density':>8} {'MB':>8} {'1/DiLoCo':>8} "
        f"{'behind':>6}",
    ]
    titles = list(dict.fromkeys(o.title for o in outcomes))
    for title in titles:
        mine = [o for o in outcomes if o.title == title]
        diloco = {o.seed: o for o in outcomes if o.method == DILOCO and o.lr == mine[0].lr}
        reward = mean_and_deviation([o.reward for o in mine if o.reward is not None])
        loss = mean_and_deviation([o.loss for o in mine if o.loss is not None])
        sent = fmean(sum(o.links) for o in mine)
        dense = f"{fmean(sum(o.links) for o in diloco.values()) / sent:.2f}" if diloco else "-"
        lags = [
            lag
            for o in mine
            if o.seed in diloco and (lag := rounds_behind(o, diloco[o.seed])) is not None
        ]
        lines.append(
            f"{title:44} {reward[0]:>7.4f} ± {reward[1]:.4f} {loss[0]:>7.4f} ± {loss[1]:.4f} "
            f"{fmean(o.density for o in mine):>8.2%} {sent / 1e6:>8.2f} {dense:>8} "
            f"{f'{fmean(lags):.1f}' if len(lags) == len(mine) else '-':>6}"
        )
    equal = equal_reward(outcomes)
    return "\n".join([*lines, *(["", *equal] if equal else [])])


def bytes_until(rewards: Sequence[float], sizes: Sequence[float], level: float) -> float | None:
    """The sum of ``sizes`` until the first round after which the reward is ``level``, the round
    before it counted in part; None if it never is."""
    first = next((i for i, reward in enumerate(rewards) if reward >= level), None)
    if first is None:
        return None
    part = (level - rewards[first - 1]) / (rewards[first] - rewards[first - 1]) if first else 1.0
    return sum(sizes[:first]) + part * sizes[first]


def equal_reward(outcomes: Sequence[Outcome]) -> list[str]:
    """What each method has sent when it is as far as DiLoCo was after a quarter, half, three
    quarters and all of its rounds, as lines; none without DiLoCo. Rewards and bytes are means over
    seeds."""
    diloco = [o for o in outcomes if o.method == DILOCO]
    if len({o.lr for o in diloco}) != 1:
        return []
    titles = list(dict.fromkeys(o.title for o in outcomes))

    def mean_of(title: str, name: str) -> list[float]:
        mine = [getattr(o, name) for o in outcomes if o.title == title]
        return [fmean(of_round) for of_round in zip(*mine, strict=True)]

    means = {
        title: [mean_of(title, name) for name in ("rewards", "payloads", "links")]
        for title in titles
    }
    reference = means[diloco[0].title]
    rounds = len(reference[0])
    after = [max(1, quarter * rounds // 4) for quarter in (1, 2, 3, 4)]
    levels = [reference[0][number - 1] for number in after]
    lines = [
        "Bytes at equal reward: MB of one trainer's messages | MB that left its process, until "
        "it first had DiLoCo's",
        f"reward after {', '.join(map(str, after))} rounds. -: it never had.",
        f"{'method':44} " + " ".join(f"{level:>17.4f}" for level in levels),
    ]
    dense = [_until_each(reference, level) for level in levels]
    for title in titles:
        found = [_until_each(means[title], level) for level in levels]
        megabytes = [[None if size is None else size / 1e6 for size in sizes] for sizes in found]
        lines.append(f"{title:44} " + _cells(megabytes, 2))
        if title != diloco[0].title:
            times = [
                [
                    None if size is None or of_dense is None else of_dense / size
                    for size, of_dense in zip(*both, strict=True)
                ]
                for both in zip(found, dense, strict=True)
            ]
            lines.append(f"{'  times less':44} " + _cells(times, 1))
    return lines


def _until_each(means: Sequence[list[float]], level: float) -> list[float | None]:
    """Payloads and links until that level, of mean rewards, payloads and links."""
    rewards, *sizes = means
    return [bytes_until(rewards, each, level) for each in sizes]


def _cells(pairs: list[list[float | None]], digits: int) -> str:
    texts = [" | ".join("-" if x is None else f"{x:.{digits}f}" for x in pair) for pair in pairs]
    return " ".join(f"{text:>17}" for text in texts)


def rounds_behind(outcome: Outcome, reference: Outcome) -> float | None:
    """How many rounds earlier ``reference`` first had the reward that ``outcome`` has: the mean
    over its last three quarters, None where the reference never had one of them."""
    lags = []
    for number in range(len(outcome.rewards) // 4, len(outcome.rewards)):
        reward, rewards = outcome.rewards[number], reference.rewards
        first = next((i for i, r in enumerate(rewards) if r >= reward), None)
        if first is None:
            return None
        between = (
            (rewards[first] - reward) / (rewards[first] - rewards[first - 1]) if first else 0.0
        )
        lags.append(number - (first - between))
    return fmean(lags)
