"""Rounds over a store whose shares have owners: the same theta on all, and what owners withhold is
theirs, as a plain simulation has it; owners that are late or killed, and parts that are damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from pulse_rl import MemoryStore, PulseLoCo, Signer, Store
from pulse_rl.errors import CorruptMessage, StoreError, StoreUnavailable, Untrusted
from pulse_rl.loco import StoreExchange, round_posts, store_format
from pulse_rl.loco.round_posts import RoundPosts, RoundSums
from pulse_rl.loco.store_format import (
    Close,
    RoundKey,
    ShardedMessage,
    ShareSums,
    Upload,
    head_bytes,
)
from pulse_rl.loco.store_rounds import StoreRounds
from pulse_rl.loco.wire import Entries, WireName
from pulse_rl.store import Data
from pulse_rl.stream.signing import trusted_by
from tests.support.loco_reference import flat, force_gated, last_round, same
from tests.support.posts import digest_of, not_finite, post_of, posts_of
from tests.support.stores import FaultyStore

from .test_over_store import SECONDS, Member, at_once, check, closes, sums_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shares of few parameters, and of few trainers; and no snapshot, which would delete what is
    looked at."""
    monkeypatch.setattr(round_posts, "MIN_SHARE", 1)
    monkeypatch.setattr(store_format.RunStore, "keep_snapshot", lambda *_: None)
    force_gated(True)
    yield
    force_gated(None)


@pytest.fixture
def line(store: MemoryStore) -> FaultyStore:
    return FaultyStore(store)


def gated(store: Store, name: str, **settings: Any) -> Member:
    return Member(store, name, **{"quorum": 2} | settings)


def together(*members: Member, rounds: int = 1) -> None:
    def train(member: Member) -> None:
        for _ in range(rounds):
            member.round()

    at_once(*(lambda m=m: train(m) for m in members))


def makers(store: Store, number: int) -> list[str]:
    return [each["trainer"] for each in sums_of(store, number)]


def end(store: Store, *members: Member) -> None:
    for member in members:
        member.final = member.held()
    check(list(members), store)


@pytest.mark.parametrize(("wire", "sweep"), [("FP32", None), ("int4", None), ("int2", 2)])
@pytest.mark.usefixtures("small_blocks")
def test_owners_sum_their_shares(wire: WireName, sweep: int | None, store: MemoryStore) -> None:
    a, b, c = (gated(store, name, wire=wire, sweep=sweep, quorum=3) for name in "abc")
    with a.loop, b.loop, c.loop:
        together(a, b, c, rounds=4)
        assert closes(store) == [["a", "b", "c"]] * 4
        assert ["".join(makers(store, number)) for number in range(4)] == ["", "bca", "cab", "abc"]
        assert last_round(a.loop).scattered
        end(store, a, b, c)


def test_a_late_owner_is_not_waited_for(store: MemoryStore) -> None:
    """It dies as it puts its sums: the other makes them, and withholds what they lack."""
    a_line, b_line = FaultyStore(store), FaultyStore(store)
    a, b = gated(a_line, "a"), gated(b_line, "b", grace=0.0)
    with a.loop, b.loop:
        together(a, b)
        b_line.fail_on("list", "posts")  # once its message is there
        a_line.fail_on("put_new", "sums")
        for member in (b, a):
            with pytest.raises(StoreUnavailable):
                member.round()
        for member in (b, a):
            member.loop.rejoin()
            assert makers(store, 1) == ["b", "b"]
            member.log.append((1, member.loop.round, member.now))
        end(store, a, b)


def test_who_comes_after_a_late_owner_makes_its_sums_first(store: MemoryStore) -> None:
    """By how many posts after the owner's its own is."""
    member = gated(store, "c", quorum=1)
    with member.loop:
        member.round()
        meeting = member.loop.meeting
        assert isinstance(meeting, StoreRounds)
        close = Close(
            meeting._store.run, 3, "", tuple(Upload(name, "0" * 64, 200) for name in "abcdefgh")
        )

        def distance(name: str, share: int) -> int:
            posts = posts_of(meeting)
            posts.place = posts.place._replace(round=3, trainer=name)
            return RoundSums(posts, close)._distance(share)

        assert [distance(name, 0) for name in "abcdefghx"] == [5, 6, 7, 0, 1, 2, 3, 4, 8]
        assert distance("a", 5) == 0


