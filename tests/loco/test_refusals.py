"""What must not spread: other settings, other models, NaN, a theta that differs, damaged messages. All find out."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl.errors import CorruptMessage, Diverged, InputError, NonFinite, PulseError, StateMismatch
from pulse_rl.loco import DiLoCo, PulseLoCo
from pulse_rl.loco.exchange import Exchange
from pulse_rl.loco.wire import Message
from tests.support.loco_reference import Job, flat, same
from tests.support.trainers import Trainer, together


def held(loop: PulseLoCo) -> list[torch.Tensor]:
    state = loop.state_dict()
    return [flat(state[key]) for key in ("theta", "momentum", "residual")]


def kept(loop: PulseLoCo, before: list[torch.Tensor]) -> bool:
    return all(same(a, b) for a, b in zip(held(loop), before, strict=True))


def other_settings(trainer: Trainer) -> None:
    job = Job()
    lr = 0.7 if trainer.rank != 1 else 0.5
    with (
        pytest.raises(InputError, match="trainer") as caught,
        PulseLoCo(job.model, job.optimizer, sync_every=2, outer_lr=lr),
    ):
        pass
    assert not isinstance(caught.value, StateMismatch)
    kind = PulseLoCo if trainer.rank != 2 else DiLoCo
    with pytest.raises(InputError, match="trainer"), kind(job.model, job.optimizer, sync_every=2):
        pass


def other_model(trainer: Trainer) -> None:
    model = torch.nn.Linear(3, 5 if trainer.rank else 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateMismatch, match="trainer"), PulseLoCo(model, optimizer, sync_every=2):
        pass
    assert not optimizer._optimizer_step_post_hooks


def not_finite(trainer: Trainer) -> None:
    """NaN and Inf of one trainer stop all of them, name it and the parameter, and nothing has changed anywhere."""
    job = Job()
    with PulseLoCo(job.model, job.optimizer, sync_every=2, timeout_seconds=10, threads=2) as loop:
        for _ in range(2):
            job.step(trainer.rank)
        for value in (float("nan"), float("-inf")):
            before = held(loop)
            job.step(trainer.rank)
            job.backward(trainer.rank)
            if trainer.rank == 2:
                job.model[2].bias.data[5] = value
            with pytest.raises(NonFinite, match=r"trainer 2.*2\.bias"):
                job.optimizer.step()
            assert kept(loop, before)
            assert (loop.round, loop.inner_step) == (1, 2)
            loop.rewind()
            assert same(job.weights(), before[0])
            assert loop.inner_step == 0
            assert kept(loop, before)
            # Adam keeps the NaN that it has seen.
            job.optimizer.state.clear()
        for _ in range(2):
            job.step(trainer.rank)
        assert loop.round == 2
        trainer.put("after", loop.last_round.root)
        assert loop.last_round.root == trainer.get("after", 0)


def overflowing(trainer: Trainer) -> None:
    """Finite pseudo-gradients whose rounding, sum or outer step is not finite."""
    for wire, size in ((torch.bfloat16, 3.4e38), (torch.float32, 3e38)):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with PulseLoCo(model, optimizer, sync_every=1, wire_dtype=wire, timeout_seconds=10) as loop:
            before = held(loop)
            for p in model.parameters():
                p.grad = torch.full_like(p, size if trainer.rank != 1 or wire == torch.float32 else 0.1)
            with pytest.raises(NonFinite):
                optimizer.step()
            assert kept(loop, before)


def differing(trainer: Trainer, flip: Callable[[PulseLoCo], np.ndarray], bits: tuple[int, ...], match: str) -> None:
    """One bit of the common state differs on trainer 1: all of them stop. Often the messages cannot even be read."""
    for bit in bits:
        job = Job()
        with PulseLoCo(job.model, job.optimizer, sync_every=2, timeout_seconds=5) as loop:
            for _ in range(2):
                job.step(trainer.rank)
            if trainer.rank == 1:
                flip(loop).view(np.uint32)[47] ^= 1 << bit
            job.step(trainer.rank)
            with pytest.raises(Diverged, match=match):
                job.step(trainer.rank)


def two_states(trainer: Trainer) -> None:
    """Trainers that meet in the same round must hold the same state."""
    for flip in ((lambda loop: loop.theta_flat), (lambda loop: loop.momentum_flat)):
        job = Job()
        with PulseLoCo(job.model, job.optimizer, sync_every=1, timeout_seconds=5) as loop:
            job.step(trainer.rank)
            if trainer.rank == 1:
                flip(loop).view(np.uint32)[47] ^= 1
            before = held(loop)
            with pytest.raises(Diverged, match=r"trainers \[1\]"):
                loop.rejoin()
            assert kept(loop, before)


def damaged(trainer: Trainer, damage: Callable[[PulseLoCo, bytes], bytes]) -> None:
    """Trainer 0 sends something else than it should. Nobody takes any of it."""
    job = Job()
    with PulseLoCo(job.model, job.optimizer, sync_every=2, timeout_seconds=3) as loop:
        for _ in range(2):
            job.step(trainer.rank)
        before = held(loop)
        if trainer.rank == 0:
            encode = loop._encode_message
            loop._encode_message = lambda: (lambda message, own: (damage(loop, message), own))(*encode())  # type: ignore[method-assign]
        job.step(trainer.rank)
        with pytest.raises(CorruptMessage, match="could not read"):
            job.step(trainer.rank)
        assert kept(loop, before)


def cut(loop: PulseLoCo, message: bytes) -> bytes:
    return message[:-1]


def extended(loop: PulseLoCo, message: bytes) -> bytes:
    return message + b"\0"


def nothing(loop: PulseLoCo, message: bytes) -> bytes:
    return b""


def another_round(loop: PulseLoCo, message: bytes) -> bytes:
    return Message(loop.round + 1, loop._wire.code, Message.parse(message, 1).payloads).to_bytes()


def too_many(loop: PulseLoCo, message: bytes) -> bytes:
    return Message(loop.round, loop._wire.code, [b"\xff\xff\x7f" + bytes(20)]).to_bytes()


def announced(trainer: Trainer) -> None:
    """A trainer that announces more bytes than any message takes: nobody allocates them."""
    exchange = Exchange(timeout_seconds=5)
    if trainer.rank == 2:
        header = struct.pack("<Q", 1 << 50) + sha256(b"").digest()
        exchange._all_gather_array(np.frombuffer(header, np.uint8))
    else:
        with pytest.raises(CorruptMessage, match="trainer 2"):
            exchange.all_gather(b"hello", max_bytes=100)
    exchange.close()


def flip_on_the_way(exchange: Exchange, length: int) -> None:
    """Once, a byte of trainer 2's message changes before it arrives here."""
    all_gather = exchange._all_gather_array

    def flipped(data: Any) -> Any:
        pieces = all_gather(data)
        if len(data) >= length:
            exchange._all_gather_array = all_gather  # type: ignore[method-assign]
            pieces[2] = pieces[2].copy()
            pieces[2][length - 1] ^= 64
        return pieces

    exchange._all_gather_array = flipped  # type: ignore[method-assign]


