"""Trainer and worker that replay a recorded RL run over the network in real time.

Each runs in its own namespace and knows the others by the store alone. Computing is a sleep of the step's length: it
stands for the GPU's work, so that two cores bear five processes and nothing but the links differs. Publishing, syncing
and scattering are real, and so are states, changes and densities: 64 versions that `benchmarks.trace` recorded, forth,
then back, and so on. The trainer publishes a version a step and waits for nobody. A worker starts each step with the
newest version that there is; it waits for its own sync and for nothing else.

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
from benchmarks.network.run import Log, Spec, Stop, interface_bytes, ping
from pulse_rl import as_state

RUN = "lr1e-6"
"""The recorded run that has a chain of consecutive states (`trace.CHAIN_RUN`; importing that would load torch)."""


def base(spec: Spec) -> Weights:
    """The chain's first state."""
    run = Path(spec.trace) / RUN
    shapes = json.loads((run / "trace.json").read_text())["tensors"]
    state = as_state(run / "chain" / "base.safetensors")
    return Weights(np.concatenate([state.read(name) for name in shapes]), shapes)


def step(spec: Spec, weights: Weights) -> Iterator[None]:
    """Moves the weights along the chain, one version each time, forth and back without end."""
    with np.load(Path(spec.trace) / RUN / "chain" / "deltas.npz") as deltas:
        steps = sorted(name.removeprefix("index") for name in deltas.files if name.startswith("index"))
        moves = [(deltas["index" + step], deltas["bits" + step]) for step in steps]
    while True:
        back = []
        for index, bits in moves:
            back.append((index, weights.flat[index]))
            weights.flat[index] = bits
            yield
        moves = back[::-1]


def train(spec: Spec, log: Log, stop: Stop) -> None:
    """A version each step, or as fast as it can where publishing takes longer than a step."""
    spec.make_bucket()
    weights = base(spec)
    trainer = methods.trainer(spec.method, spec.open_store(), weights)
    trainer.publish()
    log.write("ready", params=weights.flat.size)
    chain = step(spec, weights)
    stop.wait_for(spec.go)
    due = time.monotonic()
    while not stop:
        due = max(due + spec.step_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        next(chain)
        since = time.monotonic()
        version = trainer.publish()
        log.write("published", seconds=time.monotonic() - since, **asdict(version))


def work(spec: Spec, log: Log, stop: Stop) -> None:
    store = spec.open_store()
    worker = methods.worker(spec.method, store, base(spec))
    log.write("ready", round_trip=ping(store))
    stop.wait_for(spec.go)
    while not stop:
        since, received, previous = time.monotonic(), interface_bytes("rx"), worker.version
        worker.sync()
        synced = time.monotonic()
        time.sleep(spec.step_seconds)
        log.write(
            "step",
            since=since,
            rx_since=received,
            sync_seconds=synced - since,
            previous=previous,
            version=worker.version,
        )
    log.write("end", version=worker.version, root=worker.root())


def main() -> None:
    role, path, name = sys.argv[1:]
    spec = Spec.load(path)
    {"trainer": train, "worker": work}[role](spec, Log(spec.log(name)), Stop())


if __name__ == "__main__":
    main()
