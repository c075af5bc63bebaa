"""Starts the three processes, restarts what dies, shows what the trainer reports, and judges the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from os import getpid
from typing import Any

import pulse_rl

from .display import Display
from .processes import GAVE_UP, JournalReader, stop, tail
from .settings import STREAM, RunFolder, Settings
from .summary import print_summary, save_plot

RESTARTS = 5
POLL_SECONDS = 0.2


@dataclass
class Child:
    """A role, its process, and how often it was restarted."""

    role: str
    process: subprocess.Popen[bytes]
    restarts: int = 0
    done: bool = False


class Orchestrator:
    def __init__(self, settings: Settings, folder: RunFolder, kills: list[str]) -> None:
        self.settings = settings
        self.folder = folder
        self.kills = [parse_kill(kill, settings) for kill in kills]
        self.reader = JournalReader(folder.journal)
        self.steps: dict[int, dict[str, Any]] = {}
        self.result: dict[str, Any] | None = None
        self.children: list[Child] = []
        self.ports = {name.rpartition("-")[2]: free_port() for name in settings.server_names}
        self.started = time.monotonic()
        self.display = Display(settings, folder)

    def run(self) -> int:
        """Runs to the end; returns the exit status."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for event in self.reader.read():  # of the run that is resumed
            self._remember(event)
        self.result = None
        try:
            with self.display:
                for role in self.settings.roles:
                    self.children.append(Child(role, self._start(role)))
                while not all(child.done for child in self.children if not is_server(child.role)):
                    time.sleep(POLL_SECONDS)
                    self._follow()
                    for child in self.children:
                        self._look_after(child)
                self._follow()
        except ChildFailed as error:
            print(f"\nfailed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"\nstopped; resume with: python -m examples.grpo --run {self.folder.root}", file=sys.stderr)
            return 130
        finally:
            self._stop()
        return self._finish()

    # -- processes

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        kind, _, index = role.partition("-")
        command = [sys.executable, "-m", "examples.grpo", kind]
        command += ["--run", str(self.folder.root), "--parent", str(getpid())]
        if role != "trainer":
            command += ["--name", role]
        if index in self.ports:
            command += ["--port", str(self.ports[index])]
        with self.folder.log(role).open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=is_server(role)
            )

    def _look_after(self, child: Child) -> None:
        """Restarts a child that died; raises ChildFailed when that has been tried often enough."""
        status = child.process.poll()
        if child.done or status is None:
            return
        if is_server(child.role):
            kill(child)  # what it leaves behind
        if status == 0 or (child.role == "trainer" and self._has_result()):
            child.done = True
            return
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        if status == GAVE_UP or child.restarts == RESTARTS:
            log = self.folder.log(child.role)
            times = f"after {child.restarts} restarts"
            raise ChildFailed(f"{child.role} ended with {how} {times}; the end of {log}:\n{tail(log)}")
        child.restarts += 1
        self.display.note(f"{child.role} died ({how}) and is started again")
        child.process = self._start(child.role)

    def _stop(self) -> None:
        stop([child.process for child in self.children])
        for child in self.children:
            if is_server(child.role):
                kill(child)

    # -- what the trainer reports

    def _has_result(self) -> bool:
        self._follow()
        return self.result is not None

    def _follow(self) -> None:
        for event in self.reader.read():
            self._remember(event)
            match event["event"]:
                case "warm-up":
                    self.display.warm_up(event)
                case "stream":
                    self.display.note(f"step {event['step']} is version {event['version']}, root {event['root'][:12]}")
                case "resumed":
                    found = f"the stream is at version {event['version']}: {event['how']} {event['reason']}"
                    self.display.note(found.strip())
                case "step":
                    self.display.step(event)
                    self._carry_out_kills(event["step"])

    def _remember(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self.steps[event["step"]] = event
        elif event["event"] == "result":
            self.result = event

    def _carry_out_kills(self, step: int) -> None:
        for due in [kill for kill in self.kills if kill[1] <= step]:
            self.kills.remove(due)
            child = next(child for child in self.children if child.role == due[0])
            self.display.note(f"killing {child.role} with SIGKILL, as asked")
            kill(child)

    # -- the end

    def _finish(self) -> int:
        """Prints the summary; 0 only if every set of weights is bit-identical to the trainer's."""
        result = self.result
        if result is None:
            print("failed: the trainer ended without a result", file=sys.stderr)
            return 1
        rows = [row for _, row in sorted(self.steps.items()) if row["changed"] is not None]
        if rows:
            save_plot(rows, self.settings, self.folder.plot)
            restarts = sum(child.restarts for child in self.children)
            print_summary(rows, self.settings, seconds=time.monotonic() - self.started, restarts=restarts)
            print(f"  plot      {self.folder.plot}")
            print(f"  report    pulse report {self.folder.root} -o report.html")
        newcomer = pulse_rl.Subscriber(self.folder.store_address, stream=STREAM, threads=1)
        newcomer.sync()
        roots = {**result["workers"], "newcomer": pulse_rl.state_root(newcomer.state)}
        print(f"\n  trainer    {result['root']}  version {result['version']}")
        for name, root in roots.items():
            print(f"  {name:<10} {root}  {'bit-identical' if root == result['root'] else 'DIFFERENT'}")
        live = "the engines' parameters, read back" if self.settings.engine == "vllm" else "their live models"
        print(f"  (trainer and workers: {live}; newcomer: restored from the store alone)")
        complete = set(result["workers"]) == set(self.settings.worker_names)
        if not complete or set(roots.values()) != {result["root"]}:
            print("\nFAILED: the weights differ", file=sys.stderr)
            return 1
        print("\nevery worker holds the trainer's BF16 weights, bit for bit")
        return 0


def is_server(role: str) -> bool:
    """Whether the role is a vLLM server, which leads a group of processes and goes on until it is stopped."""
    return role.startswith("server-")


def kill(child: Child) -> None:
    """SIGKILL, for a server with all of its processes."""
    if is_server(child.role):
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
    else:
        child.process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ChildFailed(RuntimeError):
    """A process of the run died too often."""


def parse_kill(text: str, settings: Settings) -> tuple[str, int]:
    role, _, step = text.partition("@")
    if role not in settings.roles or not step.isdecimal():
        raise SystemExit(f"--kill {text}: expected for instance trainer@50 or worker-0@50")
    return role, int(step)
