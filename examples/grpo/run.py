"""What the programs of a run share, any of which may be killed at any moment: settings, places,
journals, processes."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pulse_rl

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: The name of the policy's stream in the store.
STREAM = "policy"
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.2
#: Longer than the 30 s that ``torchrun`` gives its processes to end.
STOP_SECONDS = 40.0
#: Exit status of a process whose peers did not do their part, so that starting it again is no help.
GAVE_UP = 4

T = TypeVar("T")
Event = dict[str, Any]


class RunFailed(RuntimeError):
    """A process of the run failed, or weights differ at the end."""


class PeerVanished(RuntimeError):
    """Another process of the run did not do its part in time."""


# -- settings and places


def option(default: Any, text: str) -> Any:
    """A field of the settings, with what ``--help`` says of it."""
    return field(default=default, metadata={"help": text})


class SavedSettings:
    """Base of dataclasses that are kept in a run's folder, where every process of the run finds
    them."""

    def save(self: DataclassInstance, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(asdict(self), indent=1) + "\n"
        write_file_atomically(path, lambda file: file.write(data.encode()))

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        for one in fields(cls):  # type: ignore[arg-type]
            text = f"{one.metadata['help']} (default {one.default})"
            parser.add_argument(
                "--" + one.name.replace("_", "-"), type=type(one.default), help=text
            )

    @classmethod
    def chosen(cls, arguments: argparse.Namespace, path: Path) -> Self:
        """The flags that were given, over those that an existing run was started with, over the
        defaults."""
        kept = json.loads(path.read_text()) if path.exists() else {}
        given = {one.name: getattr(arguments, one.name) for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**kept | {name: value for name, value in given.items() if value is not None})

    def require_positive(self: DataclassInstance, *but: str) -> None:
        for name, value in asdict(self).items():
            if name not in but and value <= 0:
                raise ValueError(f"{name} must be positive")


@dataclass(frozen=True)
class RunFolder:
    """The places in a run's folder. Trainers and workers share the store alone; the rest has one
    owner each."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def store_address(self) -> str:
        return (self.root / "store").absolute().as_uri()

    def checkpoint(self, role: str) -> Path:
        """A trainer's own: its weights, its optimizer's state and where it was."""
        return self.root / f"{role}.checkpoint"

    def journal(self, role: str) -> Path:
        """One JSON object a line that a process reports and the orchestrator shows."""
        return self.root / f"{role}.jsonl"

    def events(self, role: str) -> Path:
        """The library's events in one process, for ``pulse report``."""
        return self.root / f"events-{role}.jsonl"

    def log(self, role: str) -> Path:
        return self.root / f"{role}.log"

    def lock(self, role: str) -> Path:
        return self.root / f"{role}.lock"


