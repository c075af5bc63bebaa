"""PULSELoCo over a store under faults: trainers that are killed, interrupted, late, back or new,
and foreign objects.

Every theta is that of a plain simulation of the rounds that were closed, and no trainer loses what
it has trained, or sends it twice. In half of the runs members have keys, and strangers lie: their
posts and snapshots are passed over, their closes stop all alike until they are deleted.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from pulse_rl import PulseError, PulseLoCo, Signer, state_root
from pulse_rl.errors import CorruptMessage, InputError, StoreUnavailable, Untrusted
from pulse_rl.loco import StoreExchange, messages, parameters, store_rounds
from pulse_rl.loco.store_format import Close, RoundKey, Upload, sealed
from pulse_rl.loco.store_rounds import StoreRounds
from pulse_rl.store import Data
from tests.support.loco_reference import Reference, flat, same
from tests.support.posts import digest_of, not_finite, post_of

from .model import check
from .store import FAULTS, Client, CrashNow, Disk, Fault, Net

_SIZE = 96
_STEPS = 2
_BLOCK = 40
_CLOSED, _POSTS = "loco/closed", "loco/posts"
_SNAPSHOTS = "loco/snapshots"


LIES = ("forged", "replayed", "oversized", "nan", "close", "snapshot")


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
        self.saved: tuple[dict[str, Any], np.ndarray, np.ndarray] | None = None
        self.start(None)

    def start(self, saved: tuple[dict[str, Any], np.ndarray, np.ndarray] | None) -> None:
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
            min_trainers=self.world.quorum,
            grace_seconds=self.world.grace,
            timeout_seconds=1e9,
            **who,
        )
        self.loop = PulseLoCo(
            {"w": self.weights},
            self.optimizer,
            sync_every=_STEPS,
            exchange=over,
            compression=self.world.compression,
        )
        self.loop.threads = 1
        self.learnt, self.counted, self.newest = np.zeros(_SIZE), np.zeros(_SIZE), np.zeros(_SIZE)
        self.round, self.own = 0, set[str]()
        if saved is not None:
            self.loop.load_state_dict(saved[0])
            self.learnt, self.counted, self.round = (
                saved[1].copy(),
                saved[2].copy(),
                self.loop.round,
            )
        self.entered = False

    def note_message(self, digest: str) -> None:
        if digest in self.world.sent:
            return  # once more
        assert isinstance(self.loop.meeting, StoreRounds)
        assert self.loop.meeting._own is not None
        own, sent = self.loop.meeting._own.sent, torch.zeros(_SIZE)
        for block, (places, values) in zip(self.loop.parameters.blocks, own.entries, strict=True):
            block.of(sent.numpy())[places] = values
        self.world.sent[digest] = sent, own.closing
        self.own.add(digest)

    def call(self, rng: Random, work: str) -> None:
        """``train`` takes the steps of a round, ``meet`` goes on after an error; faults befall the
        calls."""
        self.line.expect(_faults(rng))
        try:
            if work == "train":
                self.train(rng)
            elif work == "close":
                self.loop.averaged_state()
            elif self.entered:
                self.loop.rejoin()
            else:
                self.loop.__enter__()
                self.entered = True
        except (CrashNow, PulseError) as error:
            calm = isinstance(error, _Waits | CrashNow) or self.line.hit > 0
            if isinstance(error, InputError) and "its norm is" in str(error):
                self.world.counts["refused"] += 1
                calm = True
            calm |= isinstance(error, Untrusted | CorruptMessage) and self.world.has_lie(
                self.loop.round
            )
            check(calm, f"{self.name} failed without a fault: {error!r}")
        finally:
            self.line.calm()
        self.take_stock()
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
        return self.loop.meeting.joined and self.loop.inner_step == 0 and not self.loop.trainer.due

    @property
    def root(self) -> str:
        return str(state_root(dict(self.loop.global_state())))

    def take_stock(self) -> None:
        """Its theta is that of its round; its residual is what it has trained and what has not
        counted."""
        world = self.world
        while self.round < self.loop.round:
            digest = world.closed(self.round).get(self.name)
            if digest is not None and digest in self.own:
                self.counted += world.sent[digest][0].double().numpy()
            elif digest is not None:  # a process before this one had sent it
                self.counted[:] = 0
                self.learnt[:] = 0
                world.counts["unknown"] += 1
            self.round += 1
        check(
            same(flat(self.loop.global_state()), world.theta(self.round)),
            f"{self.name} has another theta after round {self.round} than the simulation",
        )
        if self.loop.inner_step < _STEPS:
            held = flat(self.loop.residual()).double().numpy()
            far = np.abs(held - (self.learnt - self.counted)).max()
            check(
                far < 1e-4,
                f"{self.name} has lost or kept {far} of what it has trained, after round "
                f"{self.round}",
            )


class Rounds:
    """Two to four trainers of one run."""

    def __init__(self, rng: Random) -> None:
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self.disk = Disk(lambda name, data: None)
        self.net = Net(self.disk)
        self.sent: dict[str, tuple[torch.Tensor, bool]] = {}
        self.lr = rng.choice((1e-4, 1e-3, 1e-2))
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        self.first = torch.randn(_SIZE, generator=generator)
        self._stack = ExitStack()
        # Nothing waits: where a trainer would, its call fails, and goes on when it has its turn
        # again.
        self._stack.enter_context(patch.object(store_rounds, "pause", _wait))
        nonces = Random(rng.getrandbits(32))
        self._stack.enter_context(
            patch.object(messages, "os", SimpleNamespace(urandom=nonces.randbytes))
        )
        hexadecimal = SimpleNamespace(token_hex=lambda count: nonces.randbytes(count).hex())
        self._stack.enter_context(patch.object(store_rounds, "secrets", hexadecimal))
        clock = SimpleNamespace(monotonic=lambda: 0.0)
        self._stack.enter_context(patch.object(store_rounds, "time", clock))
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
        self.compression: messages.CompressionName = rng.choice(("fp32", "e8m2", "e8m0"))
        self._reference = Reference(self.first, compression=self.compression)
        self._thetas = [self.first]
        self.nodes = [Node(self, name) for name in names]

    @property
    def injected(self) -> Counter[str]:
        return self.net.injected

    def rules(self) -> dict[str, int]:
        return {
            "train": 40,
            "meet": 30,
            "close_round": 4,
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
        """After so many rounds, by a plain simulation: closing messages first, then the step along
        the others, where there are any."""
        reference, nothing = self._reference, torch.zeros(_SIZE)
        while len(self._thetas) <= number:
            posts = self.closed(len(self._thetas) - 1)
            sent = [self.sent_as(posts[name]) for name in sorted(posts)]
            reference.closing_step([what if closing else nothing for what, closing in sent])
            if not all(closing for _, closing in sent):
                reference.outer_step([nothing if closing else what for what, closing in sent])
            self._thetas.append(reference.theta.detach().clone())
        return self._thetas[number]

    def sent_as(self, digest: str) -> tuple[torch.Tensor, bool]:
        known = digest not in self._empty - self.sent.keys()
        return self.sent[digest] if known else (torch.zeros(_SIZE), False)

    def train(self, rng: Random) -> None:
        node = rng.choice(self.nodes)
        node.call(rng, "train" if node.may_train else "meet")

    def meet(self, rng: Random) -> None:
        rng.choice(self.nodes).call(rng, "meet")

    def close_round(self, rng: Random) -> None:
        node = rng.choice(self.nodes)
        if node.may_train:
            node.call(rng, "close")

    def checkpoint(self, rng: Random) -> None:
        node = rng.choice(self.nodes)
        if node.may_train:
            node.saved = node.loop.state_dict(), node.learnt.copy(), node.counted.copy()

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
        # A copy of a message of this round that nobody signs is one of a trainer of that name.
        whole = data in (self.disk.peek(name) for name in old) and not self.signers
        trainer = rng.choice(("x", "zz", "x" if whole else rng.choice(self.nodes).name))
        digest = digest_of(data) if rng.random() < 0.8 else "0" * 64
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
        if kind in ("close", "snapshot") and not self.signers:
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
        elif kind == "snapshot":
            fields = {"run": run, "round": number, "global": {"root": "", "pieces": []}}
            name = f"{_SNAPSHOTS}/{rng.choice((number, number + 7)):012d}.json"
            if self.disk.peek(name) is None:
                self.disk.plant(name, sealed("snapshot", fields, signer))
        else:
            posts_ = [
                name for name in self.disk.names(_POSTS) if name.rpartition(".")[2] in self.sent
            ]
            kept = self.disk.peek(rng.choice(posts_)) if posts_ and kind == "replayed" else None
            assert isinstance(node.loop.meeting, StoreRounds)
            message = bytes(20_000) if kind == "oversized" else not_finite(node.loop.meeting)
            data = post_of(RoundKey(run, number, node.name, node.root), message, signer)
            if kept:
                data = data[:36] + kept[36:]  # with the signature that it had
            if kept and not self.signers:
                return
            trainer = rng.choice((node.name, self._stranger.public_key))
            digest = digest_of(data)
            self.disk.plant(f"{_POSTS}/{number:012d}/{trainer}.{digest}", data)
            # Where nobody has a key, a head may count; what it says is not there.
            self._empty.add(digest)
        self.counts[f"lie: {kind}"] += 1

    def amend(self, rng: Random) -> None:
        """Whoever owns the store deletes the closes that are lies."""
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
            if digest_of(self.disk.peek(name) or b"") != name.rpartition(".")[2]:
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


def _wait(began: float, now: float) -> None:
    raise _Waits("the round is not closed")
