"""A fleet against one S3-compatible store, and through relays: requests, bytes, seconds to the last
worker.

    python -m benchmarks.fleet [--workers 1 10 100 400] [--regions 2] [--versions 6] [--every 4]
    [--json FILE]
    python -m benchmarks.fleet --link 2e6 [--workers 1 10 100]

Real subscribers with a small state each, as threads of a few processes; a server of the S3 protocol
(moto, one process of Python) as the origin; a relay for each region, which keeps a folder. Workers
read the folder ("relays"), or wait at a server that shows it ("served"). A version is published
every few seconds. What each worker and relay asks of the origin is counted where it asks. Beside it
stands what is expected: bytes and requests; and of the seconds, until when the relays had the
version. A first version that all have is not counted.

``--link``: workers behind one relay, whose origin is a served folder, too; each has a link of its
own of so many bit/s, and the time that a version's bytes take on that link stands beside what is
measured.

What is expected of fleets that no machine here holds: ``pulse plan --workers``.
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
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.counted import CountedStore
from pulse_rl import Bits, LocalStore, Publisher, Relay, Store, Subscriber
from pulse_rl.store import open_store
from pulse_rl.stores.http import HttpStore
from pulse_rl.stores.server import FolderServer

ELEMENTS, DENSITY, POLL_SECONDS = 500_000, 0.005, 1.0
DIRECT, RELAYS, SERVED = "direct", "relays", "served"
_LONGEST = 120.0
_spawn = multiprocessing.get_context("spawn")


def origin(address: str) -> Store:
    """The bucket of the S3 server at ``s3:http://…``, or what is served at ``http://…``."""
    endpoint = address.removeprefix("s3:")
    if endpoint == address:
        return open_store(address)
    keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    return open_store(
        "s3://bucket/fleet", endpoint=endpoint, client_options={"allow_http": True}, **keys
    )


def serve(pipe: Any) -> None:
    """An S3 server with one bucket; tells its address, and ends with the other end of ``pipe``."""
    import urllib.request

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(
        urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
    ).close()
    pipe.send(f"http://{host}:{port}")
    pipe.recv()
    os._exit(0)


def workers(
    address: str,
    stream: str,
    near: str | None,
    count: int,
    last: int,
    link: float | None,
    pipe: Any,
) -> None:
    """So many subscribers; sends when each of them had each version, and what they asked of the
    origin. ``link``: what each reads of its nearest store at most, in bit/s (None: as fast as it
    can)."""
    store = CountedStore(origin(address))
    had: list[dict[int, float]] = [{} for _ in range(count)]

    def follow(mine: dict[int, float]) -> None:
        stores: list[Store] = [store]
        if near is not None:
            stores.insert(0, open_store(near) if link is None else LinkedStore(near, link))
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


class LinkedStore(HttpStore):
    """The server at ``url`` behind a link of its own of ``bits_per_second``."""

    def __init__(self, url: str, bits_per_second: float) -> None:
        super().__init__(url)
        self._rate, self._free = bits_per_second, 0.0

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        began = time.monotonic()
        data = super().get(name, start, stop)
        self._free = max(began, self._free) + 8 * len(data) / self._rate
        time.sleep(max(0.0, self._free - time.monotonic()))
        return data


def relay(address: str, stream: str, near: str, pipe: Any) -> None:
    """A relay until the other end of ``pipe`` says so; sends when it had each version, and what it
    asked of the origin since the first one."""
    store = CountedStore(origin(address))
    copy = Relay(store, near, stream=stream, threads=1)
    while copy.sync() is None:
        time.sleep(0.05)
    before, had = Counter(store.count), dict[int, float]()
    pipe.send("ready")
    while not pipe.poll(0):
        done = copy.sync()
        if done is not None:
            had[done.version] = time.time()
        else:
            copy.wait_for_new(POLL_SECONDS, 1.5 * POLL_SECONDS)
    pipe.send((had, dict(store.count - before)))


