"""Shapes of real models, published and followed with mapped states: seconds, peak memory, a kill in
the middle.

``python -m benchmarks.sizes --shape 8b --dir DIR --log benchmarks/results/FILE`` needs twice the
state's bytes on DIR, and ``--pool`` GB. Each part is a process of its own. The trainer's weights
are views of a mapped file of ``--pool`` GB, which overlap: as of weights that are on a device,
hardly any of them are in this machine's memory.

A first publish is killed when it has hashed half of the state, and begins again; then ``--steps``
versions, each changing ``--density`` of the weights; then a first sync, which is killed, too, the
newest version, and a restart. ``--memory`` holds the states in memory instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

import pulse_rl
from pulse_rl.events import BaselineRestored, Event, FallbackUsed, Progress, Synced

_CHUNK = 1 << 22
_STEP = 1 << 24


class Shape(NamedTuple):
    """A decoder as Qwen3 has it; with ``experts``, of mixtures."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    key_value_heads: int = 8
    head: int = 128
    vocabulary: int = 151936
    tied: bool = True
    experts: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, q, kv = self.hidden, self.heads * self.head, self.key_value_heads * self.head
        yield "model.embed_tokens.weight", (self.vocabulary, h)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name, shape in (
                ("q_proj", (q, h)),
                ("k_proj", (kv, h)),
                ("v_proj", (kv, h)),
                ("o_proj", (h, q)),
            ):
                yield f"{layer}self_attn.{name}.weight", shape
            for name in ("q_norm", "k_norm"):
                yield f"{layer}self_attn.{name}.weight", (self.head,)
            if self.experts:
                yield f"{layer}mlp.gate.weight", (self.experts, h)
            for expert in range(max(self.experts, 1)):
                of = f"{layer}mlp.experts.{expert}." if self.experts else f"{layer}mlp."
                for name in ("gate_proj", "up_proj"):
                    yield f"{of}{name}.weight", (self.intermediate, h)
                yield f"{of}down_proj.weight", (h, self.intermediate)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}{name}.weight", (h,)
        yield "model.norm.weight", (h,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, h)


SHAPES = {
    "tiny": Shape(256, 4, 768, 4, vocabulary=20000),
    "0.6b": Shape(1024, 28, 3072, 16),
    "1.7b": Shape(2048, 28, 6144, 16),
    "4b": Shape(2560, 36, 9728, 32),
    "8b": Shape(4096, 36, 12288, 32, tied=False),
    # 18,867 tensors: all of Qwen3-30B-A3B's, with a sixteenth of each expert's rows and columns.
    "30b-a3b/16": Shape(512, 48, 192, 8, 1, vocabulary=37984, tied=False, experts=128),
    # The same bytes in 300 tensors.
    "few": Shape(2240, 27, 7552, 16, 8, vocabulary=37984, tied=False),
}


class Weights:
    """The tensors of a shape, as views of one mapped file."""

    def __init__(self, shape: Shape, path: Path, pool: float) -> None:
        tensors = list(shape.tensors())
        self.elements = sum(prod(dims) for _, dims in tensors)
        self.count = len(tensors)
        longest = max(prod(dims) for _, dims in tensors)
        elements = min(self.elements, max(int(pool * 5e8), longest + 2 * self.count)) + self.count
        new = not path.exists()
        self.pool: Any = np.memmap(path, np.uint16, "w+" if new else "r+", shape=(elements,))
        if new:
            for start in range(0, elements, _STEP):
                rng = np.random.default_rng(start)
                found = rng.standard_normal(min(_STEP, elements - start), np.float32) * np.float32(
                    0.02
                )
                self.pool[start : start + _STEP] = found.view(np.uint32) >> 16
        self.tensors, at = {}, 0
        for number, (name, dims) in enumerate(tensors):
            size = prod(dims)
            if (
                at + size > elements
            ):  # around, one element further each time, so that no two are the same
                at = number
            self.tensors[name] = pulse_rl.Bits(self.pool[at : at + size].reshape(dims), "BF16")
            at += size

    def step(self, number: int, density: float) -> None:
        """Changes ``density`` of the elements by one unit in the last place."""
        for start in range(0, len(self.pool), _STEP):
            rng = np.random.default_rng((number, start))
            chunk = self.pool[start : start + _STEP]
            positions = np.cumsum(rng.geometric(density, int(len(chunk) * density * 1.1)))
            positions = positions[: np.searchsorted(positions, len(chunk))]
            chunk[positions] += (
                np.where(rng.random(len(positions)) < 0.5, 1, -1).astype(np.int16).view(np.uint16)
            )