def write_file_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """Lets ``write`` fill a file that then replaces ``path`` at once, also across a power cut."""
    aside = path.with_suffix(".unfinished")
    with aside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def sole_holder(path: Path, timeout: float = 20.0) -> Iterator[None]:
    """Holds a lock that the system frees when the process dies, however it dies.

    A predecessor gets some seconds to notice that its orchestrator is gone. Raises PeerVanished
    after that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PeerVanished(
                        f"another process holds {path}: is this role running already?"
                    ) from None
                time.sleep(0.1)
        yield


# -- a process of the run


class Alarm:
    """Ends a process whose peers are gone.

    ``parent`` is the process id of the orchestrator, None for a role started by hand. Orphans must
    not train on beside the processes that a second orchestrator starts.
    """

    def __init__(self, patience: float, parent: int | None) -> None:
        self.patience = patience
        self._parent = parent
        self.reset()

    def reset(self) -> None:
        self._since = time.monotonic()

    def check_parent(self) -> None:
        """Ends an orphan, with status 0: ``torchrun`` takes any other for a reason to start it
        again."""
        try:
            if self._parent is not None:
                os.kill(self._parent, 0)
        except ProcessLookupError:
            print("the process that started the run is gone", file=sys.stderr)
            raise SystemExit(0) from None

    def check(self, waiting_for: str) -> None:
        """Raises PeerVanished once ``patience`` seconds passed since the last `reset`."""
        self.check_parent()
        if time.monotonic() - self._since > self.patience:
            raise PeerVanished(
                f"waited {self.patience:.0f} s for {waiting_for}; see the other processes' logs"
            )


def wait_for(poll: Callable[[], T | None], alarm: Alarm, what: str) -> T:
    """What ``poll`` returns once it is not None."""
    alarm.check_parent()
    alarm.reset()
    while (found := poll()) is None:
        alarm.check(what)
        time.sleep(POLL_SECONDS)
    return found


def run_role(work: Callable[..., None], settings: type[SavedSettings], *options: str) -> int:
    """The ``main`` of a program of a run: ``DIR --parent PID`` and these options. Calls ``work``
    with the settings, the run's folder, an alarm and the options' values; returns the exit
    status."""
    parser = argparse.ArgumentParser(description=sys.modules[work.__module__].__doc__)
    parser.add_argument(
        "run", type=Path, metavar="DIR", help="the run's folder, with settings.json"
    )
    parser.add_argument(
        "--parent", type=int, help="the process without which this one must not go on"
    )
    for name in options:
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    folder = RunFolder(arguments.run.absolute())
    if not folder.settings.exists():
        raise SystemExit(f"there is no run in {folder.root}")
    loaded: Any = settings.load(folder.settings)
    given = {name: getattr(arguments, name) for name in options}
    role = "-".join([Path(sys.argv[0]).stem, *given.values(), os.environ.get("RANK", "0")])
    try:
        with sole_holder(folder.lock(role)):
            work(loaded, folder, Alarm(loaded.patience, arguments.parent), **given)
    except PeerVanished as error:
        print(f"{role}: {error}", file=sys.stderr)
        return GAVE_UP
    return 0


class Journal:
    """Appends JSON objects to a file, one a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file = path.open("a", buffering=1)
        if torn:
            self._file.write("\n")

    def write(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")


class JournalReader:
    """Reads the lines that were added since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        events = []
        for line in complete.splitlines():
            with suppress(
                json.JSONDecodeError
            ):  # torn by a SIGKILL in the middle of a write; it is reported again
                events.append(json.loads(line))
        return events


# -- the process that starts the others


class Orchestrator:
    """Starts the processes of a run, shows what they report, and leaves none behind. A process that
    dies is started again up to ``restarts`` times."""

    def __init__(self, folder: RunFolder, restarts: int = 0) -> None:
        self.folder, self.restarts = folder, restarts
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started = time.monotonic()
        self.died: Counter[str] = Counter()
        self._commands: dict[str, list[str]] = {}
        self._journals: dict[str, JournalReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Asks all processes to end, and kills those that do not."""
        running = [process for process in self.processes.values() if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        for role in list(self.processes):
            self.kill(role)

    def start(
        self, role: str, module: str, *options: str, launcher: Sequence[str] = (sys.executable,)
    ) -> None:
        """``python -m MODULE DIR --parent PID`` with these options, its output in the role's
        log."""
        run = [str(self.folder.root), "--parent", str(os.getpid())]
        self._commands[role] = [*launcher, "-m", module, *run, *options]
        self.follow(role)
        self._start(role)

    def _start(self, role: str) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            # Without it, trainers that torchrun starts again may find the addresses of those that
            # are gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self.folder.log(role).open("ab") as log:
            self.processes[role] = subprocess.Popen(
                self._commands[role],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # so that `kill` ends what it has started, too
            )

    def follow(self, role: str) -> None:
        """What is in the journal of ``role`` goes to `see`, from now on."""
        self._journals.setdefault(role, JournalReader(self.folder.journal(role)))

    def kill(self, role: str) -> None:
        """SIGKILL, with all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[role].pid, signal.SIGKILL)
        self.processes[role].wait()

    def running(self) -> bool:
        """Whether a process has not ended; waits a moment, takes what was reported, and starts
        again what died.

        Raises RunFailed for one that died too often, or that gave up.
        """
        time.sleep(LOOK_SECONDS)
        states = {role: process.poll() for role, process in self.processes.items()}
        self.read()
        for role, status in states.items():
            if status:
                self._look_after(role, status)
        return any(self.processes[role].poll() is None for role in self.awaited())

    def read(self) -> None:
        for role, journal in list(self._journals.items()):
            for event in journal.read():
                self.see(role, event)

    def _look_after(self, role: str, status: int) -> None:
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        if status == GAVE_UP or self.died[role] == self.restarts:
            log = self.folder.log(role)
            end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise RunFailed(f"{role} ended with {how}; the end of {log}:\n{end}")
        self.died[role] += 1
        note(f"{role} died ({how}) and is started again")
        self.kill(role)  # what it leaves behind
        self._start(role)

    def awaited(self) -> list[str]:
        """The roles whose ends are the end of the run."""
        return list(self.processes)

    def see(self, role: str, event: Event) -> None:
        """Takes what a process has reported."""


def orchestrate(
    name: str,
    doc: str | None,
    settings: type[SavedSettings],
    run: Callable[..., None],
    **options: Mapping[str, Any],
) -> int:
    """The ``main`` of ``python -m examples.NAME``: calls ``run`` with the settings, the run's
    folder and the values of these options; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=doc)
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="the run's folder; an existing run is resumed"
    )
    for option_name, facts in options.items():
        parser.add_argument(f"--{option_name}", **facts)
    settings.add_options(parser)
    arguments = parser.parse_args()
    folder = RunFolder(
        (arguments.run or Path("runs") / time.strftime(f"{name}-%Y%m%d-%H%M%S")).absolute()
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with sole_holder(folder.lock("run")):
            chosen = settings.chosen(arguments, folder.settings)
            chosen.save(folder.settings)  # type: ignore[misc]
            print(f"run folder: {folder.root}")
            run(chosen, folder, *(getattr(arguments, option_name) for option_name in options))
    except (RunFailed, PeerVanished, ValueError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"\nstopped; resume with: python -m examples.{name} --run {folder.root}",
            file=sys.stderr,
        )
        return 130
    return 0


# -- what is shown


def note(text: str) -> None:
    print(f"· {text}", flush=True)


class Columns:
    """Prints rows of cells below their names, each column as wide as it is said."""

    def __init__(self, **widths: int) -> None:
        self._widths = {name.replace("_", " "): width for name, width in widths.items()}
        self._headed = False

    def row(self, *cells: str) -> None:
        if not self._headed:
            print("  ".join(name.rjust(width) for name, width in self._widths.items()))
            self._headed = True
        pairs = zip(cells, self._widths.values(), strict=True)
        print("  ".join(cell.rjust(width) for cell, width in pairs), flush=True)


def compare(expected: str, roots: Mapping[str, str]) -> None:
    """Prints whose weights have which root. Raises RunFailed where one is not ``expected``."""
    for name, root in roots.items():
        print(f"  {name:<24} {root}  {'bit-identical' if root == expected else 'DIFFERENT'}")
    if set(roots.values()) != {expected}:
        raise RunFailed("the weights differ")


def new_worker_root(store: pulse_rl.Store, stream: str = STREAM) -> str:
    """The root of the newest weights that the store alone gives."""
    with pulse_rl.Subscriber(store, stream=stream, threads=1) as worker:
        worker.sync()
        assert worker.root is not None
        return worker.root
