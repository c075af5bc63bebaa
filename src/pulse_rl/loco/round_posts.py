"""The posts of one round over a store, as a trainer writes, reads and judges them (docs/loco.md, 7
and 7.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import accumulate

import numpy as np

from .._util.threads import ordered_map
from ..errors import CorruptMessage, NotFound, Untrusted
from ..store.base import CONNECTIONS
from ..stream.signing import TrustedKeys
from .exchange import GatedReduction
from .outer import OuterState
from .parameters import FlatBlock
from .run_store import RunStore
from .store_exchange import StoreExchange
from .store_format import (
    Part,
    Refused,
    RoundKey,
    ShardedMessage,
    Upload,
    head_bytes,
    norm_of,
    read_head,
    write_head,
)
from .wire import Entries, Unit

_MAX_POSTS = 64
"""Of one trainer that are looked at at once: its own, and what others put in its name."""
_TRIES = 3
MIN_SHARE = 1 << 20
"""Parameters. Of fewer, what a part costs whatever it holds would count."""


def cut_runs(blocks: Sequence[FlatBlock], trainers: int) -> list[list[Unit]]:
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
        exchange: StoreExchange,
        reduction: GatedReduction,
        state: OuterState,
        place: RoundKey,
        shares: list[list[Unit]],
        trusted: TrustedKeys | None,
        own: tuple[Upload, bytes] | None,
    ) -> None:
        self.place, self.shares, self.own = place, shares, own
        self._store, self._exchange, self._state, self._trusted = store, exchange, state, trusted
        self.coder = reduction.coder(place.round)
        self.threads = 1 if state.threads == 1 else CONNECTIONS
        """So many objects are read at once."""
        self._most = [self.coder.max_bytes(units) for units in shares]
        """Bytes of each part."""
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
        parts = ShardedMessage.of(
            [Part.of(message, of) for message, of in zip(messages, by_share, strict=True)]
        )
        if (reason := self._out_of_bounds(parts)) is not None:
            return reason
        head = write_head(self.place, parts, self._exchange.signer)
        data = b"".join([head, *messages])
        post = Upload(self.place.trainer, sha256(head).hexdigest(), len(data))
        self._heads[post] = parts
        self._messages[post] = self._by_block(by_share)
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
        for post in sorted(
            self._store.posts(self.place.round),
            key=lambda post: (post.trainer not in members, *post),
        ):
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
        start = head_bytes(len(parts)) + sum(part.nbytes for part in parts[:share])
        try:
            message_of_share = self._verified(
                post, start, start + parts[share].nbytes, parts[share].digest
            )
        except CorruptMessage:
            return f"part {share} is damaged in the store"
        return self._decoded(parts, share, message_of_share)

    def message(self, post: Upload) -> list[Entries] | str:
        """All entries of a post, by block."""
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
        by_share: list[list[Entries]] = []
        stops = accumulate([part.nbytes for part in parts], initial=head_bytes(len(parts)))
        for share, (start, part) in enumerate(zip(stops, parts, strict=False)):
            message = data[start : start + part.nbytes]
            if sha256(message).digest() != part.digest:
                raise CorruptMessage(f"the message of {post.trainer} is damaged in the store")
            found = self._decoded(parts, share, message)
            if isinstance(found, str):
                return found
            by_share.append(found)
        return self._by_block(by_share)

    def _bytes(self, post: Upload, start: int, stop: int) -> bytes:
        if self.own is not None and post == self.own[0]:
            return self.own[1][start:stop]
        return self._store.post(self.place.round, post, start, stop)

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
            parts = read_head(head, post.nbytes, place, self._trusted, len(self.shares))
            found = self._out_of_bounds(parts) or parts
        except (CorruptMessage, Untrusted) as error:
            found = str(error)
        self._heads[post] = found
        return found

    def _too_long(self, post: Upload) -> str | None:
        most = head_bytes(len(self.shares)) + sum(self._most)
        return (
            f"it has {post.nbytes} bytes, more than its entries can need"
            if post.nbytes > most
            else None
        )

    def _out_of_bounds(self, parts: Sequence[Part]) -> str | None:
        for share, (part, of_part) in enumerate(zip(parts, self._most, strict=True)):
            if part.nbytes > of_part:
                return f"part {share} has more bytes than its entries can need"
        longest, norm = self._exchange.max_norm, norm_of(parts)
        if longest is not None and norm > longest:
            return f"its norm is {norm:g}, more than {longest:g}"
        return None

    def _decoded(self, parts: Sequence[Part], share: int, message: bytes) -> list[Entries] | str:
        try:
            entries = self.coder.decode_one(self.shares[share], message)
        except CorruptMessage as error:
            return str(error)
        if Part.of(message, entries) != parts[share]:
            return "its head has other entries, or another norm"
        return entries

    def _by_block(self, by_share: Sequence[Sequence[Entries]]) -> list[Entries]:
        return by_block(self.shares, by_share, len(self._state.parameters.blocks))


def by_block(
    shares: Sequence[Sequence[Unit]], by_share: Sequence[Sequence[Entries]], blocks: int
) -> list[Entries]:
    """The entries of shares, which are runs in order, as those of blocks."""
    found: list[list[Entries]] = [[] for _ in range(blocks)]
    for units, entries in zip(shares, by_share, strict=True):
        for unit, of in zip(units, entries, strict=True):
            found[unit.block.number].append(unit.place(of))
    return [each[0] if len(each) == 1 else _joined(each) for each in found]


def _joined(entries: Sequence[Entries]) -> Entries:
    return np.concatenate([places for places, _ in entries]), np.concatenate(
        [values for _, values in entries]
    )
