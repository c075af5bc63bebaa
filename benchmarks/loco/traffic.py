"""Traffic and cost by method: the message of a trainer in a round, all that it sends, and the time of a round on links
of 1 Gbit/s, beside DiLoCo's, DDP's and a dense all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from benchmarks.loco.jobs import PRETRAINED_RATES, STEADY_FROM, SYNC_EVERY, TRAINERS, WARM_UP, Job, JobResult
from benchmarks.loco.methods import DDP, DENSE, DILOCO, WIRES
from benchmarks.loco.tasks import ARITHMETIC, PRETRAINED

LINK = 1e9
PHASES = ("gate", "exchange", "decode", "update", "verify")
ARITHMETIC_RATE = 1e-5
NOT_STEADY = (
    f"NOT the steady state, in which more is sent: some runs ended before round {STEADY_FROM}, their last one counts."
)


def jobs(quick: bool) -> list[Job]:
    """Every round of a dense method sends as much as any other: for their bytes two are enough, and for all rates."""
    rounds = 3 if quick else 10
    found = []
    for lr in PRETRAINED_RATES[: 1 if quick else None]:
        methods = (DDP, DILOCO, *WIRES) if lr == PRETRAINED_RATES[0] else WIRES
        for method in methods:
            count = {DDP: 1, DILOCO: min(rounds, 6)}.get(method, rounds)  # DiLoCo's rounds are timed, too
            found.append(Job(PRETRAINED, method, lr, count, 0, WARM_UP, dense=method != DDP))
    for method in (DDP, DILOCO, *WIRES):
        found.append(Job(ARITHMETIC, method, ARITHMETIC_RATE, 2 if method in DENSE else rounds, 0, WARM_UP))
    return found


@dataclass(frozen=True)
class Row:
    """Means over trainers and steady rounds. ``payload``: one trainer's message; ``link``: all bytes that leave its
    process, with framing and what it passes on; ``interface``: as its network interface counts them.

    Of timed rounds also seconds: ``outer`` of the slowest trainer, from the moment that all are there, ``dense`` of an
    all-reduce right after it, and ``phases``, medians over rounds of the trainers' mean."""

    steady: bool
    task: str
    lr: float
    method: str
    parameters: int
    density: float
    payload: float
    link: float
    interface: float | None
    outer: list[float]
    dense: list[float]
    phases: dict[str, float]

    @property
    def less_payload(self) -> float:
        """Times less than DiLoCo's, an FP32 value a parameter."""
        return 4 * self.parameters / self.payload

    @property
    def less_link(self) -> float:
        """Times less than DiLoCo's, a ring all-reduce of these."""
        return 2 * (TRAINERS - 1) / TRAINERS * 4 * self.parameters / self.link


def row(job: Job, result: JobResult) -> Row:
    """Sparse rounds count from the steady ones on; of DiLoCo's time all but the first, which touches new memory."""
    first = min(STEADY_FROM, len(result[0])) - 1
    records = [r for rounds in result for r in rounds[first:]]
    rounds = list(zip(*result, strict=True))[min(1, first) if job.method == DILOCO else first :] if job.dense else []
    interface = [r.interface_bytes for r in records if r.interface_bytes is not None]
    return Row(
        steady=job.method in DENSE or len(result[0]) >= STEADY_FROM,
        task=job.task,
        lr=job.lr,
        method=job.method,
        parameters=records[0].parameters,
        density=fmean(r.density for r in records),
        payload=fmean(r.payload_bytes for r in records),
        link=fmean(r.sent_bytes for r in records),
        interface=fmean(interface) if interface else None,
        outer=[max(r.outer_seconds for r in of_round) for of_round in rounds],
        dense=[max(r.dense_seconds or 0.0 for r in of_round) for of_round in rounds],
        phases={
            p: median(fmean(r.seconds.get(p, 0.0) for r in of_round) for of_round in rounds) for p in PHASES if rounds
        },
    )


def traffic_text(rows: Sequence[Row]) -> str:
    """The table of bytes as lines."""
    lines = [
        f"Traffic of a round of {SYNC_EVERY} inner steps, {TRAINERS} trainers; means of rounds {STEADY_FROM} and up.",
        "payload: one trainer's message. link: all that leaves its process (a ring; headers, padding, passed on).",
        "interface: the same as its network interface counts it, TCP and Ethernet included. Times less: payload than",
        f"dense FP32 values, link than a ring all-reduce of them; than DDP, than {SYNC_EVERY} of these.",
        *([] if all(r.steady for r in rows) else [NOT_STEADY]),
        "",
        f"{'':24} {'bytes per':>9} {'bytes a round and trainer':^36} | {'payload, times':^15} | {'link, times':^15}",
        f"{'':15} {'':8} {'':>9} {'':36} | {'less than':^15} | {'less than':^15}",
        f"{'method':15} {'density':>8} {'entry':>9} {'payload':>11} {'link':>12} {'interface':>11} | "
        + " | ".join([f"{DILOCO:>7} {DDP:>7}"] * 2),
    ]
    for task, lr, parameters in dict.fromkeys((r.task, r.lr, r.parameters) for r in rows):
        lines += ["", f"{task}, {parameters / 1e6:.1f} M parameters, lr {lr:g}"]
        lines += [_traffic_line(r) for r in rows if (r.task, r.lr) == (task, lr)]
    return "\n".join(lines)


def _traffic_line(row: Row) -> str:
    messages = SYNC_EVERY if row.method == DDP else 1  # DDP has one at every inner step
    per_entry = row.payload / (messages * row.density * row.parameters)
    interface = "-" if row.interface is None else f"{row.interface:,.0f}"
    return (
        f"{row.method:15} {row.density:>8.3%} {per_entry:>9.3f} {row.payload:>11,.0f} {row.link:>12,.0f} "
        f"{interface:>11} | {row.less_payload:>7.1f} {SYNC_EVERY * row.less_payload:>7.1f} | "
        f"{row.less_link:>7.1f} {SYNC_EVERY * row.less_link:>7.1f}"
    )


def cost_text(rows: Sequence[Row], rate: float | None) -> str:
    """The table of times as lines. ``rate`` of the links in bit/s, None for the loopback interface."""
    link = f"links of {rate / 1e9:g} Gbit/s" if rate else "the loopback interface, which is no link"
    lines = [
        f"Time of an outer round, {TRAINERS} trainers on {link}, two cores for all, one thread each; ms.",
        "all: of the slowest trainer, median (first to third quartile) over rounds. dense: an all-reduce of as many",
        "FP32 values right after each round. Phases are medians; gate includes encoding, exchange includes waiting.",
        *([] if all(r.steady for r in rows) else [NOT_STEADY]),
        "",
        f"{'method':15} {'lr':>6} {'rounds':>6} {'all':>22} {'dense':>20} {'all / dense':>19} | "
        + " ".join(f"{p:>8}" for p in PHASES),
    ]
    for r in rows:
        ratios = [a / b for a, b in zip(r.outer, r.dense, strict=True)]
        lines.append(
            f"{r.method:15} {r.lr:>6g} {len(r.outer):>6} {_quartiles(r.outer, 1e3, 0):>22} "
            f"{_quartiles(r.dense, 1e3, 0):>20} {_quartiles(ratios, 1, 2):>19} | "
            + " ".join(f"{1e3 * r.phases[p]:>8.0f}" for p in PHASES)
        )
    return "\n".join(lines)


def _quartiles(values: list[float], scale: float, digits: int) -> str:
    low, middle, high = (scale * x for x in quantiles(values, n=4)) if len(values) > 1 else [scale * values[0]] * 3
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
