"""Trainers as real processes over loopback, each with a hard limit on its time."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from pulse_rl.errors import PulseError, TrainerLost
from pulse_rl.loco import gate as gate_module
from pulse_rl.loco.gate import SCATTER_FEW_BITS_FROM, SCATTER_FROM
from pulse_rl.loco.group import TrainerGroup

# One process imports what programs are made of; the trainers are forks of it, which takes
# hundredths of a second.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        *("pytest", "torch", "torch.distributed", "torch._dynamo"),
        *("torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
        *(
            "pulse_rl.loco",
            "pulse_rl.frameworks.fsdp",
            "tests.support.loco_reference",
            "tests.support.sharded",
        ),
    ]
)


@dataclass(frozen=True)
class Trainer:
    """One of ``size`` processes; ``folder`` is common to all of them."""

    rank: int
    size: int
    folder: Path

    def connect(self, name: str, ranks: tuple[int, ...] | None = None) -> None:
        """Initializes torch.distributed among ``ranks`` (default: all), anew if it was before."""
        if dist.is_initialized():
            dist.destroy_process_group()
        ranks = tuple(range(self.size)) if ranks is None else ranks
        file = f"file://{self.folder}/{name}"
        dist.init_process_group(
            "gloo", init_method=file, rank=ranks.index(self.rank), world_size=len(ranks)
        )
        # Or one that disconnects at once closes its end while others still connect to it.
        self.barrier(f"connected {name}", ranks)

    def put(self, name: str, value: Any = None) -> None:
        """Publishes a value to the others, atomically."""
        aside = self.folder / f"{name}.{self.rank}.part"
        torch.save(value, aside)
        aside.rename(self.folder / f"value-{name}.{self.rank}")

    def get(self, name: str, rank: int, seconds: float = 100) -> Any:
        """The value that trainer ``rank`` has put, as soon as it is there."""
        file = self.folder / f"value-{name}.{rank}"
        until = time.monotonic() + seconds
        while not file.exists():
            assert time.monotonic() < until, f"trainer {rank} never put {name!r}"
            time.sleep(0.005)
        return torch.load(file, weights_only=False)

    def barrier(self, name: str, ranks: tuple[int, ...]) -> None:
        """Waits until all ``ranks`` have called it."""
        self.put(name)
        for rank in ranks:
            self.get(name, rank)


class Group:
    """Trainers under way: `results` waits for them. Those in ``lost`` are expected to die or to
    stand still."""

    def __init__(
        self,
        program: Callable[..., Any],
        size: int,
        *arguments: Any,
        seconds: float = 180,
        lost: tuple[int, ...] = (),
    ) -> None:
        # A bound for what hangs, however busy the machine is: no test waits for it to pass.
        seconds = max(seconds, 180)
        self._until, self._lost = time.monotonic() + seconds, lost
        self._folder = Path(tempfile.mkdtemp(prefix="trainers-"))
        self._processes, self._replies = [], []
        for rank in range(size):
            reply, sender = _PROCESSES.Pipe(duplex=False)
            trainer = Trainer(rank, size, self._folder)
            process = _PROCESSES.Process(
                target=_main, args=(program, trainer, sender, arguments, seconds), daemon=True
            )
            process.start()
            sender.close()
            self._processes.append(process)
            self._replies.append(reply)

    def results(self) -> list[Any]:
        """What ``program`` returned in each trainer (None for the lost), or AssertionError with its
        traceback."""
        found: list[Any] = [None] * len(self._replies)
        awaited = {
            reply: rank for rank, reply in enumerate(self._replies) if rank not in self._lost
        }
        try:
            while awaited:
                ready = wait(list(awaited), max(self._until + 1 - time.monotonic(), 0))
                assert ready, f"trainers {sorted(awaited.values())} have hung"
                for reply in ready:
                    rank = awaited.pop(reply)
                    found[rank] = self._received(rank)
        finally:
            for process, reply in zip(self._processes, self._replies, strict=True):
                process.kill()  # also what stands still
                process.join()
                reply.close()
            shutil.rmtree(self._folder)
        return found

    def _received(self, rank: int) -> Any:
        try:
            failed, value = self._replies[rank].recv()
        except EOFError:
            raise AssertionError(f"trainer {rank} died") from None
        assert not failed, f"trainer {rank}:\n{value}"
        return value


def together(program: Callable[..., Any], size: int, *arguments: Any, **settings: Any) -> list[Any]:
    """What ``program(trainer, *arguments)`` returns in each of ``size`` processes."""
    return Group(program, size, *arguments, **settings).results()


def side_by_side(groups: Mapping[Any, Group]) -> dict[Any, list[Any]]:
    """The results of each group, by its name, which is noted with a failure. For programs that
    mostly wait."""
    found = {}
    for name, group in groups.items():
        try:
            found[name] = group.results()
        except AssertionError as error:
            error.add_note(f"in the group {name!r}")
            raise
    return found


def printed(file: Path, *arguments: str, size: int = 1) -> list[list[str]]:
    """The lines that a program prints in each of ``size`` processes, in its folder; several are in
    torchrun's environment."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    return together(_run_program, size, file, arguments, port)


