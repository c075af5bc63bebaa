"""``python -m examples.loco``: starts ``torchrun`` and the workers, shows their reports, compares the final weights."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pulse_rl

from ..grpo.processes import JournalReader, PeerVanished, sole_holder, stop, tail
from ..grpo.rollouts import reports_of
from ..grpo.settings import STREAM
from .settings import RunFolder, Settings
from .table import JournalEvent, Table

POLL_SECONDS = 0.2
STOP_SECONDS = 40.0
"""Longer than the 30 s that ``torchrun`` gives its processes to end."""

HELP = {
    "lr": "learning rate of the inner steps",
    "rounds": "outer rounds",
    "sync_every": "inner steps in a round (H)",
    "trainers": "trainer processes",
    "workers": "rollout-worker processes",
    "prompts": "problems in a batch of rollouts; an inner step takes one batch",
    "group": "answers per problem",
    "max_lag": "trainers refuse rollouts that are more rounds behind than this",
    "sft_steps": "supervised warm-up steps, at most",
    "sft_accuracy": "the warm-up ends earlier once this share of sampled answers is right",
    "patience": "seconds after which a process gives up on its peers",
    "seed": "seed of everything random",
}


class RunFailed(RuntimeError):
    """A process of the run failed, or the weights differ at the end."""


def main() -> int:
    arguments = parse()
    folder = RunFolder((arguments.run or Path("runs") / time.strftime("loco-%Y%m%d-%H%M%S")).absolute())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with sole_holder(folder.lock("run")):
            run(chosen_settings(arguments, folder), folder, arguments.kill)
    except (RunFailed, PeerVanished, ValueError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; resume with: python -m examples.loco --run {folder.root}", file=sys.stderr)
        return 130
    return 0


def run(settings: Settings, folder: RunFolder, kill: str | None) -> None:
    """The whole run. Raises RunFailed; leaves no process behind in any case."""
    started = time.monotonic()
    settings.save(folder.settings)
    print(f"run folder: {folder.root}")
    table = Table(settings)
    journals = [JournalReader(folder.journal_of(rank)) for rank in range(settings.trainers)]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        processes["trainers"] = start(
            "trainers", trainers_command(settings), folder, *(["--kill", kill] if kill else [])
        )
        for name in settings.worker_names:
            processes[name] = start(name, [sys.executable, "-m", "examples.loco.worker"], folder, "--name", name)
        running = True
        while running:
            time.sleep(POLL_SECONDS)
            running = any(process.poll() is None for process in processes.values())
            for rank, journal in enumerate(journals):
                for event in journal.read():
                    table.show(rank, event)
            for name, process in processes.items():
                if process.poll():
                    raise RunFailed(
                        f"{name} ended with status {process.returncode}; see {folder.log(name)}:\n"
                        + tail(folder.log(name))
                    )
    finally:
        stop(list(processes.values()))
    table.summarise(time.monotonic() - started)
    print(f"  report     pulse report {folder.root} -o report.html")
    compare_roots(settings, folder, table.results)


def trainers_command(settings: Settings) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(settings.trainers), "--max-restarts", "3", "-m", "examples.loco.trainer"]
    return command


def start(name: str, command: list[str], folder: RunFolder, *options: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # Without it, trainers that torchrun starts again may find the addresses of those that are gone.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [*command, str(folder.root), "--parent", str(os.getpid()), *options]
    with folder.log(name).open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def compare_roots(settings: Settings, folder: RunFolder, results: dict[int, JournalEvent]) -> None:
    """Compares the roots of all live models and of a newcomer; raises RunFailed where two differ."""
    if len(results) < settings.trainers:
        raise RunFailed(f"only {len(results)} of {settings.trainers} trainers reported a result")
    store = pulse_rl.open_store(folder.store_address)
    newcomer = pulse_rl.Subscriber(store, stream=STREAM, threads=1)
    newcomer.sync()
    roots = {f"trainer-{rank}": result["root"] for rank, result in sorted(results.items())}
    for name in settings.worker_names:
        roots[name] = json.loads(store.get(f"{reports_of(name)}/{settings.rounds:012d}.json"))["root"]
    roots["newcomer"] = pulse_rl.state_root(newcomer.state)

    thetas = {result["theta"] for result in results.values()}
    print(f"\n  theta      {results[0]['theta']}  FP32, after round {settings.rounds}, on {len(results)} trainers")
    for name, root in roots.items():
        print(f"  {name:<10} {root}  {'bit-identical' if root == roots['trainer-0'] else 'DIFFERENT'}")
    print("  (trainers: their live FP32 models rounded to BF16; workers: their live models; newcomer: from the store)")
    if len(thetas) > 1 or len(set(roots.values())) > 1:
        raise RunFailed("the weights differ")
    print(f"\nall {settings.trainers} trainers hold the same theta, and every worker its BF16 values, bit for bit")


def chosen_settings(arguments: argparse.Namespace, folder: RunFolder) -> Settings:
    """The flags that were given, over those that an existing run was started with, over the defaults."""
    settings = Settings.load(folder.settings) if folder.settings.exists() else Settings()
    given = {name: getattr(arguments, name) for name in HELP if getattr(arguments, name) is not None}
    return replace(settings, **given)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.loco", description=__doc__)
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder; an existing run is resumed")
    parser.add_argument(
        "--kill", metavar="trainer-RANK@ROUND", help="SIGKILL a trainer in the middle of a round: --kill trainer-2@5"
    )
    for setting in fields(Settings):
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            type=type(setting.default),
            help=f"{HELP[setting.name]} (default {setting.default})",
        )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
