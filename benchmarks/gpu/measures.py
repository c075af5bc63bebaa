"""What the rows of `benchmarks.gpu` measure: each function returns figures by name, with units in
the names.

Without a GPU the CPU stands in for one, so that all of this can be tried: the code for devices
runs, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.device import measure, seconds
from benchmarks.measure import state_of, timed
from benchmarks.sizes import SHAPES as MODELS
from benchmarks.synthetic import SHAPES, pair
from pulse_rl import MemoryStore, Publisher, State, Subscriber, Update, state_root
from pulse_rl.frameworks import torch as live_torch
from pulse_rl.frameworks.torch import Scatter, Sent, apply_, by_indices, write_group
from pulse_rl.patch.apply import TensorChanges
from pulse_rl.state.tensors import DTYPES, TensorSpec
from pulse_rl.sync.update import TensorUpdate

Figures = dict[str, Any]
Tensors = list[tuple[str, tuple[int, ...]]]

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
_TIMES = 5


class NotRun(Exception):
    """This machine lacks something."""


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of a row's process."""
    if not GPU:
        torch.set_num_threads(1)  # several wait for each other where other programs run
    parts: dict[str, Callable[[], Figures]] = {
        "limits": partial(limits, arguments.small),
        "roots": partial(roots, arguments.small),
        "apply": partial(apply, arguments.small),
        "threads": partial(threads, arguments.small),
        "submit": partial(submit, arguments.small, arguments.copy_on_device),
        "tensors": partial(tensors, arguments.small),
        "quantize": partial(quantize, arguments.small),
        "quantize_host": partial(quantize_host, arguments.small),
        "scatter": partial(scatter, arguments.small),
        "grpo": partial(grpo, arguments.small, arguments.model),
    }
    try:
        with as_on_a_gpu():
            return {"figures": parts[arguments.part]()}
    except NotRun as reason:
        return {"status": "not run", "reason": str(reason)}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Without a GPU `apply_` does on the CPU what it does on a GPU."""

    def yes(target: torch.Tensor) -> bool:  # a mock would take longer than the work
        return True

    before = live_torch._is_on_cuda
    live_torch._is_on_cuda = before if GPU else yes
    try:
        yield
    finally:
        live_torch._is_on_cuda = before


def fastest(work: Callable[[], object], times: int = _TIMES) -> float:
    """Seconds until the device, too, has ended."""
    work()
    return min(seconds(DEVICE, work) for _ in range(times))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- what the machine can do


def limits(small: bool) -> Figures:
    """GB/s. A copy within memory counts what is read and what is written once each."""
    nbytes = 1 << (26 if small else 30)
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 256, nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    found: Figures = {"GB": nbytes / 1e9, "cores": cores()}

    def speed(name: str, work: Callable[[], object], counted: int = nbytes) -> None:
        found[f"{name}, GB/s"] = counted / fastest(work) / 1e9

    if GPU:
        on_device = torch.from_numpy(source).to(DEVICE)
        other = torch.empty_like(on_device)
        for kind in ("page-locked", "pageable"):
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=kind == "page-locked")
            host.zero_()
            speed(f"host to device, {kind}", lambda h=host: other.copy_(h, non_blocking=True))  # type: ignore[misc]
            speed(f"device to host, {kind}", lambda h=host: h.copy_(other, non_blocking=True))  # type: ignore[misc]
        speed("within the device", lambda: other.copy_(on_device), 2 * nbytes)
    with ThreadPoolExecutor(cores()) as pool:
        edges = np.linspace(0, nbytes, 4 * cores() + 1, dtype=np.int64).tolist()
        pieces = [slice(*edge) for edge in pairwise(edges)]

        def copy(piece: slice) -> None:
            target[piece] = source[piece]

        def sha(piece: slice) -> None:
            hashlib.sha256(source[piece].data).digest()

        speed("memcpy, 1 thread", lambda: copy(slice(None)), 2 * nbytes)
        speed("memcpy, all cores", lambda: list(pool.map(copy, pieces)), 2 * nbytes)
        speed("SHA-256, 1 core", lambda: sha(pieces[0]), pieces[0].stop)
        speed("SHA-256, all cores", lambda: list(pool.map(sha, pieces)))
    speed("root of a state, all cores", lambda: state_root({"w": source}))
    return found


# -- updates of a live model, made without a stream


def specs_of(shape: Tensors) -> list[TensorSpec]:
    return [TensorSpec(name, DTYPES["BF16"], dims) for name, dims in shape]


def live(shape: Tensors) -> dict[str, torch.Tensor]:
    """A model's weights on the device, all zero."""
    return {name: torch.zeros(dims, dtype=torch.bfloat16, device=DEVICE) for name, dims in shape}


