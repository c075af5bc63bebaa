"""Programs that end at a random moment, with all that Pulse does for them under way and left open.

Submissions, a follower, many subscribers and a relay run in daemon threads; the main
thread trains with another process in rounds of PULSELoCo (where torch is installed), and ends by
itself, or by an exception, `sys.exit` or an interrupt in the middle of what it does. No program
ends by a signal or hangs, all that was submitted is there, and both stores are whole. Each program
is a fork of one that has imported all, made before it has a thread: it ends as any other.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NoReturn

import numpy as np

from pulse_rl import (
    Bits,
    LocalStore,
    MultiSubscriber,
    PulseError,
    Relay,
    Subscriber,
    open_store,
    verify_stream,
)
from pulse_rl.errors import EmptyStream
from tests.support.publishers import FoldingPublisher

_ENDS = {"itself": 0, "exception": 1, "exit": 3, "interrupt": 130}
_MAX_SECONDS = 60.0
_SUBMITTED, _SAID, _ROUND = "submitted", "stderr", "round"
_HAS_TORCH = importlib.util.find_spec("torch") is not None
_kept: list[object] = []


class AsAnyOther(BaseException):
    """Ends a program with a traceback, past what is caught on its way."""


def sequence(seed: int) -> Counter[str]:
    """One program: how it ended, the versions that it left and the rounds in which it was. In the
    program's own process it does not return."""
    if _HAS_TORCH:
        import torch  # noqa: F401 - so that each program has it already

        import pulse_rl.loco  # noqa: F401
    rng = Random(seed)
    end = rng.choice(list(_ENDS))
    folder = Path(tempfile.mkdtemp())
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.exit(_program(rng, folder, end))  # and the interpreter goes down as it does at any end
    wrong = _awaited(child, _ENDS[end])
    found, torn = _looked_at(folder)
    rounds = len(list(folder.glob(f"{_ROUND}*")))
    said = (folder / _SAID).read_text(errors="replace")
    shutil.rmtree(folder)
    wrong = wrong or torn
    assert not wrong, f"a program that ends by {end}: {wrong}\n{said[-4000:]}"
    return Counter({end: 1, "versions": found, "rounds": rounds})


def _awaited(child: int, expected: int) -> str:
    """What is wrong with how a process ends."""
    limit = time.monotonic() + _MAX_SECONDS
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return "" if code == expected else f"status {code}, not {expected}"
        time.sleep(0.005)
    os.kill(child, signal.SIGABRT)
    os.waitpid(child, 0)
    return "it hangs"


def _looked_at(folder: Path) -> tuple[int, str]:
    """The number of versions, and what is wrong with a store that is left."""
    submitted = len(list(folder.glob(f"{_SUBMITTED}*")))
    reports = []
    with suppress(EmptyStream):
        reports += verify_stream(LocalStore(folder / "store"), "s", threads=1)
    bad = [f"version {report.version}: {report.problems}" for report in reports if not report.ok]
    if len(reports) < submitted:
        bad.append(f"{submitted} versions were submitted, {len(reports)} are there")
    with suppress(EmptyStream):  # of which nothing had come to the relay's target yet
        bad += [
            str(report)
            for report in verify_stream(LocalStore(folder / "near"), "s", threads=1)
            if not report.ok
        ]
    return len(reports), "; ".join(bad)


def _program(rng: Random, folder: Path, end: str) -> int:
    """What a user's program does, until it ends. What it made is kept, so that nothing closes
    it."""
    os.dup2(os.open(folder / _SAID, os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable()  # says where it hangs
    step: Callable[[], object] = int  # nothing
    if _HAS_TORCH and rng.random() < 0.6:
        if not os.fork():  # before there is a thread
            _train_until(folder, os.getppid())
        step = _training(folder, rank=0)
    store = open_store(folder / "store")
    numbers = np.random.default_rng(rng.getrandbits(32))
    weight = numbers.integers(0x3C00, 0x4000, (rng.choice((10, 3000)), 1000)).astype(np.uint16)
    publisher = FoldingPublisher(
        store, stream="s", folds=rng.choice(((), (2,))), threads=rng.choice((1, 2))
    )
    works: list[Callable[[], object]] = [
        lambda: _follows(store, None),
        lambda: _follows(store, "a*"),
        lambda: _many(store),
        lambda: _relays(store, folder / "near"),
    ]
    _kept.append(publisher)
    for work in rng.sample(works, rng.randint(1, len(works))):
        threading.Thread(target=_again_and_again, args=(work,), daemon=True).start()
    ends_at = time.monotonic() + rng.random() * rng.choice((0.01, 0.1, 0.3))
    version = 0
    while time.monotonic() < ends_at or not version:
        state = {"a": Bits(weight, "BF16"), "b": Bits(weight[:1] ^ np.uint16(version % 7), "BF16")}
        if rng.random() < 0.8:
            publisher.submit(state)
        else:
            publisher.publish(state)
        (folder / f"{_SUBMITTED}{version}").touch()
        step()
        weight[numbers.random(weight.shape) < 0.05] += np.uint16(1)
        version += 1
        if rng.random() < 0.3:
            break
    if end != "itself":

        def ended(*_: object) -> NoReturn:
            raise {
                "exception": AsAnyOther,
                "exit": SystemExit(_ENDS[end]),
                "interrupt": KeyboardInterrupt,
            }[end]

        signal.signal(signal.SIGALRM, ended)
        seconds = 1e-6 + rng.random() * rng.choice((0.001, 0.05))
        with suppress(KeyboardInterrupt):
            try:
                signal.setitimer(
                    signal.ITIMER_REAL, seconds, 1.0
                )  # again where a destructor swallows it
                while True:
                    step()
                    time.sleep(0.001)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
    return _ENDS[end]


def _again_and_again(work: Callable[[], object]) -> None:
    while True:
        with suppress(PulseError):
            work()
        time.sleep(0.001)


def _follows(store: object, select: str | None) -> None:
    worker = Subscriber(store, stream="s", select=select, threads=2)  # type: ignore[arg-type]
    _kept.append(worker)
    for _ in worker.updates(poll_seconds=0.001, timeout_seconds=0.2):
        pass


def _many(store: object) -> None:
    many = MultiSubscriber(store, streams=["s"], poll_seconds=0.01, threads=2)  # type: ignore[arg-type]
    _kept.append(many)
    for _ in many.updates():
        pass


def _relays(store: object, near: Path) -> None:
    Relay(store, open_store(near), stream="s", keep=3, threads=2).sync()  # type: ignore[arg-type]


def _training(folder: Path, rank: int) -> Callable[[], object]:
    """A step of one of two trainers, with a round after it."""
    import torch
    import torch.distributed as dist

    from pulse_rl.loco import PulseLoCo, Round

    def note(done: Round) -> None:
        (folder / f"{_ROUND}{done.number}").touch()

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(1, 300)).square().mean().backward()
        optimizer.step()

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _kept.append(
        PulseLoCo(net, optimizer, sync_every=1, on_round=None if rank else note).__enter__()
    )
    return step


def _train_until(folder: Path, parent: int) -> NoReturn:
    """The other trainer, which ends with its ``parent``."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.02)
        os._exit(0)

    try:
        threading.Thread(target=watch, daemon=True).start()
        step = _training(folder, rank=1)
        while True:
            step()
    finally:
        os._exit(0)
