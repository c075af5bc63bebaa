"""Real processes that SIGKILL themselves at one store call after another, and what is left of the
stream.

One sequence is one role. Its program is repeated with the kill at its call 1, 2, 3 … until it gets
through: killed before the call has any effect, after it has all of it, and in its midst (a payload
half written, a created object not yet linked). After each kill a fresh process goes on to the end,
and everything is checked. Processes are forked from a parent that has only imported the library: it
has no threads and no state of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import sha256
from itertools import count, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np

from pulse_rl import Bits, LocalStore, Subscriber, state_root, verify_stream
from pulse_rl.follow.checkpoint import load, save
from pulse_rl.ops.gc import gc_stream
from pulse_rl.stream.names import PATCH
from pulse_rl.stream.stream import Stream
from tests.support.fuse import Fuse, FusedStore, die, forked
from tests.support.publishers import tuned

STREAM = "policy"
MODES = ("before", "after", "midst")


def policy(step: int) -> dict[str, Bits]:
    """The trainer's weights after so many steps; the first ones change in each, so that patches
    need a history."""
    rng = np.random.default_rng(0)
    sizes = {"layer.0": 500, "layer.1": 300, "norm": 8}
    state = {
        name: Bits(rng.integers(0x3C00, 0x4000, size, np.uint16), "BF16")
        for name, size in sizes.items()
    }
    for k in range(1, step + 1):
        rng = np.random.default_rng(k)
        for tensor in state.values():
            tensor.array[rng.integers(0, tensor.array.size, 1 + tensor.array.size // 100)] ^= (
                np.uint16(k)
            )
            tensor.array[: 1 + tensor.array.size // 50] += np.uint16(1)
    return state


def publish(store: FusedStore, acknowledged: Path, steps: int, again: bool) -> None:
    """A trainer's program: goes on after the head's step, up to ``steps``; ``again`` publishes the
    head's first."""
    publisher = tuned(
        store,
        stream=STREAM,
        history=True,
        anchor_ratio=0.15,
        folds=(2, 4),
        shard_bytes=1200,
        threads=1,
    )
    head = publisher.head()
    step = int(head.metadata["step"]) if head else 0
    while step < steps or again:
        step += not again
        again = False
        if step % 2:
            published = publisher.publish(policy(step), metadata={"step": step})
        else:
            published = publisher.submit(policy(step), metadata={"step": step}).result()
        with acknowledged.open("a") as log:
            log.write(f"{published.version} {published.root}\n")


def follow(store: FusedStore, folder: Path, fuse: Fuse, stops: Iterable[int]) -> None:
    """A worker's program: syncs to some versions and then to the head, and keeps the weights it
    serves in a file."""
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
                os.replace = lambda *args, **kwargs: (
                    die()
                )  # the new file is written aside, the old one in its place
            save(live, subscriber.state, {"version": str(update.version)})
            if due:
                die()
            update.acknowledge()


def require(what: bool, why: str) -> None:
    if not what:
        raise AssertionError(why)


def manifests(root: Path) -> dict[int, bytes]:
    """The committed versions of the stream in a folder, read without the library."""
    return {
        int(path.name[:12]): path.read_bytes()
        for path in (root / STREAM / "versions").glob("*.json")
    }


def check_stream(root: Path, steps: int, before: dict[int, bytes], acknowledged: Path) -> None:
    """All that must hold of a stream whose publisher was killed, restarted and went on to
    ``steps``."""
    after = manifests(root)
    require(sorted(after) == list(range(len(after))), f"the versions are {sorted(after)}")
    require(before.items() <= after.items(), "a committed version is gone or has changed")
    for line in acknowledged.read_text().splitlines():
        version, version_root = line.split()
        require(
            json.loads(after[int(version)])["root"] == version_root,
            f"version {version} was acknowledged",
        )
    reports = list(verify_stream(LocalStore(root), STREAM, threads=1))
    require(all(r.ok for r in reports), f"{[r.problems for r in reports]}")
    seen = [json.loads(after[v])["metadata"]["step"] for v in sorted(after)]
    require(all(a <= b <= a + 1 for a, b in pairwise(seen)), f"the steps are {seen}")
    require(seen[-1] == steps, f"the last step is {seen[-1]}")
    for k, step in enumerate(seen):
        require(
            json.loads(after[k])["root"] == state_root(policy(step)),
            f"version {k} is not step {step}",
        )
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


def at_every_call(
    folder: Path,
    modes: Iterable[str],
    act: Callable[[Path, Fuse], None],
    check: Callable[[Path, int], None],
) -> Counter[str]:
    """A program killed at each of its calls. ``check`` is made after each kill, with the call's
    number, and with 0 of the run that nothing killed."""
    result = Counter[str]()
    for mode in modes:
        for at in count(1):
            own = folder / f"{mode}-{at}"
            own.mkdir()
            ended = forked(lambda: act(own, Fuse(at, mode)))  # noqa: B023
            require(ended in (0, -signal.SIGKILL), f"{mode} call {at}: ended with {ended}")
            require(
                forked(lambda: check(own, at if ended else 0)) == 0,  # noqa: B023
                f"{mode} call {at}: not survived",
            )
            shutil.rmtree(own)
            if ended == 0:
                break
            result[mode] += 1
        result["calls"] = max(result["calls"], at - 1)
    return result


