"""Rounds over a store among many trainers: what each of them sends, fetches and asks for, and what
a round costs.

    python -m benchmarks.loco.many [--trainers 4 16 64] [--parameters 4194304] [--rounds 6]

Trainers are threads of one process, each with a counted line to one store in memory; their inner
steps are random, of a size that opens about two in a hundred gates, so that bytes and requests are
a run's. The second table is arithmetic: real sizes of models by bytes a parameter as measured on
pretrained weights."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch.nn import Parameter

from benchmarks.counted import CountedStore
from benchmarks.loco.jobs import OUTER_LR, OUTER_MOMENTUM
from benchmarks.loco.threads import in_threads
from pulse_rl import MemoryStore
from pulse_rl.loco import PulseLoCo, StoreExchange
from pulse_rl.loco.messages import CompressionName

#: Of random inner steps, beside parameters of standard deviation 0.02.
STEP = 4e-7


@dataclass(frozen=True)
class Simulated:
    """Means over trainers and the second half of the rounds, of one round: bytes ``up`` and
    ``down``, of a ``message``, ``requests`` by kind, ``most`` requests of one trainer, and
    processor ``seconds`` of one trainer."""

    trainers: int
    parameters: int
    compression: CompressionName
    message: float
    up: float
    down: float
    requests: dict[str, float]
    most: float
    seconds: float

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{count:.1f} {kind}" for kind, count in sorted(self.requests.items()) if count
        )
        per = (self.message, self.up, self.down)
        return (
            f"{self.trainers:>8} {self.compression:>5} "
            + " ".join(f"{each / self.parameters:>8.4f}" for each in per)
            + f" {sum(self.requests.values()):>9.1f} {self.most:>6.0f} "
            f"{1e9 * self.seconds / self.parameters / self.trainers:>7.1f}   {kinds}"
        )


HEADING = (
    "Bytes a parameter and round of one trainer; nanoseconds of a core for each parameter and "
    "message\n"
    "trainers  form  message       up     down  requests   most      ns   of them"
)


def simulate(
    trainers: int, parameters: int, rounds: int, compression: CompressionName
) -> Simulated:
    """So many rounds over one store."""
    store = MemoryStore()
    lines = [CountedStore(store) for _ in range(trainers)]
    start = 0.02 * torch.randn(parameters, generator=torch.Generator().manual_seed(0))
    half = [Counter[str]()] * trainers
    sent, messages = [0] * trainers, list[int]()

    def train(rank: int) -> None:
        noise = torch.Generator().manual_seed(1 + rank)
        weights = Parameter(start.clone())
        optimizer = torch.optim.SGD([weights], lr=1.0)
        over = StoreExchange(lines[rank], trainer=f"trainer-{rank:03}", min_trainers=trainers)
        settings = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
        loop = PulseLoCo(
            {"w": weights},
            optimizer,
            sync_every=1,
            exchange=over,
            compression=compression,
            **settings,
        )
        loop.threads = 1
        with loop:
            for number in range(rounds):
                if number == rounds // 2:
                    half[rank] = lines[rank].count.copy()
                weights.grad = STEP * torch.randn(parameters, generator=noise)
                optimizer.step()
                done = loop.last_round
                assert done is not None
                if number >= rounds // 2:
                    sent[rank] += done.sent_bytes
                    messages.append(done.payload_bytes)

    began = time.process_time()
    in_threads(train, trainers)
    spent = time.process_time() - began
    counted = rounds - rounds // 2
    deltas = [line.count - first for line, first in zip(lines, half, strict=True)]
    kinds = ("put", "get", "head", "list", "delete")
    return Simulated(
        trainers=trainers,
        parameters=parameters,
        compression=compression,
        message=fmean(messages),
        up=fmean(sent) / counted,
        down=fmean(delta["bytes"] for delta in deltas) / counted,
        requests={kind: fmean(delta[kind] for delta in deltas) / counted for kind in kinds},
        most=max(sum(delta[kind] for kind in kinds) for delta in deltas) / counted,
        seconds=spent / trainers / rounds,
    )


@dataclass(frozen=True)
class Prices:
    """Dollars: of a million requests that write or list, of a million that read, and of a GB that
    leaves the store."""

    name: str
    writes: float
    reads: float
    leaving: float


#: List prices without the free tiers, as published in 2025.
PRICES = (Prices("S3, over the internet", 5.0, 0.4, 0.09), Prices("R2", 4.5, 0.36, 0.0))

#: Of a message, a parameter, at lr 1e-6 and H = 8: docs/loco-guide.md, "Bits of a value".
BYTES = {"fp32": 0.0504, "e8m2": 0.0205}
#: Of a trainer that waits for a minute, two requests each, half of them that write or list.
LOOKS = 30


@dataclass(frozen=True)
class Cost:
    """A round of one trainer among so many over a store: bytes ``up`` and ``down``, ``seconds`` on
    links of 100 and 1,000 Mbit/s by the busier direction, and ``cents`` by the name of the
    store."""

    parameters: float
    trainers: int
    compression: str
    up: float
    down: float
    seconds: dict[int, float]
    cents: dict[str, float]


def cost(parameters: float, trainers: int, compression: str) -> Cost:
    """By docs/loco.md, section 7: one message up, over many rounds as much again for snapshots; all
    others' messages down."""
    message, cents = BYTES[compression] * parameters, dict[str, float]()
    up, down = 2 * message, (trainers - 1) * message
    writes, reads = 2 + LOOKS + message / 2**24, trainers + LOOKS
    for price in PRICES:
        dollars = (price.writes * writes + price.reads * reads) / 1e6 + price.leaving * down / 1e9
        cents[price.name] = 100 * dollars
    seconds = {megabits: 8 * max(up, down) / (megabits * 1e6) for megabits in (100, 1000)}
    return Cost(parameters, trainers, compression, up, down, seconds, cents)


def arithmetic() -> Iterator[Cost]:
    for parameters in (7e9, 70e9):
        for form in BYTES:
            for trainers in (4, 16, 64):
                yield cost(parameters, trainers, form)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loco.many", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--trainers", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--parameters", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all numbers to this file"
    )
    arguments = parser.parse_args()
    print(HEADING, flush=True)
    simulated = []
    for form in ("fp32", "e8m2"):
        for trainers in arguments.trainers:
            simulated.append(simulate(trainers, arguments.parameters, arguments.rounds, form))
            print(simulated[-1], flush=True)
    found = list(arithmetic())
    names = [price.name for price in PRICES]
    print(
        "\nOne trainer and round: GB up, GB down, seconds at 100 and at 1,000 Mbit/s, cents: "
        + "; ".join(names)
    )
    for c in found:
        numbers = [c.up / 1e9, c.down / 1e9, *c.seconds.values(), *c.cents.values()]
        columns = " ".join(f"{number:>10.3f}" for number in numbers)
        print(f"{c.parameters / 1e9:>4.0f}B {c.compression:>5} {c.trainers:>5} {columns}")
    if arguments.json:
        facts = {
            "simulated": [asdict(s) for s in simulated],
            "arithmetic": [asdict(c) for c in found],
        }
        arguments.json.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
