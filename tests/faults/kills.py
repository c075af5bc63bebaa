"""Real processes that SIGKILL themselves at one store call after another, and what is left of the stream.

    python -m tests.faults kills --all                             the long run of every role
    python -m tests.faults kills publisher --versions 5 [--json]   every kill point of one role

A run is repeated with the kill at its call 1, 2, 3 … until it gets through: killed before the call has any effect,
after it has all of it, and in its midst (a payload half written, a created object not yet linked). After each kill a
fresh process goes on to the end, and everything is checked. Processes are forked from a parent that has only imported
the library: it has no threads and no state of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pulse_rl import Bits, LocalStore, Subscriber, state_root, verify_stream
from pulse_rl.state.checkpoint import load, save
from pulse_rl.stream.names import PATCH
from pulse_rl.stream.stream import Stream
from pulse_rl.sync.gc import gc_stream
from tests.support.fuse import Fuse, FusedStore, die, forked
from tests.support.histories import named_in_small_patches
from tests.support.publishers import tuned

STREAM = "policy"
MODES = ("before", "after", "midst")


def policy(step: int) -> dict[str, Bits]:
    """The trainer's weights after so many steps; the first ones change in each, so that patches need a history."""
    rng = np.random.default_rng(0)
    sizes = {"layer.0": 500, "layer.1": 300, "norm": 8}
    state = {name: Bits(rng.integers(0x3C00, 0x4000, size, np.uint16), "BF16") for name, size in sizes.items()}
    for k in range(1, step + 1):
        rng = np.random.default_rng(k)
        for tensor in state.values():
            tensor.array[rng.integers(0, tensor.array.size, 1 + tensor.array.size // 100)] ^= np.uint16(k)
            tensor.array[: 1 + tensor.array.size // 50] += np.uint16(1)
    return state


@named_in_small_patches()
def publish(store: FusedStore, acknowledged: Path, steps: int, again: bool) -> None:
    """A trainer's program: goes on after the head's step, up to ``steps``; ``again`` publishes the head's first."""
    publisher = tuned(store, stream=STREAM, history=True, anchor_ratio=0.15, folds=(2, 4), shard_bytes=1200, threads=1)
    head = publisher.head()
    step = int(head.metadata["step"]) if head else 0
    while step < steps or again:
        step += not again
        again = False
        if step % 2:
            published = publisher.publish(policy(step), metadata={"step": step})
        else:
            published = publisher.submit(policy(step), metadata={"step": step}).result()
        # A publisher makes folds in the background; waiting for them gives every run the same order of calls.
        publisher.wait()
        with acknowledged.open("a") as log:
            log.write(f"{published.version} {published.root}\n")


def follow(store: FusedStore, folder: Path, fuse: Fuse, stops: Iterable[int]) -> None:
    """A worker's program: syncs to some versions and then to the head, and keeps the weights it serves in a file."""
    live = folder / "live.safetensors"
    base = load(live)[0] if live.exists() else None
    subscriber = Subscriber(store, stream=STREAM, base=base, cache=folder / "cache", threads=1)
    subscriber.stream.store._kept = FusedStore(folder / "cache", fuse)  # type: ignore[attr-defined]
    for stop in [*stops, None]:
        update = subscriber.sync(stop)
        if update is not None:
            due = fuse.next()
            if due and fuse.mode == "before":
                die()
            if due and fuse.mode == "midst":
                os.replace = lambda *args, **kwargs: die()  # the new file is written aside, the old one in its place
            save(live, subscriber.state, {"version": str(update.version)})
            if due:
                die()
            update.acknowledge()


@dataclass
class Survived:
    """What a role's kill points came to."""

    role: str
    kills: int = 0
    calls: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, mode: str, kills: int = 1) -> None:
        self.kills += kills
        self.modes[mode] = self.modes.get(mode, 0) + kills


def require(what: bool, why: str) -> None:
    if not what:
        raise AssertionError(why)


def manifests(root: Path) -> dict[int, bytes]:
    """The committed versions of the stream in a folder, read without the library."""
    return {int(path.name[:12]): path.read_bytes() for path in (root / STREAM / "versions").glob("*.json")}


def check_stream(root: Path, steps: int, before: dict[int, bytes], acknowledged: Path) -> None:
    """All that must hold of a stream whose publisher was killed, restarted and went on to ``steps``."""
    after = manifests(root)
    require(sorted(after) == list(range(len(after))), f"the versions are {sorted(after)}")
    require(before.items() <= after.items(), "a committed version is gone or has changed")
    for line in acknowledged.read_text().splitlines():
        version, version_root = line.split()
        require(json.loads(after[int(version)])["root"] == version_root, f"version {version} was acknowledged")
    reports = list(verify_stream(LocalStore(root), STREAM, threads=1))
    require(all(r.ok for r in reports), f"{[r.problems for r in reports]}")
    seen = [json.loads(after[v])["metadata"]["step"] for v in sorted(after)]
    require(all(a <= b <= a + 1 for a, b in pairwise(seen)), f"the steps are {seen}")
    require(seen[-1] == steps, f"the last step is {seen[-1]}")
    for k, step in enumerate(seen):
        require(json.loads(after[k])["root"] == state_root(policy(step)), f"version {k} is not step {step}")
    check_links(root)
    late = Subscriber(LocalStore(root), stream=STREAM, threads=1)
    late.sync()
    require(late.root == state_root(policy(steps)), "a newcomer does not reach the head")
    gc_stream(LocalStore(root), STREAM, keep=2, grace_seconds=0)
    last = Subscriber(LocalStore(root), stream=STREAM, threads=1)
    last.sync()
    require(last.root == late.root, "the head was lost to gc")


def check_links(root: Path) -> None:
    """Every listed fold is there and is what its name promises."""
    stream = Stream(LocalStore(root), STREAM)
    for link in stream.links():
        for payload in link.payloads or ():
            data = (root / stream.names.payload(payload.sha256, PATCH)).read_bytes()
            require(sha256(data).hexdigest() == payload.sha256, f"{link} is damaged")


def publisher_points(folder: Path, steps: int, modes: Iterable[str]) -> Survived:
    """A publisher killed at each of its calls, and restarted."""
    result = Survived("publisher")
    for mode in modes:
        at = 0
        while True:
            at += 1
            root, log = folder / f"{mode}-{at}", folder / f"{mode}-{at}.log"
            log.touch()
            ended = forked(lambda: publish(FusedStore(root, Fuse(at, mode)), log, steps, False))  # noqa: B023
            if ended == 0:
                break
            require(ended == -signal.SIGKILL, f"publisher, {mode} call {at}: ended with {ended}")
            before = manifests(root)

            def restart() -> None:
                publish(FusedStore(root, Fuse()), log, steps, bool(before) and at % 2 == 0)  # noqa: B023
                check_stream(root, steps, before, log)  # noqa: B023

            require(forked(restart) == 0, f"publisher, {mode} call {at}: the restart failed")
            result.add(mode)
            shutil.rmtree(root)
        result.calls = max(result.calls, at - 1)
        # The run that nothing killed is checked like the others, and had all kinds of calls among its own.
        kinds = [path.name for path in (root / STREAM / "links").iterdir()]
        require(len([k for k in kinds if "-anchor-" in k]) > 1, f"too few anchors: {kinds}")
        require(len([k for k in kinds if "-anchor-" not in k]) >= steps // 3, f"too few folds: {kinds}")
        require(forked(lambda: check_stream(root, steps, {}, log)) == 0, "the whole run")  # noqa: B023
    return result


def crash_loops(folder: Path, steps: int, lives: Iterable[int], restarts: int = 12) -> Survived:
    """Publishers that live for so many calls each, one after another; the last one lives to the end."""
    result = Survived("publisher in a crash loop")
    for life in lives:
        root, log = folder / f"loop-{life}", folder / f"loop-{life}.log"
        log.touch()
        committed: dict[int, bytes] = {}
        for k in range(restarts):
            ended = forked(lambda k=k: publish(FusedStore(root, Fuse(life, MODES[k % 3])), log, steps, False))  # type: ignore[misc] # noqa: B023
            now = manifests(root)
            require(committed.items() <= now.items(), f"life {life}: a committed version is gone or has changed")
            committed = now
            if ended == 0:
                break
            require(ended == -signal.SIGKILL, f"life {life}: ended with {ended}")
            result.add(MODES[k % 3])

        def finish() -> None:
            publish(FusedStore(root, Fuse()), log, steps, False)  # noqa: B023
            check_stream(root, steps, committed, log)  # noqa: B023

        require(forked(finish) == 0, f"life {life}: the restart failed")
        shutil.rmtree(root)
    return result


def check_live(live: Path, roots: list[str]) -> int:
    """The version in the live file, -1 without one; whenever the process died, it is a whole and verified one."""
    if not live.exists():
        return -1
    state, metadata = load(live)
    version = int(metadata["version"])
    require(state_root(state) == roots[version], f"the live file does not hold version {version}")
    return version


def subscriber_points(folder: Path, steps: int, modes: Iterable[str]) -> Survived:
    """A subscriber with a cache and a live file, killed at each of its calls, and restarted."""
    result = Survived("subscriber")
    root = folder / "store"
    require(forked(lambda: publish(FusedStore(root, Fuse()), folder / "log", steps, False)) == 0, "publishing")
    roots = [json.loads(data)["root"] for _, data in sorted(manifests(root).items())]
    stops = sorted({0, 1, len(roots) // 2})
    for mode in modes:
        at = 0
        while True:
            at += 1
            own = folder / f"{mode}-{at}"
            own.mkdir()
            fuse = Fuse(at, mode)
            ended = forked(lambda: follow(FusedStore(root, fuse), own, fuse, stops))  # noqa: B023
            if ended == 0:
                require(check_live(own / "live.safetensors", roots) == len(roots) - 1, "the whole run")
                kept = list(own.glob(f"cache/{STREAM}/payloads/*"))
                require(len(kept) > len(stops) and all(map(is_whole, kept)), f"the cache holds {len(kept)} payloads")
                break
            require(ended == -signal.SIGKILL, f"subscriber, {mode} call {at}: ended with {ended}")

            def restart() -> None:
                served = check_live(own / "live.safetensors", roots)  # noqa: B023
                held = {p.name for p in own.glob(f"cache/{STREAM}/payloads/*") if is_whole(p)}  # noqa: B023
                follow(FusedStore(root, Fuse(), own / "fetched"), own, Fuse(), [])  # noqa: B023
                now = check_live(own / "live.safetensors", roots)  # noqa: B023
                require(now == len(roots) - 1 >= served, f"it was at {served} and ended at {now}")
                fetched = own / "fetched"  # noqa: B023
                names = {Path(line).name for line in fetched.read_text().split()} if fetched.exists() else set()
                require(not names & held, f"{names & held} were in the cache and downloaded again")

            require(forked(restart) == 0, f"subscriber, {mode} call {at}: the restart failed")
            result.add(mode)
            shutil.rmtree(own)
        result.calls = max(result.calls, at - 1)
    return result


def payloads_of(manifest: bytes, *kinds: str) -> list[str]:
    """The digests of the payloads that a manifest names."""
    value = json.loads(manifest)
    refs = [value[kind] for kind in kinds or ("patch", "anchor") if value[kind]]
    return [payload["sha256"] for ref in refs for payload in ref.get("parts") or ref.get("shards")]


def is_whole(payload: Path) -> bool:
    return sha256(payload.read_bytes()).hexdigest() == payload.name.partition(".")[0]


def gc_points(folder: Path, steps: int, modes: Iterable[str]) -> Survived:
    """``pulse gc`` killed at each of its calls, and run again; what is to be kept can be restored in between, too."""
    result = Survived("gc")
    whole = folder / "store"
    require(forked(lambda: publish(FusedStore(whole, Fuse()), folder / "log", steps, False)) == 0, "publishing")
    roots = [json.loads(data)["root"] for _, data in sorted(manifests(whole).items())]
    for mode in (m for m in modes if m != "midst"):
        at = 0
        while True:
            at += 1
            root = folder / f"{mode}-{at}"
            shutil.copytree(whole, root)
            keep = 2
            ended = forked(
                lambda: gc_stream(FusedStore(root, Fuse(at, mode)), STREAM, keep=keep, grace_seconds=0)  # noqa: B023
            )
            require(ended in (0, -signal.SIGKILL), f"gc, {mode} call {at}: ended with {ended}")

            def check() -> None:
                # Whatever is still named is still there: links go before manifests, manifests before payloads.
                check_links(root)  # noqa: B023
                named_payloads = {digest for data in manifests(root).values() for digest in payloads_of(data)}  # noqa: B023
                there = {path.name.partition(".")[0] for path in (root / STREAM / "payloads").iterdir()}  # noqa: B023
                first = min(manifests(root))  # noqa: B023
                lost = named_payloads - there - set(payloads_of(manifests(root)[first], "patch"))  # noqa: B023
                require(not lost, f"a manifest names {lost}, which are gone")
                for _ in range(2):
                    for version in range(len(roots) - keep, len(roots)):  # noqa: B023
                        reader = Subscriber(LocalStore(root), stream=STREAM, threads=1)  # noqa: B023
                        reader.sync(version)
                        require(reader.root == roots[version], f"version {version} was lost")
                    gc_stream(LocalStore(root), STREAM, keep=keep, grace_seconds=0)  # noqa: B023
                left = manifests(root)  # noqa: B023
                require(all(r.ok for r in verify_stream(LocalStore(root), STREAM, threads=1)), "what is left")  # noqa: B023
                named = b"".join(left.values())
                for path in (root / STREAM / "payloads").glob("*.safetensors"):  # noqa: B023
                    require(path.stem.encode() in named, "a payload is left that nothing names")

            require(forked(check) == 0, f"gc, {mode} call {at}: something was lost")
            shutil.rmtree(root)
            if ended == 0:
                break
            result.add(mode)
        result.calls = max(result.calls, at - 1)
    return result


ROLES: dict[str, Callable[[Path, int, Iterable[str]], Survived]] = {
    "publisher": publisher_points,
    "subscriber": subscriber_points,
    "gc": gc_points,
    "loop": lambda folder, steps, modes: crash_loops(folder, steps, range(1, 25, 1 if steps > 5 else 3)),
}


def run(role: str, versions: int, modes: Iterable[str]) -> Survived:
    """Every kill point of one role, in a temporary folder. Raises AssertionError for the first that is not survived."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        result = ROLES[role](Path(folder), versions, modes)
    result.seconds = time.monotonic() - started
    return result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults kills", description="kill real processes at every store call"
    )
    parser.add_argument("role", nargs="?", choices=list(ROLES))
    parser.add_argument("--all", action="store_true", help="every role, long")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    os.fsync = lambda fd: None  # what a killed process wrote is there without it; that is for power cuts
    if args.all == bool(args.role):
        parser.error("give a role or --all")
    plan: list[tuple[str, int]] = [(args.role, args.versions)]
    if args.all:
        plan = [("publisher", 21), ("subscriber", 33), ("gc", 13), ("loop", 8)]
    total = 0
    for role, versions in plan:
        result = run(role, versions, args.modes)
        total += result.kills
        report: dict[str, Any] = asdict(result)
        if args.json:
            print(json.dumps(report), flush=True)
            continue
        kinds = ", ".join(f"{count} {mode}" for mode, count in result.modes.items())
        print(
            f"{result.role}: {versions} versions, killed {result.kills} times ({kinds} the call), all survived;"
            f" {result.seconds:.0f} s",
            flush=True,
        )
    if not args.json:
        print(f"{total} kill points survived: every committed version verified, every restart at the head")
    return 0
