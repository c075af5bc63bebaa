"""``python -m examples.grpo`` runs everything; with ``trainer`` or ``worker`` one role of an existing run."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path

from .settings import RunFolder, Settings

HELP = {
    "lr": "learning rate of the RL phase",
    "steps": "RL steps",
    "sft_steps": "supervised warm-up steps, at most",
    "sft_accuracy": "the warm-up ends earlier once this share of sampled answers is right",
    "workers": "rollout-worker processes; a step takes one batch for each",
    "prompts": "problems in a batch of rollouts",
    "group": "answers per problem",
    "max_lag": "the trainer refuses rollouts that are more versions behind than this",
    "checkpoint_every": "steps between two checkpoints of the trainer",
    "patience": "seconds after which a process gives up on its peers",
    "seed": "seed of everything random",
    "engine": "what generates: torch, or a vLLM server for each worker",
}


def main() -> int:
    arguments = parse()
    folder = RunFolder((arguments.run or Path("runs") / time.strftime("grpo-%Y%m%d-%H%M%S")).absolute())
    if arguments.role == "all":
        from .orchestrator import Orchestrator

        try:
            settings = chosen_settings(arguments, folder)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        settings.save(folder.settings)
        return Orchestrator(settings, folder, kills=arguments.kill).run()
    if not folder.settings.exists():
        raise SystemExit(f"there is no run in {folder.root}; start one with: python -m examples.grpo --run DIR")
    return run_role(arguments, Settings.load(folder.settings), folder)


def run_role(arguments: argparse.Namespace, settings: Settings, folder: RunFolder) -> int:
    """One process of a run, until the run is done."""
    from .processes import GAVE_UP, MISMATCH, PeerVanished, sole_holder

    if arguments.role != "trainer" and arguments.name not in settings.roles:
        raise SystemExit(f"--name must be one of {', '.join(settings.roles)}")
    role = "trainer" if arguments.role == "trainer" else arguments.name
    if arguments.role == "server":
        from .vllm_server import serve

        serve(settings, folder, role, arguments.port, arguments.parent)
    try:
        with sole_holder(folder.lock(role)):
            import torch

            # Three processes share the machine's cores; more threads each would only wait for one another.
            torch.set_num_threads(1)
            if role == "trainer":
                from .trainer import Trainer

                return 0 if Trainer(settings, folder, arguments.parent).run() else MISMATCH
            if settings.engine == "vllm":
                from .vllm_worker import VllmWorker

                VllmWorker(settings, folder, role, f"http://127.0.0.1:{arguments.port}", arguments.parent).run()
            else:
                from .worker import Worker

                Worker(settings, folder, role, arguments.parent).run()
            return 0
    except PeerVanished as error:
        print(f"{role}: {error}", file=sys.stderr)
        return GAVE_UP


def chosen_settings(arguments: argparse.Namespace, folder: RunFolder) -> Settings:
    """The flags that were given, over those that an existing run was started with, over the defaults."""
    settings = Settings.load(folder.settings) if folder.settings.exists() else Settings()
    given = {name: getattr(arguments, name) for name in HELP if getattr(arguments, name) is not None}
    return replace(settings, **given)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.grpo", description=__doc__)
    parser.add_argument("role", nargs="?", choices=["all", "trainer", "worker", "server"], default="all")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder; an existing run is resumed")
    parser.add_argument("--name", default="worker-0", help="which worker or server this is (with these roles)")
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="ROLE@STEP",
        help="SIGKILL a process after a step, to see it resume: --kill trainer@50 --kill worker-1@80",
    )
    parser.add_argument("--port", type=int, default=8000, help="of the worker's vLLM server, on loopback")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    for setting in fields(Settings):
        assert setting.default is not MISSING
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            type=type(setting.default),
            help=f"{HELP[setting.name]} (default {setting.default})",
        )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
