"""The posts of one round over a store, as a trainer writes, reads and judges them (docs/loco.md, 7
and 7.2)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import islice
from threading import Lock

import numpy as np

from .._util.threads import ordered_map
from ..errors import CorruptMessage, NotFound, Untrusted
from ..store.base import CONNECTIONS
from .gate import GatedReduction, ReduceGate, add_up
from .parameters import FlatBlock, Floats
from .store_format import (
    MAX_SUMS_HEAD,
    Close,
    Part,
    Refused,
    RoundKey,
    RunStore,
    ShardedMessage,
    ShareSums,
    Upload,
    head_bytes,
    norm,
    pause,
    read_head,
    squares_of,
    write_head,
)
from .wire import Entries, Unit

# Of one trainer that are looked at at once: its own, and what others put in its name.
_MAX_POSTS = 64
_TRIES = 3
#: Parameters. Of fewer, what a part costs whatever it holds would count.
MIN_SHARE = 1 << 20


def contiguous_shares(blocks: Sequence[FlatBlock], trainers: int) -> list[list[Unit]]:
    """The units of each share where so many trainers meet in a store: runs of as many parameters,
    in order, a share for each trainer, or fewer that are not too short. So a share is one range of
    a post, and no more units are cut than there are shares."""
    count = blocks[-1].stop
    shares = max(1, min(trainers, count // MIN_SHARE))
    found: list[list[Unit]] = [[]]
    for block in blocks:
        start = block.start
        while start < block.stop:
            end = count * len(found) // shares
            stop = min(end, block.stop)
            found[-1].append(Unit(block, start - block.start, stop - block.start))
            start = stop
            if stop == end < count:
                found.append([])
    return found


class RoundPosts:
    """The posts of the round at ``place``, each read once, whose parts are of the ``shares``.

    What a post or a part holds, or why it cannot count, is the same for all trainers. What raises
    NotFound, StoreError, or CorruptMessage, for what has arrived damaged, may be good later.
    """

    def __init__(
        self,
        store: RunStore,
        max_norm: float | None,
        reduction: GatedReduction,
        place: RoundKey,
        shares: list[list[Unit]],
        own: tuple[Upload, bytes] | None,
    ) -> None:
        self.place, self.shares, self.own = place, shares, own
        self.store, self.max_norm, self.reduction = store, max_norm, reduction
        self.coder = reduction.coder(place.round)
        #: So many objects are read at once.
        self.threads = 1 if reduction.state.threads == 1 else CONNECTIONS
        # Bytes of each part.
        self._most = [self.coder.max_bytes(units) for units in shares]
        # By post: one's bytes may be put in another's name.
        self._heads: dict[Upload, ShardedMessage | str] = {}
        self._messages: dict[Upload, list[Entries] | str] = {}
        self._damaged: Counter[Upload] = Counter()

    # -- this trainer's own

    def write(self, entries: Sequence[Entries]) -> tuple[Upload, bytes] | str:
        """The post of these entries, by block, which is its own from now on; or why it would be
        refused by all."""
        by_share = [
            [unit.take(entries[unit.block.number]) for unit in units] for units in self.shares
        ]
        messages = self.coder.encode_each(self.shares, by_share)
        parts = ShardedMessage.of(map(Part.of, messages, by_share))
        if (reason := self._out_of_bounds(parts)) is not None:
            return reason
        head = write_head(self.place, parts, self.store.signer)
        data = b"".join([head, *messages])
        post = Upload(self.place.trainer, sha256(head).hexdigest(), len(data))
        self._heads[post] = parts
        self._messages[post] = self.by_block(by_share)
        self.own = post, data
        return self.own

    @property
    def own_entries(self) -> int:
        """How many this trainer has sent."""
        parts = self.head(self.own[0]) if self.own else ""
        return 0 if isinstance(parts, str) else sum(part.entries for part in parts)

    # -- those of all

    def good(self, members: Collection[str], most: int) -> tuple[dict[str, Upload], list[Refused]]:
        """By trainer, the first post that can count, of so many trainers at ``most``, ``members``
        first; and what cannot, as far as it was looked at."""
        found: dict[str, Upload] = {}
        refused: list[Refused] = []
        tried: Counter[str] = Counter()
        posts = list[Upload]()
        there = self.store.posts(self.place.round)
        for post in sorted(there, key=lambda post: (post.trainer not in members, *post)):
            tried[post.trainer] += not self._is_refused(post)
            if tried[post.trainer] <= _MAX_POSTS:
                posts.append(post)
        with closing(ordered_map(self._read, posts, self.threads)) as reads:
            for post, read in zip(posts, reads, strict=True):
                if post.trainer not in found:
                    if not isinstance(read, str):
                        found[post.trainer] = post
                    elif read:
                        refused.append(Refused(post.trainer, post.sha256, read))
                if len(found) == most:
                    break
        return found, refused

    def _is_refused(self, post: Upload) -> bool:
        """Whether it is known by now that a post cannot count: others in the trainer's name must
        not hide its own."""
        found = self._messages.get(post, self._heads.get(post))
        return isinstance(found, str) or self._damaged[post] >= _TRIES

    def _read(self, post: Upload) -> list[Entries] | ShardedMessage | str:
        """What must be known of a post before it is named, or why it cannot be; "" where it may be
        good later. One that arrives damaged is read again, and then passed over."""
        if self._damaged[post] >= _TRIES:
            return "it is damaged in the store"
        try:
            # Where shares are summed by their owners, these read what only they need.
            return self.message(post) if len(self.shares) == 1 else self.head(post)
        except NotFound:
            return ""
        except CorruptMessage:
            self._damaged[post] += 1
            return ""

    def head(self, post: Upload) -> ShardedMessage | str:
        """The parts of a post."""
        if post not in self._heads:
            if (reason := self._too_long(post)) is not None:
                self._heads[post] = reason
            else:
                stop = min(head_bytes(len(self.shares)), post.nbytes)
                self._take_head(post, self._verified(post, 0, stop, bytes.fromhex(post.sha256)))
        return self._heads[post]

    def part(self, post: Upload, share: int) -> list[Entries] | str:
        """What a post has for a share, by unit."""
        parts = self.head(post)
        if isinstance(parts, str):
            return parts
        if len(parts) == 1 and isinstance(entries := self._messages.get(post), list):
            return entries
        start, part = head_bytes(len(parts)), parts[share]
        start += sum(before.nbytes for before in islice(parts, share))
        try:
            message = self._verified(post, start, start + part.nbytes, part.digest)
        except CorruptMessage:
            return f"part {share} is damaged in the store"
        return self._decoded(parts, share, message)

    def message(self, post: Upload) -> list[Entries] | str:
        """All entries of a post of one part, by block."""
        if post not in self._messages:
            self._messages[post] = self._fetched(post)
        return self._messages[post]

    def _fetched(self, post: Upload) -> list[Entries] | str:
        if (reason := self._too_long(post)) is not None:
            return reason
        data = self._bytes(post, 0, post.nbytes)
        parts = self._take_head(post, data)
        if isinstance(parts, str):
            return parts
        message = data[head_bytes(1) :]
        if sha256(message).digest() != parts[0].digest:
            raise CorruptMessage(f"the message of {post.trainer} is damaged in the store")
        found = self._decoded(parts, 0, message)
        return found if isinstance(found, str) else self.by_block([found])

    def _bytes(self, post: Upload, start: int, stop: int) -> bytes:
        if self.own is not None and post == self.own[0]:
            return self.own[1][start:stop]
        return self.store.post(self.place.round, post, start, stop)

    def _verified(self, post: Upload, start: int, stop: int, digest: bytes) -> bytes:
        """Some bytes of a post. Raises CorruptMessage where they have not this SHA-256, however
        often they are read."""
        for _ in range(_TRIES):
            data = self._bytes(post, start, stop)
            if sha256(data).digest() == digest:
                return data
        raise CorruptMessage(f"the message of {post.trainer} is damaged in the store")

    def _take_head(self, post: Upload, data: bytes) -> ShardedMessage | str:
        """The parts by a post's first bytes, at least."""
        head = data[: head_bytes(len(self.shares))]
        if sha256(head).hexdigest() != post.sha256:
            raise CorruptMessage(f"the message of {post.trainer} is damaged in the store")
        try:
            place = self.place._replace(trainer=post.trainer)
            parts = read_head(head, post.nbytes, place, self.store.trusted, len(self.shares))
            found = self._out_of_bounds(parts) or parts
        except (CorruptMessage, Untrusted) as error:
            found = str(error)
        self._heads[post] = found
        return found

    def _too_long(self, post: Upload) -> str | None:
        if post.nbytes > head_bytes(len(self.shares)) + sum(self._most):
            return f"it has {post.nbytes} bytes, more than its entries can need"
        return None

    def _out_of_bounds(self, parts: ShardedMessage) -> str | None:
        for share, (part, most) in enumerate(zip(parts, self._most, strict=True)):
            if part.nbytes > most:
                return f"part {share} has more bytes than its entries can need"
        found = norm(part.squares for part in parts)
        if self.max_norm is not None and found > self.max_norm:
            return f"its norm is {found:g}, more than {self.max_norm:g}"
        return None

    def _decoded(self, parts: ShardedMessage, share: int, message: bytes) -> list[Entries] | str:
        try:
            entries = self.coder.decode_one(self.shares[share], message)
        except CorruptMessage as error:
            return str(error)
        if Part.of(message, entries) != parts[share]:
            return "its head has other entries, or another norm"
        return entries

    def by_block(self, by_share: Sequence[Sequence[Entries]]) -> list[Entries]:
        """The entries of the shares, which are runs in order, as those of blocks."""
        found: list[list[Entries]] = [[] for _ in self.reduction.state.parameters.blocks]
        for units, entries in zip(self.shares, by_share, strict=True):
            for unit, of in zip(units, entries, strict=True):
                found[unit.block.number].append(unit.place(of))
        return [each[0] if len(each) == 1 else _joined(each) for each in found]


