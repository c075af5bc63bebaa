"""What a round takes on a link: its bytes and its seconds by method, among trainers with recorded
inner steps.

    python -m benchmarks.loco.links [--quick] [--log loco-links]

The inner steps of real training on pretrained weights (`recorded`) are replayed, the same for all
methods, so that a round is timed apart from them: the first ones on open links, which fill the
residuals, then some on each link. A round of DDP is one step's all-reduce, times `SYNC_EVERY`: that
is computed, not measured. Its bytes and those of other dense methods, and of SparseLoCo, are the
same at every learning rate; they have the first one's rows.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from benchmarks import results
from benchmarks.loco import recorded, tasks
from benchmarks.loco.jobs import (
    PRETRAINED_RATES,
    STEADY_FROM,
    SYNC_EVERY,
    TRAINERS,
    Job,
    RoundRecord,
)
from benchmarks.loco.methods import COMPRESSED, DDP, DENSE, DILOCO, E8M2
from benchmarks.loco.processes import (
    ENDPOINT,
    Link,
    TrainerProcesses,
    start_trainers,
    why_no_network,
)

CARRIED = (Link(10e6, 0.08), Link(100e6, 0.04))
SWITCHED = Link(1e9, None)
OVER_STORE = f"{E8M2}, over a store"
METHODS = (*DENSE, "SparseLoCo 1%", "SparseLoCo 3%", *COMPRESSED, OVER_STORE)
_ROUNDS = 3
_LONG = 30.0


@dataclass(frozen=True)
class Row:
    """Means over trainers and rounds of bytes: ``payload``, one trainer's message; ``link``, all
    that left its process; ``interface``, that left its network interface. ``seconds`` of each
    round, of the slowest trainer from the moment that all are there; ``exchange``: of the trainer
    that waited least for the others, what the exchange takes of it. ``rate`` and ``round_trip``: of
    the link; None: no link, and the time of a switch."""

    method: str
    lr: float
    rate: float | None
    round_trip: float | None
    trainers: int
    sync_every: int
    parameters: int
    density: float
    payload: float
    link: float
    interface: float | None
    seconds: list[float]
    exchange: list[float]
    phases: dict[str, float]


def row(method: str, lr: float, link: Link | None, rounds: Sequence[Sequence[RoundRecord]]) -> Row:
    """``rounds``: the records of all trainers, of each."""
    records = [record for of_round in rounds for record in of_round]
    times = SYNC_EVERY if method == DDP else 1
    interface = [r.interface_bytes for r in records if r.interface_bytes is not None]
    return Row(
        method=method,
        lr=lr,
        rate=link.rate if link else None,
        round_trip=link.round_trip if link else None,
        trainers=len(rounds[0]),
        sync_every=SYNC_EVERY,
        parameters=records[0].parameters,
        density=fmean(r.entries / r.parameters for r in records),
        payload=times * fmean(r.payload_bytes for r in records),
        link=times * fmean(r.sent_bytes for r in records),
        interface=times * fmean(interface) if interface else None,
        seconds=[times * max(r.seconds for r in of_round) for of_round in rounds],
        exchange=[times * min(r.phases["exchange"] for r in of_round) for of_round in rounds],
        phases={
            p: median(fmean(r.phases[p] for r in of_round) for of_round in rounds)
            for p in records[0].phases
        },
    )


def jobs(quick: bool, store: str | None) -> list[tuple[str, Job]]:
    """With the name of each one's row."""
    found = []
    for lr in PRETRAINED_RATES[: 1 if quick else None]:
        for method in METHODS:
            dense = method in DENSE
            if (lr != PRETRAINED_RATES[0] and (dense or method.startswith("SparseLoCo"))) or (
                method == OVER_STORE and store is None
            ):
                continue
            fill = 1 if dense or quick else STEADY_FROM - 1
            where = {"store": store, "name": f"run-{len(found)}"} if method == OVER_STORE else {}
            found.append((method, Job(E8M2 if where else method, lr, fill, **where)))
    return found


