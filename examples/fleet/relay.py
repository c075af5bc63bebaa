"""A region's relay: copies both policies over the region's link once, for all workers of the
region."""

from __future__ import annotations

import sys
import threading
import time

import pulse_rl
from pulse_rl.metrics import JsonLines

from ..grpo.run import LOOK_SECONDS, Alarm, Journal, RunFolder, run_role
from .links import link, near
from .settings import POLICIES, Settings


def work(settings: Settings, folder: RunFolder, alarm: Alarm, region: str) -> None:
    name = f"relay-{region}"
    events, journal = JsonLines(folder.events(name)), Journal(folder.journal(name))
    threads = []
    for policy in POLICIES:
        relay = pulse_rl.Relay(
            link(folder, region), near(folder, region), stream=policy, threads=1, on_event=events
        )
        threads.append(threading.Thread(target=copy, args=(policy, relay, journal), daemon=True))
        threads[-1].start()
    while all(thread.is_alive() for thread in threads):
        alarm.check_parent()
        time.sleep(LOOK_SECONDS)
    raise SystemExit("a stream is not copied any more; the reason is above")


def copy(policy: str, relay: pulse_rl.Relay, journal: Journal) -> None:
    """Copies a stream as long as nothing but the link fails."""
    while True:
        try:
            done = relay.sync()
        except pulse_rl.errors.StoreUnavailable:
            time.sleep(LOOK_SECONDS)
            continue
        if done is None:
            relay.wait_for_new(LOOK_SECONDS)
            continue
        journal.write(
            "relayed",
            policy=policy,
            version=done.version,
            previous=done.previous,
            bytes=done.nbytes,
            seconds=done.seconds,
            links=done.links,
        )


if __name__ == "__main__":
    sys.exit(run_role(work, Settings, "region"))
