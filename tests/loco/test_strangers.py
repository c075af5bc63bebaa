"""Rounds over a store to which strangers can write: what is in a round is signed by members, and
within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pulse_rl import MemoryStore, PulseLoCo, Signer, Store
from pulse_rl.errors import CorruptMessage, InputError, TrainerLost, Untrusted
from pulse_rl.loco import StoreExchange, round_posts
from pulse_rl.loco.store_format import MAX_CLOSE_BYTES, MAX_TRAINERS, Close, Refused, Upload
from pulse_rl.loco.store_rounds import StoreRounds
from tests.support.loco_reference import Job, flat, last_round, same
from tests.support.posts import digest_of, not_finite, post_of, posts_of

MEMBERS = [Signer.generate() for _ in range(2)]
KEYS = [signer.public_key for signer in MEMBERS]
STRANGER = Signer.generate()


class Member:
    def __init__(
        self, store: Store, signer: Signer | None, keys: list[str] | None = None, **settings: Any
    ) -> None:
        known = (keys or KEYS) if signer else None
        settings = {"min_trainers": 1, "grace_seconds": 0.0, "timeout_seconds": 0.0, **settings}
        over = StoreExchange(store, signer=signer, trusted_keys=known, **settings)
        self.job = Job(lr=1e-3)
        self.loop = PulseLoCo(
            self.job.model, self.job.optimizer, sync_every=1, exchange=over, compression="fp32"
        )

    @property
    def meeting(self) -> StoreRounds:
        assert isinstance(self.loop.meeting, StoreRounds)
        return self.loop.meeting

    def not_finite(self) -> bytes:
        """A post with a NaN."""
        place = posts_of(self.meeting).place._replace(trainer="stranger")
        return post_of(place, not_finite(self.meeting))

    def round(self, seed: int = 0) -> str:
        self.job.step(seed)
        return last_round(self.loop).excluded_reason


def members(store: Store, **settings: Any) -> list[Member]:
    return [Member(store, signer, **settings) for signer in MEMBERS]


def close_of(store: Store, number: int) -> tuple[list[str], dict[str, str]]:
    """Who is in a round, and why others are not, by digest."""
    fields = json.loads(store.get(f"loco/closed/{number:012d}.json"))
    return [each[0] for each in fields["posts"]], {
        digest: reason for _, digest, reason in fields["refused"]
    }


def put(store: Store, number: int, trainer: str, data: bytes) -> str:
    digest = digest_of(data)
    store.put(f"loco/posts/{number:012d}/{trainer}.{digest}", data)
    return digest


def test_members_meet_by_their_keys(store: MemoryStore) -> None:
    a, b = members(store)
    with a.loop, b.loop:
        assert a.round() == ""
        assert b.round(1) == "round 1: it was closed before this trainer had put its message"
        a.round()
        b.round(1)
        a.loop.rejoin()
        b.loop.rejoin()
        assert same(flat(a.loop.global_state()), flat(b.loop.global_state()))
        assert [close_of(store, number)[0] for number in range(4)] == [KEYS[:1], KEYS[1:]] * 2
        signed = json.loads(store.get("loco/run.json"))
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed["key"]))
        key.verify(bytes.fromhex(signed["signature"]), f"pulse.loco.1 {signed['sha256']}".encode())


def test_posts_of_strangers_are_refused_and_say_why() -> None:
    """Forged, replayed in another round or under another's name, of another run, cut off, and too
    large."""
    store, elsewhere = MemoryStore(), MemoryStore()
    a, b = members(store)
    (other,) = (Member(elsewhere, MEMBERS[1]),)
    with a.loop, b.loop, other.loop:
        other.round()
        (of_other_run,) = [elsewhere.get(info.name) for info in elsewhere.list("loco/posts")]
        put(store, 0, KEYS[1], of_other_run)
        a.round()
        (mine,) = [info for info in store.list("loco/posts") if KEYS[0] in info.name]
        old = store.get(mine.name)
        root = bytes.fromhex(last_round(a.loop).root)  # type: ignore[union-attr]
        digests = {
            put(store, 1, KEYS[1], old): "other global weights",
            put(store, 1, KEYS[1], old[:4] + root + old[36:]): "invalid signature",
            put(store, 1, KEYS[1], old[:4] + root + bytes(64) + old[100:]): "not signed",
            put(store, 1, KEYS[1], b"junk"): "no post",
            put(store, 1, KEYS[1], bytes(100_000)): "more than its entries can need",
        }
        put(store, 1, STRANGER.public_key, old)
        a.round()
        inside, refused = close_of(store, 1)
        assert inside == KEYS[:1]
        assert refused.keys() == digests.keys()
        assert all(words in refused[digest] for digest, words in digests.items())
        assert list(close_of(store, 0)[1].values()) == ["it has an invalid signature"]


def test_junk_in_a_members_name_does_not_hide_its_message(store: MemoryStore) -> None:
    """However much of it there is: what is known to be refused is not looked at again."""
    member = Member(store, MEMBERS[0], min_trainers=2, timeout_seconds=60.0)
    other = Member(store, MEMBERS[1], min_trainers=2, timeout_seconds=60.0)
    with member.loop, other.loop, ThreadPoolExecutor(1) as pool:
        for number in range(300):
            put(store, 0, KEYS[1], b"PLSP%d" % number)
        of_other = pool.submit(other.round)
        assert member.round(1) == of_other.result() == ""
        assert close_of(store, 0)[0] == sorted(KEYS)


@pytest.mark.parametrize("letter", ["x", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{GRINNING FACE}"])
def test_a_close_that_refuses_many_can_be_read(letter: str) -> None:
    posts = tuple(Upload(f"trainer-{number:04d}", "0" * 64, 10) for number in range(MAX_TRAINERS))
    refused = tuple(Refused(post.trainer, post.sha256, 400 * letter) for post in posts)
    data = Close("run", 3, "theta", posts, refused).to_bytes(MEMBERS[0])
    assert len(data) <= MAX_CLOSE_BYTES
    found = Close.parse(data, "close", "run", 3, None)
    assert found.posts == posts
    assert found.refused


def test_a_message_in_another_name_is_not_counted_twice(store: MemoryStore) -> None:
    """A copy in the same round: its bytes, and so its digest, are those of a good one."""
    member = Member(store, MEMBERS[0], min_trainers=2)
    with member.loop:
        with pytest.raises(TrainerLost, match="1 of 2"):
            member.round()
        (post,) = store.list("loco/posts")
        put(store, 0, KEYS[1], store.get(post.name))
        with pytest.raises(TrainerLost, match="1 of 2"):
            member.loop.rejoin()


@pytest.mark.parametrize("kind", ["closed", "run", "snapshot"])
@pytest.mark.parametrize("how", ["unsigned", "stranger", "changed", "junk"])
def test_what_only_members_may_say(kind: str, how: str) -> None:
    """All stop alike at a forged close, or run, and go on once it is deleted; a forged snapshot is
    passed over."""
    store, forged = MemoryStore(), MemoryStore()
    signer = {"unsigned": None, "stranger": STRANGER}.get(how, MEMBERS[0])
    liar = Member(forged, signer, [STRANGER.public_key] if signer is STRANGER else None)
    with liar.loop:
        liar.round()
    a, b = members(store)
    if kind == "run":
        data = forged.get("loco/run.json")
        store.put(
            "loco/run.json",
            {"changed": data.replace(b'"round": 0', b'"round": 1'), "junk": b"{}"}.get(how, data),
        )
        with pytest.raises((Untrusted, CorruptMessage), match="loco/run"):
            a.loop.__enter__()
        store.delete("loco/run.json")
    with a.loop, b.loop:
        a.round()
        theta = flat(a.loop.global_state()).clone()
        data = forged.get("loco/closed/000000000000.json")
        data = {"changed": data.replace(b'"round": 0', b'"round": 1'), "junk": b"junk"}.get(
            how, data
        )
        if kind == "snapshot":
            store.put("loco/snapshots/000000000001.json", data)
            store.put("loco/snapshots/000000000009.json", data)
            assert same(flat(Member(store, MEMBERS[1]).loop.__enter__().global_state()), theta)
        if kind == "closed":
            store.put("loco/closed/000000000001.json", data)
            for member in (a, b):
                with pytest.raises(
                    (Untrusted, CorruptMessage), match="closed/000000000001"
                ) as caught:
                    member.round(3)
                assert how in ("changed", "junk") or "delete loco/closed/000000000001.json" in (
                    caught.value.hint or ""
                )
                assert same(flat(member.loop.global_state()), theta)
            store.delete("loco/closed/000000000001.json")
            for member in (a, b):
                member.loop.rejoin()
        a.round(4)
        b.loop.rejoin()
        a.loop.rejoin()
        assert same(flat(a.loop.global_state()), flat(b.loop.global_state()))


def test_who_diverges_is_left_out_and_rewinds(store: MemoryStore) -> None:
    """Its message is far above the median of the round's."""
    settings = {"min_trainers": 3, "timeout_seconds": 0.0}
    *good, sick = [Member(store, None, trainer=name, **settings) for name in "abcd"]
    sick.job.optimizer.param_groups[0]["lr"] = 1.0
    with ExitStack() as stack:
        for member in (*good, sick):
            stack.enter_context(member.loop)
        for member in (sick, *good):
            with pytest.raises(TrainerLost) if member is not good[-1] else nullcontext():
                member.round()
        assert close_of(store, 0)[0] == ["a", "b", "c"]
        for act in (sick.loop.rejoin, sick.round):
            with pytest.raises(InputError, match=r"round 1 was closed without .*: its norm is"):
                act()
        sick.loop.rewind()
        assert not flat(sick.loop.residual()).any()
        for member in good[:-1]:
            member.loop.rejoin()
        assert same(flat(sick.loop.global_state()), flat(good[0].loop.global_state()))


