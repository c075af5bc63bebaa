"""Programs that end at a random moment, with all that Pulse does for them under way and left open.

Submissions, a follower, many subscribers, a relay, a group and rounds of PULSELoCo (where torch is installed) run in
daemon threads; the main thread ends by itself, by an exception, by `sys.exit` or by an interrupt. No program ends by a
signal or hangs, all that was submitted is there, and both stores are whole. Each program is a fork of one that has
imported all, made before it has a thread: it ends as any other.
"""

from __future__ import annotations

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

import numpy as np

from pulse_rl import (
    Bits,
    GroupMember,
    LocalStore,
    Publisher,
    PulseError,
    Relay,
    Subscriber,
    Subscribers,
    open_store,
    verify_stream,
)
from pulse_rl.errors import EmptyStream

_ENDS = {"itself": 0, "exception": 1, "exit": 3, "interrupt": 130}
_MOST_SECONDS = 60.0
_SUBMITTED, _SAID = "submitted", "stderr"
_HAS_TORCH = importlib.util.find_spec("torch") is not None
_kept: list[object] = []


class AsAnyOther(BaseException):
    """Ends a program with a traceback, past what is caught on its way."""


def sequence(seed: int) -> Counter[str]:
    """One program: how it ended, and the versions that it left. In the program's own process it does not return."""
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
    said = (folder / _SAID).read_text(errors="replace")
    shutil.rmtree(folder)
    wrong = wrong or torn
    assert not wrong, f"a program that ends by {end}: {wrong}\n{said[-4000:]}"
    return Counter({end: 1, "versions": found})


def _awaited(child: int, expected: int) -> str:
    """What is wrong with how a process ends."""
    limit = time.monotonic() + _MOST_SECONDS
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
        bad += [str(report) for report in verify_stream(LocalStore(folder / "near"), "s", threads=1) if not report.ok]
    return len(reports), "; ".join(bad)


def _program(rng: Random, folder: Path, end: str) -> int:
    """What a user's program does, until it ends. What it made is kept, so that nothing closes it."""
    os.dup2(os.open(folder / _SAID, os.O_WRONLY | os.O_CREAT), 2)
    store = open_store(folder / "store")
    numbers = np.random.default_rng(rng.getrandbits(32))
    weight = numbers.integers(0x3C00, 0x4000, (rng.choice((10, 3000)), 1000)).astype(np.uint16)
    publisher = Publisher(store, stream="s", folds=rng.choice(((), (2,))), threads=rng.choice((1, 2)))
    works: list[Callable[[], object]] = [
        lambda: _follows(store, None),
        lambda: _follows(store, "a*"),
        lambda: _many(store),
        lambda: _relays(store, folder / "near"),
        lambda: _polls(store),
        *([_rounds] if _HAS_TORCH else []),
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
        weight[numbers.random(weight.shape) < 0.05] += np.uint16(1)
        version += 1
        if rng.random() < 0.3:
            break
    if end == "exception":
        raise AsAnyOther
    if end == "interrupt":
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
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
    many = Subscribers(store, streams=["s"], poll_seconds=0.01, threads=2)  # type: ignore[arg-type]
    _kept.append(many)
    for _ in many.updates():
        pass


def _relays(store: object, near: Path) -> None:
    Relay(store, open_store(near), stream="s", keep=3, threads=2).sync()  # type: ignore[arg-type]


def _polls(store: object) -> None:
    member = GroupMember(Subscriber(store, stream="s", threads=2), group="g", name="m")  # type: ignore[arg-type]
    _kept.append(member)
    while True:
        if update := member.poll():
            update.acknowledge()
        time.sleep(0.002)


def _rounds() -> None:
    import torch

    from pulse_rl.loco import PulseLoCo

    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = PulseLoCo(net, optimizer, sync_every=1)
    _kept.append(loop)
    while True:
        optimizer.zero_grad()
        net(torch.ones(1, 300)).square().mean().backward()
        optimizer.step()
