"""A sharded trainer of some ranks: each has a thread, a client of the store and its slices, and no
process group.

The ranks run one at a time, handed over to where they wait for each other, so that a sequence
repeats call by call. What carries their messages is a stand-in (tests/integrations/fsdp has the
road over gloo); all else is the library's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np

from pulse_rl import Bits, Published, PulseError, Signer, State
from pulse_rl._util.collective import Bytes, RankGroup
from pulse_rl.errors import PublisherConflict, RankLost
from pulse_rl.sharding.layout import Runs, SliceSpec
from pulse_rl.sharding.rank import ShardedRank
from pulse_rl.state.tensors import TensorSpec
from pulse_rl.stream.signing import TrustedKeys
from pulse_rl.stream.stream import Stream
from pulse_rl.sync.publisher import PublisherSettings
from pulse_rl.sync.request import LocalState, PublishRequest

from .model import STREAM, check
from .store import Client, CrashNow, Fault, Net


class _Turns:
    """Lets one of some threads run at a time: the next in order that does not wait for
    something."""

    def __init__(self) -> None:
        self._awaited: dict[int, Callable[[], bool] | None] = {}
        self._given: dict[int, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._stalled: set[int] = set()

    def run(self, works: list[Callable[[], None]]) -> None:
        """Returns when all ``works`` have. Where all that are left wait in vain, the first is told
        so by `wait`."""
        self._given = {k: threading.Semaphore(0) for k in range(len(works))}
        self._awaited = dict.fromkeys(range(len(works)))
        threads = [
            threading.Thread(target=self._work, args=(k, work), daemon=True)
            for k, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        while self._awaited:
            ready = [k for k, until in self._awaited.items() if until is None or until()]
            if not ready:
                self._stalled = set(self._awaited)
            turn = ready[0] if ready else min(self._stalled)
            self._given[turn].release()
            self._back.acquire()
        for thread in threads:
            thread.join()
        self._stalled = set()

    def wait(self, rank: int, until: Callable[[], bool]) -> bool:
        """Lets others run ``until`` something holds; whether it does."""
        self._awaited[rank] = until
        self._hand_over(rank)
        self._awaited[rank] = None
        return until()

    def _hand_over(self, rank: int) -> None:
        self._back.release()
        self._given[rank].acquire()

    def _work(self, rank: int, work: Callable[[], None]) -> None:
        self._given[rank].acquire()
        try:
            work()
        finally:
            del self._awaited[rank]
            self._back.release()


class _Wire:
    """What is under way between the ranks. ``parted`` once one of them was lost."""

    def __init__(self, size: int, turns: _Turns) -> None:
        self.size, self.turns, self.parted = size, turns, False
        self.gathered: list[dict[int, bytes]] = []
        self.sent: dict[tuple[int, int], deque[Bytes]] = {}


class _Group:
    """The stand-in for a process group, of one rank, whose process ends with its ``client``'s."""

    def __init__(self, wire: _Wire, rank: int, clients: RankClients) -> None:
        self.size, self.rank = wire.size, rank
        self._wire, self._clients, self._step = wire, clients, 0

    def all_gather(self, message: bytes) -> list[bytes]:
        self._require_alive()
        wire, step = self._wire, self._step
        self._step += 1
        if step == len(wire.gathered):
            wire.gathered.append({})
        wire.gathered[step][self.rank] = message
        self._await(lambda: len(wire.gathered[step]) == wire.size)
        messages = [wire.gathered[step][rank] for rank in range(wire.size)]
        check(
            len({len(message) for message in messages}) == 1, "the ranks' messages differ in length"
        )
        return messages

    def exchange(self, sent: Mapping[int, Bytes], received: Mapping[int, Bytes]) -> None:
        self._require_alive()
        boxes = self._wire.sent
        for rank, array in sent.items():
            boxes.setdefault((self.rank, rank), deque()).append(array.copy())
        for rank, array in received.items():
            self._await(lambda rank=rank: bool(boxes.get((rank, self.rank))))  # type: ignore[misc]
            came = boxes[rank, self.rank].popleft()
            check(
                len(came) == len(array),
                f"rank {rank} sends {len(came)} bytes, rank {self.rank} awaits {len(array)}",
            )
            array[:] = came

    def close(self) -> None:
        self._wire.parted = self._wire.parted or self.size > 1

    def _await(self, until: Callable[[], bool]) -> None:
        if not until() and not self._wire.turns.wait(self.rank, until):
            self._wire.parted = True
            self._require_alive()
            raise RankLost("a rank died or stalled")
        self._require_alive()

    def _require_alive(self) -> None:
        self._clients.end_together()
        if self._clients.each[self.rank].dead:
            raise CrashNow("the process has ended")


def _local(state: State, places: Mapping[str, SliceSpec | None]) -> LocalState:
    """What a rank has of a state: the boxes that ``places`` says, in arrays of its own."""
    arrays: dict[str, Bits] = {}
    names = [spec.name for spec in state.specs] + list(state.aliases)
    kept = {
        name: box for name in names if (box := places[state.aliases.get(name, name)]) is not None
    }
    for name, box in kept.items():
        spec = state.spec(name)
        whole = state.read(name).reshape(spec.shape)
        if name in state.aliases:
            arrays[name] = arrays[state.aliases[name]]
        else:
            indices = [
                np.array([k for run in runs for k in range(*run)], np.int64) for runs in box.of
            ]
            arrays[name] = Bits(
                whole[np.ix_(*indices)].copy() if spec.shape else whole.copy(), spec.dtype.name
            )
    return LocalState(State.of(arrays), boxes=kept)


