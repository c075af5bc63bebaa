"""A region's relay: copies both policies over the region's link once, for all workers of the region."""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import pulse_rl
from pulse_rl.metrics import JsonLines

from ..grpo.processes import Alarm, Journal
from .links import link
from .settings import POLICIES, RunFolder, Settings

POLL_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--region", required=True)
    parser.add_argument("--parent", type=int)
    args = parser.parse_args()
    folder = RunFolder(args.run)
    settings = Settings.load(folder.settings)
    alarm = Alarm(settings.patience, args.parent)
    events, journal = JsonLines(folder.events(f"relay-{args.region}")), Journal(folder.journal(f"relay-{args.region}"))
    source, target = link(settings, folder, args.region), pulse_rl.LocalStore(folder.near(args.region))
    relays = [pulse_rl.Relay(source, target, stream=each, threads=1, on_event=events) for each in POLICIES]
    pairs = zip(POLICIES, relays, strict=True)
    threads = [threading.Thread(target=copy, args=(*pair, journal), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    while all(thread.is_alive() for thread in threads):
        alarm.check_parent()
        time.sleep(POLL_SECONDS)
    raise SystemExit("a stream is not copied any more; the reason is above")


def copy(policy: str, relay: pulse_rl.Relay, journal: Journal) -> None:
    """Copies a stream as long as nothing but the link fails. Where the source can be waited for, the pause ends with
    the next version."""
    while True:
        try:
            done = relay.sync()
        except pulse_rl.errors.StoreUnavailable:
            time.sleep(POLL_SECONDS)
            continue
        if done is None:
            relay.wait(POLL_SECONDS)
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
    main()
