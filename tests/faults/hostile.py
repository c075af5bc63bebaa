"""A hostile co-writer in real time: one publisher and three trusting workers, processes of their
own, over a folder.

The co-writer writes, replaces, deletes and replays what it likes for some seconds, then rests and
leaves everything as it is; the publisher and the workers never rest. The publisher keeps a record
outside of the store. Checked: what a live model holds is, to the last bit, a version that the
publisher has signed, and never an older one than before; nobody meets an error that is not the
library's; and once the co-writer rests, everybody reaches the head in time.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pulse_rl import Bits, LocalStore, PulseError, Subscriber, state_root
from pulse_rl.errors import PublisherConflict
from pulse_rl.stream.manifest import parse
from pulse_rl.sync.gc import gc_stream
from tests.support.histories import named_in_small_patches
from tests.support.publishers import tuned

from .cowriter import KINDS, CoWriter
from .interrupts import NumpyModel, changed
from .model import STREAM, Committed, Snapshot, check
from .world import SIGNER, STREAM_ID

_WORKERS = 3
_SECONDS = 300.0
_RAGE_SECONDS = 12.0
_MAX_SECONDS = 60.0  # from the co-writer's rest until everybody must be at the head
_POLL_SECONDS = 0.05
_ACTS_A_SECOND = 15.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything is: the store, the records outside of it, and what all processes are
    told."""

    store: Path
    records: Path
    calm: Flag
    ended: Flag


class Folder:
    """The store's objects as files, for one who does not keep to the protocol."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self, folder: str) -> list[str]:
        found = (self._root / folder).rglob("*") if (self._root / folder).is_dir() else ()
        return sorted(str(path.relative_to(self._root)) for path in found if not path.is_dir())

    def peek(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except OSError:
            return None

    def plant(self, name: str, data: bytes) -> None:
        path = self._root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)  # in place: a reader may see half of it
        except OSError:
            return

    def delete(self, name: str) -> None:
        path = self._root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def odd_file(self, rng: Random) -> None:
        """A folder, a link or a pipe in place of an object."""
        name = rng.choice(self.names(STREAM) or [f"{STREAM}/versions/000000000000.json"])
        path = self._root / name
        self.delete(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        how = rng.choice(("folder", "link", "pipe"))
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to("/etc/hostname")
        else:
            os.mkfifo(path)


class Seen:
    """What the co-writer knows of the stream: the manifests that it has seen."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.versions: dict[int, Committed] = {}
        self.states: dict[str, Snapshot] = {}

    @property
    def head(self) -> int | None:
        return max(self.versions, default=None)

    def look(self) -> None:
        for name in self._folder.names(f"{STREAM}/versions")[-20:]:
            data, number = self._folder.peek(name), name.rpartition("/")[2].removesuffix(".json")
            if data and number.isdigit() and int(number) not in self.versions:
                try:
                    said = parse(data, stream=STREAM, version=int(number))
                except PulseError:
                    continue
                if (
                    said.signature
                    and said.signature.key == SIGNER.public_key
                    and said.stream_id == STREAM_ID
                ):
                    self.versions[said.version] = Committed(
                        data, said.root, said.aliases, bool(said.anchor), ""
                    )


def rage(place: Place, seed: int) -> None:
    """The co-writer's process."""
    rng, folder = Random(seed), Folder(place.store)
    seen = Seen(folder)
    cowriter = CoWriter(folder, seen, SIGNER)  # type: ignore[arg-type]
    while not place.ended.is_set():
        if place.calm.is_set():
            time.sleep(0.05)
            continue
        seen.look()
        cowriter.watch(rng)
        if rng.random() < 0.05:
            folder.odd_file(rng)
        else:
            KINDS[rng.choice(list(KINDS))](cowriter, rng)
        time.sleep(rng.random() * 2 / _ACTS_A_SECOND)


@named_in_small_patches()
def publish(place: Place, seed: int) -> None:
    """The publisher's process: a version whenever it can. Its record has each root before it is
    published, and each version once it is said to be committed."""
    numbers, rng = np.random.default_rng(seed), Random(seed)
    state = {"embed": Bits(numbers.integers(0x3C00, 0x4000, (200, 50), np.uint16), "BF16")}
    publisher, errors = None, Counter[str]()
    with (place.records / "publisher").open("a", buffering=1) as record:
        while not place.ended.is_set():
            state = changed(numbers, state)
            root = state_root(state)
            record.write(f"offered {root}\n")
            try:
                publisher = publisher or tuned(
                    LocalStore(place.store),
                    stream=STREAM,
                    history=True,
                    signer=SIGNER,
                    stream_id=STREAM_ID,
                    folds=(2, 4),
                    threads=1,
                )
                published = publisher.publish(
                    state, anchor=place.calm.is_set() or rng.random() < 0.1
                )
                record.write(f"committed {published.version} {root}\n")
                if rng.random() < 0.05:
                    keys = [SIGNER.public_key]
                    gc_stream(
                        place.store.as_uri(),
                        STREAM,
                        keep=20,
                        trusted_keys=keys,
                        stream_id=STREAM_ID,
                    )
            except PublisherConflict:
                errors["conflict"] += 1
                publisher = None
            except PulseError as error:
                errors[error.kind] += 1
            if rng.random() < 0.01:
                publisher = None
            time.sleep(_POLL_SECONDS)
        record.writelines(f"error {kind} {number}\n" for kind, number in errors.items())