def publisher_points(folder: Path, steps: int, modes: Iterable[str]) -> Counter[str]:
    """A publisher killed at each of its calls, and restarted."""

    def act(own: Path, fuse: Fuse) -> None:
        (own / "log").touch()
        publish(FusedStore(own / "store", fuse), own / "log", steps, False)

    def check(own: Path, at: int) -> None:
        root, before = own / "store", manifests(own / "store")
        if at:
            publish(FusedStore(root, Fuse()), own / "log", steps, bool(before) and at % 2 == 0)
        else:  # it is checked like the others, and had all kinds of calls among its own
            kinds = [path.name for path in (root / STREAM / "links").iterdir()]
            require(len([k for k in kinds if "-anchor-" in k]) > 1, f"too few anchors: {kinds}")
            require(
                len([k for k in kinds if "-anchor-" not in k]) >= steps // 3,
                f"too few folds: {kinds}",
            )
        check_stream(root, steps, before, own / "log")

    return at_every_call(folder, modes, act, check)


def check_live(live: Path, roots: list[str]) -> int:
    """The version in the live file, -1 without one; whenever the process died, it is a whole and
    verified one."""
    if not live.exists():
        return -1
    state, metadata = load(live)
    version = int(metadata["version"])
    require(state_root(state) == roots[version], f"the live file does not hold version {version}")
    return version


def published(folder: Path, steps: int) -> tuple[Path, list[str]]:
    """A store with a whole stream, and the roots of its versions."""
    whole = folder / "store"
    require(
        forked(lambda: publish(FusedStore(whole, Fuse()), folder / "log", steps, False)) == 0,
        "publishing",
    )
    return whole, [json.loads(data)["root"] for _, data in sorted(manifests(whole).items())]


def subscriber_points(folder: Path, steps: int, modes: Iterable[str]) -> Counter[str]:
    """A subscriber with a cache and a live file, killed at each of its calls, and restarted."""
    root, roots = published(folder, steps)
    stops = sorted({0, 1, len(roots) // 2})

    def check(own: Path, at: int) -> None:
        live, fetched = own / "live.safetensors", own / "fetched"
        served = check_live(live, roots)
        kept = list(own.glob(f"cache/{STREAM}/payloads/*"))
        held = {p.name for p in kept if is_whole(p)}
        if not at:
            require(served == len(roots) - 1, "the whole run")
            require(
                len(stops) < len(kept) == len(held),
                f"the cache holds {len(kept)} payloads, {len(held)} whole",
            )
            return
        follow(FusedStore(root, Fuse(), fetched), own, Fuse(), [])
        now = check_live(live, roots)
        require(now == len(roots) - 1 >= served, f"it was at {served} and ended at {now}")
        names = (
            {Path(line).name for line in fetched.read_text().split()} if fetched.exists() else set()
        )
        require(not names & held, f"{names & held} were in the cache and downloaded again")

    return at_every_call(
        folder, modes, lambda own, fuse: follow(FusedStore(root, fuse), own, fuse, stops), check
    )


def payloads_of(manifest: bytes, *kinds: str) -> list[str]:
    """The digests of the payloads that a manifest names."""
    value = json.loads(manifest)
    refs = [value[kind] for kind in kinds or ("patch", "anchor") if value[kind]]
    return [payload["sha256"] for ref in refs for payload in ref.get("parts") or ref.get("shards")]


def is_whole(payload: Path) -> bool:
    return sha256(payload.read_bytes()).hexdigest() == payload.name.partition(".")[0]


def gc_points(folder: Path, steps: int, modes: Iterable[str]) -> Counter[str]:
    """``pulse gc`` killed at each of its calls, and run again; what is to be kept can be restored
    in between, too."""
    whole, roots = published(folder, steps)
    keep = 2

    def act(own: Path, fuse: Fuse) -> None:
        shutil.copytree(whole, own, dirs_exist_ok=True)
        gc_stream(FusedStore(own, fuse), STREAM, keep=keep, grace_seconds=0)

    def check(root: Path, _: int) -> None:
        # Whatever is still named is still there: links go before manifests, manifests before
        # payloads.
        check_links(root)
        named = {digest for data in manifests(root).values() for digest in payloads_of(data)}
        there = {path.name.partition(".")[0] for path in (root / STREAM / "payloads").iterdir()}
        lost = named - there - set(payloads_of(manifests(root)[min(manifests(root))], "patch"))
        require(not lost, f"a manifest names {lost}, which are gone")
        for _ in range(2):
            for version in range(len(roots) - keep, len(roots)):
                reader = Subscriber(LocalStore(root), stream=STREAM, threads=1)
                reader.sync(version)
                require(reader.root == roots[version], f"version {version} was lost")
            gc_stream(LocalStore(root), STREAM, keep=keep, grace_seconds=0)
        require(
            all(r.ok for r in verify_stream(LocalStore(root), STREAM, threads=1)), "what is left"
        )
        left = b"".join(manifests(root).values())
        for path in (root / STREAM / "payloads").glob("*.safetensors"):
            require(path.stem.encode() in left, "a payload is left that nothing names")

    return at_every_call(folder, [mode for mode in modes if mode != "midst"], act, check)


ROLES: dict[str, Callable[[Path, int, Iterable[str]], Counter[str]]] = {
    "publisher": publisher_points,
    "subscriber": subscriber_points,
    "gc": gc_points,
}
#: Of the long run of each role.
VERSIONS = {"publisher": 21, "subscriber": 33, "gc": 13}


def run(role: str, versions: int, modes: Iterable[str] = MODES) -> Counter[str]:
    """Every kill point of one role, by mode, with the number of its ``calls``. Raises
    AssertionError for the first that is not survived."""
    with (
        tempfile.TemporaryDirectory(prefix="killed-") as folder,
        patch.object(os, "fsync", lambda fd: None),
    ):
        # What a killed process wrote is there without fsync; that is for power cuts.
        return ROLES[role](Path(folder), versions, modes)


def sequence(seed: int) -> Counter[str]:
    """The long run of one role, each in its turn."""
    role = list(ROLES)[seed % len(ROLES)]
    return run(role, VERSIONS[role])