def garbled(trainer: Trainer) -> None:
    exchange = Exchange(timeout_seconds=5)
    if trainer.rank == 1:
        flip_on_the_way(exchange, 50)
        with pytest.raises(CorruptMessage, match="trainer 2"):
            exchange.all_gather(bytes(50), max_bytes=100)
    else:
        assert exchange.all_gather(bytes(50), max_bytes=100) == [bytes(50)] * 3
    exchange.close()


def garbled_round(trainer: Trainer) -> None:
    """What only one trainer could not read is refused by all, and the next try may succeed."""
    job = Job()
    with PulseLoCo(job.model, job.optimizer, sync_every=2, timeout_seconds=5) as loop:
        exchange = loop._exchange
        assert exchange is not None
        for _ in range(2):
            job.step(trainer.rank)
        before = held(loop)
        if trainer.rank == 1:
            flip_on_the_way(exchange, 100)
        job.step(trainer.rank)
        with pytest.raises(CorruptMessage, match=r"\[1\]"):
            job.step(trainer.rank)
        assert kept(loop, before)
        job.step(trainer.rank)
        assert loop.round == 2


def refuse(trainer: Trainer) -> list[str]:
    """Every case in a world of its own. Returns those that failed, and how."""
    cases: dict[str, Callable[[Trainer], None]] = {
        "other settings": other_settings,
        "other model": other_model,
        "not finite": not_finite,
        "overflowing": overflowing,
        "theta": lambda t: differing(t, lambda loop: loop.theta_flat, (3, 12, 25, 31), r"0\.weight' on trainers \[1\]"),
        "momentum": lambda t: differing(t, lambda loop: loop.momentum_flat, (20, 25, 29), r"trainers \[1\]"),
        "two states": two_states,
        "announced": announced,
        "garbled": garbled,
        "garbled round": garbled_round,
        **{f.__name__: lambda t, f=f: damaged(t, f) for f in (cut, extended, nothing, another_round, too_many)},
    }
    failed = []
    for name, case in cases.items():
        trainer.connect(name.replace(" ", "-"))
        try:
            case(trainer)
        except (PulseError, AssertionError, pytest.fail.Exception) as error:
            failed.append(f"{name}: {type(error).__name__} {error}"[:300])
        trainer.barrier(f"done with {name}", tuple(range(trainer.size)))
    return failed


@pytest.mark.slow
def test_all_trainers_refuse() -> None:
    found = together(refuse, 3, seconds=60)
    assert found == [[], [], []]
