"""The posts of one round over a store, as a trainer writes, reads and judges them (docs/loco.md, 7
and 7.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from hashlib import sha256
from typing import NamedTuple

from .._util.threads import ordered_map
from ..errors import CorruptMessage, NotFound, Untrusted
from ..store.base import CONNECTIONS
from .gate import GatedReduction
from .messages import Sent, Sums, Unit
from .store_format import (
    HEAD_BYTES,
    Close,
    Refused,
    RoundKey,
    RunStore,
    Upload,
    norm_of,
    read_head,
    write_head,
)

# Of one trainer that are examined in one poll: its own, and what others put in its name.
_MAX_POSTS = 64
_TRIES = 3
#: A message whose L2 norm is more than so many times the median of its round's cannot count, where
#: so many have entries: of two nobody knows which one diverged.
_MAX_NORM_RATIO, _FEWEST_NORMS = 10.0, 3


class Received(NamedTuple):
    """A message that decodes: its bytes, or its entries where memory allows; its L2 norm."""

    message: bytes | Sent
    norm: float


class Own(NamedTuple):
    """A trainer's own post: its name, its bytes, and the entries in it."""

    post: Upload
    data: bytes
    sent: Sent


class RoundPosts:
    """The posts of the round at ``place``, each read once.

    What a post holds, or why it cannot count, is the same for all trainers. What raises NotFound,
    StoreError, or CorruptMessage, for what has arrived damaged, may be good later.
    """

    def __init__(
        self, store: RunStore, reduction: GatedReduction, place: RoundKey, own: Own | None
    ) -> None:
        self.place, self.store = place, store
        blocks = reduction.state.parameters.blocks
        self.coder, self.units = (
            reduction.coder(place.round),
            [Unit(block, 0, block.stop - block.start) for block in blocks],
        )
        #: So many objects are read at once.
        self.threads = 1 if reduction.state.threads == 1 else CONNECTIONS
        self._most = HEAD_BYTES + self.coder.max_bytes(self.units)
        # By post: one's bytes may be put in another's name.
        self._read: dict[Upload, Received | str] = {}
        self._damaged: Counter[Upload] = Counter()
        if own is not None:
            self._read[own.post] = Received(own.sent, norm_of(own.sent))
        # Bytes of decoded entries that may be kept: one for each parameter. Other messages are
        # decoded again where they are added up.
        self._room = reduction.state.parameters.count

    def write(self, sent: Sent) -> Own:
        """The post of these entries, by block, of this trainer."""
        message = self.coder.encode(self.units, sent)
        head = write_head(self.place, sha256(message).digest(), self.store.signer)
        post = Upload(self.place.trainer, sha256(head).hexdigest(), HEAD_BYTES + len(message))
        self._read[post] = Received(sent, norm_of(sent))
        return Own(post, head + message, sent)

    def good(self, members: Collection[str], most: int) -> tuple[dict[str, Upload], list[Refused]]:
        """By trainer, the first post that can count, of so many trainers at ``most``, ``members``
        first; and what cannot, as far as it was examined."""
        found: dict[str, Upload] = {}
        refused: list[Refused] = []
        tried: Counter[str] = Counter()
        posts = list[Upload]()
        there = self.store.posts(self.place.round)
        for post in sorted(there, key=lambda post: (post.trainer not in members, *post)):
            # Others in the trainer's name must not hide its own.
            known = isinstance(self._read.get(post), str) or self._damaged[post] >= _TRIES
            tried[post.trainer] += not known
            if tried[post.trainer] <= _MAX_POSTS:
                posts.append(post)
        with closing(ordered_map(self._examined, posts, self.threads)) as reads:
            for post, read in zip(posts, reads, strict=True):
                if post.trainer not in found:
                    if isinstance(read, Received):
                        found[post.trainer] = post
                    elif read:
                        refused.append(Refused(post.trainer, post.sha256, read))
                if len(found) == most:
                    break
        # Without the largest message the median may fall, and another one be above the bound.
        while reasons := self._too_large({name: self._read[post] for name, post in found.items()}):
            for name, reason in reasons.items():
                refused.append(Refused(name, found.pop(name).sha256, reason))
        return found, refused

    def sums(self, close: Close) -> Sums:
        """The sums of the messages that are named in a closed round, in their order. Raises
        CorruptMessage where one of them cannot count."""
        received: dict[str, Received | str] = {}
        reads = ordered_map(self.received, close.posts, self.threads)
        for post, found in zip(close.posts, reads, strict=True):
            received[post.trainer] = found
        bad = {name: found for name, found in received.items() if isinstance(found, str)}
        for name, why in (bad or self._too_large(received)).items():
            raise CorruptMessage(
                f"round {close.round + 1} was closed with a message of {name} that cannot count: "
                f"{why}",
                hint="Do all trainers have the same trusted_keys? Else who closed it does not keep "
                "to the rules.",
            )
        good = [found for found in received.values() if isinstance(found, Received)]
        return self.coder.add_up(self.units, [found.message for found in good])

    def bound(self, close: Close, own: Upload) -> str | None:
        """Why this trainer's ``own`` message is above the bound of a round that was closed without
        it; None where it is not."""
        received = {post.trainer: self._read[post] for post in close.posts}
        return self._too_large({**received, "": self._read[own]}).get("")

    def received(self, post: Upload) -> Received | str:
        """What a post has, or why it cannot count."""
        if post not in self._read:
            found = self._fetched(post)
            if isinstance(found, Received) and isinstance(found.message, Sent):
                self._room -= 8 * found.message.size
            self._read[post] = found
        return self._read[post]

    def _examined(self, post: Upload) -> Received | str:
        """What must be known of a post before it is named; "" where it may be good later. One that
        arrives damaged is read again, and then passed over."""
        if self._damaged[post] >= _TRIES:
            return "it is damaged in the store"
        try:
            return self.received(post)
        except NotFound:
            return ""
        except CorruptMessage:
            self._damaged[post] += 1
            return ""

    def _fetched(self, post: Upload) -> Received | str:
        if post.nbytes > self._most:
            return f"it has {post.nbytes} bytes, more than its entries can need"
        # Where members have keys the head comes first: who has none cannot have others read, and
        # hold, long objects.
        stop = min(HEAD_BYTES, post.nbytes) if self.store.trusted else post.nbytes
        data = self.store.post(self.place.round, post, 0, stop)
        head = data[:HEAD_BYTES]
        if sha256(head).hexdigest() != post.sha256:
            raise CorruptMessage(f"the message of {post.trainer} is damaged in the store")
        try:
            place = self.place._replace(trainer=post.trainer)
            digest = read_head(head, place, self.store.trusted)
        except (CorruptMessage, Untrusted) as error:
            return str(error)
        message = data[HEAD_BYTES:]
        if stop < post.nbytes:
            message = self.store.post(self.place.round, post, HEAD_BYTES, post.nbytes)
        if sha256(message).digest() != digest:
            raise CorruptMessage(f"the message of {post.trainer} is damaged in the store")
        try:
            sent = self.coder.decode(self.units, message)
        except CorruptMessage as error:
            return str(error)
        fits = 8 * sent.size <= self._room
        return Received(sent if fits else message, norm_of(sent))

    def _too_large(self, received: Mapping[str, Received | str]) -> dict[str, str]:
        """By trainer, why its message is above the bound among all that are ``received``."""
        norms = {name: each.norm for name, each in received.items() if isinstance(each, Received)}
        sizes = sorted(filter(None, norms.values()))
        if len(sizes) < _FEWEST_NORMS:
            return {}
        median = sizes[(len(sizes) - 1) // 2]
        return {
            name: f"its norm is {norm:g}, more than {_MAX_NORM_RATIO:g} times the median of the "
            f"round's messages, {median:g}"
            for name, norm in norms.items()
            if norm > _MAX_NORM_RATIO * median
        }
