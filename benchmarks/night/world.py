"""The processes of a night, what restarts them, and the oracle that judges their bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet import serve, start
from pulse_rl import ObjectInfo, Store, open_store

from .roles import STREAM, digest_of
from .store import Proxy, free_port

WORKERS = ("direct", "served", "python")
RESTART_SECONDS, FOLD_SECONDS = 1.0, 20.0
_TMPFS_BYTES = 512 << 20


@dataclass
class Role:
    """A process and its command. It is started again when it has ended, ``again`` seconds later;
    ``cron``: as it is meant to."""

    name: str
    command: list[str]
    again: float = RESTART_SECONDS
    cron: bool = False
    process: subprocess.Popen[bytes] | None = None
    ended: float | None = None


@dataclass
class Held:
    """What a worker holds, as the oracle read it."""

    version: int
    sha: str


@dataclass
class World:
    """All of it, in ``folder``. ``disks``: mounts disks that may be filled."""

    folder: Path
    seed: int
    keep: int
    caches: bool
    disks: bool = True
    #: The interpreter of an environment that has vLLM and this library; None: no vLLM follows.
    vllm: str | None = None
    roles: dict[str, Role] = field(default_factory=dict)
    #: Deaths by role: the exit statuses that the supervisor has seen.
    deaths: list[tuple[str, int]] = field(default_factory=list)
    #: The latest of each worker; and all that was ever seen, as (worker, version, digest).
    held: dict[str, Held] = field(default_factory=dict)
    seen: set[tuple[str, int, str]] = field(default_factory=set)
    #: When each digest was to be published; and the digests published as each version.
    began: dict[str, float] = field(default_factory=dict)
    published: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    confirmed: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def __enter__(self) -> World:
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._read: Counter[str] = Counter()
        self._shown: dict[str, str] = {}
        self._keys = 0
        self.mounts: list[Path] = []
        self._moto, self._pipe = start(serve)
        behind = self._pipe.recv()
        self.proxy = Proxy(behind, "key-0", self.seed)
        self.store = f"s3://bucket/night?endpoint={self.proxy.address}&region=us-east-1"
        #: The store behind the proxy, for those who damage it.
        self.behind: Store = open_store(
            f"s3://bucket/night?endpoint={behind}&region=us-east-1",
            access_key_id="key",
            secret_access_key="secret",
        )
        for name in ("logs", "clock", "caches"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.workers = [*WORKERS, *(["vllm"] if self.vllm else [])]
        self.preload = _built_clock(self.folder)
        self.renew_keys()
        for name in ("near", "direct", "served"):
            self._mount(self.folder / name)
        self._describe()
        for role in self.roles.values():
            self._start(role)
        for work in (self._supervise, self._judge):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with self._lock:
            for role in self.roles.values():
                if role.process is not None and role.process.poll() is None:
                    role.process.kill()
                    role.process.wait()
        for mount in self.mounts:
            subprocess.run(["umount", "-l", mount], check=False)
        self._pipe.send("end")
        self._moto.join(10)

    # -- processes

    def _describe(self) -> None:
        roles = [sys.executable, "-m", "benchmarks.night.roles"]
        pulse = [str(Path(sys.executable).parent / "pulse")]
        near, port = self.folder / "near", free_port()
        common = ["--stream", STREAM, "--threads", "1"]
        follow = [*common, "--allow-recreated", "--poll", "1"]

        def cached(name: str) -> list[str]:
            return ["--cache", str(self.folder / "caches" / name)] if self.caches else []

        def out(name: str) -> list[str]:
            return ["--out", str(self.folder / name / "out"), "--name", name, *cached(name)]

        url = f"http://127.0.0.1:{port}"
        commands = {
            "trainer": [*roles, "trainer", str(self.folder), self.store, "--keep", str(self.keep)],
            "relay": [*pulse, "relay", self.store, str(near), *follow, "--keep", str(self.keep)],
            "serve": [*pulse, "serve", str(near), "--port", str(port)],
            "direct": [*pulse, "follow", self.store, *follow, *out("direct")],
            "served": [*pulse, "follow", url, self.store, *follow, *out("served")],
            "python": [*roles, "worker", str(self.folder), self.store, *cached("python")],
        }
        if self.vllm is not None:
            commands["trainer"].append("--for-vllm")
            own = [self.vllm, *roles[1:], "vllm", str(self.folder), self.store, *cached("vllm")]
            commands["vllm"] = own
        self.roles = {name: Role(name, command) for name, command in commands.items()}
        fold = [*pulse, "fold", self.store, *common]
        self.roles["fold"] = Role("fold", fold, FOLD_SECONDS, cron=True)

    def _start(self, role: Role) -> None:
        clock = self.folder / "clock" / role.name
        if not clock.exists():
            clock.write_bytes(bytes(8))
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        env |= {
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / "credentials"),
            "AWS_CONFIG_FILE": str(self.folder / "config"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if self.preload and not role.cron and role.name != "vllm":
            env |= {"LD_PRELOAD": str(self.preload), "CLOCK_OFFSET_FILE": str(clock)}
        with (self.folder / "logs" / f"{role.name}.log").open("ab") as log:
            log.write(f"-- {time.monotonic():.1f}: started\n".encode())
            role.process = subprocess.Popen(role.command, stdout=log, stderr=log, env=env)
        role.ended = None

    def _supervise(self) -> None:
        """Starts again what has ended, as systemd does with Restart=always."""
        while not self._stopping.wait(0.1):
            with self._lock:
                for role in self.roles.values():
                    if role.process is None:
                        continue
                    status = role.process.poll()
                    if status is not None and role.ended is None:
                        role.ended = time.monotonic()
                        if not role.cron:
                            self.deaths.append((role.name, status))
                    if role.ended is not None and time.monotonic() > role.ended + role.again:
                        self._start(role)

    def signal(self, name: str, number: signal.Signals) -> None:
        with self._lock:
            process = self.roles[name].process
            if process is not None and process.poll() is None:
                process.send_signal(number)

    def forget(self, name: str) -> None:
        """Kills a worker or the relay and deletes what it has on its disk: a new machine."""
        with self._lock:
            process = self.roles[name].process
            if process is not None:
                process.kill()
                process.wait()
            places = [self.folder / "caches" / name, self.folder / name / "out"]
            if name == "relay":
                places = list((self.folder / "near").iterdir())
            for place in places:
                shutil.rmtree(place, ignore_errors=True)

    def renew_keys(self) -> None:
        """Writes new keys into the file that all processes read; the store takes these alone."""
        self._keys += 1
        new, path = self.folder / "credentials.new", self.folder / "credentials"
        new.write_text(
            f"[default]\naws_access_key_id = key-{self._keys}\naws_secret_access_key = secret\n"
        )
        os.replace(new, path)
        self.proxy.keys = {f"key-{self._keys}"}

    def expire_keys(self, refusal: str) -> None:
        self.proxy.refusal = refusal
        self.proxy.keys = set()

    def step_clock(self, name: str, seconds: int) -> None:
        """Sets a process's clock so many seconds off."""
        with (self.folder / "clock" / name).open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def _mount(self, place: Path) -> None:
        """A disk of its own, which may be filled, where this may be done (Linux, root)."""
        place.mkdir()
        mounted = self.disks and sys.platform == "linux" and os.geteuid() == 0
        command = ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "tmpfs", str(place)]
        if mounted and subprocess.run(command, check=False, capture_output=True).returncode == 0:
            self.mounts.append(place)

    # -- the oracle

    def _judge(self) -> None:
        while not self._stopping.wait(0.2):
            with self._lock:
                for line in self._new_lines("trainer"):
                    if "version" in line:
                        self.published[line["version"]].add(line["sha"])
                        self.confirmed.add(line["sha"])
                    else:
                        self.began[line["sha"]] = line["at"]
                for name in ("python", "vllm"):
                    for line in self._new_lines(name):
                        if not line["proved"]:
                            self.wrong.append(f"{name}, version {line['version']}: not the root")
                        self._holds(name, Held(line["version"], line["sha"]))
                for name in ("direct", "served"):
                    # While its folder is replaced a reader may find it gone.
                    with suppress(OSError, ValueError, KeyError):
                        self._look_at(name)

    def _new_lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[name])
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read[name] += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]

    def _look_at(self, name: str) -> None:
        current = os.path.realpath(self.folder / name / "out" / ".pulse" / "current")
        path = Path(current) / "model.safetensors"
        key = f"{current} {path.stat().st_ino} {path.stat().st_mtime_ns}"
        if self._shown.get(name) == key:
            return
        data = path.read_bytes()  # its file keeps its content while it is open
        nbytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + nbytes])
        version = int(header.pop("__metadata__")["pulse.version"])
        body = memoryview(data)[8 + nbytes :]
        tensors = {each: body[slice(*of["data_offsets"])] for each, of in header.items()}
        self._shown[name] = key
        self._holds(name, Held(version, digest_of(dict(tensors))))

    def _holds(self, name: str, held: Held) -> None:
        self.held[name] = held
        self.seen.add((name, held.version, held.sha))
        if held.sha not in self.began:
            self.wrong.append(f"{name}, version {held.version}: bits that nobody has published")

    def misnumbered(self) -> list[str]:
        """What was seen under a number of which the trainer has published other bits alone."""
        with self._lock:
            return [
                f"{name}, version {version}: the bits of another version"
                for name, version, sha in self.seen
                if sha in self.confirmed and sha not in self.published[version]
            ]

    def late(self, since: float) -> list[str]:
        """The workers that do not hold what was published after ``since``."""
        with self._lock:
            return [
                name
                for name in self.workers
                if name not in self.held or self.began.get(self.held[name].sha, 0.0) <= since
            ]

    # -- objects

    def objects(self, kind: str) -> list[ObjectInfo]:
        """The objects of a kind in the store, the newest last."""
        folder, ending = KINDS[kind]
        found = [i for i in self.behind.list(f"{STREAM}/{folder}") if i.name.endswith(ending)]
        if folder == "links":
            found = [info for info in found if ("anchor" in info.name) == (kind == "anchor link")]
        return sorted(found, key=lambda info: (info.modified, info.name))

    def files(self, place: Path, kind: str | None = None) -> list[Path]:
        """The objects of a kind in a store that is a folder; of all kinds, the newest last."""
        folder, ending = KINDS[kind] if kind else ("", "")
        found = (place / STREAM / folder).rglob(f"*{ending}") if kind else place.rglob("*")
        return sorted((p for p in found if p.is_file()), key=lambda path: path.stat().st_mtime_ns)

    def backup(self) -> dict[str, bytes]:
        found = {}
        for info in self.behind.list(STREAM):
            with suppress(Exception):  # deleted since it was listed
                found[info.name] = self.behind.get(info.name)
        return found

    def restore(self, saved: dict[str, bytes]) -> int:
        """Puts back what is missing, and deletes what was not there. How many objects that was."""
        now = {info.name for info in self.behind.list(STREAM)}
        for name in now - saved.keys():
            self.behind.delete(name)
        for name in saved.keys() - now:
            self.behind.put(name, saved[name])
        return len(now ^ saved.keys())


def _built_clock(folder: Path) -> Path | None:
    """The library that moves clocks; None where there is no compiler, or no Linux."""
    compiler, built = shutil.which("cc"), folder / "clock.so"
    if compiler is None or sys.platform != "linux":
        return None
    source = Path(__file__).with_name("clock.c")
    command: list[str | Path] = [compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"]
    return built if subprocess.run(command, check=False).returncode == 0 else None


#: The folder and the ending of each kind of object below the stream.
KINDS = {
    "patch": ("payloads", ".patch"),
    "shard": ("payloads", ".safetensors"),
    "manifest": ("versions", ".json"),
    "digests": ("digests", ""),
    "heartbeat": ("workers", ""),
    "fold link": ("links", ""),
    "anchor link": ("links", ""),
}
