"""PULSESync, the smallest run: a trainer publishes three steps of a tiny model, a worker follows,
and the bits agree.

    python examples/minimal.py [STORE]

STORE is a folder (default: a temporary one) or the address of an object store, such as
s3://bucket/run.
"""

from __future__ import annotations

import sys
import tempfile

import torch

import pulse_rl
from pulse_rl.frameworks.torch import apply_


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)
    ).bfloat16()


def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = torch.randn(32, 64, dtype=torch.bfloat16)
    optimizer.zero_grad()
    (model(batch) - batch).square().mean().backward()
    optimizer.step()


def main(store: str) -> None:
    trained = make_model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-5)
    served = make_model()

    with (
        pulse_rl.Publisher(store, stream="policy") as publisher,
        pulse_rl.Subscriber(store, stream="policy") as worker,
    ):
        for step in range(3):
            train_one_step(trained, optimizer)
            done = publisher.publish(trained.state_dict(), metadata={"step": step})
            print(
                f"published version {done.version}: {done.density:.1%} of the weights, "
                f"{done.ratio:.1f} times smaller"
            )

            update = worker.sync()  # fetched and verified on the host
            assert update is not None
            apply_(served, update)  # writes the changed elements only
            print(
                f"  the worker took {update.payload_bytes:,} bytes and wrote {update.changed:,} "
                "weights"
            )

        assert (
            pulse_rl.state_root(served.state_dict())
            == pulse_rl.state_root(trained.state_dict())
            == worker.root
        )
        print(f"bit-identical, root {worker.root}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
