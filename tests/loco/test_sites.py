"""Rounds of two levels: first within a site, then between sites; and what crosses between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.loco.threads import as_threads
from pulse_rl.errors import CorruptMessage, InputError, NonFinite
from pulse_rl.loco import PulseLoCo
from tests.support.loco_reference import Flat, flat, pulse_loco, same
from tests.support.site_members import SIZE, Member, members

pytestmark = pytest.mark.usefixtures("small_blocks")
ROUNDS = 4


# -- rounds


ALL_SUMS = {"gate_sums": False, "lookahead": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "by default": {},
    "bf16": {"wire": "BF16", "gate_scale": 0.5},
    "a small lookahead": {"wire": "BF16", "lookahead": 1.5},
    "all sums": ALL_SUMS,
    "all sums, bf16": {**ALL_SUMS, "wire": "BF16"},
    "all sums, int2": {**ALL_SUMS, "wire": "int2"},
    "sweep": {"wire": "int4", "sweep": 2},
}
"""Sums are gated between sites, unless there is no lookahead: of the setting ``gate_sums`` only the
reference knows."""


@pytest.mark.parametrize("names", ["aabb", "aaabbb", "aab", "aaabb", "abab", "aabbc"])
@pytest.mark.parametrize("how", SETTINGS)
def test_every_round_equals_the_dense_algorithm(names: str, how: str) -> None:
    def work(member: Member) -> None:
        for _ in range(ROUNDS):
            member.round()

    found = members(names, work, **SETTINGS[how])
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

    members(" " * size, work, gate_sums=gated, **settings)


@pytest.mark.parametrize("names", ["aaaa", "abcd", "    "])
def test_sites_that_make_no_difference_change_nothing(names: str) -> None:
    """Rounds are as without: in theta's bits, and in what is sent but for random numbers."""
    sent = []
    for given in (names, "    "):
        found = members(given, lambda member: (member.step(), member.step())[0])
        done = [member.loop.last_round for member in found]
        crossed = [r.sent_bytes if given == "abcd" else 0 for r in done if r]
        assert [r.between_bytes for r in done if r] == crossed
        sent.append([(r.root, r.sent_bytes, r.payload_bytes) for r in done if r])
    assert sent[0] == sent[1]


# -- what crosses between sites


def by_hand(member: Member, names: str) -> Callable[[], int]:
    """What this member gives to the network for other sites from now on: a gathered message goes
    around the ring."""
    exchange, counts = member.group, [0]
    all_gather, all_to_all = exchange._all_gather_array, exchange._all_to_all_arrays
    here, following = names[member.rank], names[(member.rank + 1) % len(names)]

    def gathering(data: Any) -> Any:
        counts[0] += (len(names) - 1) * len(data) * (following != here)
        return all_gather(data)

    def sending(pieces: Any, lengths: Any) -> Any:
        counts[0] += sum(
            len(piece) for piece, name in zip(pieces, names, strict=True) if name != here
        )
        return all_to_all(pieces, lengths)

    exchange._all_gather_array, exchange._all_to_all_arrays = gathering, sending
    return lambda: counts[0]


def crossing(names: str, **settings: Any) -> list[int]:
    """The bytes that each member sends to other sites in its third round."""
    found = [0] * len(names)

    def work(member: Member) -> None:
        for _ in range(2):
            member.step()
        counted = by_hand(member, names)
        member.step()
        done = member.loop.last_round
        assert done is not None
        found[member.rank] = done.between_bytes
        assert done.between_bytes == counted() <= done.sent_bytes

    members(names, work, **settings)
    return found


@pytest.mark.slow
def test_a_site_sends_about_what_a_trainer_sends() -> None:
    two_levels = crossing("aaaabbbb")
    # Ranks 3 and 7 pass the sums on to the other site, the others send parts of its own sums.
    assert min(two_levels[3], two_levels[7]) > 3 * max(two_levels[:3] + two_levels[4:7])
    apart = crossing("abababab")
    assert sum(apart) > 2.5 * sum(two_levels), "the ring of sums crosses with every step"
    one_level = crossing("aaaabbbb", one_level=True)
    assert sum(one_level) > 1.5 * sum(two_levels)


# -- what must not spread


def held(loop: PulseLoCo) -> list[Flat]:
    state = loop.state_dict()
    return [flat(state[key]) for key in ("theta", "momentum", "residual")]