def test_a_close_that_names_what_is_above_the_bound_stops_all(store: MemoryStore) -> None:
    settings = {"min_trainers": 3, "timeout_seconds": 0.0}
    *good, liar = [Member(store, None, trainer=name, **settings) for name in "abc"]
    liar.job.optimizer.param_groups[0]["lr"] = 1.0
    with ExitStack() as stack:
        for member in (*good, liar):
            stack.enter_context(member.loop)
        for member in good:
            with pytest.raises(TrainerLost):
                member.round()
        with patch.object(round_posts, "_MAX_NORM_RATIO", 1e9):
            liar.round()
        for member in good:
            theta = flat(member.loop.global_state()).clone()
            with pytest.raises(CorruptMessage, match="of c that cannot count: its norm is"):
                member.loop.rejoin()
            assert same(flat(member.loop.global_state()), theta)


def test_what_is_not_finite_is_refused_without_keys_as_well(store: MemoryStore) -> None:
    member = Member(store, None)
    with member.loop:
        data = member.not_finite()
        digest = put(store, 0, "stranger", data)
        member.round()
        assert close_of(store, 0) == (
            [member.loop.trainer.name],
            {digest: "a value that is not finite"},
        )
        assert all(tensor.isfinite().all() for tensor in member.loop.global_state().values())


def refusals() -> dict[str, tuple[Callable[[], Any], str]]:
    own, store = MEMBERS[0], MemoryStore()
    return {
        "no keys": (lambda: StoreExchange(store, signer=own), "trusted_keys"),
        "no signer": (lambda: StoreExchange(store, trusted_keys=KEYS), "members sign"),
        "two names": (
            lambda: StoreExchange(store, trainer="a", signer=own, trusted_keys=KEYS),
            "named by its key",
        ),
        "not a member": (
            lambda: StoreExchange(store, signer=STRANGER, trusted_keys=KEYS),
            "own key",
        ),
    }


@pytest.mark.parametrize("case", refusals())
def test_refusals(case: str) -> None:
    act, words = refusals()[case]
    with pytest.raises(InputError, match=words):
        act()