def measure(
    trainers: TrainerProcesses,
    links: Sequence[Link | None],
    jobs: Iterable[tuple[str, Job]],
    most: int,
) -> Iterator[Row]:
    """At most so many rounds of each job on each link, one where it takes long; prints as it
    goes."""
    for method, job in jobs:
        trainers.begin(job)
        for link in links:
            if link is not None:
                trainers.set(link)
            began, rounds = time.monotonic(), list[list[RoundRecord]]()
            while not rounds or (len(rounds) < most and time.monotonic() - began < _LONG):
                rounds.append(trainers.round())
            found = row(method, job.lr, link, rounds)
            print(line(found, None), file=sys.stderr, flush=True)
            yield found
        trainers.end()


def run(quick: bool) -> Iterator[Row]:
    for lr in PRETRAINED_RATES[: 1 if quick else None]:
        recorded.ensure(lr)
    most = 1 if quick else _ROUNDS
    if missing := why_no_network():
        print(
            f"{missing}\nHere: the loopback interface, bytes by the processes' own count, no "
            "link to time."
        )
        with start_trainers(None) as trainers:
            yield from measure(trainers, [None], jobs(quick, None), most)
        return
    for links in (CARRIED[1:] if quick else CARRIED, [SWITCHED]):
        with start_trainers(links[0]) as trainers:
            yield from measure(trainers, links, jobs(quick, ENDPOINT), most)


HEADING = (
    f"A round of {SYNC_EVERY} inner steps, {TRAINERS} trainers: bytes of one trainer (a message, "
    "what left its process,"
    "\nwhat left its interface), median seconds of the round and of its exchange; times less "
    "than DiLoCo.\n"
    f"{'method':26} {'lr':>6} {'Mbit/s':>6} {'ms':>4} {'density':>8} {'payload':>11} "
    f"{'link':>12} {'interface':>12} "
    f"{'seconds':>8} {'exchange':>8} {'bytes':>7} {'seconds':>7}"
)


def line(row: Row, diloco: Row | None) -> str:
    rate = "-" if row.rate is None else f"{row.rate / 1e6:.0f}"
    far = "-" if row.round_trip is None else f"{1e3 * row.round_trip:.0f}"
    seen = "-" if row.interface is None else f"{row.interface:,.0f}"
    less = ""
    if diloco is not None:
        less = (
            f" {diloco.link / row.link:>7.1f} {median(diloco.seconds) / median(row.seconds):>7.1f}"
        )
    return (
        f"{row.method:26} {row.lr:>6g} {rate:>6} {far:>4} {row.density:>8.3%} "
        f"{row.payload:>11,.0f} {row.link:>12,.0f} "
        f"{seen:>12} {median(row.seconds):>8.2f} {median(row.exchange):>8.2f}{less}"
    )


def text(rows: Sequence[Row]) -> str:
    """The table as lines."""
    lines = [HEADING]
    for rate in dict.fromkeys(r.rate for r in rows):
        mine = [r for r in rows if r.rate == rate]
        diloco = next(r for r in mine if r.method == DILOCO)
        lines += [line(r, diloco) for r in mine]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loco.links", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one learning rate and one round; residuals are not full",
    )
    parser.add_argument(
        "--log", metavar="NAME", help="also write a log of that name to benchmarks/results"
    )
    arguments = parser.parse_args()
    # SIGTERM unwinds like Ctrl-C, so that trainers and network are taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: list[Row] = []
    seconds = {
        task: recorded.inner_step_seconds(task) for task in (tasks.PRETRAINED, tasks.ARITHMETIC)
    }
    command = " ".join(["python -m benchmarks.loco.links", *sys.argv[1:]])
    for of_link in run(arguments.quick):
        found.append(of_link)
        if arguments.log:  # so far: a run takes a while
            results.save(arguments.log, command, map(asdict, found), inner_step_seconds=seconds)
    steps = ", ".join(f"{taken:.3f} s ({task})" for task, taken in seconds.items())
    print(f"an inner step of one trainer alone, of a core: {steps}\n{text(found)}")


if __name__ == "__main__":
    main()
