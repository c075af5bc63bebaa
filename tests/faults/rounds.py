"""PULSELoCo over a store under faults: trainers that are killed, interrupted, late, back or new,
and foreign objects.

Every theta is that of a plain simulation of the rounds that were closed, and no trainer loses what
it has learnt, or sends it twice, or what it withholds of the sums that it makes. In half of the
runs members have keys, and strangers lie: their posts and snapshots are passed over, their closes
and sums stop all alike until they are deleted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from pulse_rl import PulseError, PulseLoCo, Signer, state_root
from pulse_rl._util.threads import Call
from pulse_rl.errors import CorruptMessage, StoreUnavailable, Untrusted
from pulse_rl.loco import StoreExchange, parameters, round_posts, store_rounds, wire
from pulse_rl.loco.store_format import Close, RoundKey, ShareSums, Upload, head_bytes, sealed
from pulse_rl.loco.store_rounds import StoreRounds
from pulse_rl.store import Data
from tests.support.loco_reference import Reference, added, flat, force_gated, same
from tests.support.posts import digest_of, not_finite, post_of

from .model import check
from .store import FAULTS, Client, CrashNow, Disk, Fault, Net

_SIZE = 96
_STEPS = 2
_BLOCK = 40
_CLOSED, _POSTS, _SUMS = "loco/closed", "loco/posts", "loco/sums"
_SNAPSHOTS = "loco/snapshots"


LIES = ("forged", "replayed", "oversized", "nan", "close", "sums", "snapshot")


class _Waits(StoreUnavailable):
    """The round is not closed yet: others have their turn."""


class _Line(Client):
    """A trainer's client, which notes what is sent."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.world.net)
        self._node = node

    def put(self, name: str, data: Data) -> None:
        if name.startswith(_POSTS):
            self._node.note_message(name.rpartition(".")[2])
        super().put(name, data)


