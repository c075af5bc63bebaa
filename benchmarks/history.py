"""A stream of a real run that is coded by what changed before, and one that is not: bytes, speed,
what is remembered.

    python -m benchmarks.history [--lr 1e-6] [--bf16] [--steps 60] [--from 28] [--save]

The policy-gradient run of `benchmarks.trace` (22.7 M pretrained weights); each of its states is
published by both and followed by a worker each, through memory, in turns. --bf16: pure BF16
weights; without: FP32 masters. Counted are the steps after --from: whole patch files, seconds of
the clock and of the processor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks import results, trace
from pulse_rl import MemoryStore, Publisher, State, Subscriber

_WAYS = ("plain", "history")


class Measured:
    """A publisher and its worker."""

    def __init__(self, way: str) -> None:
        store = MemoryStore()
        self.publisher = Publisher(store, stream="run")
        self.publisher._rank.history.forced = way == "history"
        self.worker = Subscriber(store, stream="run")
        self.changed = self.nbytes = 0
        self.clock, self.processor = np.zeros(2), np.zeros(2)
        self.remembered = 0.0

    def take(self, state: State, counts: bool) -> tuple[float | None, int]:
        """Publishes and follows; the density and the bytes of the patch."""
        clock, processor = [time.perf_counter()], [time.process_time()]
        done = self.publisher.publish(state)
        clock.append(time.perf_counter())
        processor.append(time.process_time())
        update = self.worker.sync()
        clock.append(time.perf_counter())
        processor.append(time.process_time())
        assert update is not None
        update.acknowledge()
        assert self.worker.root == done.root
        if counts and done.changed is not None:
            self.changed += done.changed
            self.nbytes += done.patch_bytes
            self.clock += np.diff(clock)
            self.processor += np.diff(processor)
            self.remembered = max(self.remembered, self.worker._host.history.nbytes / state.nbytes)
        return (None if done.changed is None else done.density), done.patch_bytes


def states(args: argparse.Namespace) -> Iterator[dict[str, np.ndarray]]:
    """The BF16 bits of each step by tensor."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = trace.Policy()
    generator = torch.Generator().manual_seed(0)
    trace.load_start(policy, trace.CACHE / "start.pt", 0)
    run = trace.Run("history", float(args.lr), masters=not args.bf16)
    adam, prompts = trace.AdamW(policy, run), trace.Prompts(policy.vocabulary, 0)
    for _ in range(args.steps):
        policy.policy_gradient(prompts, generator)
        adam.step()
        yield shaped(policy, policy.bits())


def shaped(policy: trace.Policy, bits: np.ndarray) -> dict[str, np.ndarray]:
    found, at = {}, 0
    for name, shape in policy.shapes.items():
        found[name] = bits[at : at + int(np.prod(shape))].reshape(shape)
        at += found[name].size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=__doc__)
    parser.add_argument("--lr", default="1e-6")
    parser.add_argument("--bf16", action="store_true", help="pure BF16 weights")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--from", type=int, default=28, dest="start")
    parser.add_argument(
        "--save", action="store_true", help="write a log of the steps to benchmarks/results"
    )
    args = parser.parse_args()
    both = {way: Measured(way) for way in _WAYS}
    elements, rows = 0, []
    for step, found in enumerate(states(args), 1):
        tensors = {
            name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            for name, bits in found.items()
        }
        state = State.of(tensors).copy()
        elements = state.elements
        for way in _WAYS if step % 2 else _WAYS[::-1]:
            density, nbytes = both[way].take(state, step > args.start)
            rows.append(
                {
                    "step": step,
                    "way": way,
                    "density": density,
                    "bytes": nbytes,
                    "elements": elements,
                }
            )
    counted = args.steps - args.start
    print(
        f"{'pure BF16' if args.bf16 else 'FP32 masters'}, lr {args.lr}, steps {args.start + 1} "
        f"to {args.steps}:"
    )
    for way, each in both.items():
        publish, sync = 1000 * each.clock / counted
        print(
            f"  {way:8} {each.nbytes / each.changed:.3f} bytes a change at "
            f"{each.changed / elements / counted:.3%}, "
            f"publish {publish:.1f} ms, sync {sync:.1f} ms, remembered at most "
            f"{each.remembered:.1%} of the state"
        )
    plain, history = both["plain"], both["history"]
    clock, processor = history.clock / plain.clock, history.processor / plain.processor
    print(
        f"  bytes x {history.nbytes / plain.nbytes:.3f}; publish x {clock[0]:.2f} (processor "
        f"{processor[0]:.2f}), "
        f"sync x {clock[1]:.2f} ({processor[1]:.2f})"
    )
    if args.save:
        name = f"history-{args.lr}{'-bf16' if args.bf16 else ''}"
        results.save(
            name,
            f"python -m benchmarks.history --lr {args.lr}{' --bf16' if args.bf16 else ''}",
            rows,
        )


if __name__ == "__main__":
    main()
