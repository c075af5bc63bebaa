"""What must not spread: other settings, other models, NaN, a theta that differs, damaged messages.
All find out."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl.errors import (
    CorruptMessage,
    Diverged,
    InputError,
    NonFinite,
    PulseError,
    StateMismatch,
)
from pulse_rl.loco import DiLoCo, PulseLoCo
from pulse_rl.loco.group import TrainerGroup
from pulse_rl.loco.group_rounds import Transfer
from pulse_rl.loco.messages import Coder, Message
from tests.support.loco_reference import Job, all_same, group_of, outer_state, pulse_loco, same
from tests.support.trainers import Trainer, force_scattered, together


def other_settings(trainer: Trainer) -> None:
    job = Job()
    lr = 0.7 if trainer.rank != 1 else 0.5
    with (
        pytest.raises(InputError, match="trainer") as caught,
        pulse_loco(job.model, job.optimizer, sync_every=2, outer_lr=lr),
    ):
        pass
    assert not isinstance(caught.value, StateMismatch)
    kind = PulseLoCo if trainer.rank != 2 else DiLoCo
    with pytest.raises(InputError, match="trainer"), kind(job.model, job.optimizer, sync_every=2):
        pass


def other_model(trainer: Trainer) -> None:
    model = torch.nn.Linear(3, 5 if trainer.rank else 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateMismatch, match="trainer"), pulse_loco(model, optimizer, sync_every=2):
        pass
    assert not optimizer._optimizer_step_post_hooks


def not_finite(trainer: Trainer) -> None:
    """NaN and Inf of one trainer stop all of them, name it and the parameter, and nothing has
    changed anywhere."""
    job = Job()
    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=10, threads=2) as loop:
        for _ in range(2):
            job.step(trainer.rank)
        for value in (float("nan"), float("-inf")):
            before = outer_state(loop)
            job.step(trainer.rank)
            job.backward(trainer.rank)
            if trainer.rank == 2:
                job.model[2].bias.data[5] = value
            with pytest.raises(NonFinite, match=r"trainer 2.*2\.bias"):
                job.optimizer.step()
            assert all_same(outer_state(loop), before)
            assert (loop.round, loop.inner_step) == (1, 2)
            loop.rewind()
            with loop.global_weights():
                assert same(job.weights(), before[0])
            assert loop.inner_step == 0
            assert all_same(outer_state(loop), before)
            # Adam keeps the NaN that it has seen.
            job.optimizer.state.clear()
        for _ in range(2):
            job.step(trainer.rank)
        assert loop.round == 2
        trainer.put("after", loop.last_round.root)
        assert loop.last_round.root == trainer.get("after", 0)


def overflowing(trainer: Trainer) -> None:
    """Finite pseudo-gradients whose rounding, sum or outer step is not finite."""
    for compression, size in (("bf16", 3.4e38), ("fp32", 3e38)):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pulse_loco(
            model, optimizer, sync_every=1, compression=compression, timeout_seconds=10
        ) as loop:
            before = outer_state(loop)
            for p in model.parameters():
                p.grad = torch.full_like(
                    p, size if trainer.rank != 1 or compression == "fp32" else 0.1
                )
            with pytest.raises(NonFinite):
                optimizer.step()
            assert all_same(outer_state(loop), before)


def differing(
    trainer: Trainer, flip: Callable[[PulseLoCo], np.ndarray], bits: tuple[int, ...], match: str
) -> None:
    """One bit of the common state differs on trainer 1: all of them stop. Often the messages cannot
    even be read."""
    for bit in bits:
        job = Job()
        with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=5) as loop:
            for _ in range(2):
                job.step(trainer.rank)
            if trainer.rank == 1:
                flip(loop).view(np.uint32)[47] ^= 1 << bit
            job.step(trainer.rank)
            with pytest.raises(Diverged, match=match):
                job.step(trainer.rank)


def two_states(trainer: Trainer) -> None:
    """Trainers that meet in the same round must hold the same state."""
    for flip in ((lambda loop: loop.state.weights), (lambda loop: loop.state.momentum)):
        job = Job()
        with pulse_loco(job.model, job.optimizer, sync_every=1, timeout_seconds=5) as loop:
            job.step(trainer.rank)
            if trainer.rank == 1:
                flip(loop).view(np.uint32)[47] ^= 1
            before = outer_state(loop)
            with pytest.raises(Diverged, match=r"trainers \[1\]"):
                loop.rejoin()
            assert all_same(outer_state(loop), before)


def damaged(
    trainer: Trainer, damage: Callable[[PulseLoCo, bytes], bytes], *, sums: bool = False
) -> None:
    """Trainer 0 sends something else than it should in place of its entries (int4), or of its
    ``sums`` (FP32). Nobody takes any of it."""
    job = Job()
    with pulse_loco(
        job.model, job.optimizer, sync_every=2, timeout_seconds=3, compression="e8m2"
    ) as loop:
        for _ in range(2):
            job.step(trainer.rank)
        before = outer_state(loop)
        with pytest.MonkeyPatch.context() as patch:
            if trainer.rank == 0:
                encode = Coder.encode
                patch.setattr(
                    Coder,
                    "encode",
                    lambda coder, *of: (
                        damage if (coder.compression.name == "e8m2") != sums else whole
                    )(loop, encode(coder, *of)),
                )
            job.step(trainer.rank)
            with pytest.raises(CorruptMessage, match="could not read"):
                job.step(trainer.rank)
        assert all_same(outer_state(loop), before)
        assert loop.round == 1


def whole(loop: PulseLoCo, message: bytes) -> bytes:
    return message


def cut(loop: PulseLoCo, message: bytes) -> bytes:
    return message[:-1]


def extended(loop: PulseLoCo, message: bytes) -> bytes:
    return message + b"\0"


def nothing(loop: PulseLoCo, message: bytes) -> bytes:
    return b""


def another_round(loop: PulseLoCo, message: bytes) -> bytes:
    return message[:8] + struct.pack("<Q", loop.round + 1) + message[16:]


def too_many(loop: PulseLoCo, message: bytes) -> bytes:
    return Message(loop.round, message[5], [b"\xff\xff\x7f" + bytes(20)]).to_bytes()


def announced(trainer: Trainer) -> None:
    """A trainer that announces more bytes than any message takes: nobody allocates them."""
    exchange = TrainerGroup(timeout_seconds=5)
    if trainer.rank == 2:
        header = struct.pack("<Q", 1 << 50) + sha256(b"").digest()
        exchange._all_gather_array(np.frombuffer(header, np.uint8))
    else:
        with pytest.raises(CorruptMessage, match="trainer 2"):
            exchange.all_gather(b"hello", max_bytes=100)
    exchange.close()


def announced_to_one(trainer: Trainer) -> None:
    """The same of a message for one trainer: all refuse, as all know all lengths."""
    exchange = TrainerGroup(timeout_seconds=5)
    messages = [bytes(10), bytes(101 if trainer.rank == 2 else 10), bytes(10)]
    with pytest.raises(CorruptMessage, match="trainer 2 announces 101"):
        exchange.all_to_all(messages, max_bytes=[200, 100, 200])
    found = exchange.all_to_all([bytes([trainer.rank, to]) for to in range(3)], max_bytes=[2, 2, 2])
    assert found == [bytes([source, trainer.rank]) for source in range(3)]
    exchange.close()


def flip_on_the_way(exchange: TrainerGroup, length: int, *names: str) -> None:
    """Once, a byte of trainer 2's message changes before it arrives here."""

    def flipping(name: str) -> None:
        collective = getattr(exchange, name)

        def flipped(data: Any, *more: Any) -> Any:
            pieces = collective(data, *more)
            if len(pieces[2]) >= length:
                setattr(exchange, name, collective)
                pieces[2] = pieces[2].copy()
                pieces[2][length - 1] ^= 64
            return pieces

        setattr(exchange, name, flipped)

    for name in names:
        flipping(name)