class Node:
    """A trainer of a vector, with the books of what it has learnt and of what has counted."""

    def __init__(self, world: Rounds, name: str) -> None:
        self.world, self.name = world, name
        self.saved: tuple[dict[str, Any], np.ndarray, np.ndarray, set[str]] | None = None
        self.start(None)

    def start(self, saved: tuple[dict[str, Any], np.ndarray, np.ndarray, set[str]] | None) -> None:
        """A new process, from a checkpoint or as one that is new."""
        self.weights = torch.nn.Parameter(self.world.first.clone())
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)
        self.now = self.world.first.clone()
        self.optimizer.register_step_post_hook(
            lambda *_: setattr(self, "now", self.weights.detach().clone())
        )
        self.line = _Line(self)
        signer = self.world.signers.get(self.name)
        who: dict[str, Any] = {"trainer": self.name}
        if signer is not None:
            who = {"signer": signer, "trusted_keys": list(self.world.signers)}
        over = StoreExchange(
            self.line,
            quorum=self.world.quorum,
            grace_seconds=self.world.grace,
            deadline_seconds=1e9,
            wire=self.world.wire,
            sweep=self.world.sweep,
            **who,
        )
        overlap = int(self.world.overlap)
        self.loop = PulseLoCo(
            {"w": self.weights}, self.optimizer, sync_every=_STEPS, over=over, overlap=overlap
        )
        self.loop.threads = 1
        assert isinstance(self.loop.meeting, StoreRounds)
        self.loop.meeting._behind = _AtOnce
        self.learnt, self.counted, self.newest = np.zeros(_SIZE), np.zeros(_SIZE), np.zeros(_SIZE)
        self.round, self.own, self.behind, self.on_way = 0, set[str](), False, False
        self.is_new = True
        if saved is not None:
            self.loop.load_state_dict(saved[0])
            self.learnt, self.counted, self.round = (
                saved[1].copy(),
                saved[2].copy(),
                self.loop.round,
            )
            self.own = set(saved[3])
        self.entered = False

    def note_message(self, digest: str) -> None:
        if digest in self.world.sent:
            return  # once more
        assert isinstance(self.loop.meeting, StoreRounds)
        assert self.loop.meeting._own is not None
        entries = self.loop.meeting._round_posts().message(self.loop.meeting._own[0])
        assert not isinstance(entries, str)
        sent = torch.zeros(_SIZE)
        for block, (places, values) in zip(self.loop.parameters.blocks, entries, strict=True):
            block.of(sent.numpy())[places] = values
        self.world.sent[digest] = sent
        self.own.add(digest)

    def call(self, rng: Random, work: str) -> None:
        """``train`` takes the steps of a round, ``meet`` goes on after an error; faults befall the
        calls."""
        self.line.expect(_faults(rng))
        self.behind, self.on_way = self.is_whole, self.loop.state_dict().get("message") is not None
        self.is_new = not (self.round or self.loop.inner_step or self.on_way)
        try:
            if work == "train":
                self.train(rng)
            elif self.entered:
                self.loop.rejoin()
            else:
                self.loop.__enter__()
                self.entered = True
        except (CrashNow, PulseError) as error:
            calm = isinstance(error, _Waits | CrashNow) or self.line.hit > 0
            calm |= isinstance(error, Untrusted | CorruptMessage) and self.world.has_lie(
                self.loop.round
            )
            check(calm, f"{self.name} failed without a fault: {error!r}")
        finally:
            self.line.calm()
        self.take_stock()
        if self.loop.inner_step < _STEPS:
            self.newest[:] = 0
        if self.line.dead:
            self.world.counts["killed"] += 1
            self.start(self.saved)

    def train(self, rng: Random) -> None:
        began = self.weights.detach().clone()
        for step in range(_STEPS):
            by = (
                np.random.default_rng(rng.getrandbits(32)).standard_normal(_SIZE).astype(np.float32)
            )
            self.weights.grad = torch.from_numpy(by) * self.world.lr
            if step == _STEPS - 1:
                self.newest = (began - (self.weights.detach() - self.weights.grad)).double().numpy()
                self.learnt += self.newest
            self.optimizer.step()

    @property
    def may_train(self) -> bool:
        return self.loop.meeting.joined and self.loop.inner_step == 0

    @property
    def is_whole(self) -> bool:
        """Whether its residual is whole: with overlap, or after it was late."""
        return self.loop.reduction.residual.includes_sent

    @property
    def root(self) -> str:
        return str(state_root(dict(self.loop.global_state())))

    def take_stock(self) -> None:
        """Its theta is that of its round; its residual is what it has learnt and what has not
        counted."""
        world, first, may_lack = self.world, self.round, np.zeros(_SIZE)
        # What this trainer has withheld in rounds that a snapshot has led past, unless it lives on:
        # where their messages are gone, or where it is new and takes the newest snapshot.
        lost, gone = list[np.ndarray](), False
        led_to = world.newest_snapshot() if self.is_new else 0
        while self.round < self.loop.round:
            digest, ended = world.closed(self.round).get(self.name), world.ended(self.round)
            if digest is not None and digest in self.own:
                self.counted += (world.sent[digest] * ended.taken[self.name]).double().numpy()
            elif digest is not None:  # a process before this one had sent it
                self.counted[:] = 0
                self.learnt = self.newest.copy() if self.behind else np.zeros(_SIZE)
                # Newest steps were in the residual already, unless a snapshot has led past all
                # these rounds at once, or in a message that was put then.
                may_lack = self.newest * (self.behind and (self.round > first or not self.on_way))
                lost.clear()
                world.counts["unknown"] += 1
            withheld, gone = ended.withheld.get(self.name), gone or world.is_gone(self.round)
            if withheld is not None:
                self.learnt += withheld
                world.counts["withheld"] += 1
                if gone or self.round < led_to:
                    lost.append(withheld)
            self.round += 1
        check(
            same(flat(self.loop.global_state()), world.theta(self.round)),
            f"{self.name} has another theta after round {self.round} than the simulation",
        )
        held = flat(self.loop.residual()).double().numpy()
        due = self.loop.inner_step >= _STEPS
        if not due:
            passed = [
                sum(lost[i:j], np.zeros(_SIZE))
                for i in range(len(lost) + 1)
                for j in range(i, len(lost) + 1)
            ]
            for lack in (each + newest for each in passed for newest in (0, may_lack)):
                if np.abs(held - (self.learnt - lack - self.counted)).max() < 1e-4:
                    self.learnt -= lack
                    break
            far = np.abs(held - (self.learnt - self.counted)).max()
            check(
                far < 1e-4,
                f"{self.name} has lost or kept {far} of what it has learnt, after round "
                f"{self.round}",
            )


class Ended(NamedTuple):
    """A round by a plain simulation: ``theta`` after it; where each trainer's message was
    ``taken``; and what makers of sums have ``withheld``."""

    theta: torch.Tensor
    taken: dict[str, torch.Tensor]
    withheld: dict[str, np.ndarray]


