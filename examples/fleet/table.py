"""What is known of the fleet, as a table and at the end as a summary."""

from __future__ import annotations

from statistics import mean
from typing import Any

from pulse_rl._util.units import format_bytes, format_duration

from .settings import POLICIES, REGIONS, Settings

Event = dict[str, Any]
EVERY = 5
"""Steps of the solver between two rows."""


class Table:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.steps: dict[str, list[Event]] = {name: [] for name in POLICIES}
        self.relayed: dict[str, list[Event]] = {region: [] for region in REGIONS}
        self.workers: dict[str, Event] = {}
        self.results: dict[str, Event] = {}
        self.homes: dict[str, str] = {}

    def note(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def see(self, role: str, event: Event) -> None:
        """Takes a line of a role's journal."""
        if event["event"] == "result":
            self.results[role] = event
        elif role.startswith("trainer-"):
            self.steps[role.removeprefix("trainer-")].append(event)
            if role == "trainer-solver" and event["step"] % EVERY == 0:
                self._row(event["step"])
        elif role.startswith("relay-"):
            self.relayed[role.removeprefix("relay-")].append(event)
            if event["folds"]:
                folds = ", ".join(event["folds"])
                self.note(f"the relay of {role.removeprefix('relay-')} takes {folds} of the {event['policy']}")
        else:
            self.workers[role] = event

    def at_relay(self, region: str, policy: str) -> int | None:
        """The newest version that a region's relay has."""
        return max((event["version"] for event in self.relayed[region] if event["policy"] == policy), default=None)

    @property
    def step(self) -> int:
        """The solver's."""
        return self.steps["solver"][-1]["step"] if self.steps["solver"] else 0

    def _row(self, step: int) -> None:
        if step == EVERY:
            print("  step  reward: solver verifier   patch kB   behind, by region (solver/verifier)      unsent")
        newest = {name: events[-1]["version"] if events else 0 for name, events in self.steps.items()}
        rewards = [
            mean(e["reward"] for e in self.steps[name][-EVERY:]) if self.steps[name] else 0.0 for name in POLICIES
        ]
        behind = []
        for region in REGIONS:
            lags = [
                "/".join(str(newest[name] - (event["versions"][name] or 0)) for name in POLICIES)
                for worker, event in sorted(self.workers.items())
                if self.homes.get(worker) == region
            ]
            behind.append(f"{region}: {' '.join(lags)}")
        unsent = sum(event["unsent"] for event in self.workers.values())
        patch = mean(e["patch_bytes"] for e in self.steps["solver"][-EVERY:]) / 1e3
        figures = f"{rewards[0]:.3f}    {rewards[1]:.3f}     {patch:6.1f}"
        print(f"  {step:4}          {figures}   {'; '.join(behind)}   {unsent}", flush=True)

    def summarise(self, seconds: float) -> None:
        print(f"\n{self.settings.steps} steps of each policy, {seconds:.0f} s")
        fifth = max(1, self.settings.steps // 5)
        for name in POLICIES:
            events = self.steps[name]
            first, last = (mean(e["reward"] for e in part) for part in (events[:fifth], events[-fifth:]))
            patch, dense = mean(e["patch_bytes"] for e in events), events[-1]["dense_bytes"]
            sizes = f"a version {patch / 1e3:.1f} kB instead of {dense / 1e3:.0f} kB"
            print(f"  {name:9} reward {first:.3f} -> {last:.3f}; {sizes}")
        self._compare()

    def _compare(self) -> None:
        """What the run would take if each step waited for its versions to cross, by layout: from what was measured."""
        steps = [e for name in POLICIES for e in self.steps[name]]
        ours = sum(e["patch_bytes"] for e in steps)
        sparse = sum(6 * (e["changed"] or 0) for e in steps)
        full = sum(e["dense_bytes"] for e in steps)
        computed = mean(e["step_ms"] - e["waited_ms"] for e in self.steps["solver"]) / 1e3 * self.settings.steps
        print("\n  seconds that the versions of this run take over a region's link (arithmetic, from their sizes):")
        rows = (
            ("ours, one copy by the relay", ours),
            ("AstraFlow's layout, 6 bytes a change, for each of 3 workers", 3 * sparse),
            ("full states, for each of 3 workers", 3 * full),
        )
        for label, nbytes in rows:
            times = ", ".join(f"{region} {format_duration(8 * nbytes / rate)}" for region, rate in REGIONS.items())
            slowest = max(8 * nbytes / rate for rate in REGIONS.values())
            faster = max(computed, slowest) / max(computed, max(8 * ours / rate for rate in REGIONS.values()))
            print(f"    {label:60} {format_bytes(nbytes):>9}: {times}; the run {faster:.1f} times as long")
