"""``python -m examples.llm_grpo``: a language model learns to add, its workers follow through a
store, every process is killed once, and all end with the same bits."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import pulse_rl

from ..grpo.__main__ import RESTARTS, compare_weights, killed_at, start_workers
from ..grpo.run import STREAM, Columns, Event, Orchestrator, RunFolder, note, orchestrate
from .model import prepare
from .settings import Settings

QUICK: Mapping[str, Any] = {"steps": 32, "lr": 1e-5, "evaluate_every": 16, "checkpoint_every": 8}
#: Steps of which the mean reward is shown.
AVERAGED = 10


class Run(Orchestrator):
    def __init__(self, settings: Settings, folder: RunFolder, kills: list[tuple[str, int]]) -> None:
        super().__init__(folder, RESTARTS)
        self.settings, self.kills = settings, kills
        self.steps: dict[int, Event] = {}
        self.accuracies: dict[int, float] = {}
        self.result: Event | None = None
        self._began: tuple[float, int] | None = None
        self._columns = Columns(
            step=7, reward=6, mean=6, density=8, patch_kB=8, times_less=10, live_s=6, left=6
        )

    def run(self) -> None:
        """The whole run. Raises RunFailed."""
        for role in self.settings.roles:
            self.follow(role)
        self.read()  # of the run that is resumed
        self.result = None
        prepare(self.settings.folder)
        with self:
            self.start("trainer", "examples.llm_grpo.trainer")
            start_workers(self, self.settings, "examples.llm_grpo")
            while self.running():
                pass
        rows = [row for _, row in sorted(self.steps.items()) if row["changed"] is not None]
        if rows and self.accuracies:
            self._summarize(rows)
            draw(rows, self.accuracies, self.folder.root / "run.svg")
        compare_weights(self.settings, self.folder, self.result)

    def awaited(self) -> list[str]:
        """All but the vLLM servers, which go on until they are stopped."""
        return ["trainer", *self.settings.worker_names]

    def see(self, role: str, event: Event) -> None:
        match event["event"]:
            case "stream":
                note(f"the trainer is at step {event['step']}, version {event['version']}")
            case "resumed":
                note(f"the trainer resumes the stream at version {event['version']}")
            case "held-out":
                self.accuracies[event["step"]] = event["accuracy"]
                note(f"step {event['step']}: {event['accuracy']:.1%} of held-out problems right")
            case "step":
                self.steps[event["step"]] = event
                self._show(event)
                for due in [kill for kill in self.kills if kill[1] <= event["step"]]:
                    self.kills.remove(due)
                    note(f"kills {due[0]} with SIGKILL")
                    self.kill(due[0])
            case "result":
                self.result = event

    def _show(self, event: Event) -> None:
        step, last = event["step"], self.settings.steps
        now = time.monotonic()
        self._began = self._began or (now, step)
        began, first = self._began
        if step % max(1, last // 30) and step not in (1, last):
            return
        left = (now - began) / max(1, step - first) * (last - step) if step > first else 0.0
        rewards = [self.steps[one]["reward"] for one in sorted(self.steps) if one <= step]
        sizes = ["none", "-", "-"]
        if event["changed"] is not None:
            times = event["dense_bytes"] / max(1, event["patch_bytes"])
            sizes = [
                f"{event['density']:.2%}",
                f"{event['patch_bytes'] / 1e3:.0f}",
                f"{times:.0f}",
            ]
        self._columns.row(
            f"{step}/{last}",
            f"{rewards[-1]:.3f}",
            f"{mean(rewards[-AVERAGED:]):.3f}",
            *sizes,
            f"{event['live_ms'] / 1e3:.2f}",
            f"{int(left) // 60}:{int(left) % 60:02}",
        )

    def _summarize(self, rows: list[Event]) -> None:
        part = min(20, max(1, len(rows) // 3))
        rewards = [mean(row["reward"] for row in some) for some in (rows[:part], rows[-part:])]
        first, last = min(self.accuracies), max(self.accuracies)
        patch, dense = mean(row["patch_bytes"] for row in rows), rows[-1]["dense_bytes"]
        each = sum(row["patch_bytes"] for row in rows) / max(1, sum(row["changed"] for row in rows))
        publish, sync, pause, live = (
            median(row[key] for row in rows)
            for key in ("publish_ms", "sync_ms", "pause_ms", "live_ms")
        )
        zeros = changed_zeros(self.folder)
        seconds = time.monotonic() - self.started
        print(f"\n{rows[-1]['step']} steps at learning rate {self.settings.lr:g}, {seconds:.0f} s")
        table = {
            "held-out problems": f"{self.accuracies[first]:.1%} right at step {first}, "
            f"{self.accuracies[last]:.1%} at step {last}",
            "sampled reward": f"{rewards[0]:.3f} in the first {part} steps, {rewards[1]:.3f} in "
            f"the last {part}",
            "changed weights": f"{mean(row['density'] for row in rows):.2%} a step",
            "of the last step": f"{zeros:.0%} were exactly 0 in the checkpoint (see "
            "docs/evidence.md)",
            "patch": f"{patch / 1e3:.0f} kB instead of {dense / 1e6:.0f} MB, {dense / patch:.0f} "
            f"times less; {each:.2f} bytes per changed weight",
            "publish to live": f"{live / 1e3:.2f} s (publish {publish:.0f} ms, sync {sync:.0f} ms)",
            "pause": f"{pause:.0f} ms",
            "rollouts": f"at most {max(row['lag'] for row in rows)} versions behind",
            "restarts": f"{self.died.total()}",
            "report": f"pulse report {self.folder.root} -o report.html",
        }
        for name, text in table.items():
            print(f"  {name:<18} {text}")
        print()


def changed_zeros(folder: RunFolder) -> float:
    """The share of the last version's changes that are in weights which version 0 has as 0."""
    head = pulse_rl.Publisher(folder.store_address, stream=STREAM).head()
    assert head is not None
    with pulse_rl.Subscriber(folder.store_address, stream=STREAM, threads=1) as subscriber:
        first = subscriber.sync(target=0)
        assert first is not None
        zero = {name: values == 0 for name, _, values in first}
        first.acknowledge()
        before = subscriber.sync(target=head.version - 1)
        if before is not None:
            before.acknowledge()
        last = subscriber.sync()
        assert last is not None
        changes = [(name, indices) for name, indices, _ in last if indices is not None]
    changed = sum(len(indices) for _, indices in changes)
    return sum(int(zero[name][indices].sum()) for name, indices in changes) / max(1, changed)


