"""Trainer and worker that replay a recorded RL run over the network in real time.

Each runs in its own namespace and knows the other by the store alone. Computing is a sleep of the
step's length: it stands for the GPU's work. Publishing, syncing and scattering are real, and so are
states, changes and densities: 64 versions that `benchmarks.trace` recorded, forth, then back, and
so on. The trainer publishes a version a step and waits for nobody. The worker moves to each version
as soon as it can be seen.

    python -m benchmarks.network.replay trainer|worker SPEC.json NAME
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.network import methods
from benchmarks.network.methods import Weights
from benchmarks.network.run import LOOK_SECONDS, Log, Spec, Stop, interface_bytes, ping, upload_rate
from pulse_rl import State, Store

#: The recorded run that has a chain of consecutive states (`trace.CHAIN_RUN`; importing that would
#: load torch).
RUN = "lr1e-6"


_APART = 16  # steps between two copies


def start(spec: Spec) -> tuple[Weights, list[Iterator[None]]]:
    """The first state, and what moves each of its copies one step further."""
    run = Path(spec.trace) / RUN
    shapes = json.loads((run / "trace.json").read_text())["tensors"]
    state = State.of(run / "chain" / "base.safetensors")
    flat = np.tile(np.concatenate([state.read(name) for name in shapes]), spec.copies)
    chains = [step(spec, part) for part in flat.reshape(spec.copies, -1)]
    for copy, chain in enumerate(chains):
        for _ in range(copy * _APART):
            next(chain)
    return Weights(
        flat, {f"{copy}.{name}": shapes[name] for copy in range(spec.copies) for name in shapes}
    ), chains


def step(spec: Spec, flat: np.ndarray) -> Iterator[None]:
    """Moves the weights, [elements] uint16, along the chain, one version each time, forth and back
    without end."""
    with np.load(Path(spec.trace) / RUN / "chain" / "deltas.npz") as deltas:
        steps = sorted(
            name.removeprefix("index") for name in deltas.files if name.startswith("index")
        )
        moves = [(deltas["index" + step], deltas["bits" + step]) for step in steps]
    while True:
        back = []
        for index, bits in moves:
            back.append((index, flat[index]))
            flat[index] = bits
            yield
        moves = back[::-1]


def train(spec: Spec, log: Log, stop: Stop) -> None:
    """A version each step, or as fast as it can where publishing takes longer than a step."""
    weights, chains = start(spec)
    trainer = methods.trainer(spec.method, place(spec), weights)
    trainer.publish()
    facts = {}
    if spec.method != "rsync":
        store = spec.open_store()
        facts = {"round_trip": ping(store), "upload_rate": upload_rate(store)}
    log.write("ready", params=weights.flat.size, **facts)
    stop.wait_for(spec.go)
    due = time.monotonic()
    while not stop:
        due = max(due + spec.step_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        for chain in chains:
            next(chain)
        since = time.monotonic()
        version = trainer.publish()
        log.write("published", seconds=time.monotonic() - since, **asdict(version))


def place(spec: Spec) -> Store | Path:
    """Where versions are published: the store, once it answers; for rsync the folder that its
    daemon shows."""
    if spec.method == "rsync":
        return Path(spec.folder) / "shown"
    spec.make_bucket()
    return spec.open_store()


def follow(spec: Spec, log: Log, stop: Stop) -> None:
    """Moves to each version as soon as it can be seen."""
    weights = start(spec)[0]
    if spec.method == "rsync":
        daemon = spec.endpoint.removeprefix("http://")
        worker: methods.Worker = methods.RsyncWorker(
            daemon, Path(spec.folder) / "followed", weights
        )
        host, _, port = daemon.rpartition(":")
        round_trip = ping((host, int(port)))
    else:
        store = spec.open_store()
        worker, round_trip = methods.worker(spec.method, store, weights), ping(store)
    log.write("ready", params=weights.flat.size, round_trip=round_trip)
    stop.wait_for(spec.go)
    while not stop:
        since, received, previous, failed = (
            time.monotonic(),
            interface_bytes("rx"),
            worker.version,
            worker.fallbacks,
        )
        worker.sync()
        now = time.monotonic()
        if worker.version == previous:
            time.sleep(LOOK_SECONDS)
            continue
        facts = {"rx": interface_bytes("rx") - received, "fallbacks": worker.fallbacks - failed}
        facts["phases"] = getattr(worker, "phases", None)
        log.write(
            "synced",
            version=worker.version,
            seconds=now - since,
            **facts,
            root=worker.root(),
            time=now,
        )


def main() -> None:
    role, path, name = sys.argv[1:]
    spec = Spec.load(path)
    {"trainer": train, "worker": follow}[role](spec, Log(spec.log(name)), Stop())


if __name__ == "__main__":
    main()
