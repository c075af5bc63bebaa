"""``python -m examples.grpo``: starts (and restarts) the processes, shows what they do, compares
the final weights."""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter, deque
from statistics import mean, median

import pulse_rl

from .rollouts import reported_root
from .run import (
    STREAM,
    Columns,
    Event,
    Orchestrator,
    RunFailed,
    RunFolder,
    compare,
    new_worker_root,
    note,
    orchestrate,
)
from .settings import GrpoSettings, Settings

RESTARTS = 5
#: Steps of which the mean reward is shown.
AVERAGED = 20


class Run(Orchestrator):
    def __init__(self, settings: Settings, folder: RunFolder, kills: list[tuple[str, int]]) -> None:
        super().__init__(folder, RESTARTS)
        self.settings, self.kills = settings, kills
        self.steps: dict[int, Event] = {}
        self.result: Event | None = None
        self._rewards: deque[float] = deque(maxlen=AVERAGED)
        self._columns = Columns(
            step=4,
            reward=6,
            mean=6,
            density=8,
            patch_kB=8,
            ratio=8,
            publish_ms=10,
            sync_ms=7,
            pause_ms=8,
            lag=3,
        )

    def run(self) -> None:
        """The whole run. Raises RunFailed."""
        self.follow("trainer")
        self.read()  # of the run that is resumed
        self.result = None
        with self:
            self.start("trainer", "examples.grpo.trainer")
            start_workers(self, self.settings, "examples.grpo")
            while self.running():
                pass
        self._summarize()
        compare_weights(self.settings, self.folder, self.result)

    def awaited(self) -> list[str]:
        """All but the vLLM servers, which go on until they are stopped."""
        return ["trainer", *self.settings.worker_names]

    def see(self, role: str, event: Event) -> None:
        match event["event"]:
            case "warm-up":
                accuracy = (
                    f"accuracy {event['accuracy']:.2f} (RL starts at "
                    f"{self.settings.sft_accuracy:.2f})"
                )
                print(
                    f"warm-up step {event['step']}: loss {event['loss']:.3f}, {accuracy}",
                    flush=True,
                )
            case "stream":
                note(
                    f"step {event['step']} is version {event['version']}, root {event['root'][:12]}"
                )
            case "resumed":
                note(
                    f"the stream is at version {event['version']}: {event['how']} "
                    f"{event['reason']}".strip()
                )
            case "step":
                self.steps[event["step"]] = event
                self._show(event)
                self._carry_out_kills(event["step"])
            case "result":
                self.result = event

    def _show(self, event: Event) -> None:
        step = event["step"]
        self._rewards.append(event["reward"])
        for reason, count in event["refused"].items():
            note(f"before step {step} the trainer refused {count} batches of rollouts: {reason}")
        if step % max(1, self.settings.steps // 25) and step not in (1, self.settings.steps):
            return
        sizes = ["none", f"{event['dense_bytes'] / 1e3:.0f}", "1.0"]
        if event["changed"] is not None:
            ratio = min(
                event["dense_bytes"] / max(1, event["patch_bytes"]), 99999.0
            )  # nothing changed without rewards
            sizes = [f"{event['density']:.2%}", f"{event['patch_bytes'] / 1e3:.1f}", f"{ratio:.1f}"]
        times = [f"{event[key]:.1f}" for key in ("publish_ms", "sync_ms", "pause_ms")]
        rewards = [f"{event['reward']:.3f}", f"{mean(self._rewards):.3f}"]
        self._columns.row(f"{step}", *rewards, *sizes, *times, f"{event['lag']}")

    def _carry_out_kills(self, step: int) -> None:
        for due in [kill for kill in self.kills if kill[1] <= step and kill[0] in self.processes]:
            self.kills.remove(due)
            note(f"killing {due[0]} with SIGKILL, as asked")
            self.kill(due[0])

    def _summarize(self) -> None:
        rows = [row for _, row in sorted(self.steps.items()) if row["changed"] is not None]
        if not rows:
            return
        fifth = max(1, len(rows) // 5)
        first, last = (
            mean(row["reward"] for row in part) for part in (rows[:fifth], rows[-fifth:])
        )
        densities = [row["density"] for row in rows]
        patch, dense = mean(row["patch_bytes"] for row in rows), rows[-1]["dense_bytes"]
        per_changed = sum(row["patch_bytes"] for row in rows) / max(
            1, sum(row["changed"] for row in rows)
        )
        publish, sync, pause = (
            median(row[key] for row in rows) for key in ("publish_ms", "sync_ms", "pause_ms")
        )
        reasons: Counter[str] = sum((Counter(row["refused"]) for row in rows), Counter())
        refused = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
        seconds = time.monotonic() - self.started
        print(f"\n{rows[-1]['step']} steps at learning rate {self.settings.lr:g}, {seconds:.0f} s")
        print(
            f"  reward    {first:.3f} -> {last:.3f}: means of the first and the last {fifth} steps"
        )
        print(
            f"  density   {mean(densities):.2%} of the weights changed in a step; LLMs at 1e-6 "
            "to 3e-6: 0.3% to 1.1%"
        )
        print(
            f"  patch     {patch / 1e3:.1f} kB instead of {dense / 1e3:.0f} kB: ratio "
            f"{dense / patch:.1f}, ",
            end="",
        )
        print(f"{per_changed:.2f} bytes per changed weight")
        print(
            f"  medians   publish {publish:.1f} ms, sync {sync:.1f} ms, the model paused for "
            f"{pause:.1f} ms"
        )
        print(
            f"  rollouts  at most {max(row['lag'] for row in rows)} versions behind; refused: "
            f"{refused}"
        )
        print(f"  restarts  {self.died.total()}")
        print(f"  report    pulse report {self.folder.root} -o report.html\n")


def compare_weights(settings: GrpoSettings, folder: RunFolder, result: Event | None) -> None:
    """Compares the roots of the trainer, of all live models and of a new worker; raises RunFailed
    where two differ."""
    if result is None:
        raise RunFailed("the trainer ended without a result")
    store = pulse_rl.open_store(folder.store_address)
    roots = {"trainer": result["root"]}
    roots |= {name: reported_root(store, name, result["version"]) for name in settings.worker_names}
    compare(result["root"], roots | {"new worker": new_worker_root(store, STREAM)})
    live = (
        "the engines' parameters, read back" if settings.engine == "vllm" else "their live models"
    )
    print(f"  (trainer and workers: {live}; new worker: restored from the store alone)")
    print("\nevery worker holds the trainer's BF16 weights, bit for bit")


def start_workers(run: Orchestrator, settings: GrpoSettings, package: str) -> None:
    """Starts the workers of an example, and a vLLM server for each if they generate with vLLM."""
    for index, name in enumerate(settings.worker_names):
        if settings.engine == "vllm":
            port, server = str(free_port()), settings.server_names[index]
            run.start(server, f"{package}.vllm_server", "--name", server, "--port", port)
            run.start(name, f"{package}.vllm_worker", "--name", name, "--port", port)
        else:
            run.start(name, f"{package}.worker", "--name", name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def killed_at(settings: GrpoSettings, kills: list[str]) -> list[tuple[str, int]]:
    """(role, step) of each ``ROLE@STEP``. Raises ValueError."""
    chosen = []
    for text in kills:
        role, _, step = text.partition("@")
        if role not in settings.roles or not step.isdecimal():
            raise ValueError(f"--kill {text}: expected for instance trainer@50 or worker-0@50")
        chosen.append((role, int(step)))
    return chosen


def run(settings: Settings, folder: RunFolder, kills: list[str]) -> None:
    Run(settings, folder, killed_at(settings, kills)).run()


def main() -> int:
    text = "SIGKILL a process after a step, to see it resume: --kill trainer@50 --kill worker-1@80"
    kill = {"action": "append", "default": [], "metavar": "ROLE@STEP", "help": text}
    return orchestrate("grpo", __doc__, Settings, run, kill=kill)


if __name__ == "__main__":
    sys.exit(main())
