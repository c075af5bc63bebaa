"""A line per round, when all trainers have reported it, and the totals at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from .settings import Settings

JournalEvent = dict[str, Any]

COLUMNS = {
    "round": 5, "steps": 5, "reward": 6, "density": 7, "payload kB": 10, "vs DiLoCo": 9, "vs DDP": 6,
    "patch kB": 8, "vs full": 7, "lag": 3, "outer ms": 8, "theta": 12, "same on": 7,
}  # fmt: skip
LEGEND = """
density of one trainer's gate and its payload, a mean; how many times less that is than a payload of DiLoCo and of DDP;
patch to the workers, and against a full sync; rounds that rollouts lag behind; time of the outer round; theta's root"""


@dataclass(frozen=True)
class Row:
    """A round. Bytes are means over the trainers: ``payload`` is a trainer's message, ``sent`` all that left it."""

    number: int
    reward: float
    density: float
    payload: float
    sent: float
    dense: int
    patch: int
    full: int
    lag: int
    outer_ms: float
    theta: str
    same: int

    @classmethod
    def of(cls, events: list[JournalEvent]) -> Row:
        """What the trainers, in rank order, reported of one round."""
        return cls(
            number=events[0]["round"],
            reward=mean(event["reward"] for event in events),
            density=mean(event["density"] for event in events),
            payload=mean(event["payload_bytes"] for event in events),
            sent=mean(event["sent_bytes"] for event in events),
            dense=4 * events[0]["parameters"],
            patch=events[0]["patch_bytes"],
            full=events[0]["dense_bytes"],
            lag=max(event["lag"] for event in events),
            outer_ms=1e3 * min(sum(event["seconds"].values()) for event in events),
            theta=events[0]["root"],
            same=sum(event["root"] == events[0]["root"] for event in events),
        )


class Table:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.results: dict[int, JournalEvent] = {}
        self.rows: list[Row] = []
        self.before = 0.0
        self.restarts = 0
        self._rounds: dict[int, dict[int, JournalEvent]] = {}
        self._headed = False

    def show(self, rank: int, event: JournalEvent) -> None:
        """Takes up what a trainer reported."""
        match event["event"]:
            case "warm-up":
                accuracy = f"accuracy {event['accuracy']:.2f} (RL starts at {self.settings.sft_accuracy:.2f})"
                print(f"warm-up step {event['step']}: loss {event['loss']:.3f}, {accuracy}", flush=True)
            case "met" if rank == 0:
                if event["round"] == 0:
                    self.before = event["reward"]
                self.restarts = event["restarts"]
                restart = f" again (restart {self.restarts})" if self.restarts else ""
                found = f"round {event['round']}, reward {event['reward']:.3f}"
                print(f"· the trainers have met{restart}: {found}", flush=True)
            case "round":
                trainers = self._rounds.setdefault(event["round"], {})
                trainers[rank] = event
                if len(trainers) == self.settings.trainers:
                    self._print_round([trainers[rank] for rank in sorted(trainers)])
            case "result":
                self.results[rank] = event

    def _print_round(self, events: list[JournalEvent]) -> None:
        if not self._headed:
            print(LEGEND)
            print("  ".join(name.rjust(width) for name, width in COLUMNS.items()))
            self._headed = True
        refused: Counter[str] = sum((Counter(event["refused"]) for event in events), Counter())
        for reason, count in refused.items():
            print(f"· {count} batches of rollouts were refused: {reason}")
        row = Row.of(events)
        self.rows.append(row)
        cells = [
            f"{row.number}",
            f"{row.number * self.settings.sync_every}",
            f"{row.reward:.3f}",
            f"{row.density:.2%}",
            f"{row.payload / 1e3:.1f}",
            f"{row.dense / row.payload:.1f}",
            f"{row.dense * self.settings.sync_every / row.payload:.0f}",
            f"{row.patch / 1e3:.1f}",
            f"{row.full / row.patch:.1f}",
            f"{row.lag}",
            f"{row.outer_ms:.0f}",
            row.theta[:12],
            f"{row.same} of {len(events)}",
        ]
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True)), flush=True)

    def summarise(self, seconds: float) -> None:
        """The totals of the rounds that were shown."""
        if not self.rows or 0 not in self.results:
            return
        settings, rows = self.settings, self.rows
        fifth = max(1, len(rows) // 5)
        first, last = (mean(row.reward for row in part) for part in (rows[:fifth], rows[-fifth:]))
        steps = f"{len(rows)} rounds of {settings.sync_every} inner steps at learning rate {settings.lr:g}"
        print(f"\n{steps}, {seconds:.0f} s, restarts: {self.restarts}")
        print(f"  reward     {self.before:.3f} -> {self.results[0]['reward']:.3f} on the same problems;", end=" ")
        print(f"rollouts {first:.3f} -> {last:.3f}, means of the first and the last {fifth} rounds")
        print(f"  rollouts   at most {max(row.lag for row in rows)} rounds behind theta")
        print(f"  density    {mean(row.density for row in rows):.2%} of the entries passed a trainer's gate in a round")
        print(
            f"  outer      {median(row.outer_ms for row in rows):.0f} ms a round of the trainer that came last; median"
        )
        self._print_traffic()

    def _print_traffic(self) -> None:
        """Bytes of the whole run: the messages of one trainer, and what leaves its process with all-gather or ring."""
        payload, sent, dense, patch, full = (
            sum(getattr(row, key) for row in self.rows) for key in ("payload", "sent", "dense", "patch", "full")
        )
        ring = 2 * (self.settings.trainers - 1) / self.settings.trainers  # times its size: what an all-reduce sends
        ddp = dense * self.settings.sync_every
        table = [
            ("PULSELoCo", payload, sent, "counted"),
            (
                "DiLoCo",
                dense,
                ring * dense,
                f"computed; {dense / payload:.1f} and {ring * dense / sent:.1f} times more",
            ),
            ("DDP", ddp, ring * ddp, f"computed; {ddp / payload:.0f} and {ring * ddp / sent:.0f} times more"),
        ]
        print("  traffic    of one trainer   payload   leaves its process")
        for name, payload_bytes, sent_bytes, how in table:
            print(f"    {name:<10} {payload_bytes / 1e6:18.1f} MB {sent_bytes / 1e6:17.1f} MB   {how}")
        syncs = f"{patch / 1e6:.1f} MB instead of {full / 1e6:.1f} MB of full syncs"
        print(f"    PULSESync to a worker: {syncs}, {full / patch:.1f} times less")