def update_of(changed: Sequence[TensorUpdate], full: bool) -> Update:
    return Update(1, None if full else 0, "", tuple(changed), {}, {}, 0, 0.0)


def full_update(shape: Tensors, rng: np.random.Generator) -> Update:
    """Random bits, each tensor in memory of its own."""
    pool = rng.integers(0, 1 << 16, 1 << 20, np.uint16)
    changed = []
    for spec in specs_of(shape):
        values = np.resize(np.roll(pool, len(changed)), spec.elements)
        values.flags.writeable = False  # as those of a subscriber's state
        changed.append(TensorUpdate(spec, None, values))
    return update_of(changed, True)


def sparse_update(shape: Tensors, rng: np.random.Generator, elements: int) -> Update:
    """About ``elements`` changes, spread evenly."""
    every = max(1, sum(prod(dims) for _, dims in shape) // elements)
    changed = []
    for spec in specs_of(shape):
        at = np.arange(int(rng.integers(every)), spec.elements, every, dtype=np.int64)
        changed.append(TensorUpdate(spec, at, rng.integers(0, 1 << 16, len(at), np.uint16)))
    return update_of([one for one in changed if one.elements], False)


def written(model: dict[str, np.ndarray], update: Update) -> None:
    """What ``update`` should do to a model, by numpy."""
    for one in update.tensors:
        flat = model[one.spec.name].reshape(-1)
        if one.indices is None:
            flat[:] = one.values
        else:
            flat[one.indices] = one.values


def roots(small: bool) -> Figures:
    """Needs the right root after updates of 1, 2 and 17 groups, after ten that no synchronization
    is between, and after a whole state of many buffers."""
    rng = np.random.default_rng(0)
    group = 1 << (12 if small else 20)
    shape = [("a", (group // 3,)), ("b", (5 * group, 4)), ("c", (7,)), ("d", (150 * group,))]
    model, found = live(shape), {}
    expected = {name: np.zeros(dims, np.uint16) for name, dims in shape}
    buffers = {"_GROUP_ELEMENTS": group, "_BUFFER_BYTES": group}
    with mock.patch.multiple(live_torch, **buffers):
        steps: list[tuple[str, list[Update]]] = [
            (f"{n} groups", [sparse_update(shape, rng, n * group - group // 2)]) for n in (1, 2, 17)
        ]
        steps.append(("ten updates", [sparse_update(shape, rng, 2 * group) for _ in range(10)]))
        steps.append(("whole", [full_update(shape, rng)]))
        steps.append(("whole, and one more", [full_update(shape, rng), steps[0][1][0]]))
        for name, updates in steps:
            for update in updates:
                apply_(model, update)
                written(expected, update)
            root = state_root(model)
            assert root == state_root(state_of(expected)), f"{name}: wrong bits"
            found[f"{name}, right root"] = root[:16]
    return found


def apply(small: bool) -> Figures:
    """`apply_` at 8B, 0.86% and all: until it returns, until the device has ended, and of it the
    host alone, the bus alone and the kernel alone."""
    shape = list(MODELS["tiny" if small else "8b"].tensors())
    rng, model = np.random.default_rng(0), live(shape)
    count = sum(prod(dims) for _, dims in shape)
    found: Figures = {"GB": 2 * count / 1e9}
    found |= parts_of("0.86%", model, sparse_update(shape, rng, int(0.0086 * count)))
    found |= parts_of("whole", model, full_update(shape, rng))
    return found


def parts_of(name: str, model: dict[str, torch.Tensor], update: Update) -> Figures:
    def ignore(*_: object) -> None:
        pass

    def both(method: str) -> Any:
        return mock.patch.multiple(live_torch._Group, **{method: ignore}), mock.patch.object(
            live_torch._Parts, method, ignore
        )

    apply_(model, update)
    returned, ended = [], []
    for _ in range(3):
        if GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        apply_(model, update)
        returned.append(time.perf_counter() - began)
        if GPU:
            torch.cuda.synchronize()
        ended.append(time.perf_counter() - began)
    found = {"until it returns": median(returned), "until the device has ended": median(ended)}
    one, other = both("launch")
    with one, other:
        found["host alone"] = fastest(lambda: apply_(model, update), 3)
    # Nothing is launched here: the buffers hold no positions.
    one, other = both("fill")
    with one, other, mock.patch.object(live_torch, "_launch_of", return_value=ignore):
        found["bus alone"] = fastest(lambda: apply_(model, update), 3)
    if GPU and not update.full:
        found["kernel alone"] = kernel_seconds(model, update)
    return {f"{name}, {part}, ms": 1e3 * took for part, took in found.items()} | {
        f"{name}, GB sent": sum(
            one.values.nbytes + 4 * (not one.whole) * one.elements for one in update.tensors
        )
        / 1e9
    }


def kernel_seconds(model: dict[str, torch.Tensor], update: Update) -> float:
    """By the device's clock."""
    launch, events = live_torch._launch_of(torch.device("cuda", torch.cuda.current_device())), []

    def clocked(sent: Sent) -> None:
        pair_of_events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair_of_events[0].record()
        launch(sent)
        pair_of_events[1].record()
        events.append(pair_of_events)

    with mock.patch.object(live_torch, "_launch_of", return_value=clocked):
        apply_(model, update)
        torch.cuda.synchronize()
    return sum(began.elapsed_time(ended) for began, ended in events) / 1e3


def tensors(small: bool) -> Figures:
    """18,867 tensors, 1% changed: through a stream from the device and back to it."""
    shape = list(MODELS["30b-a3b/16"].tensors())
    if small:
        shape = [(name, (64, 16)) for name, _ in shape[:2000]]
    rng, trained, model = np.random.default_rng(0), live(shape), live(shape)
    count = sum(prod(dims) for _, dims in shape)
    found: Figures = {"tensors": len(shape), "GB": 2 * count / 1e9}
    apply_(trained, full_update(shape, rng))
    with (
        Publisher(store := MemoryStore(), stream="run") as publisher,
        Subscriber(store, stream="run") as worker,
    ):
        for name in ("first", "second", "third"):
            if name != "first":
                apply_(trained, sparse_update(shape, rng, count // 100))
            found[f"{name} publish, s"] = seconds(DEVICE, lambda: publisher.publish(trained))
            updates: list[Update | None] = []
            found[f"{name} sync, s"] = seconds(DEVICE, lambda: updates.append(worker.sync()))  # noqa: B023
            update = updates.pop()
            assert update is not None
            found[f"{name} apply_, s"] = seconds(DEVICE, partial(apply_, model, update))
            del update
        assert state_root(model) == worker.root == state_root(trained), "wrong bits"
    return found


# -- what needs cores


def threads(small: bool) -> Figures:
    """Publish and sync of host states on 1 to 16 threads, by the clock and by the processor."""
    shape = SHAPES["10m" if small else "1b"]
    states = [state_of(tensors) for tensors in pair(shape, 3e-6)]
    found: Figures = {"GB": states[0].nbytes / 1e9, "cores": cores()}
    for count in (1, 2, 4, 8, 16):
        if count > cores():
            found[f"{count} threads"] = f"{cores()} cores"
            continue
        took: dict[str, list[tuple[float, float]]] = {}
        with (
            Publisher(store := MemoryStore(), stream="run", threads=count) as publisher,
            Subscriber(store, stream="run", threads=count) as worker,
        ):
            for number in range(4):
                for name, work in (
                    ("publish", partial(publisher.publish, states[number % 2])),
                    ("sync", worker.sync),
                ):
                    cost, done = timed(work)
                    key = name if number else f"first {name}"
                    took.setdefault(key, []).append((cost.wall, cost.cpu))
                    if name == "sync":
                        done.acknowledge()
                    del done
        for key, pairs in took.items():
            wall, cpu = (median(part) for part in zip(*pairs, strict=True))
            found[f"{count} threads, {key}, s/GB (CPU)"] = (
                f"{wall / found['GB']:.3f} ({cpu / found['GB']:.3f})"
            )
    return found


def submit(small: bool, copy_on_device: bool) -> Figures:
    """How long a trainer on the device is held up."""
    shape = "10m" if small else "qwen3-4b"
    found = measure(DEVICE, shape, 2 if small else 3, copy_on_device)
    return {"shape": shape} | found


def quantize_host(small: bool) -> Figures:
    """Weights in host memory, GB/s by one core and by all."""
    from benchmarks.quantized import speeds

    return {
        f"{name}, {count} threads, GB/s": speed
        for name, count, speed, *_ in speeds(1 if small else 4, 8 if small else 64)
    }


# -- the kernels


def scatter(small: bool) -> Figures:
    """Writes 1% of a 0.5B-shaped state by both of the ways that `apply_` has; needs the same bits
    of both."""
    device, shape = DEVICE, SHAPES["10m" if small else "0.5b"]
    ways = {"index_copy_": by_indices}
    if GPU and importlib.util.find_spec("triton"):
        from pulse_rl.frameworks.scatter_kernel import by_kernel

        ways["kernel"] = by_kernel
    sizes = [prod(dims) for _, dims in shape.tensors()]
    made = [(np.arange(n % 100, n, 100, dtype=np.int64), n) for n in sizes if n > 100]
    changes = [(TensorChanges.at(at, np.full(len(at), 7, np.uint16)), n) for at, n in made]
    took, roots = {}, set()
    for name, launch in ways.items():
        group = [
            Scatter(change, torch.zeros(n, dtype=torch.int16, device=device))
            for change, n in changes
        ]
        took[name] = median(
            seconds(device, lambda g=group, by=launch: write_group(g, by)) for _ in range(5)
        )  # type: ignore[misc]
        roots.add(state_root({str(n): one.flat for n, one in enumerate(group)}))
    assert len(roots) == 1, "the two ways wrote different bits"
    changed = sum(len(at) for at, _ in made)
    found: Figures = {"elements": changed, "tensors": len(made)}
    return found | {f"{name}, ms": 1e3 * each for name, each in took.items()}


def quantize(small: bool) -> Figures:
    """Quantizes FP32 and BF16 weights, and any bits, where they are, and by the host; needs the
    same bits of both, and that no weights are copied for the first."""
    from pulse_rl.quantize import device as quantize_device
    from pulse_rl.quantize.formats import FORMATS
    from pulse_rl.quantize.states import Quantize, QuantizedState
    from pulse_rl.state.digest import state_digest
    from pulse_rl.state.tensors import DeviceTensor

    device, size = DEVICE, 256 if small else 4096
    assert quantize_device.divides_exactly(torch.device(device)), (
        "it divides otherwise than the host, and is not used"
    )
    weights = [0.02 * torch.randn(2, size, size, device=device) for _ in range(3)]
    odd = torch.randint(
        -(1 << 31), 1 << 31, (2, size, size), dtype=torch.int32, device=device
    ).view(torch.float32)
    tensors = [
        of for weight in (*weights, odd) for of in ((weight, "F32"), (weight.bfloat16(), "BF16"))
    ]
    state = State(
        tuple(
            TensorSpec(f"m.experts.{k}", DTYPES[name], tuple(of.shape))
            for k, (of, name) in enumerate(tensors)
        ),
        {
            f"m.experts.{k}": DeviceTensor(of.view(-1).view(torch.uint8), of.itemsize)
            for k, (of, _) in enumerate(tensors)
        },
    )

    def read(made: QuantizedState) -> None:
        for spec in made.specs:
            for at in range(0, spec.elements, 1 << 22):
                made.read(spec.name, at, min(at + (1 << 22), spec.elements))

    def refuse(*_: object) -> None:
        raise AssertionError("weights were copied to the host")

    quantize_device.DEVICES = (device,)
    ways = {"device": (DeviceTensor, "read", refuse), "host": (quantize_device, "DEVICES", ())}
    formats: dict[str, Quantize] = {name: name for name in FORMATS} | {
        "GPT-OSS": {"quant_method": "mxfp4"}
    }
    found: Figures = {"weights": state.elements}
    for name, how in formats.items():
        roots, took = set(), []
        for target, attribute, replacement in ways.values():
            with mock.patch.object(target, attribute, replacement):
                roots.add(state_digest(QuantizedState(state, how)).root)
                took.append(
                    median(
                        seconds(device, lambda h=how: read(QuantizedState(state, h)))
                        for _ in range(3)
                    )
                )  # type: ignore[misc]
        assert len(roots) == 1, f"{name}: the device and the host make different bits"
        for way, each in zip(ways, took, strict=True):
            found[f"{name}, {way}, ms by one thread"] = 1e3 * each
    return found


# -- a language model


def grpo(small: bool, folder: Path | None) -> Figures:
    """GRPO on additions by SmolLM2-135M: the trainer's weights are published after each step, and
    a model that `apply_` alone writes to samples the answers to the next problems."""
    try:
        from examples.grpo.grpo import clipped_loss, group_advantages
        from examples.llm_grpo import model as language
        from examples.llm_grpo.task import Additions
    except ImportError as error:
        raise NotRun(f"no examples.llm_grpo: {error}") from None
    try:
        folder = language.prepare(folder or language.FOLDER)
    except (ImportError, ValueError) as error:
        raise NotRun(f"no model: {error}") from None
    until = time.monotonic() + (12 if small else 130)
    prompts, group, lr, most = (2, 4, 1e-5, 2) if small else (8, 8, 3e-6, 400)
    task = Additions(language.load_tokenizer(folder))
    masters = language.load_model(folder).float().to(DEVICE)
    rollouts = language.load_model(folder).to(DEVICE)
    for parameter in rollouts.parameters():
        parameter.data.zero_()
    optimizer = torch.optim.AdamW(
        masters.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    generator, rng = torch.Generator(DEVICE).manual_seed(0), random.Random(0)
    took: dict[str, list[float]] = {}
    rewards, densities, nbytes = [], [], []

    def clock(name: str, work: Callable[[], Any]) -> Any:
        result: list[Any] = []
        spent = seconds(DEVICE, lambda: result.append(work()))
        took.setdefault(name, []).append(spent)
        return result.pop()

    def likeliest(asked: torch.Tensor, count: int) -> torch.Tensor:
        return language.sample(rollouts, asked.to(DEVICE), 1, count)[0].cpu()

    def train(asked: torch.Tensor, answers: torch.Tensor, old: torch.Tensor) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            now, _ = language.log_probabilities(masters, asked, answers)
        counted = task.counted(answers.cpu()).to(DEVICE)
        advantages = group_advantages(rewards[-1], group).to(DEVICE)
        optimizer.zero_grad(set_to_none=True)
        clipped_loss(now, old, advantages, counted).backward()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()

    found: Figures = {"lr": lr}
    with (
        Publisher(store := MemoryStore(), stream="policy") as publisher,
        Subscriber(store, stream="policy") as worker,
    ):

        def follow() -> None:
            published = clock(
                "publish",
                lambda: publisher.submit(
                    masters.state_dict(), dtype="BF16", copy_on_device=True
                ).result(),
            )
            update = clock("sync", worker.sync)
            clock("apply_", lambda: apply_(rollouts, update))
            if published.changed is not None:
                densities.append(published.density)
                nbytes.append(published.patch_bytes)

        follow()
        first = {name: spent.pop() for name, spent in took.items()}
        found |= {f"first {name}, ms": 1e3 * spent for name, spent in first.items()}
        if not small:
            found["held-out accuracy at the start"] = task.accuracy(likeliest)
        while len(rewards) < 2 or (time.monotonic() < until and len(rewards) < most):
            problems = task.draw(rng, prompts)
            asked = task.prompts(problems).to(DEVICE)
            answers, old = clock(
                "sample",
                lambda: language.sample(rollouts, asked, group, task.answer_tokens, generator),  # noqa: B023
            )
            each = [problem for problem in problems for _ in range(group)]
            rewards.append(task.rewards(each, answers.cpu()))
            clock("train", lambda: train(asked, answers, old))  # noqa: B023
            follow()
        assert state_root(rollouts.state_dict()) == worker.root, "wrong bits"
        found |= {"steps": len(rewards), "right root": worker.root[:16]}
    if not small:
        found["held-out accuracy at the end"] = task.accuracy(likeliest)
    for name, part in (("first", rewards[:10]), ("last", rewards[-10:])):
        found[f"reward, {name} {len(part)} steps"] = mean(float(of.mean()) for of in part)
    found |= {f"{name}, median ms": 1e3 * median(spent) for name, spent in took.items()}
    found["changed, mean %"] = 100 * mean(densities)
    found["patch, mean kB"] = mean(nbytes) / 1e3
    return found