def _joined(entries: Sequence[Entries]) -> Entries:
    return np.concatenate([places for places, _ in entries]), np.concatenate(
        [values for _, values in entries]
    )


# -- the sums of owners of shares


class RoundSums:
    """The sums of a round that ``close`` has ended, as the trainer of ``posts`` makes and reads
    them. Who owns a share sums its parts of all posts, and withholds what the gate holds back.

    ``left_out``: by share, the trainers whose part could not count, and why; what it had is still
    theirs."""

    def __init__(self, posts: RoundPosts, close: Close) -> None:
        self.close = close
        self.left_out: list[dict[str, str]] = [{} for _ in posts.shares]
        self._store, self._posts, self._threads = posts.store, posts, posts.threads
        self._name, self._number = posts.place.trainer, posts.place.round
        # By share: what was read, as entries by unit, one after the other; and, of what this
        # trainer has made, a gate that knows what was withheld.
        self._read: dict[int, list[list[Entries]]] = {}
        self._withheld: dict[int, ReduceGate] = {}
        # One that was interrupted may still go on behind the inner steps.
        self._one_at_a_time = Lock()

    def entries(self) -> list[list[Entries]]:
        """By block, what theta moves against, in the order of the addition. `gather` has read
        all."""
        blocks = self._posts.reduction.state.parameters.blocks
        found: list[list[Entries]] = [[] for _ in blocks]
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

    def gather(self, grace_seconds: float) -> None:
        """Makes the sums of this trainer's shares, after ``grace_seconds`` those of owners that are
        late, and reads all. Raises NotFound where the round is long over, and what was in it is
        gone; and CorruptMessage where the sums are more than messages within ``max_norm`` add up
        to."""
        with self._one_at_a_time:
            self._gather(grace_seconds)

    def _gather(self, grace_seconds: float) -> None:
        heads = ordered_map(self._head, self.close.posts, self._threads)
        for post, head in zip(self.close.posts, heads, strict=True):
            if isinstance(head, str):
                raise cannot_count(self.close, post.trainer, head)
        shares = range(len(self._posts.shares))
        began = time.monotonic()
        over, tried = False, set[int]()
        while True:
            # 1. Those that are there are read.
            there = self._store.sums(self._number)
            sizes = [(n, there[n]) for n in shares if n in there and n not in self._read]
            reads = ordered_map(self._fetched, sizes, self._threads)
            for (share, _), found in zip(sizes, reads, strict=True):
                self._take(share, *found)
            missing = [share for share in shares if share not in self._read]
            if not missing:
                return self._require_bound()
            # 2. Of a round that is long over nothing is made.
            if over:
                raise NotFound(f"the sums of round {self._number + 1} are gone")
            if over := self._is_over():
                continue  # all had been there by then
            # 3. This trainer makes its own, and with time those of others, each once.
            now = time.monotonic()
            due = [share for share in missing if share not in tried]
            own = [share for share in due if self._owner(share) == self._name]
            if due and not own:
                # First the next trainer makes them, then two more, then four.
                near = min(due, key=self._distance)
                if now - began >= grace_seconds * self._distance(near).bit_length():
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

    def _require_bound(self) -> None:
        max_norm = self._posts.max_norm
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
        where = place.run, place.round, share, place.root
        made = ShareSums(*where, self._name, tuple(left_out), message)
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
        reduction, units = self._posts.reduction, self._posts.shares[share]
        gate = reduction.reduce_gate(self._number)
        summands = [[part[number] for part in parts] for number in range(len(units))]
        sums = add_up(units, summands, len(self.close.posts), gate, self._posts.coder.threads)
        return gate if sums is not None else reduction.reduce_gate(self._number), sums

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
            # An earlier process has made it, or this one, which has not seen that it was stored.
            gate, again = self._gated(share, self._same_parts(share, left_out))
            if again is None or not _same(again, found[0]):
                raise CorruptMessage(
                    f"the sums of share {share} are in this trainer's name, and not what it makes"
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
