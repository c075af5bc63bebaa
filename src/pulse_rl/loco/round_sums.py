"""The sums of a round over a store whose shares have owners (docs/loco.md, section 7.3)."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from threading import Lock

from .._native import sum_entries
from .._util.threads import ordered_map
from ..errors import CorruptMessage, NotFound, Untrusted
from .exchange import GatedReduction
from .gate import ReduceGate
from .outer import OuterState
from .parameters import Floats, is_finite
from .round_posts import RoundPosts
from .run_store import RunStore, pause
from .store_exchange import StoreExchange
from .store_format import MAX_SUMS_HEAD, Close, ShardedMessage, ShareSums, Upload, norm, squares_of
from .wire import Entries


class RoundSums:
    """The sums of a round that ``close`` has ended, as the trainer ``name`` makes and reads them.
    Who owns a share sums its parts of all ``posts``, and withholds what the gate holds back.

    ``left_out``: by share, the trainers whose part could not count, and why; what it had is still
    theirs."""

    def __init__(
        self,
        store: RunStore,
        posts: RoundPosts,
        close: Close,
        state: OuterState,
        reduction: GatedReduction,
        name: str,
    ) -> None:
        self.close = close
        self.left_out: list[dict[str, str]] = [{} for _ in posts.shares]
        self._store, self._posts, self._state, self._reduction = store, posts, state, reduction
        self._name, self._number = name, posts.place.round
        self._threads = posts.threads
        # By share: what was read, as entries by unit, one after the other; and, of what this
        # trainer has made, the message, with a gate that knows what was withheld.
        self._read: dict[int, list[list[Entries]]] = {}
        self._made: dict[int, tuple[bytes, ReduceGate]] = {}
        self._withheld: dict[int, ReduceGate] = {}
        # One that was interrupted may still go on behind the inner steps.
        self._one_at_a_time = Lock()

    def entries(self) -> list[list[Entries]]:
        """By block, what theta moves against, in the order of the addition. `gather` has read
        all."""
        found: list[list[Entries]] = [[] for _ in self._state.parameters.blocks]
        for share, units in enumerate(self._posts.shares):
            for by_unit in self._read[share]:
                for unit, entries in zip(units, by_unit, strict=True):
                    found[unit.block.number].append(unit.place(entries))
        return found

    def add_withheld(self, flat: Floats) -> None:
        """Adds what this trainer has withheld to its ``flat`` residual, once."""
        for gate in self._withheld.values():
            gate.add_residual(flat)

    def leaves_out(self, trainer: str) -> str | None:
        """Why a part of the trainer's message is not in the sums, if one is not."""
        return next((names[trainer] for names in self.left_out if trainer in names), None)

    def gather(self, exchange: StoreExchange) -> None:
        """Makes the sums of this trainer's shares, after ``grace_seconds`` those of owners that are
        late, and reads all. Raises NotFound where the round is long over, and what was in it is
        gone; and CorruptMessage where the sums are more than messages within ``max_norm`` add up
        to."""
        with self._one_at_a_time:
            self._gather(exchange)

    def _gather(self, exchange: StoreExchange) -> None:
        for post, head in zip(
            self.close.posts, ordered_map(self._head, self.close.posts, self._threads), strict=True
        ):
            if isinstance(head, str):
                raise cannot_count(self.close, post.trainer, head)
        began = time.monotonic()
        over, tried = False, set[int]()
        while True:
            there = self._store.sums(self._number)
            shares = range(len(self._posts.shares))
            new = [share for share in shares if share in there and share not in self._read]
            sizes = [(share, there[share]) for share in new]
            for share, found in zip(
                new, ordered_map(self._fetched, sizes, self._threads), strict=True
            ):
                self._take(share, *found)
            missing = [share for share in shares if share not in self._read]
            if not missing:
                return self._require_bound(exchange.max_norm)
            if over:
                raise NotFound(f"the sums of round {self._number + 1} are gone")
            if over := self._is_over():
                continue  # all had been there by then
            now = time.monotonic()
            due = [share for share in missing if share not in tried]
            own = [share for share in due if self._owner(share) == self._name]
            if due and not own:
                # First the next trainer makes them, then two more, then four.
                near = min(due, key=self._distance)
                if now - began >= exchange.grace_seconds * self._distance(near).bit_length():
                    own = [near]
            for share in own:
                self._make(share)
            tried.update(own)
            if not own:
                pause(began, now)

    def _head(self, post: Upload) -> ShardedMessage | str | None:
        """What is known of a post; None where it was damaged or deleted since the round was
        closed."""
        try:
            return self._posts.head(post)
        except (CorruptMessage, NotFound):
            return None

    def _require_bound(self, max_norm: float | None) -> None:
        if max_norm is None:
            return
        found = norm(
            squares_of(by_unit) for share in sorted(self._read) for by_unit in self._read[share]
        )
        # The coarsest wire rounds 3 to 4.
        if found > 4 / 3 * len(self.close.posts) * max_norm:
            raise CorruptMessage(
                f"the sums of round {self._number + 1} have a norm of {found:g}, more than its "
                "messages add up to",
                hint="A member does not keep to the rules: see who made those in "
                f"loco/sums/{self._number:012d}.",
            )

    def _owner(self, share: int) -> str:
        return self.close.posts[(share + self._number) % len(self.close.posts)].trainer

    def _distance(self, share: int) -> int:
        """How many posts after the owner's this trainer's is; of one that is not in the round, as
        many as there are."""
        trainers = [post.trainer for post in self.close.posts]
        if self._name not in trainers:
            return len(trainers)
        return (trainers.index(self._name) - share - self._number) % len(trainers)

    def _is_over(self) -> bool:
        """Whether the next round is closed: then all sums of this one had been there."""
        try:
            return self._store.closed(self._number + 1) is not None
        except (CorruptMessage, Untrusted):
            return False

    def _make(self, share: int) -> None:
        left_out, parts = self._parts(share)
        gate, sums = self._gated(share, parts)
        message = b"" if sums is None else self._posts.coder.encode(self._posts.shares[share], sums)
        place = self._posts.place
        self._made[share] = message, gate
        made = ShareSums(
            place.run, place.round, share, place.root, self._name, tuple(left_out), message
        )
        if self._store.put_sums(made):
            self._withheld[share] = gate

    def _parts(
        self, share: int, without: Collection[str] = ()
    ) -> tuple[list[tuple[str, str]], list[list[Entries]]]:
        """What the posts have for a share, in order, and whose part could not be read, and why."""
        left_out, good, posts = list[tuple[str, str]](), list[list[Entries]](), list[Upload]()
        for post in self.close.posts:
            if post.trainer in without:
                continue
            try:
                found = self._posts.head(post)
            except CorruptMessage as error:  # it was good when the round was closed
                left_out.append((post.trainer, str(error)))
                continue
            if isinstance(found, str):
                raise cannot_count(self.close, post.trainer, found)
            posts.append(post)
        parts = ordered_map(lambda post: self._posts.part(post, share), posts, self._threads)
        for post, part in zip(posts, parts, strict=True):
            if isinstance(part, str):
                left_out.append((post.trainer, part))
            else:
                good.append(part)
        return left_out, good

    def _same_parts(self, share: int, left_out: Collection[str]) -> list[list[Entries]]:
        """Those that the sums of a share are of."""
        unread, parts = self._parts(share, left_out)
        if unread:
            who, why = unread[0]
            raise CorruptMessage(
                f"a part of {who} that is in the sums of share {share} cannot be read here: {why}"
            )
        return parts

    def _gated(
        self, share: int, parts: list[list[Entries]]
    ) -> tuple[ReduceGate, list[Entries] | None]:
        """The sums of a share that pass the gate, by unit, None where one is too large for a
        message; and the gate."""
        reduction, units = self._reduction, self._posts.shares[share]
        gate = partial(ReduceGate, self._state.theta, reduction.gate, reduction.wire, self._number)
        used, sent = gate(), list[Entries]()
        for number, unit in enumerate(units):
            sums = sum_entries([part[number] for part in parts], unit.stop - unit.start)
            sent.append(used.filter(unit, sums, len(self.close.posts)))
            if not is_finite(sent[-1][1]).all():
                return gate(), None
        return used, sent

    def _fetched(self, size: tuple[int, int]) -> tuple[ShareSums, list[list[Entries]]]:
        share, nbytes = size
        coder, units = self._posts.coder, self._posts.shares[share]
        if nbytes > MAX_SUMS_HEAD + coder.max_bytes(units):
            raise CorruptMessage(
                f"the sums of share {share} have {nbytes} bytes, more than they can need"
            )
        sums = self._store.share_sums(self._posts.place, share, nbytes)
        if not sums.message:
            return sums, []
        return sums, [coder.decode_one(units, sums.message)]

    def _take(self, share: int, sums: ShareSums, found: list[list[Entries]]) -> None:
        """Takes up what was read of a share, and what this trainer has withheld if it has made
        that."""
        left_out = dict(sums.left_out)
        if not sums.message:
            found = self._same_parts(share, left_out)
        elif sums.trainer == self._name and share not in self._withheld:
            message, gate = self._made.get(share, (b"", None))
            if gate is None or message != sums.message:  # an earlier process has made it
                gate, again = self._gated(share, self._same_parts(share, left_out))
                if again is None or not _same(again, found[0]):
                    raise CorruptMessage(
                        f"the sums of share {share} are in this trainer's name, and not what it "
                        "makes"
                    )
            self._withheld[share] = gate
        self.left_out[share], self._read[share] = left_out, found


def cannot_count(close: Close, trainer: str, why: str) -> CorruptMessage:
    return CorruptMessage(
        f"round {close.round + 1} was closed with a message of {trainer} that cannot count: {why}",
        hint="Do all trainers have the same trusted_keys? Else who closed it does not keep to "
        "the rules.",
    )


def _same(one: list[Entries], other: list[Entries]) -> bool:
    return all(
        a[0].tobytes() == b[0].tobytes() and a[1].tobytes() == b[1].tobytes()
        for a, b in zip(one, other, strict=True)
    )
