"""Processes that SIGKILL themselves at one call to the store after another.

``python -m tests.promises.killed ROLE FOLDER`` prints at how many calls a run was killed, each of which was followed by
a restart that found all that was committed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pulse_rl import LocalStore, Publisher, Subscriber, verify_stream
from tests.support.fuse import Fuse, FusedStore, forked

from .oracle import STREAM, Trainer, held, root_of

VERSIONS = 4


def publish(store: FusedStore, log: Path) -> None:
    """A trainer's program, which goes on after the head's step."""
    publisher = Publisher(store, stream=STREAM, anchor_ratio=0.1, threads=1)
    head = publisher.head()
    done = int(head.metadata["step"]) if head else 0
    trainer = Trainer(elements=600)
    for step in range(1, VERSIONS + 1):
        trainer.step()
        if step > done:
            published = publisher.publish(trainer.state, metadata={"step": step})
            with log.open("a") as lines:
                lines.write(f"{published.version} {published.root}\n")


def follow(store: FusedStore) -> None:
    subscriber = Subscriber(store, stream=STREAM, threads=1)
    for target in (0, 2, None):
        subscriber.sync(target)
        assert root_of(held(subscriber)) == subscriber.root


def check(root: Path, log: Path) -> None:
    reports = list(verify_stream(LocalStore(root), STREAM, threads=1))
    assert all(not report.problems for report in reports), reports
    roots = {report.version: report.root for report in reports}
    for line in log.read_text().splitlines():
        version, acknowledged = line.split()
        assert roots[int(version)] == acknowledged
    trainer = Trainer(elements=600)
    for _ in range(VERSIONS):
        trainer.step()
    assert roots[max(roots)] == trainer.root


def main(role: str, folder: Path) -> int:
    kills = 0
    base = folder / "base"
    if role == "subscriber":
        assert forked(lambda: publish(FusedStore(base, Fuse()), folder / "log")) == 0
    for mode in ("before", "after", "midst") if role == "publisher" else ("before",):
        at = 0
        while True:
            at += 1
            root, log = (folder / f"{mode}-{at}" if role == "publisher" else base), folder / f"{mode}-{at}.log"
            log.touch()

            def life(fuse: Fuse) -> None:
                store = FusedStore(root, fuse)  # noqa: B023
                publish(store, log) if role == "publisher" else follow(store)  # noqa: B023

            ended = forked(lambda: life(Fuse(at, mode)))  # noqa: B023
            if ended == 0:
                break
            assert ended == -signal.SIGKILL, f"{mode} {at}: {ended}"
            assert forked(lambda: life(Fuse())) == 0, f"{mode} {at}: the restart failed"
            if role == "publisher":
                assert forked(lambda: check(root, log)) == 0, f"{mode} {at}: something was lost"  # noqa: B023
            kills += 1
    return kills


if __name__ == "__main__":
    os.fsync = lambda fd: None  # that is for power cuts
    print(main(sys.argv[1], Path(sys.argv[2])))