class Rounds:
    """Two to four trainers of one run."""

    def __init__(self, rng: Random) -> None:
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self.disk = Disk(self._note_sums)
        self.sums: dict[str, dict[str, Any]] = {}
        self.net = Net(self.disk)
        self.sent: dict[str, torch.Tensor] = {}
        self.lr = rng.choice((1e-4, 1e-3, 1e-2))
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        self.first = torch.randn(_SIZE, generator=generator)
        self._stack = ExitStack()
        # Nothing waits: where a trainer would, its call fails, and goes on when it has its turn
        # again.
        for module in (store_rounds, round_posts):
            self._stack.enter_context(patch.object(module, "pause", _wait))
        nonces = Random(rng.getrandbits(32))
        self._stack.enter_context(
            patch.object(wire, "os", SimpleNamespace(urandom=nonces.randbytes))
        )
        hexadecimal = SimpleNamespace(token_hex=lambda count: nonces.randbytes(count).hex())
        self._stack.enter_context(patch.object(store_rounds, "secrets", hexadecimal))
        for module in (store_rounds, round_posts):
            self._stack.enter_context(
                patch.object(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
            )
        self._stack.enter_context(patch.object(round_posts, "MIN_SHARE", 1))
        self._stack.enter_context(patch.object(parameters, "BLOCK_ELEMENTS", _BLOCK))
        names: list[str] = list("abcd"[: rng.choice((2, 2, 3, 4))])
        keys = [Signer(rng.randbytes(32)) for _ in names] if rng.random() < 0.5 else []
        self.signers = {signer.public_key: signer for signer in keys}
        self._stranger = Signer(rng.randbytes(32))
        self._lies: dict[str, bytes] = {}
        self._empty = set[str]()
        names = list(self.signers) or names
        self.quorum = rng.randint(1, len(names))
        self.grace = rng.choice((0.0, 0.0, 1.0))
        self.wire: wire.WireName = rng.choice(("FP32", "int4", "int2"))
        self.sweep = None if self.wire == "FP32" else rng.choice((None, 1, 2, 3))
        self.overlap = rng.random() < 0.4
        self.gate_sums = rng.random() < 0.6
        force_gated(self.gate_sums)
        self._stack.callback(force_gated, None)
        self._reference = Reference(self.first, sweep=self.sweep, wire=self.wire)
        self._ended: list[Ended] = []
        self.nodes = [Node(self, name) for name in names]
        blocks = self.nodes[0].loop.parameters.blocks
        self._reference.blocks = [block.stop - block.start for block in blocks]

    @property
    def injected(self) -> Counter[str]:
        return self.net.injected

    def rules(self) -> dict[str, int]:
        return {
            "train": 40,
            "meet": 30,
            "checkpoint": 12,
            "kill": 5,
            "forget": 2,
            "junk": 4,
            "lie": 8,
            "amend": 6,
        }

    def close(self) -> None:
        self._stack.close()

    def closed(self, number: int) -> dict[str, str]:
        """Who is in a round, with the digest of the message."""
        data = self.disk.peek(f"{_CLOSED}/{number:012d}.json")
        assert data is not None
        return {trainer: digest for trainer, digest, _ in json.loads(data)["posts"]}

    def theta(self, number: int) -> torch.Tensor:
        """After so many rounds, by a plain simulation."""
        return self.ended(number - 1).theta if number else self.first

    def ended(self, number: int) -> Ended:
        while len(self._ended) <= number:
            self._ended.append(self._end(len(self._ended)))
        return self._ended[number]

    def _end(self, number: int) -> Ended:
        posts, reference, shares = self.closed(number), self._reference, self.shares_of(number)
        taken, withheld = {name: torch.ones(_SIZE) for name in posts}, dict[str, np.ndarray]()
        said = [
            self.sums[f"{_SUMS}/{number:012d}/{share:04d}"]
            for share in range(shares if shares > 1 else 0)
        ]
        bounds = [
            (_SIZE * share // shares, _SIZE * (share + 1) // shares) for share in range(shares)
        ]
        for (start, stop), each in zip(bounds, said, strict=False):
            for name, _ in each["left_out"]:
                taken[name][start:stop] = 0
        sent = [self.sent_as(posts[name]) * taken[name] for name in sorted(posts)]
        reference.gate_sums = bool(said)
        if said:
            total = added(sent)
            rest = (total - reference.passed(total, len(sent))).double().numpy()
            for (start, stop), each in zip(bounds, said, strict=True):
                withheld.setdefault(each["trainer"], np.zeros(_SIZE))[start:stop] = rest[start:stop]
        self.counts["left out of a share"] += sum(len(each["left_out"]) for each in said)
        reference.outer_step(sent)
        return Ended(reference.theta.detach().clone(), taken, withheld)

    def sent_as(self, digest: str) -> torch.Tensor:
        return torch.zeros(_SIZE) if digest in self._empty - self.sent.keys() else self.sent[digest]

    def shares_of(self, number: int) -> int:
        return len(self.closed(number - 1)) if self.gate_sums and number else 1

    def is_gone(self, number: int) -> bool:
        """Whether messages of a round were deleted."""
        posts = self.closed(number).items()
        return any(
            self.disk.peek(f"{_POSTS}/{number:012d}/{name}.{digest}") is None
            for name, digest in posts
        )

    def newest_snapshot(self) -> int:
        """After how many rounds a member has stored the newest snapshot, 0 without one."""
        found = [json.loads(self.disk.peek(name) or b"{}") for name in self.disk.names(_SNAPSHOTS)]
        return max((each["round"] for each in found if "momentum" in each), default=0)

    def _note_sums(self, name: str, data: bytes) -> None:
        if name.startswith(_SUMS):
            self.sums.setdefault(name, json.loads(data.partition(b"\n")[0]))

    def train(self, rng: Random) -> None:
        node = rng.choice(self.nodes)
        node.call(rng, "train" if node.may_train else "meet")

    def meet(self, rng: Random) -> None:
        rng.choice(self.nodes).call(rng, "meet")

    def checkpoint(self, rng: Random) -> None:
        node = rng.choice(self.nodes)
        if node.may_train:
            own = set(node.own) if node.is_whole else set[str]()
            node.saved = node.loop.state_dict(), node.learnt.copy(), node.counted.copy(), own

    def kill(self, rng: Random) -> None:
        node = rng.choice(self.nodes)
        node.start(node.saved)

    def forget(self, rng: Random) -> None:
        """A trainer loses its checkpoint as well."""
        node = rng.choice(self.nodes)
        node.saved = None
        node.start(None)

    def junk(self, rng: Random) -> None:
        """What others write below posts: old messages again, pieces of them, anything."""
        closed = len(self.closes())
        old = self.disk.names(_POSTS)
        data = self.disk.peek(rng.choice(old)) if old else b"junk"
        assert data is not None
        data = rng.choice((data, data[: rng.randint(0, len(data))], b"", rng.randbytes(50)))
        trainer = rng.choice(("x", "zz", rng.choice(self.nodes).name))
        digest = digest_of(data, self.shares_of(closed)) if rng.random() < 0.8 else "0" * 64
        if f"{trainer}.{digest}" not in {
            name.rpartition("/")[2] for name in old
        }:  # or it is a message of its own
            self.disk.plant(
                f"{_POSTS}/{closed + rng.choice((0, 0, 1)):012d}/{trainer}.{digest}", data
            )
            self._empty.add(digest)  # the copy of a lie about this trainer is believed like the lie

    def lie(self, rng: Random) -> None:
        """What a stranger writes who knows the format, and all that members have written."""
        if self.disk.peek("loco/run.json") is None:
            return
        run = json.loads(self.disk.peek("loco/run.json") or b"{}")["run"]
        number = max(0, len(self.closes()) + rng.choice((0, 0, 0, 1, -1)))
        signer = rng.choice((None, self._stranger))
        node = rng.choice(self.nodes)
        kind = rng.choice(LIES)
        if kind in ("close", "sums", "snapshot") and not self.signers:
            return  # where nobody has a key, whoever writes is believed
        if kind == "close":
            old = [self.disk.peek(name) for name in self.closes()]
            posts = tuple(
                Upload(each.name, "0" * 64, 99)
                for each in sorted(self.nodes, key=lambda each: each.name)
            )
            data = rng.choice((*old, Close(run, number, node.root, posts).to_bytes(signer), b"{}"))
            name = f"{_CLOSED}/{number:012d}.json"
            if self.disk.peek(name) is None and data:
                self.disk.plant(name, data)
                self._lies[name] = data
        elif kind == "sums":
            share = rng.randrange(self.shares_of(number) if number <= len(self.closes()) else 1)
            old = [self.disk.peek(name) for name in self.disk.names(_SUMS)]
            lie = ShareSums(run, number, share, node.root, node.name, (), b"").to_bytes(signer)
            data = rng.choice((*old, lie, b"{}"))
            name = f"{_SUMS}/{number:012d}/{share:04d}"
            if self.disk.peek(name) is None and data:
                self.disk.plant(name, data)
                self._lies[name] = data
        elif kind == "snapshot":
            fields = {"run": run, "round": number, "theta": {"root": "", "pieces": []}}
            name = f"{_SNAPSHOTS}/{rng.choice((number, number + 7)):012d}.json"
            if self.disk.peek(name) is None:
                self.disk.plant(name, sealed("snapshot", fields, signer))
        else:
            posts_ = [
                name for name in self.disk.names(_POSTS) if name.rpartition(".")[2] in self.sent
            ]
            kept = self.disk.peek(rng.choice(posts_)) if posts_ and kind == "replayed" else None
            assert isinstance(node.loop.meeting, StoreRounds)
            messages = [bytes(20_000)] if kind == "oversized" else not_finite(node.loop.meeting)
            data = post_of(RoundKey(run, number, node.name, node.root), messages, signer)
            if kept:
                data = data[:36] + kept[36:]  # with the signature that it had
            if kept and not self.signers:
                return
            trainer = rng.choice((node.name, self._stranger.public_key))
            shares = (
                1 if len(data) < head_bytes(9) else self.shares_of(min(number, len(self.closes())))
            )
            digest = digest_of(data, shares)
            self.disk.plant(f"{_POSTS}/{number:012d}/{trainer}.{digest}", data)
            # Where nobody has a key, a head may count; what it says is not there.
            self._empty.add(digest)
        self.counts[f"lie: {kind}"] += 1

    def amend(self, rng: Random) -> None:
        """Whoever owns the store deletes the closes and sums that are lies."""
        for name, data in self._lies.items():
            if self.disk.peek(name) == data:
                self.disk.delete(name)
        self._lies.clear()

    def has_lie(self, number: int) -> bool:
        return any(f"/{number:012d}" in name for name in self._lies)

    def closes(self) -> list[str]:
        """The rounds that were closed by members."""
        return [name for name in self.disk.names(_CLOSED) if name not in self._lies]

    def settled(self, rng: Random) -> None:
        closed = [json.loads(self.disk.peek(name) or b"{}") for name in self.closes()]
        check([each["round"] for each in closed] == list(range(len(closed))), "a round is missing")
        for each in closed:
            check(len(each["posts"]) >= self.quorum, f"round {each['round']} has no quorum")

    def finish(self, rng: Random) -> None:
        """All go on without faults, and end with one theta."""
        self.net.flush()
        self.disk_is_clean()
        self.amend(rng)
        self.grace = 0.0  # it passes
        for node in self.nodes:
            assert isinstance(node.loop.meeting, StoreRounds)
            node.loop.meeting.exchange = replace(node.loop.meeting.exchange, grace_seconds=0.0)
        for _ in range(2):
            for _turn in range(40):
                for node in self.nodes:
                    if not node.may_train:
                        node.call(_Calm(), "meet")
                if all(node.may_train and node.round == len(self.closes()) for node in self.nodes):
                    break
            else:
                due = [node for node in self.nodes if not node.may_train]
                check(len(due) < self.quorum, f"{[node.name for node in due]} wait for ever")
            for node in self.nodes:
                if node.may_train:
                    node.call(_Calm(rng), "train")
        self.counts["rounds"] += len(self.closes())
        self.counts["snapshots"] += len(self.disk.names(_SNAPSHOTS))

    def disk_is_clean(self) -> None:
        """Objects whose bytes are not what their names say would stop a trainer that reads them
        again and again."""
        for name in self.disk.names(_POSTS):
            data, number = self.disk.peek(name), min(int(name.split("/")[2]), len(self.closes()))
            if digest_of(data or b"", self.shares_of(number)) != name.rpartition(".")[2]:
                self.disk.delete(name)


class _Calm(Random):
    """Chance without faults."""

    def __new__(cls, source: Random | None = None) -> _Calm:
        return super().__new__(cls)

    def __init__(self, source: Random | None = None) -> None:
        super().__init__(source.getrandbits(32) if source else 0)
        self.calm = True


def _faults(rng: Random) -> list[Fault]:
    if isinstance(rng, _Calm) or rng.random() < 0.4:
        return []
    kinds = rng.choices(list(FAULTS), k=rng.choice((1, 1, 2, 4)))
    return [Fault(kind, rng.randrange(rng.choice((3, 8, 20))), rng.random()) for kind in kinds]


class _AtOnce(Call[Any]):
    """What goes on behind the inner steps, before them: one call after another, in an order that a
    seed repeats."""

    __slots__ = ()

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(work)
        self.run()
        if isinstance(self._error, CrashNow):
            self.result()

    def stop(self) -> None:
        pass


def _wait(began: float, now: float) -> None:
    raise _Waits("the round is not closed")
