"""A fleet against one S3-compatible store, and through relays: requests, bytes, seconds to the last worker.

    python -m benchmarks.fleet [--workers 1 10 100 400] [--regions 2] [--versions 6] [--every 4] [--json FILE]
    python -m benchmarks.fleet --plan

Real subscribers with a small state each, as threads of a few processes; a server of the S3 protocol (moto, one process
of Python) as the origin; a relay for each region, which keeps a folder. A version is published every few seconds. What
each worker and relay asks of the origin is counted where it asks. Beside it stands what is expected: bytes and
requests, not seconds, which are this server's and these cores'. A first version that all have is not counted.

``--plan``: `pulse_rl.plan` for fleets that no machine here holds.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pulse_rl import Bits, Publisher, Relay, Store, Subscriber
from pulse_rl._util.units import format_bytes, format_duration
from pulse_rl.plan import WAYS, Fleet, Scenario, make_fleet_plan
from pulse_rl.store import Data, ObjectInfo, open_store

ELEMENTS, DENSITY, POLL_SECONDS = 500_000, 0.005, 1.0
_LONGEST = 120.0
_spawn = multiprocessing.get_context("spawn")


class Counted:
    """``store``, whose requests and bytes read are counted in ``count``."""

    def __init__(self, store: Store) -> None:
        self.store, self.count, self.lock = store, Counter[str](), threading.Lock()

    def _note(self, call: str, nbytes: int = 0) -> None:
        with self.lock:
            self.count[call] += 1
            self.count["bytes"] += nbytes

    def put(self, name: str, data: Data) -> None:
        self._note("put")
        self.store.put(name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self._note("put")
        self.store.put_new(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self.store.get(name, start, stop)
        self._note("get", len(data))
        return data

    def head(self, name: str) -> ObjectInfo:
        self._note("head")
        return self.store.head(name)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        self._note("list")
        return self.store.list(folder, start_after)

    def delete(self, name: str) -> None:
        self._note("delete")
        self.store.delete(name)


def origin(endpoint: str) -> Store:
    keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    return open_store("s3://bucket/fleet", endpoint=endpoint, client_options={"allow_http": True}, **keys)


def serve(pipe: Any) -> None:
    """An S3 server with one bucket; tells its address, and ends with the other end of ``pipe``."""
    import urllib.request

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
    pipe.send(f"http://{host}:{port}")
    pipe.recv()
    os._exit(0)


def workers(endpoint: str, stream: str, near: str | None, count: int, last: int, pipe: Any) -> None:
    """So many subscribers; sends when each of them had each version, and what they asked of the origin."""
    store = Counted(origin(endpoint))
    had: list[dict[int, float]] = [{} for _ in range(count)]

    def follow(mine: dict[int, float]) -> None:
        stores: Any = store if near is None else [near, store]
        with Subscriber(stores, stream=stream, threads=1) as subscriber:
            for update in subscriber.updates(poll_seconds=POLL_SECONDS, timeout_seconds=_LONGEST):
                mine[update.version] = time.time()
                if update.version == last:
                    return

    threads = [threading.Thread(target=follow, args=[mine]) for mine in had]
    for thread in threads:
        thread.start()
    while any(not mine for mine in had):  # all have the first version
        time.sleep(0.05)
    time.sleep(POLL_SECONDS)
    with store.lock:
        before = Counter(store.count)
    pipe.send("ready")
    for thread in threads:
        thread.join()
    pipe.send((had, dict(store.count - before)))


def relay(endpoint: str, stream: str, near: str, pipe: Any) -> None:
    """A relay until the other end of ``pipe`` says so; sends what it asked of the origin since the first version."""
    store = Counted(origin(endpoint))
    copy = Relay(store, near, stream=stream, threads=1)
    while copy.sync() is None:
        time.sleep(0.05)
    before = Counter(store.count)
    pipe.send("ready")
    while not pipe.poll(POLL_SECONDS):
        copy.sync()
    pipe.send(dict(store.count - before))


@dataclass(frozen=True)
class Row:
    """Per version: ``seconds`` from the commit until the last worker had it (mean and ``worst``), ``requests``, lists
    apart, and ``megabytes`` at the origin, and what they would be if each worker, or each relay, asked for the
    manifest, the patch's size and the patch. ``lists`` are those of a minute.
    """

    workers: int
    way: str
    seconds: float
    worst: float
    requests: float
    lists: float
    expected_requests: float
    megabytes: float
    expected_megabytes: float


def measure(
    endpoint: str, number: int, regions: int, versions: int, every: float, processes: int, *, near: bool
) -> Row:
    stream = f"w{number}-{'relays' if near else 'direct'}"
    rng = np.random.default_rng(number)
    bits = (rng.standard_normal(ELEMENTS, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    state = {"w": Bits(bits.reshape(-1, 500), "BF16")}
    publisher = Publisher(origin(endpoint), stream=stream, anchor_ratio=1e9, threads=1)
    publisher.publish(state)
    with tempfile.TemporaryDirectory() as folder:
        places = [f"{folder}/{r}" for r in range(regions)] if near else [None]
        relays = [start(relay, endpoint, stream, place) for place in places if place]
        for _, pipe in relays:
            pipe.recv()
        shares = [(i, number // processes + (i < number % processes)) for i in range(processes)]
        followers = [
            start(workers, endpoint, stream, places[i % len(places)], share, versions) for i, share in shares if share
        ]
        for _, pipe in followers:
            pipe.recv()
        committed, patch_bytes, began = {}, 0, time.time()
        for _ in range(versions):
            bits[rng.choice(ELEMENTS, int(ELEMENTS * DENSITY), replace=False)] += 1
            published = publisher.publish(state)
            committed[published.version] = time.time()
            head = publisher.head()
            assert head is not None
            patch_bytes += published.patch_bytes + len(head.to_bytes())
            time.sleep(every)
        asked, had = Counter[str](), []
        for process, pipe in followers:
            found, count = pipe.recv()
            had += found
            asked.update(count)
            process.join()
        seconds_of_all = time.time() - began
        for process, pipe in relays:
            pipe.send("end")
            asked.update(pipe.recv())
            process.join()
    lag = [max(found.get(v, found[versions]) for found in had) - at for v, at in committed.items()]
    receivers = regions if near else number
    requests = sum(n for call, n in asked.items() if call not in ("bytes", "list"))
    return Row(
        workers=number,
        way="relays" if near else "direct",
        seconds=sum(lag) / versions,
        worst=max(lag),
        requests=requests / versions,
        lists=asked["list"] * 60 / seconds_of_all,
        expected_requests=3 * receivers,
        megabytes=asked["bytes"] / versions / 1e6,
        expected_megabytes=receivers * patch_bytes / versions / 1e6,
    )


PARAMS = {"7B": 7e9, "70B": 70e9, "1T": 1e12}


def planned() -> None:
    """1% changed in a step of a minute; ten regions, each with 10 Gbit/s to an origin that sends 100 Gbit/s in all; 1
    Gbit/s to each worker and 100 Gbit/s in a region; 0.1 s for a round trip; 32 cores; a look every second."""
    print(f"{planned.__doc__}\n")
    print("params   workers  way       to all       a fetch  versions  from the origin a day")
    for name, params in PARAMS.items():
        scenario = Scenario(int(params), 0.01, 60, 1e9, 10e9, cores=32, round_trip_seconds=0.1)
        for number in (1000, 10_000, 100_000):
            plan = make_fleet_plan(scenario, Fleet(number, 10, 100e9, 10e9, 100e9))
            for way in WAYS:
                each = plan.ways[way]["context"]
                print(
                    f"{name:6} {number:9,}  {way:8} {format_duration(each.seconds_to_all):>8} "
                    f"{format_bytes(each.fetch_bytes):>12} {each.versions:>9,}  {format_bytes(each.origin_bytes)}"
                )
        print(f"{name:6} a relay is sooner from {plan.relays_pay_from} workers in a region on")


def start(work: Any, *arguments: Any) -> tuple[Any, Any]:
    here, there = _spawn.Pipe()
    process = _spawn.Process(target=work, args=[*arguments, there], daemon=True)
    process.start()
    return process, here


def main() -> None:
    parser = argparse.ArgumentParser(description="a fleet against one S3-compatible store, and through relays")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 10, 100, 400])
    parser.add_argument("--regions", type=int, default=2)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two versions")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plan", action="store_true", help="only what is expected of larger fleets")
    args = parser.parse_args()
    if args.plan:
        planned()
        return
    server, pipe = start(serve)
    endpoint = pipe.recv()
    rows = []
    print(f"{ELEMENTS:,} weights, {DENSITY:.1%} changed, a version every {args.every:g} s; at the origin, a version:")
    heads = ("workers", "way", "last has it", "worst", "requests", "(plan)", "MB", "(plan)")
    print("{:>8} {:8} {:>12} {:>8} {:>9} {:>8} {:>8} {:>8}  lists/min".format(*heads))
    for number in args.workers:
        for near in (False, True):
            row = measure(endpoint, number, args.regions, args.versions, args.every, args.processes, near=near)
            rows.append(asdict(row))
            asked = (
                f"{row.requests:9.1f} {row.expected_requests:8.0f} {row.megabytes:8.3f} {row.expected_megabytes:8.3f}"
            )
            print(
                f"{number:8} {row.way:8} {row.seconds:10.2f} s {row.worst:6.2f} s {asked}  {row.lists:,.0f}", flush=True
            )
    pipe.send("end")
    server.join()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
