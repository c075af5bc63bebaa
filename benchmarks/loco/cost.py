"""What an outer round costs on links of 1 Gbit/s: PULSELoCo's, DiLoCo's, and a dense all-reduce beside each."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median, quantiles

from benchmarks.loco.jobs import NOT_STEADY, STEADY_FROM, TRAINERS, Job, JobResult
from benchmarks.loco.methods import DILOCO

LINK = 1e9
PHASES = ("gate", "exchange", "decode", "update", "verify")


@dataclass(frozen=True)
class Row:
    """Seconds of each round: of the slowest trainer, from the moment that all are there. ``phases``: medians over
    rounds of the trainers' mean, waiting for others included; encoding is part of "gate"."""

    steady: bool
    method: str
    lr: float
    outer: list[float]
    dense: list[float]
    phases: dict[str, float]

    @property
    def ratios(self) -> list[float]:
        """Each outer round / the dense all-reduce right after it."""
        return [a / b for a, b in zip(self.outer, self.dense, strict=True)]


def row(job: Job, result: JobResult) -> Row:
    """Sparse rounds count from the steady ones on; of DiLoCo's, all but the first, which touches new memory."""
    first = min(2 if job.method == DILOCO else STEADY_FROM, len(result[0])) - 1
    rounds = list(zip(*result, strict=True))[first:]
    dense = [[r.dense_seconds for r in records if r.dense_seconds is not None] for records in rounds]
    return Row(
        steady=job.method == DILOCO or len(result[0]) >= STEADY_FROM,
        method=job.method,
        lr=job.lr,
        outer=[max(r.outer_seconds for r in records) for records in rounds],
        dense=[max(seconds) for seconds in dense],
        phases={p: median(fmean(r.seconds.get(p, 0.0) for r in records) for records in rounds) for p in PHASES},
    )


def text(rows: list[Row], rate: float | None) -> str:
    """The table as lines. ``rate`` of the links in bit/s, None for the loopback interface."""
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
        lines.append(
            f"{r.method:15} {r.lr:>6g} {len(r.outer):>6} {_quartiles(r.outer, 1e3, 0):>22} "
            f"{_quartiles(r.dense, 1e3, 0):>20} {_quartiles(r.ratios, 1, 2):>19} | "
            + " ".join(f"{1e3 * r.phases[p]:>8.0f}" for p in PHASES)
        )
    return "\n".join([*lines, "", *verdicts(rows)])


def verdicts(rows: list[Row]) -> list[str]:
    """One line for each of PULSELoCo's rows."""
    diloco = next((median(r.outer) for r in rows if r.method == DILOCO), None)
    lines = []
    for r in (r for r in rows if r.method != DILOCO):
        ratio = median(r.ratios)
        line = (
            f"{r.method}, lr {r.lr:g}: less than a dense all-reduce? {'yes' if ratio < 1 else 'NO'}, {ratio:.2f} of it"
        )
        lines.append(line if diloco is None else f"{line}; {median(r.outer) / diloco:.2f} of DiLoCo's outer round")
    return lines


def _quartiles(values: list[float], scale: float, digits: int) -> str:
    low, middle, high = (scale * x for x in quantiles(values, n=4)) if len(values) > 1 else [scale * values[0]] * 3
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
