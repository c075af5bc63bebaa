"""What is known of the fleet, as a table and at the end as a summary."""

from __future__ import annotations

from collections import Counter
from statistics import mean
from typing import Any

from pulse_rl._util.units import format_bytes, format_duration

from .settings import POLICIES, REGIONS, Settings

Event = dict[str, Any]
EVERY = 5
"""Steps of the solver between two rows."""
KINDS = {"patch": "patches", "fold": "folds", "anchor": "full states"}


class Table:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.steps: dict[str, list[Event]] = {name: [] for name in POLICIES}
        self.relayed: dict[str, list[Event]] = {region: [] for region in REGIONS}
        self.synced: dict[str, list[Event]] = {}
        self.workers: dict[str, Event] = {}
        self.results: dict[str, Event] = {}
        self.homes: dict[str, str] = {}
        self.cut: set[str] = set()

    def note(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def see(self, role: str, event: Event) -> None:
        """Takes a line of a role's journal."""
        if event["event"] == "result":
            self.results[role] = event
        elif event["event"] == "synced":
            self.synced.setdefault(role, []).append(event)
        elif role.startswith("trainer-"):
            self.steps[role.removeprefix("trainer-")].append(event)
            if role == "trainer-solver" and event["step"] % EVERY == 0:
                self._row(event["step"])
        elif role.startswith("relay-"):
            self._relayed(role.removeprefix("relay-"), event)
        else:
            self.workers[role] = event

    def at_relay(self, region: str, policy: str) -> int | None:
        """The newest version that a region's relay has."""
        return max((event["version"] for event in self.relayed[region] if event["policy"] == policy), default=None)

    def newest(self, policy: str) -> int:
        return int(self.steps[policy][-1]["version"]) if self.steps[policy] else 0

    @property
    def step(self) -> int:
        """The solver's."""
        return int(self.steps["solver"][-1]["step"]) if self.steps["solver"] else 0

    def _relayed(self, region: str, event: Event) -> None:
        self.relayed[region].append(event)
        if event["previous"] is not None and any("fold" in link for link in event["links"]):
            behind = event["version"] - event["previous"]
            kinds = Counter(link.split()[1] for link in event["links"])
            by = " and ".join(f"{count} {KINDS[kind]}" for kind, count in kinds.items())
            size = format_bytes(event["bytes"])
            self.note(f"the relay of {region} gets {behind} versions of the {event['policy']} by {by}, {size}")

    def _row(self, step: int) -> None:
        if step == EVERY:
            heads = ("step", "solver", "verifier: true, of right, of wrong", "patch kB", "unsent")
            print("  {:>4} {:>7}  {:34} {:>9} {:>7}  versions behind, solver/verifier of each worker".format(*heads))
        solver, verifier = (self.steps[name][-EVERY:] for name in POLICIES)
        judged = [mean(e[key] for e in verifier) if verifier else 0.0 for key in ("reward", "of_right", "of_wrong")]
        behind = []
        for region in REGIONS:
            lags = [
                "/".join(str(self.newest(name) - (event["versions"][name] or 0)) for name in POLICIES)
                for worker, event in sorted(self.workers.items())
                if self.homes.get(worker) == region
            ]
            behind.append(f"{region}{' (cut off)' if region in self.cut else ''} {' '.join(lags)}")
        unsent = sum(event["unsent"] for event in self.workers.values())
        figures = [mean(e["reward"] for e in solver), *judged, mean(e["patch_bytes"] for e in solver) / 1e3, unsent]
        row = "  {:4} {:7.3f}  {:14.3f} {:9.3f} {:9.3f} {:9.1f} {:7}  ".format(step, *figures)
        print(row + "; ".join(behind), flush=True)

    def summarise(self, seconds: float) -> None:
        print(f"\n{self.settings.steps} steps of each policy, {seconds:.0f} s")
        fifth = max(1, self.settings.steps // 5)
        for name in POLICIES:
            events = self.steps[name]
            patch, dense = mean(e["patch_bytes"] for e in events), events[-1]["dense_bytes"]
            learnt = f"reward {_from_to(events, 'reward', fifth)}"
            if name == "verifier":
                right, wrong = (_from_to(events, key, fifth) for key in ("of_right", "of_wrong"))
                learnt += f", of right answers {right}, of wrong ones {wrong}"
            print(f"  {name:9} {learnt}; a version {patch / 1e3:.1f} kB instead of {dense / 1e3:.0f} kB")
        self._compare()

    def _compare(self) -> None:
        """The time that syncs took, and what the same syncs would take over the same links in other layouts."""
        changed = {name: {e["version"]: e["changed"] or 0 for e in self.steps[name]} for name in POLICIES}
        dense = self.steps["solver"][-1]["dense_bytes"]
        print(
            "\n  seconds of wall-clock for the syncs of this run; and, by arithmetic from its counted changes, what the"
        )
        print("  same syncs of the same versions, and so of the same rewards, take a region's link by other layouts:")
        for region, rate in REGIONS.items():
            here = {worker: moves for worker, moves in self.synced.items() if self.homes[worker] == region}
            moves = [move for worker in here.values() for move in worker]
            single = [m for m in moves if m["previous"] is not None and m["version"] == m["previous"] + 1]
            sparse = sum(6 * changed[m["policy"]][m["version"]] for m in single) + (len(moves) - len(single)) * dense
            ours = sum(e["seconds"] for e in self.relayed[region])
            each = mean(sum(m["seconds"] for m in worker) for worker in here.values())
            crossed = format_bytes(sum(e["bytes"] for e in self.relayed[region]))
            others = {"AstraFlow's layout": 8 * sparse / rate, "full syncs": 8 * len(moves) * dense / rate}
            longer = "; ".join(
                f"{label} {format_duration(taken)}, {taken / (ours + each):.1f} times as long"
                for label, taken in others.items()
            )
            measured = f"the relay {ours:.1f} s for {crossed}, then a worker {each:.1f} s, both measured"
            print(f"    {region}, {rate / 1e6:.0f} Mbit/s: {measured}")
            print(f"      {len(moves)} syncs of its workers, {len(single)} of them by one version: {longer}")
        print("    (AstraFlow's layout: 6 bytes a change, a full state for who is more than one version behind)")


def _from_to(events: list[Event], key: str, count: int) -> str:
    first, last = (mean(e[key] for e in part) for part in (events[:count], events[-count:]))
    return f"{first:.3f} -> {last:.3f}"