def garbled(trainer: Trainer) -> None:
    exchange = TrainerGroup(timeout_seconds=5)
    if trainer.rank == 1:
        flip_on_the_way(exchange, 50, "_all_gather_array")
        with pytest.raises(CorruptMessage, match="trainer 2"):
            exchange.all_gather(bytes(50), max_bytes=100)
    else:
        assert exchange.all_gather(bytes(50), max_bytes=100) == [bytes(50)] * 3
    exchange.close()


def garbled_round(trainer: Trainer, collective: str = "_all_gather_array") -> None:
    """What only one trainer could not read is refused by all, and the next try may succeed."""
    job = Job()
    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=5) as loop:
        exchange = group_of(loop)
        for _ in range(2):
            job.step(trainer.rank)
        before = outer_state(loop)
        if trainer.rank == 1:
            flip_on_the_way(exchange, 100, collective)
        job.step(trainer.rank)
        with pytest.raises(CorruptMessage, match=r"\[1\]"):
            job.step(trainer.rank)
        assert all_same(outer_state(loop), before)
        job.step(trainer.rank)
        assert loop.round == 2


def unknown_answer(trainer: Trainer, answer: bytes) -> None:
    """Trainer 0 answers with what is neither sums nor one of the reasons why there are none."""
    job = Job()
    with pulse_loco(job.model, job.optimizer, sync_every=2, timeout_seconds=3) as loop:
        for _ in range(2):
            job.step(trainer.rank)
        before = outer_state(loop)
        with pytest.MonkeyPatch.context() as patch:
            if trainer.rank == 0:
                patch.setattr(Transfer, "_answer", lambda *_: answer)
            job.step(trainer.rank)
            with pytest.raises(CorruptMessage, match="no known form"):
                job.step(trainer.rank)
        assert all_same(outer_state(loop), before)
        assert loop.reduction.residual.message is None, "nobody has counted it"
        job.step(trainer.rank)
        assert loop.round == 2


def refuse(trainer: Trainer, scattered: bool) -> list[str]:
    """Every case in a world of its own. Returns those that failed, and how."""
    force_scattered(scattered)
    damages = (cut, extended, nothing, another_round, too_many)
    cases: dict[str, Callable[[Trainer], None]] = {
        "not finite": not_finite,
        "overflowing": overflowing,
        "theta": lambda t: differing(
            t, lambda loop: loop.state.weights, (3, 12, 25, 31), r"0\.weight' on trainers \[1\]"
        ),
        "momentum": lambda t: differing(
            t, lambda loop: loop.state.momentum, (20, 25, 29), r"trainers \[1\]"
        ),
        "garbled round": garbled_round,
        **{f.__name__: lambda t, f=f: damaged(t, f) for f in damages},
    }
    if scattered:
        cases["garbled parts"] = lambda t: garbled_round(t, "_all_to_all_arrays")
        cases |= {
            f"answer {a!r}": lambda t, a=a: unknown_answer(t, a)
            for a in (b"", b"garbage", b"PLSHx")
        }
        cases |= {f"{f.__name__} sums": lambda t, f=f: damaged(t, f, sums=True) for f in damages}
    else:
        cases |= {
            "other settings": other_settings,
            "other model": other_model,
            "two states": two_states,
            "announced": announced,
            "announced to one": announced_to_one,
            "garbled": garbled,
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
@pytest.mark.parametrize("scattered", [False, True], ids=["gathered", "scattered"])
def test_all_trainers_refuse(scattered: bool) -> None:
    found = together(refuse, 3, scattered, seconds=60)
    assert found == [[], [], []]
