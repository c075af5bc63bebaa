"""``python -m examples.fleet``: starts the fleet, kills, cuts and mends, shows it all, compares the
final weights."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import mean

from pulse_rl._util.settings import format_bytes, format_duration

from ..grpo.rollouts import reported_root
from ..grpo.run import (
    Event,
    Orchestrator,
    RunFailed,
    RunFolder,
    compare,
    new_worker_root,
    note,
    orchestrate,
)
from .links import cut, near, origin
from .policies import warm_up
from .settings import CUT, FIRST, HOMES, JOINING, KILLED, POLICIES, REGIONS, Settings

#: Steps of the solver between two rows.
EVERY = 5


class Fleet(Orchestrator):
    def __init__(self, settings: Settings, folder: RunFolder) -> None:
        super().__init__(folder)
        self.settings = settings
        self.steps: dict[str, list[Event]] = {name: [] for name in POLICIES}
        self.relayed: dict[str, list[Event]] = {region: [] for region in REGIONS}
        self.synced: dict[str, list[Event]] = {}
        self.workers: dict[str, Event] = {}
        self.results: dict[str, Event] = {}
        self.cut_at: dict[str, int | None] = {}
        fifth = settings.steps / 5
        self.plan = [
            (fifth, self._kill),
            (2 * fifth, self._join),
            (2.5 * fifth, self._cut),
            (4 * fifth, self._mend),
        ]

    def run(self) -> None:
        """The whole run. Raises RunFailed."""
        with self:
            for name in POLICIES:
                for rank in range(self.settings.ranks):
                    options = ("--policy", name, "--rank", str(rank))
                    self.start(
                        f"trainer-{name}" + (f"-{rank}" if rank else ""),
                        "examples.fleet.trainer",
                        *options,
                    )
            for region in REGIONS:
                self.start(f"relay-{region}", "examples.fleet.relay", "--region", region)
            self._await(
                lambda: all(self.at_relay(r, p) is not None for r in REGIONS for p in POLICIES)
            )
            for name in FIRST:
                self._worker(name)
            while self.running() or self.plan:
                while self.plan and self.step >= int(self.plan[0][0]):
                    self.plan.pop(0)[1]()
            self._await(self._relays_have_all)
        self.read()
        self._summarize()
        print(f"  report     pulse report {self.folder.root} -o report.html")
        self._compare()
        self._require_patches()

    def awaited(self) -> list[str]:
        """All but the relays, which go on until they are stopped."""
        return [role for role in self.processes if not role.startswith("relay-")]

    def _await(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.settings.patience
        while not is_so():
            if time.monotonic() > deadline:
                raise RunFailed("a relay does not get on; see its log")
            self.running()

    def _worker(self, name: str) -> None:
        self.start(name, "examples.fleet.worker", "--name", name)

    # -- what happens on the way

    def _kill(self) -> None:
        for name in KILLED:
            note(f"killing {name} with SIGKILL")
            self.kill(name)
            del self.processes[name]
            self.workers.pop(name, None)

    def _join(self) -> None:
        for name, region in JOINING.items():
            note(f"{name} joins {region}")
            self._worker(name)

    def _cut(self) -> None:
        note(f"{CUT} is cut off")
        self.cut_at = {policy: self.at_relay(CUT, policy) for policy in POLICIES}
        cut(self.folder, CUT).touch()

    def _mend(self) -> None:
        note(f"{CUT} is back")
        cut(self.folder, CUT).unlink()

    # -- what is known

    def see(self, role: str, event: Event) -> None:
        kind, _, name = role.partition("-")
        match event["event"]:
            case "result":
                self.results[name] = event
            case "synced":
                self.synced.setdefault(role, []).append(event)
            case "relayed":
                self._see_relayed(name, event)
            case "step":
                self.steps[name].append(event)
                if name == "solver" and event["step"] % EVERY == 0:
                    self._row(event["step"])
            case _ if kind == "worker":
                self.workers[role] = event

    def _see_relayed(self, region: str, event: Event) -> None:
        self.relayed[region].append(event)
        if event["previous"] is not None and len(event["links"]) > 1:
            behind, size = event["version"] - event["previous"], format_bytes(event["bytes"])
            kinds = Counter(link.split()[1] for link in event["links"])
            by = " and ".join(f"{count} {kind}" for kind, count in kinds.items())
            note(
                f"the relay of {region} gets {behind} versions of the {event['policy']} by {by}, "
                f"{size}"
            )

    def at_relay(self, region: str, policy: str) -> int | None:
        """The newest version that a region's relay has."""
        return max(
            (event["version"] for event in self.relayed[region] if event["policy"] == policy),
            default=None,
        )

    def _relays_have_all(self) -> bool:
        return all(
            self.at_relay(r, p) == self.results[p]["version"] for r in REGIONS for p in POLICIES
        )

    def newest(self, policy: str) -> int:
        return int(self.steps[policy][-1]["version"]) if self.steps[policy] else 0

    @property
    def step(self) -> int:
        """The solver's."""
        return int(self.steps["solver"][-1]["step"]) if self.steps["solver"] else 0

    def _row(self, step: int) -> None:
        if step == EVERY:
            heads = ("step", "solver", "verifier: true, of right, of wrong", "patch kB", "unsent")
            print(
                "  {:>4} {:>7}  {:34} {:>9} {:>7}  versions behind, solver/verifier of each "
                "worker".format(*heads)
            )
        solver, verifier = (self.steps[name][-EVERY:] for name in POLICIES)
        judged = [
            mean(e[key] for e in verifier) if verifier else 0.0
            for key in ("reward", "of_right", "of_wrong")
        ]
        behind = []
        for region in REGIONS:
            lags = [
                "/".join(
                    str(self.newest(name) - (event["versions"][name] or 0)) for name in POLICIES
                )
                for worker, event in sorted(self.workers.items())
                if HOMES[worker] == region
            ]
            behind.append(
                f"{region}{' (cut off)' if cut(self.folder, region).exists() else ''} "
                f"{' '.join(lags)}"
            )
        unsent = sum(event["unsent"] for event in self.workers.values())
        figures = [
            mean(e["reward"] for e in solver),
            *judged,
            mean(e["patch_bytes"] for e in solver) / 1e3,
            unsent,
        ]
        row = "  {:4} {:7.3f}  {:14.3f} {:9.3f} {:9.3f} {:9.1f} {:7}  ".format(step, *figures)
        print(row + "; ".join(behind), flush=True)

    # -- the end

    def _summarize(self) -> None:
        """What was learnt; the time that syncs took, and what the same syncs would take over the
        same links in other layouts, by arithmetic from the counted changes."""
        print(
            f"\n{self.settings.steps} steps of each policy, {time.monotonic() - self.started:.0f} s"
        )
        fifth = max(1, self.settings.steps // 5)
        for name, events in self.steps.items():
            patch, dense = mean(e["patch_bytes"] for e in events), events[-1]["dense_bytes"]
            keys = ("reward", "of_right", "of_wrong") if name == "verifier" else ("reward",)
            learnt = ", ".join(f"{key} {_from_to(events, key, fifth)}" for key in keys)
            print(
                f"  {name:9} {learnt}; a version {patch / 1e3:.1f} kB instead of "
                f"{dense / 1e3:.0f} kB"
            )
        changed = {
            name: {e["version"]: e["changed"] or 0 for e in self.steps[name]} for name in POLICIES
        }
        print(
            "\n  seconds of wall-clock for the syncs of this run, and for the same syncs over "
            "the same link with 6"
        )
        print(
            "  bytes a change and a full state after more than one version (AstraFlow), or with "
            "full states:"
        )
        for region, rate in REGIONS.items():
            here = [moves for worker, moves in self.synced.items() if HOMES[worker] == region]
            moves = [move for worker in here for move in worker]
            single = [
                m for m in moves if m["previous"] is not None and m["version"] == m["previous"] + 1
            ]
            sparse = (
                sum(6 * changed[m["policy"]][m["version"]] for m in single)
                + (len(moves) - len(single)) * dense
            )
            ours = sum(e["seconds"] for e in self.relayed[region])
            each = mean(sum(m["seconds"] for m in worker) for worker in here)
            crossed = format_bytes(sum(e["bytes"] for e in self.relayed[region]))
            others = [format_duration(8 * nbytes / rate) for nbytes in (sparse, len(moves) * dense)]
            print(
                f"    {region}, {rate / 1e6:.0f} Mbit/s: the relay {ours:.1f} s for {crossed}, a "
                f"worker {each:.1f} s;"
            )
            print(
                f"      {len(moves)} syncs, {len(single)} of them by one version, would take "
                f"{' and '.join(others)}"
            )

    def _compare(self) -> None:
        """Compares the roots of trainers, live models and new workers in every store. Raises
        RunFailed."""
        stores = {"origin": origin(self.folder)} | {
            region: near(self.folder, region) for region in REGIONS
        }
        for policy in POLICIES:
            trained = self.results[policy]
            print(
                f"\n  {policy}, version {trained['version']}, its {self.settings.ranks} ranks: "
                f"{trained['root']}"
            )
            names = [name for name in HOMES if name not in KILLED]
            roots = {
                n: reported_root(stores["origin"], f"{n}-{policy}", trained["version"])
                for n in names
            }
            roots |= {
                f"a new worker at {place}": new_worker_root(store, policy)
                for place, store in stores.items()
            }
            compare(trained["root"], roots)
        print("\nevery worker of both regions holds both policies, bit for bit")

    def _require_patches(self) -> None:
        """The region that was cut off has come on by patches alone. Raises RunFailed."""
        for policy, had in self.cut_at.items():
            since = [
                e for e in self.relayed[CUT] if e["policy"] == policy and e["version"] > (had or 0)
            ]
            links = [link for event in since for link in event["links"]]
            if any("anchor" in link for link in links):
                raise RunFailed(
                    f"{CUT} has fetched a full state of the {policy}: {', '.join(links)}"
                )
            print(
                f"{CUT}, cut off at version {had} of the {policy}, came back by {len(links)} "
                "patches and no full state"
            )


def _from_to(events: list[Event], key: str, count: int) -> str:
    first, last = (mean(e[key] for e in part) for part in (events[:count], events[-count:]))
    return f"{first:.3f} -> {last:.3f}"


def run(settings: Settings, folder: RunFolder) -> None:
    if (folder.root / "origin").exists():
        raise ValueError(f"{folder.root} holds a run already; a fleet begins in a new folder")
    rates = ", ".join(f"{region} {rate / 1e6:.0f} Mbit/s" for region, rate in REGIONS.items())
    print(
        f"links: {rates}, simulated: processes wait as long as their bytes would take", flush=True
    )
    warm_up(settings, folder)
    Fleet(settings, folder).run()


def main() -> int:
    return orchestrate("fleet", __doc__, Settings, run)


if __name__ == "__main__":
    sys.exit(main())