def follow(place: Place, number: int, seed: int) -> None:
    """A worker's process. Its record has every version that its live model came to hold, with the
    model's own root."""
    rng, errors = Random(seed), Counter[str]()
    cache = place.records / f"cache-{number}" if number == 1 else None
    with (place.records / f"worker-{number}").open("a", buffering=1) as record:
        while not place.ended.is_set():
            live = NumpyModel()
            record.write("started\n")
            subscriber = Subscriber(
                LocalStore(place.store),
                stream=STREAM,
                trusted_keys=[SIGNER.public_key],
                stream_id=STREAM_ID,
                cache=cache,
                threads=1,
            )
            while not place.ended.is_set() and (
                number < _WORKERS or rng.random() > 0.02 or place.calm.is_set()
            ):
                try:
                    update = subscriber.sync()
                except PulseError as error:
                    errors[error.kind] += 1
                    update = None
                if update is not None:
                    live.apply(update)
                    update.acknowledge()
                    record.write(f"holds {update.version} {live.root()}\n")
                time.sleep(_POLL_SECONDS)
        record.writelines(f"error {kind} {number}\n" for kind, number in errors.items())


class Judge:
    """Reads the records as they grow, and finds fault with them."""

    def __init__(self, records: Path) -> None:
        self._records = records
        self._read = Counter[str]()
        self._offered: set[str] = set()
        self._committed: dict[int, set[str]] = {}
        self.head = -1
        self.at: dict[str, int] = {}
        self.counts = Counter[str]()

    def look(self) -> None:
        # The workers' records first: what these hold was offered before, and is in the publisher's
        # by then.
        held = {f"worker-{k}": self._lines(f"worker-{k}") for k in range(1, _WORKERS + 1)}
        for words in self._lines("publisher"):
            if words[0] == "offered":
                self._offered.add(words[1])
            elif words[0] == "committed":
                self.head = int(words[1])
                self._committed.setdefault(self.head, set()).add(words[2])
                self.counts["versions"] += 1
            else:
                self.counts[words[1]] += int(words[2])
        for worker, lines in held.items():
            for words in lines:
                if words[0] == "started":
                    self.at.pop(worker, None)
                elif words[0] == "holds":
                    self._judge(worker, int(words[1]), words[2])
                else:
                    self.counts[words[1]] += int(words[2])

    def _judge(self, worker: str, version: int, root: str) -> None:
        check(
            root in self._offered,
            f"{worker} holds version {version} with a root that nobody has signed: {root}",
        )
        known = self._committed.get(version)
        if known is not None and root not in known and version < self.head:
            # A commit whose call failed is not in the record; two of one number are only possible
            # after a deletion.
            check(
                not self._committed_elsewhere(root, version),
                f"{worker} holds {root} as version {version}",
            )
        check(
            version >= self.at.get(worker, -1),
            f"{worker} went back from {self.at.get(worker)} to {version}",
        )
        self.at[worker] = version
        self.counts["checked"] += 1

    def _committed_elsewhere(self, root: str, version: int) -> bool:
        return any(root in roots for other, roots in self._committed.items() if other != version)

    def _lines(self, name: str) -> list[list[str]]:
        path = self._records / name
        if not path.exists():
            return []
        with path.open() as file:
            file.seek(self._read[name])
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read[name] += len(whole.encode())
        return [line.split(maxsplit=2) for line in whole.splitlines()]


def run(seconds: float, seed: int) -> Counter[str]:
    """So many seconds of it; what happened, with the errors that were met. Raises Violation, and
    RuntimeError where a process has ended."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        place = Place(
            Path(folder) / "store", Path(folder) / "records", context.Event(), context.Event()
        )
        place.store.mkdir()
        place.records.mkdir()
        processes = [
            context.Process(target=publish, args=(place, seed), daemon=True, name="publisher")
        ]
        processes += [
            context.Process(
                target=follow, args=(place, k, seed + k), daemon=True, name=f"worker-{k}"
            )
            for k in range(1, _WORKERS + 1)
        ]
        processes.append(
            context.Process(target=rage, args=(place, seed + 99), daemon=True, name="co-writer")
        )
        for process in processes:
            process.start()
        judge, started = Judge(place.records), time.monotonic()
        try:
            while not judge.counts["rests"] or time.monotonic() - started < seconds:
                _watch(judge, processes, min(_RAGE_SECONDS, seconds))
                place.calm.set()
                judge.counts["seconds behind"] += round(_catch_up(judge, processes))
                judge.counts["rests"] += 1
                place.calm.clear()
            place.ended.set()
            for process in processes:
                process.join(30)
            judge.look()
        finally:
            place.ended.set()
            for process in processes:
                process.kill()
                process.join()
    return judge.counts


def _watch(judge: Judge, processes: list[Any], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        time.sleep(0.2)
        _look(judge, processes)


def _catch_up(judge: Judge, processes: list[Any]) -> float:
    """The seconds until every worker has reached what the publisher committed after the co-writer's
    last act."""
    time.sleep(0.5)
    started = time.monotonic()
    _look(judge, processes)
    rested = judge.head
    goal: int | None = None
    while True:
        _look(judge, processes)
        if goal is None and judge.head > rested:
            goal = judge.head
        behind = [
            f"worker-{k}"
            for k in range(1, _WORKERS + 1)
            if goal is None or judge.at.get(f"worker-{k}", -1) < goal
        ]
        if not behind:
            return time.monotonic() - started
        waited = time.monotonic() - started
        check(
            waited < _MAX_SECONDS,
            f"{waited:.0f} s after the co-writer's rest {behind} are not at {goal}: {judge.at}",
        )
        time.sleep(0.05)


def _look(judge: Judge, processes: list[Any]) -> None:
    judge.look()
    dead = [process.name for process in processes if process.exitcode is not None]
    if dead:
        raise RuntimeError(
            f"{', '.join(dead)} ended: an error that is not the library's, see above"
        )


def sequence(seed: int) -> Counter[str]:
    return run(_SECONDS, seed)