class RankClients:
    """The clients of all ranks, for who disturbs them as one. A fault befalls one of them.
    ``dead``: the ranks cannot go on together."""

    def __init__(self, net: Net, size: int) -> None:
        self.each = [Client(net) for _ in range(size)]
        self.lost = False
        self._one_fate = self.disturbed = False

    @property
    def dead(self) -> bool:
        return self.lost or any(client.dead for client in self.each)

    @property
    def hit(self) -> int:
        return sum(client.hit for client in self.each)

    @hit.setter
    def hit(self, value: int) -> None:
        self.each[0].hit += value - self.hit

    def expect(self, faults: list[Fault]) -> None:
        self.disturbed = bool(faults)
        self._one_fate = any(int(fault.where * 7919) % 2 for fault in faults)
        for rank, client in enumerate(self.each):
            client.expect(
                [fault for fault in faults if int(fault.where * 997) % len(self.each) == rank]
            )

    def calm(self) -> None:
        for client in self.each:
            client.calm()

    def meanwhile(self, call: int, act: Callable[[], None]) -> None:
        self.each[call % len(self.each)].meanwhile(call, act)

    def end_together(self) -> None:
        """Where one process has ended, perhaps all do: their machine is gone."""
        if self._one_fate and any(client.dead for client in self.each):
            for client in self.each:
                client.dead = True


class RankTrainer:
    """The ranks as one: what all of them return or raise is what one `Publisher` would. ``rng``
    chooses how tensors are spread, which now and then changes."""

    def __init__(
        self,
        clients: RankClients,
        rng: Random,
        *,
        anchor_ratio: float,
        signer: Signer | None = None,
        stream_id: str | None = None,
        shard_bytes: int = 1 << 30,
        history: bool | None = None,
    ) -> None:
        self._clients = clients
        self._rng = rng
        self._size, self._step = len(clients.each), 0
        self._turns = _Turns()
        wire = _Wire(self._size, self._turns)
        self._wire = wire
        self._spread = rng.getrandbits(32)
        self._ranks = [
            ShardedRank(
                Stream(
                    client,
                    STREAM,
                    TrustedKeys([signer.public_key]) if signer else None,
                    signer=signer,
                    stream_id=stream_id,
                ),
                RankGroup(_Group(wire, rank, clients)),
                PublisherSettings(anchor_ratio, signer=signer, threads=1),
            )
            for rank, client in enumerate(clients.each)
        ]
        for publisher in self._ranks:
            publisher.shard_bytes = shard_bytes
            publisher.history.forced = history

    def publish(self, state: State, *, anchor: bool = False) -> Published:
        """Raises what one of them raises, the end of a process first."""
        if self._rng.random() < 0.05:
            self._spread = self._rng.getrandbits(32)
        places = [
            {spec.name: self._box(spec, rank) for spec in state.specs} for rank in range(self._size)
        ]
        self._step += 1
        steps = [self._step] * self._size
        if (
            self._size > 1 and self._clients.disturbed and self._rng.random() < 0.1
        ):  # interrupted before the call, it goes on with its next step
            steps[self._rng.randrange(self._size)] += 1
            self._clients.hit += 1
        requests = [
            PublishRequest(_local(state, at), {"step": step}, None, anchor)
            for at, step in zip(places, steps, strict=True)
        ]
        done = self._all(lambda rank: self._ranks[rank].publish(requests[rank])[0])
        check(len({(one.version, one.root) for one in done}) == 1, f"the ranks return {done}")
        return done[0]

    def _all(self, act: Callable[[int], Any]) -> list[Any]:
        done: dict[int, Any] = {}
        failed: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                done[rank] = act(rank)
            except BaseException as error:
                failed[rank] = error

        self._turns.run([lambda rank=rank: work(rank) for rank in range(self._size)])  # type: ignore[misc]
        errors = list(failed.values())
        if self._wire.parted or any(isinstance(error, RankLost) for error in errors):
            self._clients.lost = True
        expected = (CrashNow, PublisherConflict, PulseError)
        unexpected = [error for error in errors if not isinstance(error, expected)]
        for error in unexpected + [
            error for kind in expected for error in errors if isinstance(error, kind)
        ]:
            raise error
        return [done[rank] for rank in range(self._size)]

    def _box(self, spec: TensorSpec, rank: int) -> SliceSpec | None:
        """What the rank has of a tensor: rows or columns, uneven ones too; all of it; or
        nothing."""
        rng = Random(f"{self._spread} {spec.name}")
        how = rng.choice(("rows", "rows", "columns", "rank", "all"))
        if how == "rank":
            return SliceSpec.whole(spec.shape) if rng.randrange(self._size) == rank else None
        if how == "all" or not spec.shape:
            return SliceSpec.whole(spec.shape)
        dim = 0 if how == "rows" else len(spec.shape) - 1
        n = spec.shape[dim]
        cuts = [0, *sorted(rng.randint(0, n) for _ in range(self._size - 1)), n]
        of: list[Runs] = [((0, size),) if size else () for size in spec.shape]
        of[dim] = ((cuts[rank], cuts[rank + 1]),) if cuts[rank] < cuts[rank + 1] else ()
        return SliceSpec(tuple(of), spec.shape)