class Peaks:
    """The most anonymous memory and mapped files that this process had within a ``with``, in bytes;
    and its seconds, by the clock and of the processor."""

    def __enter__(self) -> Self:
        self.anonymous = self.mapped = 0
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._before = _resident()[0]
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            anonymous, mapped = _resident()
            self.anonymous = max(self.anonymous, anonymous - self._before)
            self.mapped = max(self.mapped, mapped)

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._ended.set()
        self._thread.join()

    def said(self, **more: Any) -> dict[str, Any]:
        seconds = {"seconds": round(self.seconds, 2), "cpu": round(self.cpu, 2)}
        return seconds | {"anonymous": self.anonymous, "mapped": self.mapped} | more


def _resident() -> tuple[int, int]:
    """(RssAnon, RssFile) in bytes."""
    said = dict(
        line.split(":")
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return tuple(int(said[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def _tell(what: str, **found: Any) -> None:
    print(json.dumps({"what": what} | found), flush=True)


def _killed_at(share: float, stages: tuple[str, ...]) -> Callable[[Event], None]:
    """Kills this process when one of the ``stages`` has done so much."""

    def listen(event: Event) -> None:
        if (
            isinstance(event, Progress)
            and event.stage in stages
            and event.done >= share * event.total
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    return listen


def publish(given: argparse.Namespace) -> None:
    """The publisher's process: ``given.steps`` versions, or one that is killed."""
    weights = Weights(SHAPES[given.shape], given.dir / "pool", given.pool)
    nbytes = 2 * weights.elements
    folder = None if given.memory else given.dir / "p"
    events: list[Event] = []
    listen = _killed_at(0.5, ("digest", "upload")) if given.kill else events.append
    with pulse_rl.Publisher(
        str(given.dir / "store"), stream="policy", baseline=folder, on_event=listen
    ) as publisher:
        for number in range(given.first, given.first + given.steps):
            if number:
                weights.step(number, given.density)
            events.clear()
            with Peaks() as peaks:
                done = publisher.publish(weights.tensors)
            how = [e.how for e in events if isinstance(e, BaselineRestored)]
            _tell(
                "publish",
                **peaks.said(
                    version=done.version,
                    tensors=weights.count,
                    nbytes=nbytes,
                    changed=done.density,
                    patch_bytes=done.patch_bytes,
                    phases={name: round(s, 2) for name, s in done.phases.items()},
                    found=how,
                    root=done.root,
                ),
            )
        head = publisher.head()
        assert head
    del weights
    _tell("header", **_headers(given.dir / "store"))


def _headers(store: Path) -> dict[str, Any]:
    """The bytes of the newest patch's header."""
    patches = sorted((store / "policy").rglob("*.patch"), key=lambda file: file.stat().st_mtime)
    if not patches:
        return {}
    with patches[-1].open("rb") as file:
        header = 28 + int.from_bytes(file.read(16)[12:], "little")
    return {"patch": patches[-1].stat().st_size, "header": header}


def follow(given: argparse.Namespace) -> None:
    """The subscriber's process: a sync to each version, or one that is killed."""
    events: list[Event] = []
    listen = _killed_at(0.5, ("restore",)) if given.kill else events.append
    folder = None if given.memory else given.dir / "s"
    with pulse_rl.Subscriber(
        str(given.dir / "store"), stream="policy", state=folder, on_event=listen
    ) as worker:
        for target in range(given.first, given.first + given.steps):
            events.clear()
            with Peaks() as peaks:
                update = worker.sync(target)
            assert update
            update.acknowledge()
            # What is held while the state moves would have it move in a copy.
            full, payload = update.full, update.payload_bytes
            del update
            fetched = sum(e.fetched_bytes for e in events if isinstance(e, Synced))
            not_used = [e.reason for e in events if isinstance(e, FallbackUsed)]
            phases = {
                k: round(s, 2) for e in events if isinstance(e, Synced) for k, s in e.phases.items()
            }
            _tell(
                "sync",
                **peaks.said(
                    version=target,
                    full=full,
                    fetched=fetched,
                    payload=payload,
                    phases=phases,
                    not_used=not_used,
                    root=worker.root,
                ),
            )


def _run(
    log: list[dict[str, Any]], given: argparse.Namespace, role: str, name: str, **options: Any
) -> None:
    """One process; what it says goes into ``log``."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.sizes",
        "--role",
        role,
        "--shape",
        given.shape,
        "--dir",
        given.dir,
    ]
    command += ["--pool", str(given.pool), "--density", str(given.density)]
    command += [f"--{key}={value}" for key, value in options.items() if not isinstance(value, bool)]
    command += ["--kill"] * options.get("kill", False) + ["--memory"] * given.memory
    began = time.perf_counter()
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != (-signal.SIGKILL if options.get("kill") else 0):
        raise SystemExit(f"{name} ended with {done.returncode}")
    said = [json.loads(line) for line in done.stdout.splitlines()] or [
        {"what": role, "killed": True}
    ]
    for each in said:
        log.append({"part": name, "process_seconds": round(time.perf_counter() - began, 1)} | each)
        print(_line(log[-1]), flush=True)


def _line(said: dict[str, Any]) -> str:
    nbytes = 2 * sum(prod(dims) for _, dims in SHAPES[_SHAPE[0]].tensors())
    if "seconds" not in said:
        return f"{said['part']:40} {said}"
    shares = (
        f"anonymous {said['anonymous'] / nbytes:5.3f} states, mapped {said['mapped'] / 1e9:5.1f} GB"
    )
    times = f"{said['seconds']:7.2f} s {said['cpu']:7.2f} cpu"
    return f"{said['part']:40} {times}  {shares}  {said['phases']} {said['root'][:8]}"


_SHAPE = [""]


def machine() -> dict[str, Any]:
    """This machine in words, the date and the revision."""
    cpu = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cores": os.cpu_count(),
        "processor": cpu[0] if cpu else platform.machine(),
        "memory": total,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": revision,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument(
        "--dir", type=Path, required=True, help="a folder on a disk; what it makes there it deletes"
    )
    parser.add_argument("--pool", type=float, default=4.0, help="GB")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--role", choices=["publish", "follow"], help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        (publish if given.role == "publish" else follow)(given)
        return
    _SHAPE[0] = given.shape
    given.dir.mkdir(parents=True)
    options = " --memory" * given.memory + " --no-kills" * given.no_kills
    about = {"shape": given.shape, "density": given.density, "pool": given.pool, "options": options}
    log: list[dict[str, Any]] = [machine() | about]
    print(log[0], flush=True)
    try:
        Weights(SHAPES[given.shape], given.dir / "pool", given.pool).pool.flush()
        if not given.no_kills:
            _run(log, given, "publish", "first publish, killed", steps=1, kill=True)
        _run(log, given, "publish", "first publish", steps=1)
        _run(log, given, "publish", "publisher starts again", first=1, steps=given.steps)
        (given.dir / "pool").unlink()
        shutil.rmtree(given.dir / "p", ignore_errors=True)
        if not given.no_kills:
            _run(log, given, "follow", "first sync, killed", steps=1, kill=True)
        _run(log, given, "follow", "first sync, then each version", steps=given.steps + 1)
        _run(log, given, "follow", "subscriber starts again", first=given.steps, steps=1)
        roots = {(each["version"], each["root"]) for each in log if "root" in each}
        print("roots equal:", len(roots) == given.steps + 1)
        log.append({"roots_equal": len(roots) == given.steps + 1})
    finally:
        shutil.rmtree(given.dir, ignore_errors=True)
        if given.log:
            given.log.parent.mkdir(parents=True, exist_ok=True)
            given.log.write_text("".join(json.dumps(each) + "\n" for each in log))


if __name__ == "__main__":
    main()