def spoil(member: Member, call: int, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Once, what this member sends with the call of that number, from 1, is another thing."""
    exchange, calls = member.group, itertools.count(1)
    all_to_all = exchange.all_to_all

    def spoiling(messages: Sequence[bytes], *, max_bytes: Any) -> Any:
        return all_to_all(
            change(list(messages)) if next(calls) == call else messages, max_bytes=max_bytes
        )

    exchange.all_to_all = spoiling


def at(rank: int, message: bytes | None = None) -> Callable[[list[bytes]], list[bytes]]:
    """The message for a trainer becomes another one, or lacks its last byte."""

    def change(messages: list[bytes]) -> list[bytes]:
        messages[rank] = messages[rank][:-1] if message is None else message
        return messages

    return change


DAMAGES: dict[str, tuple[int, Callable[[list[bytes]], list[bytes]], str]] = {
    "a part is cut": (1, at(1), r"trainers \[1\] could not read"),
    "a part is missing": (1, at(1, b""), r"trainers \[1\] could not read"),
    "a part for another site": (1, at(2, b"PLSL"), r"trainer 0 announces 4 bytes, more than 0"),
    "a site's sums are cut": (2, at(2), r"trainers \[2\] could not read"),
    "a site's sums are of no known form": (2, at(2, b"PLSHx"), r"trainers \[2\] could not read"),
    "a site's sums are missing": (2, at(2, b""), "no known form"),
    "a site's sums for the same site": (
        2,
        at(1, b"PLSL"),
        r"trainer 0 announces 4 bytes, more than 0",
    ),
    "a site's sums are too long": (2, at(2, bytes(1 << 17)), r"trainer 0 announces 131072 bytes"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_cannot_be_read_fails_the_round_on_all(what: str) -> None:
    """Trainer 0 sends it. Nothing has changed anywhere, and the next try succeeds, with all that
    was withheld."""
    call, change, words = DAMAGES[what]

    def work(member: Member) -> None:
        member.round()
        before, reference = held(member.loop), member.reference.residual
        if member.rank == 0:
            spoil(member, call, change)
        with pytest.raises(CorruptMessage, match=words):
            member.step()
        assert all(same(a, b) for a, b in zip(before, held(member.loop), strict=True))
        residual = member.loop.reduction.residual
        assert (member.loop.round, residual.pending_message, residual.add_held_back) == (
            1,
            None,
            None,
        )
        member.loop.rewind()
        member.reference.residual = reference
        for _ in range(2):
            member.round()

    members("aabb", work)


@pytest.mark.parametrize("call", [1, 2])
def test_what_is_damaged_on_the_way_to_one_is_refused_by_all(call: int) -> None:
    def work(member: Member) -> None:
        member.round()
        before, calls, exchange = held(member.loop), itertools.count(1), member.group
        receive = exchange._all_to_all_arrays

        def damaged(pieces: Any, lengths: Any) -> Any:
            arrived = receive(pieces, lengths)
            if next(calls) == call:
                longest = max(
                    (r for r in range(4) if r != member.rank), key=lambda r: len(arrived[r])
                )
                arrived[longest] = arrived[longest] ^ np.uint8(64)
            return arrived

        if member.rank == 3:
            exchange._all_to_all_arrays = damaged
        with pytest.raises(CorruptMessage, match=r"\[3\]"):
            member.step()
        assert all(same(a, b) for a, b in zip(before, held(member.loop), strict=True))

    members("aabb", work)


@pytest.mark.parametrize("names", ["aabb", "aaab"])
def test_who_is_not_finite_is_named_in_every_site(names: str) -> None:
    def work(member: Member) -> None:
        member.round()
        before, reference = held(member.loop), member.reference.residual
        member.weight.grad = torch.zeros(SIZE)
        if member.rank == 3:
            member.weight.grad[11] = torch.nan
        with pytest.raises(NonFinite, match="trainer 3: the pseudo-gradient of 'w' is not finite"):
            member.optimizer.step()
        assert all(same(a, b) for a, b in zip(before, held(member.loop), strict=True))
        member.loop.rewind()
        member.reference.residual = reference
        member.round()

    members(names, work)


@pytest.mark.parametrize("who", [(2, 3), (0, 1), (1, 2)], ids=["one site", "the owner's", "in all"])
@pytest.mark.parametrize("gated", [False, True])
def test_sums_that_no_message_takes_are_gathered(who: tuple[int, int], *, gated: bool) -> None:
    """In the same round; nothing is withheld then. The next one has two levels again."""

    def work(member: Member) -> None:
        member.weight.grad = torch.zeros(SIZE)
        member.weight.grad[5] = 1.5e19 if member.rank in who else 0.0
        if member.rank == 0:  # many pass the trainer's gate, few the gate of its sums
            member.weight.grad[100:] = 0.003 * member.weight.detach()[100:]
        member.optimizer.step()
        done = member.loop.last_round
        assert done is not None
        assert not done.scattered
        assert done.summed > 1000
        member.reference.sites, member.reference.gate_sums = (), False
        member.reference.outer_step([member.seen[0, rank] for rank in range(4)])
        assert same(flat(member.loop.global_state()), member.reference.theta.data)
        assert same(flat(member.loop.residual()), member.reference.residual)
        member.reference.sites, member.reference.gate_sums = list("aabb"), gated
        member.round()

    members("aabb", work, **({} if gated else ALL_SUMS))


# -- meeting


@pytest.mark.parametrize("site", ["", 3, b"a"])
def test_a_site_is_a_name(site: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match="site is") as caught:
        pulse_loco({"w": weight}, torch.optim.SGD([weight], lr=1.0), sync_every=1, site=site)
    assert caught.value.hint


def test_all_have_a_site_or_none_has() -> None:
    sites, seen = ["a", "a", "", "b"], dict[tuple[int, int], Flat]()
    everyone = [Member(rank, sites, seen) for rank in range(4)]

    def meet(rank: int) -> None:
        with pytest.raises(InputError, match=r"trainers \[2\] have no site"):
            everyone[rank].loop.__enter__()

    as_threads(meet, 4)


def test_sites_change_as_trainers_leave() -> None:
    """A site has one member left, then each of the trainers is alone in its own."""
    seen: dict[tuple[int, int], Flat] = {}
    everyone = [Member(rank, list("aabb"), seen) for rank in range(4)]
    for present, names in (((0, 1, 2, 3), "aabb"), ((0, 1, 2), "aab"), ((0, 2), "")):

        def work(index: int, present: tuple[int, ...] = present, names: str = names) -> None:
            member = everyone[present[index]]
            member.rank, member.size, member.reference.rank = index, len(present), index
            member.reference.sites, member.reference.gate_sums = list(names), bool(names)
            if member.loop._hooks:
                member.loop.rejoin()
            else:
                member.loop.__enter__()
            for _ in range(2):
                member.round()

        as_threads(work, len(present))
    for member in everyone:
        member.loop.close()