def test_an_owner_that_lost_a_reply_knows_its_sums(store: MemoryStore, line: FaultyStore) -> None:
    a, b = gated(line, "a"), gated(store, "b")
    with a.loop, b.loop:
        together(a, b)
        line.fail_on("put_new", "sums", after=True)
        with pytest.raises(StoreUnavailable):
            together(a, b)
        assert makers(store, 1) == ["b", "a"]
        a.loop.rejoin()
        a.log.append((1, a.loop.round, a.now))
        end(store, a, b)


def test_an_owner_that_was_killed_finds_what_it_withheld(store: MemoryStore) -> None:
    """From a checkpoint: its own message may not count twice, but what it held back of sums it
    makes again."""
    line = FaultyStore(store)
    a, b = gated(line, "a"), gated(store, "b")
    with a.loop, b.loop:
        together(a, b)
        saved, job = a.loop.state_dict(), a.job.state_dict()
        line.fail_on("put_new", "sums", after=True)
        with pytest.raises(StoreUnavailable):
            together(a, b)
        b.final = b.held()
    back = gated(store, "a")
    back.load(job, saved)
    with back.loop, a.loop:  # a process that lives on knows the same
        assert same(flat(back.loop.global_state()), b.final[0])
        a.log.append((1, a.loop.round, a.now))
        a.final = a.held()
        check([a, b], store)
        withheld = flat(back.loop.residual())
        assert withheld.any()
        assert not withheld[: len(withheld) // 2].any()  # the share of b


class Damaging(FaultyStore):
    """The last byte of each message changes on the way into the store, but for the first."""

    posts = 0

    def put(self, name: str, data: Data) -> None:
        if "posts" in name:
            assert isinstance(data, bytes)
            self.posts += 1
            if self.posts > 1:
                data = data[:-1] + bytes([data[-1] ^ 1])
        super().put(name, data)


def test_a_part_that_is_damaged_is_left_out_and_loses_nothing(store: MemoryStore) -> None:
    a, b = gated(store, "a"), gated(Damaging(store), "b")
    with a.loop, b.loop:
        together(a, b, rounds=4)
        assert last_round(b.loop).excluded_reason == (
            "round 4: a part of this trainer's message was refused: part 1 is damaged in the store"
        )
        together(a, b)
        assert last_round(b.loop).excluded_reason == ""
        left_out = [
            [dict(each["left_out"]) for each in sums_of(store, number)] for number in range(5)
        ]
        # Where b owns the last share itself it has what it sent.
        assert left_out[1] == left_out[3] == [{}, {"b": "part 1 is damaged in the store"}]
        assert left_out[2] == left_out[4] == [{}, {}]
        end(store, a, b)


@pytest.mark.parametrize("overlap", [0, 1])
def test_who_closes_reads_heads_alone(overlap: int, store: MemoryStore, line: FaultyStore) -> None:
    read = Counter[str]()

    def arrives(name: str, data: bytes) -> bytes:
        read[name] += len(data)
        return data

    line.damage = arrives
    a = gated(store, "a", overlap=overlap)
    b = gated(line, "b", overlap=overlap, quorum=3)
    with a.loop, b.loop:
        at_once(*(lambda m=m: [m.job.step(ord(m.name)) for _ in range(8)] for m in (a, b)))
    for number in range(1, 4):
        (of_a,) = [info for info in store.list(f"loco/posts/{number:012d}") if "/a." in info.name]
        assert 0.3 < read[of_a.name] / of_a.nbytes < 0.7
    assert same(flat(a.loop.global_state()), flat(b.loop.global_state()))


@pytest.mark.parametrize("lie", ["entries", "squares", "not finite", "junk"])
def test_a_part_that_is_not_what_its_head_says_is_left_out(lie: str, store: MemoryStore) -> None:
    a, b = gated(store, "a"), gated(store, "b")
    with a.loop, b.loop:
        together(a, b)
        assert isinstance(a.loop.meeting, StoreRounds)
        posts = posts_of(a.loop.meeting)
        entries = [
            [(np.zeros(1, np.uint32), np.ones(1, np.float32)) for _ in units]
            for units in posts.shares
        ]
        messages = posts.coder.encode_each(posts.shares, entries)
        if lie == "not finite":
            messages = not_finite(a.loop.meeting)
        if lie == "junk":
            messages = [b"junk", *messages[1:]]
        false = {"entries": 2, "squares": 9.0}
        said = {lie: false[lie]} if lie in false else {}
        data = post_of(posts.place._replace(trainer="0"), messages, **said)
        store.put(f"loco/posts/{1:012d}/0.{digest_of(data, 2)}", data)
        together(a, b)
        assert same(flat(a.loop.global_state()), flat(b.loop.global_state()))
    assert closes(store) == [["a", "b"], ["0", "a", "b"]]
    words = {
        "not finite": "a value that is not finite",
        "junk": "a message of 4 bytes is too short for 1 blocks",
    }
    left_out = [dict(each["left_out"]) for each in sums_of(store, 1)]
    expected = {"0": words.get(lie, "its head has other entries, or another norm")}
    assert left_out == ([expected, {}] if lie == "junk" else [expected] * 2)


def test_sums_that_no_message_takes_are_added_by_all() -> None:
    store, huge = MemoryStore(), 1.5 * 2.0**63

    def train(name: str) -> torch.Tensor:
        weights = torch.nn.Parameter(torch.ones(64))
        over = StoreExchange(store, trainer=name, quorum=2)
        optimizer = torch.optim.SGD([weights], lr=1.0)
        with PulseLoCo({"w": weights}, optimizer, sync_every=1, over=over) as loop:
            for number in range(2):
                weights.grad = torch.full((64,), 1e-3)
                if number:
                    weights.grad[:8] = huge
                optimizer.step()
            return flat(loop.global_state()).clone()

    a, b = at_once(lambda: train("a"), lambda: train("b"))
    assert same(a, b)
    # Momentum 0.9, and both trainers' mean: theta moves by 0.7 (1 + 0.9) of it.
    assert a[:8].tolist() == pytest.approx([-0.7 * 1.9 * huge] * 8)
    messages = [
        store.get(info.name).partition(b"\n")[2] for info in store.list("loco/sums/000000000001")
    ]
    assert [len(message) > 0 for message in messages] == [False, True]


def test_sums_that_are_more_than_messages_add_up_to_stop_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member that has a key, and adds what nobody has sent."""
    store, honest = MemoryStore(), RoundSums._gated

    def gated_sums(self: RoundSums, share: int, parts: list[list[Entries]]) -> Any:
        gate, sums = honest(self, share, parts)
        assert sums is not None
        return gate, [
            (places, values * 1e4 if self._name == "a" else values) for places, values in sums
        ]

    monkeypatch.setattr(RoundSums, "_gated", gated_sums)
    a, b = gated(store, "a", max_norm=1.0), gated(store, "b", max_norm=1.0)
    with a.loop, b.loop:
        together(a, b)
        thetas = [flat(member.loop.global_state()).clone() for member in (a, b)]

        def stops(member: Member) -> None:
            with pytest.raises(CorruptMessage, match="more than its messages add up to"):
                member.round()

        at_once(*(lambda m=m: stops(m) for m in (a, b)))
        assert all(
            same(flat(m.loop.global_state()), theta)
            for m, theta in zip((a, b), thetas, strict=True)
        )


def test_who_cannot_read_what_others_have_added_stops() -> None:
    """A sum is too large for a message, all add the parts, and one of them gets one damaged."""
    store, huge, damaged = MemoryStore(), 1.5 * 2.0**63, FaultyStore(MemoryStore())
    damaged.inner = store
    outcome: dict[str, Any] = {}

    def arrives(name: str, data: bytes) -> bytes:
        of_part = "posts/000000000001/a." in name and len(data) != head_bytes(2)
        return data[:-1] + bytes([data[-1] ^ 1]) if of_part else data

    def train(name: str, line: Store) -> None:
        weights = torch.nn.Parameter(torch.ones(64))
        optimizer = torch.optim.SGD([weights], lr=1.0)
        grace = 0.0 if name == "a" else SECONDS  # b may stop before it has summed its share
        over = StoreExchange(line, trainer=name, quorum=2, grace_seconds=grace)
        with PulseLoCo({"w": weights}, optimizer, sync_every=1, over=over) as loop:
            for number in range(2):
                weights.grad = torch.full((64,), 1e-3)
                if number:
                    weights.grad[-8:] = huge  # of the share of a
                    damaged.damage = arrives
                try:
                    optimizer.step()
                except CorruptMessage as error:
                    outcome[name] = str(error)
                    return
            outcome[name] = loop.round

    at_once(lambda: train("a", store), lambda: train("b", damaged))
    assert outcome["a"] == 2
    assert "cannot be read here: part 1 is damaged" in outcome["b"]


def test_sums_that_no_list_shows_yet_are_made_once(store: MemoryStore, line: FaultyStore) -> None:
    a, b = gated(line, "a"), gated(store, "b")
    with a.loop, b.loop:
        together(a, b)
        name = f"loco/sums/{1:012d}/0001"  # of a
        line.hidden.add(name)
        line.calls.clear()
        pauses = iter(range(3))

        def wait(*_: float) -> None:
            if next(pauses, None) is None:
                line.hidden.clear()

        with mock.patch.object(round_posts, "pause", wait):
            together(a, b)
    assert [call for call, of in line.calls if of == name and call == "put_new"] == ["put_new"]


def test_who_never_sees_sums_stops_once_the_others_have_gone_on(store: MemoryStore) -> None:
    """Their next round is closed only after it has looked, and has made its own."""
    line = FaultyStore(store)
    a, b, c = gated(store, "a", quorum=3), gated(store, "b", quorum=3), gated(line, "c", quorum=3)
    with a.loop, b.loop, c.loop:
        together(a, b, c)
        line.hidden |= {f"loco/sums/{1:012d}/{share:04d}" for share in range(3)}
        for member in (a, b):
            member.loop.meeting.exchange = replace(member.loop.meeting.exchange, quorum=2)  # type: ignore[attr-defined]

        def go_on(member: Member) -> None:
            member.round()
            member.loop.meeting.exchange = replace(member.loop.meeting.exchange, grace_seconds=0.0)  # type: ignore[attr-defined]
            member.round()

        def stops() -> None:
            with pytest.raises(StoreError, match="the messages of round 2 are gone"):
                c.round()

        at_once(lambda: go_on(a), lambda: go_on(b), stops)
    assert closes(store) == [["a", "b", "c"], ["a", "b", "c"], ["a", "b"]]


def test_all_stop_at_a_close_that_names_what_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those who own no share of it."""
    store, honest, made = MemoryStore(), RoundPosts.head, RoundSums._make
    a, b = gated(store, "a", grace=0.0), gated(store, "b", grace=0.0)
    refused: list[str] = []

    def head(self: RoundPosts, post: Upload) -> ShardedMessage | str:
        return (
            "its norm is too large"
            if refused and self.place.trainer == "b" == post.trainer
            else honest(self, post)
        )

    with a.loop, b.loop:
        together(a, b)
        theta = flat(b.loop.global_state()).clone()
        monkeypatch.setattr(RoundPosts, "head", head)
        monkeypatch.setattr(
            RoundSums, "_make", lambda self, share: made(self, share) if self._name == "a" else None
        )
        refused.append("b")

        def stops() -> None:
            with pytest.raises(CorruptMessage, match="cannot count: its norm is too large"):
                b.round()

        at_once(a.round, stops)
        assert same(flat(b.loop.global_state()), theta)


def test_names_in_deeper_folders_are_no_sums(store: MemoryStore) -> None:
    a, b = gated(store, "a"), gated(store, "b")
    with a.loop, b.loop:
        together(a, b)
        store.put(f"loco/sums/{1:012d}/x/0001", b"junk")
        together(a, b)
        assert len(closes(store)) == 2


def test_sums_are_signed_by_who_has_made_them() -> None:
    signers = [Signer.generate() for _ in range(2)]
    keys = [signer.public_key for signer in signers]
    place = RoundKey("run", 1, "", "00" * 32)
    data = ShareSums("run", 1, 0, "00" * 32, keys[1], (), b"message").to_bytes(signers[1])
    assert ShareSums.parse(data, "sums", place, 0, trusted_by(keys)).message == b"message"
    data = ShareSums("run", 1, 0, "00" * 32, keys[0], (), b"message").to_bytes(signers[1])
    with pytest.raises(Untrusted, match="sums"):
        ShareSums.parse(data, "sums", place, 0, trusted_by(keys))


def test_a_state_from_before_may_be_loaded_with_a_message_on_the_way(store: MemoryStore) -> None:
    """It has another number of parts."""
    line = FaultyStore(store)
    a, b = gated(line, "a"), gated(store, "b")
    with a.loop, b.loop:
        saved, job = a.loop.state_dict(), a.job.state_dict()
        together(a, b)
        line.fail_on("list", "posts")
        with pytest.raises(StoreUnavailable):
            a.round()
        a.load(job, saved)
        a.loop.rejoin()
        together(a, b)
        a.loop.rejoin()
        b.loop.rejoin()
        assert a.loop.round == b.loop.round
        assert same(flat(a.loop.global_state()), flat(b.loop.global_state()))