def _run_program(trainer: Trainer, file: Path, arguments: tuple[str, ...], port: int) -> list[str]:
    if trainer.size > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(trainer.size),
        }
        os.environ |= {"RANK": str(trainer.rank), "LOCAL_RANK": str(trainer.rank)}
    # The processes that it starts are forks of this one, which has imported what they import for
    # seconds.
    multiprocessing.current_process().daemon = False
    forks = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: forks  # type: ignore[assignment, return-value]
    torch.multiprocessing.spawn = partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    os.chdir(file.parent)
    sys.argv = [str(file), *arguments]
    output = trainer.folder / f"printed.{trainer.rank}"
    with output.open("w") as shared:  # with the processes that it starts
        os.dup2(shared.fileno(), 1)
        runpy.run_path(str(file), run_name="__main__")
        sys.stdout.flush()
    return output.read_text().splitlines()


def each(trainer: Trainer, cases: Sequence[Callable[[Trainer], None]], size: int) -> list[str]:
    """Every case among all ``size`` trainers in a world of its own. Returns those that failed here,
    and how."""
    failed = []
    for case in cases:
        trainer.connect(case.__name__)
        try:
            case(trainer)
        except (PulseError, AssertionError, pytest.fail.Exception) as error:
            failed.append(f"{case.__name__}: {type(error).__name__} {error}"[:600])
        trainer.barrier(f"done with {case.__name__}", tuple(range(size)))
    return failed


def all_pass(trainer: Trainer, *cases: Callable[[Trainer], None]) -> None:
    failed = each(trainer, cases, trainer.size)
    assert not failed, "\n".join(failed)


def force_scattered(scattered: bool | None) -> None:
    """From now on all rounds of this process are scattered, none is, or (None) the rule decides."""
    forced = None if scattered is None else 1 if scattered else 1 << 30
    gate_module.SCATTER_FROM = forced or SCATTER_FROM
    gate_module.SCATTER_FEW_BITS_FROM = forced or SCATTER_FEW_BITS_FROM


@contextmanager
def cut_off_in_broadcast(number: int, *, torn: bool) -> Iterator[None]:
    """The line goes dead in the broadcast of that number, from 1; half of it has arrived where it
    is ``torn``."""
    broadcast, calls = TrainerGroup.broadcast, 0

    def broken(self: TrainerGroup, array: Any, source: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            if torn:
                array[: len(array) // 2] = 7
            raise TrainerLost("the line went dead")
        broadcast(self, array, source)

    TrainerGroup.broadcast = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainerGroup.broadcast = broadcast  # type: ignore[method-assign]


def lose(how: signal.Signals) -> None:
    """Kills or stops the calling process."""
    os.kill(os.getpid(), how)


def _main(
    program: Callable[..., Any],
    trainer: Trainer,
    sender: Any,
    arguments: tuple[Any, ...],
    seconds: float,
) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    try:
        reply = (False, program(trainer, *arguments))
    except BaseException:
        reply = (True, traceback.format_exc())
    try:
        sender.send(reply)
    finally:
        # Straight out: a process group whose peers are gone may wait for them in its destructor.
        os._exit(0)
