"""Scattered rounds whose messages or sums cannot be read, or sent: nothing has changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from pulse_rl.errors import CorruptMessage
from tests.support.group_members import SIZE, Member, members
from tests.support.loco_reference import all_same, flat, last_round, outer_state, same
from tests.support.states import present
from tests.support.trainers import force_scattered

pytestmark = pytest.mark.usefixtures("small_blocks", "scattered")


@pytest.fixture
def scattered() -> Iterator[None]:
    force_scattered(True)
    yield
    force_scattered(None)


def spoil(member: Member, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Once, what this member sends to owners of shares is another thing."""
    exchange, calls = member.group, itertools.count(1)
    all_to_all = exchange.all_to_all

    def spoiling(messages: Sequence[bytes], *, max_bytes: Any) -> Any:
        return all_to_all(
            change(list(messages)) if next(calls) == 1 else messages, max_bytes=max_bytes
        )

    exchange.all_to_all = spoiling


def at(rank: int, message: bytes | None = None) -> Callable[[list[bytes]], list[bytes]]:
    """The message for a trainer becomes another one, or lacks its last byte."""

    def change(messages: list[bytes]) -> list[bytes]:
        messages[rank] = messages[rank][:-1] if message is None else message
        return messages

    return change


DAMAGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a part is cut": (at(1), r"trainers \[1\] could not read"),
    "a part is missing": (at(1, b""), r"trainers \[1\] could not read"),
    "a part is of no known form": (at(2, b"PLSHx"), r"trainers \[2\] could not read"),
    "a part is too long": (at(2, bytes(1 << 17)), r"trainer 0 announces 131072 bytes"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_cannot_be_read_fails_the_round_on_all(what: str) -> None:
    """Trainer 0 sends it, and the next try succeeds."""
    change, words = DAMAGES[what]

    def work(member: Member) -> None:
        member.round()
        before, reference = outer_state(member.loop), member.reference.residual
        if member.rank == 0:
            spoil(member, change)
        with pytest.raises(CorruptMessage, match=words):
            member.step()
        assert all_same(before, outer_state(member.loop))
        assert member.loop.round == 1
        assert member.loop.reduction.residual.message is None
        member.loop.rewind()
        member.reference.residual = reference
        for _ in range(2):
            member.round()

    members(4, work)


@pytest.mark.parametrize("who", [(2, 3), (0, 1), (1, 2)])
def test_sums_that_no_message_takes_are_gathered(who: tuple[int, int]) -> None:
    """In the same round. The next one is scattered again."""

    def work(member: Member) -> None:
        member.weight.grad = torch.zeros(SIZE)
        member.weight.grad[5] = 1.5e19 if member.rank in who else 0.0
        member.optimizer.step()
        done = present(member.loop.last_round)
        assert not done.scattered
        assert done.summed == 1
        member.reference.outer_step([member.seen[0, rank] for rank in range(4)])
        assert same(flat(member.loop.global_state()), member.reference.theta.data)
        assert same(flat(member.loop.residual()), member.reference.residual)
        member.round()
        assert last_round(member.loop).scattered

    members(4, work)
