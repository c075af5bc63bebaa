"""Rounds whose sums pass a gate, beside the dense reference; and messages that cannot be read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pulse_rl.errors import CorruptMessage
from tests.support.group_members import SIZE, Member, members
from tests.support.loco_reference import all_same, flat, last_round, outer_state, same
from tests.support.states import present

pytestmark = pytest.mark.usefixtures("small_blocks")
ROUNDS = 4


# -- rounds


ALL_SUMS = {"gate_sums": False, "lookahead": 0.0}
#: Sums are gated, unless there is no lookahead: of the setting ``gate_sums`` only the reference
#: knows.
SETTINGS: dict[str, dict[str, Any]] = {
    "by default": {},
    "bf16": {"wire": "BF16"},
    "a small lookahead": {"wire": "BF16", "lookahead": 1.5},
    "all sums": ALL_SUMS,
    "all sums, bf16": {**ALL_SUMS, "wire": "BF16"},
    "all sums, int2": {**ALL_SUMS, "wire": "int2"},
    "sweep": {"wire": "int4", "sweep": 2},
}


@pytest.mark.parametrize("size", [3, 4, 6])
@pytest.mark.parametrize("how", SETTINGS)
def test_every_round_equals_the_dense_algorithm(size: int, how: str) -> None:
    def work(member: Member) -> None:
        for _ in range(ROUNDS):
            member.round()

    found = members(size, work, forced=True, **SETTINGS[how])
    done = [member.loop.last_round for member in found]
    assert len({r.root for r in done if r}) == 1
    gated = SETTINGS[how].get("gate_sums", True)
    if gated:
        assert all((member.loop.residual()["w"] != 0).sum() > 100 for member in found)
        assert all(r and (0 < r.summed < SIZE / 2 or "sweep" in how) for r in done)


SWEPT = {"wire": "int2", "sweep": 2}


@pytest.mark.parametrize(
    ("size", "settings", "gated"),
    [(8, {}, True), (7, {}, False), (8, {"lookahead": 0.0}, False), (4, SWEPT, True)],
)
def test_sums_are_gated_by_themselves_where_they_are_many(
    size: int, settings: dict[str, Any], *, gated: bool
) -> None:
    def work(member: Member) -> None:
        for _ in range(2):
            member.round()

    members(size, work, gate_sums=gated, **settings)


# -- what must not spread


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
    """Trainer 0 sends it. Nothing has changed anywhere, and the next try succeeds, with all that
    was withheld."""
    change, words = DAMAGES[what]

    def work(member: Member) -> None:
        member.round()
        before, reference = outer_state(member.loop), member.reference.residual
        if member.rank == 0:
            spoil(member, change)
        with pytest.raises(CorruptMessage, match=words):
            member.step()
        assert all_same(before, outer_state(member.loop))
        residual = member.loop.reduction.residual
        assert member.loop.round == 1
        assert residual.pending_message is None
        assert residual.apply_withheld is None
        member.loop.rewind()
        member.reference.residual = reference
        for _ in range(2):
            member.round()

    members(4, work, forced=True)


@pytest.mark.parametrize("who", [(2, 3), (0, 1), (1, 2)])
@pytest.mark.parametrize("gated", [False, True])
def test_sums_that_no_message_takes_are_gathered(who: tuple[int, int], *, gated: bool) -> None:
    """In the same round; nothing is withheld then. The next one is scattered again."""

    def work(member: Member) -> None:
        member.weight.grad = torch.zeros(SIZE)
        member.weight.grad[5] = 1.5e19 if member.rank in who else 0.0
        if member.rank == 0:  # many pass the trainer's gate, few the gate of its sums
            member.weight.grad[100:] = 0.003 * member.weight.detach()[100:]
        member.optimizer.step()
        done = present(member.loop.last_round)
        assert not done.scattered
        assert done.summed > 1000
        member.reference.gate_sums = False
        member.reference.outer_step([member.seen[0, rank] for rank in range(4)])
        assert same(flat(member.loop.global_state()), member.reference.theta.data)
        assert same(flat(member.loop.residual()), member.reference.residual)
        member.reference.gate_sums = gated
        member.round()
        assert last_round(member.loop).scattered

    members(4, work, forced=True, **({} if gated else ALL_SUMS))