@dataclass(frozen=True)
class Row:
    """Per version: ``seconds`` from the commit until the last worker had it (mean and ``worst``),
    of which the relays had it after ``at_relays``; ``requests``, lists apart, and ``megabytes`` at
    the origin, and what they would be if each worker, or each relay, asked for the manifest, the
    patch's size and the patch. ``lists`` are those of a minute. ``link_seconds``: what its bytes
    take on a worker's own link, None without one.
    """

    workers: int
    way: str
    seconds: float
    worst: float
    at_relays: float
    requests: float
    lists: float
    expected_requests: float
    megabytes: float
    expected_megabytes: float
    link_seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """``origin``: an address of `origin`; ``writer``: where the trainer publishes; ``link``: of
    each worker, bit/s."""

    origin: str
    writer: Store
    regions: int
    versions: int
    every: float
    processes: int
    link: float | None = None

    def measure(self, number: int, way: str) -> Row:
        stream = f"w{number}-{way}"
        rng = np.random.default_rng(number)
        bits = (rng.standard_normal(ELEMENTS, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        state = {"w": Bits(bits.reshape(-1, 500), "BF16")}
        publisher = Publisher(self.writer, stream=stream, anchor_ratio=1e9, threads=1)
        publisher.publish(state)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            places = [Path(folder) / str(r) for r in range(self.regions if way != DIRECT else 0)]
            for place in places:
                place.mkdir()
            relays = [start(relay, self.origin, stream, str(place)) for place in places]
            for _, pipe in relays:
                pipe.recv()
            near: list[str | None] = [str(place) for place in places] or [None]
            if way == SERVED:
                near = [stack.enter_context(FolderServer(place)).url for place in places]
            shares = [
                number // self.processes + (i < number % self.processes)
                for i in range(self.processes)
            ]
            followers = [
                start(
                    workers,
                    self.origin,
                    stream,
                    near[i % len(near)],
                    share,
                    self.versions,
                    self.link,
                )
                for i, share in enumerate(shares)
                if share
            ]
            for _, pipe in followers:
                pipe.recv()
            committed, nbytes, began = dict[int, float](), 0, time.time()
            for _ in range(self.versions):
                bits[rng.choice(ELEMENTS, int(ELEMENTS * DENSITY), replace=False)] += 1
                published = publisher.publish(state)
                committed[published.version] = time.time()
                head = publisher.head()
                assert head is not None
                nbytes += published.patch_bytes + len(head.to_bytes())
                time.sleep(self.every)
            asked, had, relayed = Counter[str](), [], []
            for process, pipe in followers:
                found, count = pipe.recv()
                had += found
                asked.update(count)
                process.join()
            minutes = (time.time() - began) / 60
            for process, pipe in relays:
                pipe.send("end")
                found, count = pipe.recv()
                relayed.append(found)
                asked.update(count)
                process.join()
        lag, at_relays = last_after(committed, had), last_after(committed, relayed)
        receivers = self.regions if relays else number
        requests = sum(n for call, n in asked.items() if call not in ("bytes", "list"))
        return Row(
            workers=number,
            way=way,
            seconds=sum(lag) / self.versions,
            worst=max(lag),
            at_relays=sum(at_relays) / self.versions,
            requests=requests / self.versions,
            lists=asked["list"] / minutes,
            expected_requests=3 * receivers,
            megabytes=asked["bytes"] / self.versions / 1e6,
            expected_megabytes=receivers * nbytes / self.versions / 1e6,
            link_seconds=None if self.link is None else 8 * nbytes / self.versions / self.link,
        )


def last_after(committed: dict[int, float], had: list[dict[int, float]]) -> list[float]:
    """For each version the seconds from its commit until the last one ``had`` it, or a later
    one."""
    return [
        max((min(at for v, at in found.items() if v >= version) for found in had), default=began)
        - began
        for version, began in committed.items()
    ]


def start(work: Any, *arguments: Any) -> tuple[Any, Any]:
    here, there = _spawn.Pipe()
    process = _spawn.Process(target=work, args=[*arguments, there], daemon=True)
    process.start()
    return process, here


def main() -> None:
    parser = argparse.ArgumentParser(
        description="a fleet against one S3-compatible store, and through relays"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 10, 100, 400])
    parser.add_argument("--regions", type=int, default=2)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two versions")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--link", type=float, help="of each worker behind one relay, in bit/s")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    rows = behind_links(args) if args.link else against_one_server(args)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def against_one_server(args: argparse.Namespace) -> list[Row]:
    server, pipe = start(serve)
    address = "s3:" + pipe.recv()
    run = Run(address, origin(address), args.regions, args.versions, args.every, args.processes)
    print(
        f"{ELEMENTS:,} weights, {DENSITY:.1%} changed, a version every {args.every:g} s; at the "
        "origin, a version:"
    )
    heads = (
        "workers",
        "way",
        "last has it",
        "worst",
        "relays",
        "requests",
        "(plan)",
        "MB",
        "(plan)",
        "lists/min",
    )
    print("{:>8} {:8} {:>12} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>10}".format(*heads))
    rows = []
    for number in args.workers:
        for way in (DIRECT, RELAYS, SERVED):
            row = run.measure(number, way)
            rows.append(row)
            times = f"{row.seconds:10.2f} s {row.worst:6.2f} s {row.at_relays:6.2f} s"
            asked = (
                f"{row.requests:9.1f} {row.expected_requests:8.0f} {row.megabytes:8.3f} "
                f"{row.expected_megabytes:8.3f}"
            )
            print(f"{number:8} {way:8} {times} {asked} {row.lists:10,.0f}", flush=True)
    pipe.send("end")
    server.join()
    return rows


def behind_links(args: argparse.Namespace) -> list[Row]:
    print(
        f"one relay; each worker behind a link of its own, {args.link / 1e6:g} Mbit/s; a version:"
    )
    print(
        " workers    MB  its link takes  relay has it  last has it (worst)  over it  MB at the "
        "origin (once)"
    )
    rows = []
    for number in args.workers:
        with tempfile.TemporaryDirectory() as folder, FolderServer(folder) as server:
            every = 1.5 * 16 * ELEMENTS / args.link
            run = Run(
                server.url, LocalStore(folder), 1, args.versions, every, args.processes, args.link
            )
            row = run.measure(number, SERVED)
        assert row.link_seconds is not None
        rows.append(row)
        over = row.seconds / row.link_seconds - 1
        times = (
            f"{row.link_seconds:13.2f} s {row.at_relays:11.2f} s {row.seconds:10.2f} s "
            f"({row.worst:.2f} s) {over:8.1%}"
        )
        mb = row.expected_megabytes
        print(f"{number:8} {mb:5.2f} {times} {row.megabytes:8.3f} ({mb:.3f})", flush=True)
    return rows


if __name__ == "__main__":
    main()
