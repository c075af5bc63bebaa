"""Traffic by method: the message of a trainer in a round, and all that it sends, beside DiLoCo's and DDP's."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from benchmarks.loco.jobs import (
    NOT_STEADY,
    PRETRAINED_RATES,
    STEADY_FROM,
    SYNC_EVERY,
    TRAINERS,
    WARM_UP,
    Job,
    JobResult,
)
from benchmarks.loco.methods import DDP, DENSE, DILOCO, PULSE, PULSE_BF16
from benchmarks.loco.tasks import ARITHMETIC, PRETRAINED

ARITHMETIC_RATE = 1e-5
_SEED = 0


@dataclass(frozen=True)
class Row:
    """Means over trainers and steady rounds. Payload is one trainer's message; link is all bytes that leave its process
    in a ring, with framing, padding and what it passes on."""

    steady: bool
    task: str
    lr: float
    method: str
    parameters: int
    density: float
    payload: float
    link: float
    interface: float | None
    u32: float | None
    gap16: float | None

    @property
    def bytes_per_entry(self) -> float:
        """Of one message; DDP has one at every inner step."""
        messages = SYNC_EVERY if self.method == DDP else 1
        return self.payload / (messages * self.density * self.parameters)

    @property
    def dense_payload(self) -> int:
        """DiLoCo's: an FP32 value a parameter."""
        return 4 * self.parameters

    @property
    def dense_link(self) -> float:
        """DiLoCo's: a ring all-reduce of it."""
        return 2 * (TRAINERS - 1) / TRAINERS * self.dense_payload


def jobs(quick: bool) -> list[Job]:
    """Every round of a dense method sends as much as any other: for their bytes two are enough, and for all rates."""
    rounds = 3 if quick else 10
    found = []
    for lr in PRETRAINED_RATES[: 1 if quick else None]:
        methods = (DDP, DILOCO, PULSE, PULSE_BF16) if lr == PRETRAINED_RATES[0] else (PULSE, PULSE_BF16)
        for method in methods:
            # DiLoCo's rounds are timed, too (`cost`).
            count = {DDP: 1, DILOCO: min(rounds, 6)}.get(method, rounds)
            found.append(Job(PRETRAINED, method, lr, count, _SEED, WARM_UP, dense=method != DDP))
    for method in (DDP, DILOCO, PULSE, PULSE_BF16):
        count = 2 if method in DENSE else rounds
        found.append(Job(ARITHMETIC, method, ARITHMETIC_RATE, count, _SEED, WARM_UP))
    return found


def row(job: Job, result: JobResult) -> Row:
    first = min(STEADY_FROM, len(result[0])) - 1
    records = [r for rounds in result for r in rounds[first:]]

    def mean(key: str) -> float | None:
        values = [getattr(r, key) for r in records]
        return None if None in values else fmean(values)

    return Row(
        steady=job.method in DENSE or len(result[0]) >= STEADY_FROM,
        task=job.task,
        lr=job.lr,
        method=job.method,
        parameters=records[0].parameters,
        density=fmean(r.density for r in records),
        payload=fmean(r.payload_bytes for r in records),
        link=fmean(r.sent_bytes for r in records),
        interface=mean("interface_bytes"),
        u32=mean("u32_bytes"),
        gap16=mean("gap16_bytes"),
    )


@dataclass(frozen=True)
class Target:
    """So many times less than another method is what PULSELoCo has to reach."""

    method: str
    than: str
    times: float

    def measured(self, row: Row) -> dict[str, float]:
        """How many times less it is, of payloads and of links."""
        steps = SYNC_EVERY if self.than == DDP else 1
        return {"payload": steps * row.dense_payload / row.payload, "link": steps * row.dense_link / row.link}


TARGETS = (Target(PULSE, DILOCO, 17), Target(PULSE, DDP, 100), Target(PULSE_BF16, DILOCO, 30))


def text(rows: list[Row]) -> str:
    """The tables as lines."""
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
        mine = [r for r in rows if (r.task, r.lr) == (task, lr)]
        lines += ["", f"{task}, {parameters / 1e6:.1f} M parameters, lr {lr:g}", *map(_line, mine)]
        lines += [_plain(r) for r in mine if r.u32 is not None and r.method == PULSE]
    return "\n".join([*lines, "", *verdicts(rows)])


def _line(row: Row) -> str:
    interface = "-" if row.interface is None else f"{row.interface:,.0f}"
    payload, link = row.dense_payload / row.payload, row.dense_link / row.link
    return (
        f"{row.method:15} {row.density:>8.3%} {row.bytes_per_entry:>9.3f} {row.payload:>11,.0f} {row.link:>12,.0f} "
        f"{interface:>11} | {payload:>7.1f} {SYNC_EVERY * payload:>7.1f} | {link:>7.1f} {SYNC_EVERY * link:>7.1f}"
    )


def _plain(row: Row) -> str:
    sizes = [(name, size) for name, size in (("u32", row.u32), ("u16 gaps", row.gap16)) if size is not None]
    parts = [f"{name} {size:,.0f} bytes ({row.dense_payload / size:.1f} times less)" for name, size in sizes]
    return f"  computed for the same entries, FP32 values and plain positions: {', '.join(parts)}"


def verdicts(rows: list[Row]) -> list[str]:
    """One line a target and row."""
    lines = []
    for target in TARGETS:
        for r in (r for r in rows if r.method == target.method):
            parts = [
                f"{what} {x:.1f}, {'yes' if x >= target.times else 'NO'}" for what, x in target.measured(r).items()
            ]
            asked = f"at least {target.times:g} times less than {target.than}"
            lines.append(f"{r.method}, {r.task}, lr {r.lr:g}, {asked}? {'; '.join(parts)}")
    return lines