def draw(rows: list[Event], accuracies: Mapping[int, float], path: Path) -> None:
    """A picture of the run: rewards, changed weights, and the time from publish to live."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note("no picture: matplotlib is not installed")
        return
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7, 7), layout="constrained")
    reward, density, live = figure.subplots(3, sharex=True)
    reward.plot(steps, [row["reward"] for row in rows], color="#9db8d2", label="sampled")
    at = sorted(accuracies)
    reward.plot(at, [accuracies[one] for one in at], "o-", color="#c05020", label="held out")
    reward.set(ylabel="share of right answers", ylim=(0, 1))
    reward.legend()
    density.plot(steps, [100 * row["density"] for row in rows], color="#205080")
    density.set(ylabel="changed weights, %", ylim=(0, None))
    live.plot(steps, [row["live_ms"] / 1e3 for row in rows], color="#205080")
    live.set(ylabel="publish to live, s", xlabel="step", ylim=(0, None))
    figure.savefig(path)
    note(f"picture: {path}")


def run(settings: Settings, folder: RunFolder, kills: list[str], quick: None) -> None:
    """Kills each process once unless others are asked for."""
    steps = settings.steps
    default = {name: steps * (3 + index) // 6 for index, name in enumerate(settings.worker_names)}
    # The trainer a little after a checkpoint: it has to go back, and its stream with it.
    trainer = (steps // 3 // settings.checkpoint_every) * settings.checkpoint_every + 2
    chosen = kills or [f"trainer@{trainer}", *(f"{name}@{at}" for name, at in default.items())]
    Run(settings, folder, [] if kills == ["none"] else killed_at(settings, chosen)).run()


class _Quick(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        for name, value in QUICK.items():
            setattr(namespace, name, value)


def main() -> int:
    text = "SIGKILL a process after a step (default: each process once; none: no process)"
    return orchestrate(
        "llm_grpo",
        __doc__,
        Settings,
        run,
        kill={"action": "append", "default": [], "metavar": "ROLE@STEP", "help": text},
        quick={"action": _Quick, "nargs": 0, "help": "three minutes: 32 steps at 1e-5"},
    )


if __name__ == "__main__":
    sys.exit(main())
