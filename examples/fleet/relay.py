"""A region's relay: copies both policies over the region's link once, for all workers of the region."""

from __future__ import annotations

import argparse
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
    alarm = Alarm(Settings.load(folder.settings).patience, args.parent)
    events, journal = JsonLines(folder.events(f"relay-{args.region}")), Journal(folder.journal(f"relay-{args.region}"))
    source, target = link(folder, args.region), pulse_rl.LocalStore(folder.near(args.region))
    relays = {each: pulse_rl.Relay(source, target, stream=each, threads=1, on_event=events) for each in POLICIES}
    while True:
        alarm.check_parent()
        for name, relay in relays.items():
            try:
                done = relay.sync(shards=1)
            except pulse_rl.StoreUnavailable:
                continue
            if done is not None:
                folds = [each for each in done.links if each.startswith("the fold")]
                journal.write(
                    "relayed", policy=name, version=done.version, previous=done.previous, bytes=done.nbytes, folds=folds
                )
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
