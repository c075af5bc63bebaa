"""``python -m examples.fleet``: starts the fleet, kills, cuts and mends, shows it all, compares the final weights."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import pulse_rl

from ..grpo.processes import JournalReader, PeerVanished, sole_holder, stop, tail
from . import namespaces
from .policies import warm_up
from .settings import CUT, FIRST, FOLDS, JOINING, KILLED, POLICIES, REGIONS, RunFolder, Settings
from .table import Table

POLL_SECONDS = 0.2
HOW = {
    "namespaces": "token buckets between network namespaces",
    "simulated": "simulated: processes wait as long as their bytes would take",
}


class RunFailed(RuntimeError):
    """A process of the run failed, or weights differ at the end."""


class Fleet:
    def __init__(self, settings: Settings, folder: RunFolder) -> None:
        self.settings, self.folder = settings, folder
        self.table = Table(settings)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.readers: dict[str, JournalReader] = {}
        self.cut_at: dict[str, int | None] = {}
        self.plan = [
            (settings.killed_at, self._kill),
            (settings.joined_at, self._join),
            (settings.cut_at, self._cut),
            (settings.mended_at, self._mend),
        ]

    def run(self) -> None:
        """The whole run. Raises RunFailed; leaves no process behind."""
        began = time.monotonic()
        try:
            if self.settings.links == "namespaces":
                self._start("origin", "origin", bind=namespaces.ORIGIN.address)
            for name in POLICIES:
                for rank in range(self.settings.ranks):
                    self._start(f"trainer-{name}" + (f"-{rank}" if rank else ""), "trainer", policy=name, rank=rank)
            for region in REGIONS:
                self._start(f"relay-{region}", "relay", region, region=region)
            self._await(lambda: all(self.table.at_relay(r, p) is not None for r in REGIONS for p in POLICIES))
            for name, region in FIRST.items():
                self._worker(name, region)
            while not self._ended():
                self._wait()
                while self.plan and self.table.step >= self.plan[0][0]:
                    self.plan.pop(0)[1]()
            self._await(self._relays_have_all)
        finally:
            stop(self.processes.values())
        self._read()
        self.table.summarise(time.monotonic() - began)
        print(f"  report     pulse report {self.folder.root} -o report.html")
        self._compare()
        self._require_folds()

    def _await(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.settings.patience
        while not is_so():
            if time.monotonic() > deadline:
                raise RunFailed("a relay does not get on; see its log")
            self._wait()

    def _wait(self) -> None:
        time.sleep(POLL_SECONDS)
        self._look()

    def _start(self, role: str, module: str, place: str | None = None, **options: object) -> None:
        """Starts a process in the region ``place``, None: beside the origin."""
        command = [
            sys.executable,
            "-m",
            f"examples.fleet.{module}",
            str(self.folder.root),
            "--parent",
            str(os.getpid()),
        ]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        if self.settings.links == "namespaces":
            command = namespaces.inside(place, command)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        with self.folder.log(role).open("ab") as log:
            self.processes[role] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        self.readers.setdefault(role, JournalReader(self.folder.journal(role)))

    def _worker(self, name: str, region: str) -> None:
        self.table.homes[name] = region
        self._start(name, "worker", region, name=name, region=region)

    def _read(self) -> None:
        for role, reader in self.readers.items():
            for event in reader.read():
                self.table.see(role, event)

    def _look(self) -> None:
        self._read()
        for role, process in self.processes.items():
            if process.poll():
                log = self.folder.log(role)
                raise RunFailed(f"{role} ended with status {process.returncode}; the end of {log}:\n{tail(log)}")

    def _ended(self) -> bool:
        return not self.plan and all(
            process.poll() == 0 for role, process in self.processes.items() if role.startswith(("trainer-", "worker-"))
        )

    def _relays_have_all(self) -> bool:
        newest = {policy: self.table.results[f"trainer-{policy}"]["version"] for policy in POLICIES}
        return all(self.table.at_relay(region, policy) == newest[policy] for region in REGIONS for policy in POLICIES)

    def _kill(self) -> None:
        for name in KILLED:
            self.table.note(f"killing {name} with SIGKILL")
            process = self.processes.pop(name)
            process.kill()
            process.wait()
            self.table.workers.pop(name, None)

    def _join(self) -> None:
        for name, region in JOINING.items():
            self.table.note(f"{name} joins {region}")
            self._worker(name, region)

    def _cut(self) -> None:
        self.table.note(f"{CUT} is cut off")
        self.table.cut.add(CUT)
        self.cut_at = {policy: self.table.at_relay(CUT, policy) for policy in POLICIES}
        if self.settings.links == "namespaces":
            namespaces.set_link(CUT, up=False)
        else:
            self.folder.cut(CUT).touch()

    def _mend(self) -> None:
        self.table.note(f"{CUT} is back")
        self.table.cut.discard(CUT)
        if self.settings.links == "namespaces":
            namespaces.set_link(CUT, up=True)
        else:
            self.folder.cut(CUT).unlink()

    def _require_folds(self) -> None:
        """The region that was cut off has come on by patches and folds alone. Raises RunFailed."""
        for policy, had in self.cut_at.items():
            since = [e for e in self.table.relayed[CUT] if e["policy"] == policy and e["version"] > (had or 0)]
            links = [link for event in since for link in event["links"]]
            if any("anchor" in link for link in links):
                raise RunFailed(f"{CUT} has fetched a full state of the {policy}: {', '.join(links)}")
            longest = max(e["version"] - e["previous"] for e in since)
            folds = [link for link in links if "fold" in link]
            if longest >= 2 * FOLDS[0] and not folds:
                raise RunFailed(f"{CUT} was {longest} versions of the {policy} behind, and has taken no fold")
            print(f"{CUT}, cut off at version {had} of the {policy}, came back by {len(folds)} folds and no full state")

    def _compare(self) -> None:
        """Compares the roots of trainers, live models and newcomers in every store. Raises RunFailed."""
        expected = set(FIRST) - set(KILLED) | set(JOINING)
        stores = {"origin": self.folder.origin, **{region: self.folder.near(region) for region in REGIONS}}
        different = []
        for policy in POLICIES:
            trained = self.table.results[f"trainer-{policy}"]
            print(f"\n  {policy:9} {trained['root']}  version {trained['version']}, its {self.settings.ranks} ranks")
            roots = {name: self.table.results[name]["roots"][policy] for name in sorted(expected)}
            for place, path in stores.items():
                with pulse_rl.Subscriber(pulse_rl.LocalStore(path), stream=policy, threads=1) as newcomer:
                    newcomer.sync()
                    roots[f"a newcomer at {place}"] = newcomer.root
            for name, root in roots.items():
                same = root == trained["root"]
                print(f"    {name:22} {root[:16]}…  {'bit-identical' if same else 'DIFFERENT'}")
                different += [] if same else [f"{policy} of {name}"]
        if different:
            raise RunFailed(f"the weights differ: {', '.join(different)}")
        print("\nevery worker of both regions holds both policies, bit for bit")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.fleet", description=__doc__)
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder, a new one")
    for setting in fields(Settings):
        parser.add_argument("--" + setting.name.replace("_", "-"), type=type(setting.default), default=setting.default)
    args = parser.parse_args()
    if args.links == "namespaces" and (why := namespaces.enter("examples.fleet", sys.argv[1:])):
        print(f"no network namespaces: {why}")
        args.links = "simulated"
    folder = RunFolder((args.run or Path("runs") / time.strftime("fleet-%Y%m%d-%H%M%S")).absolute())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        settings = replace(Settings(), **{f.name: getattr(args, f.name) for f in fields(Settings)})
        folder.root.mkdir(parents=True)
        with sole_holder(folder.root / "run.lock"):
            settings.save(folder.settings)
            print(f"run folder: {folder.root}")
            rates = ", ".join(f"{region} {rate / 1e6:.0f} Mbit/s" for region, rate in REGIONS.items())
            print(f"links: {rates}, {HOW[settings.links]}")
            print(f"warm-up: supervised steps {warm_up(settings, folder)}", flush=True)
            with namespaces.regions() if settings.links == "namespaces" else nullcontext():
                Fleet(settings, folder).run()
    except (RunFailed, PeerVanished, ValueError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except FileExistsError:
        print(f"\nFAILED: {folder.root} exists already; a run begins in a new folder", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
