"""The claims to a stream: each publisher takes the next epoch, and stops when it sees a later one
(docs/protocol.md, 3).

Whoever can write to a store can write a claim. Where publishers sign, only signed claims to this
very stream count; elsewhere a claim must at least be one, and no farther from the ones before it
than any number of publishers could be.
"""

from __future__ import annotations

from .._util.faults import hit
from ..errors import FormatError, PublisherConflict, Untrusted
from ..store.base import ObjectInfo, Store, create_or_confirm, whole
from .names import EpochName, StreamNames, next_unused, plausible
from .signing import MAX_CLAIM_BYTES, NOBODY, Claim, Signer, TrustedKeys, read_claim
from .unreadable import UnreadableObjects, read_again

_TRIES = 100


class Claims:
    """The epochs of a stream; ``trusted`` keys, if any, must have signed a claim that counts."""

    def __init__(
        self, store: Store, names: StreamNames, signer: Signer | None, trusted: TrustedKeys | None
    ) -> None:
        self._store = store
        self._names = names
        self._signer = signer
        self._trusted = trusted
        self._unreadable = UnreadableObjects()

    def take(self, publisher: str, stream_id: str, above: int, *, born: bool) -> int:
        """Claims the first free epoch after ``above`` and after all that count, and returns it.
        Older publishers then stop. Until the stream is ``born`` its ID is not settled, and any
        stream's claims count. Raises PublisherConflict where others are always faster.
        """
        for _ in range(_TRIES):
            listed = self._listed(0)
            newest = self._first(sorted(listed, reverse=True), listed, stream_id if born else "")
            epoch = next_unused(listed, max(newest.epoch if newest else 0, above))
            claim = Claim(
                self._names.stream,
                stream_id,
                epoch,
                publisher,
                newest.publisher if newest else NOBODY,
            )
            hit("claim.before")
            # Creation decides between publishers that saw the same list; who comes second looks
            # again.
            if create_or_confirm(
                self._store, self._names.epoch(epoch), claim.to_bytes(self._signer)
            ):
                return epoch
        raise PublisherConflict(
            f"{_TRIES} other publishers claimed {self._names.stream!r} at the same time"
        )

    def stream_id(self) -> str:
        """The ID that the newest claim gives a stream whose manifests are all damaged, or "". Where
        claims are signed none is believed: they may be those of an earlier stream of the name."""
        listed = {} if self._trusted else self._listed(0)
        newest = self._first(sorted(listed, reverse=True), listed, "")
        return newest.stream_id if newest else ""

    def after(self, epoch: int, publisher: str, stream_id: str) -> int | None:
        """An epoch after ``epoch`` that another publisher has claimed. One listing where there is
        none. ``publisher``'s own are none: the reply to one was lost.

        A claim to another stream of the name counts only if it says that it follows
        ``publisher``'s: it may be an old one of that stream, or be made by somebody who could not
        read this one's manifests any more.
        """
        listed = self._listed(epoch)
        found = self._first(sorted(listed), listed, stream_id, publisher)
        return found.epoch if found else None

    def _listed(self, after: int) -> dict[int, ObjectInfo]:
        """The claims after an epoch. What lies too far beyond the others is left out: it would use
        up the numbers."""
        infos = self._store.list(self._names.epochs, self._names.epoch(after))
        named = {
            name.epoch: i for i in infos if isinstance(name := self._names.parse(i.name), EpochName)
        }
        return {epoch: named[epoch] for epoch in plausible(named, after)}

    def _first(
        self,
        epochs: list[int],
        listed: dict[int, ObjectInfo],
        stream_id: str,
        publisher: str | None = None,
    ) -> Claim | None:
        """The first claim that counts, and is not ``publisher``'s own."""

        def read(epoch: int) -> Claim:
            if listed[epoch].nbytes > MAX_CLAIM_BYTES:
                raise FormatError(f"the claim to epoch {epoch} has {listed[epoch].nbytes} bytes")
            claim = read_again(
                lambda: whole(self._store, self._names.epoch(epoch), listed[epoch].nbytes),
                lambda data: read_claim(data, self._names.stream, epoch, self._trusted),
            )
            if (
                self._trusted
                and stream_id
                and claim.stream_id != stream_id
                and claim.previous != publisher
            ):
                raise Untrusted(f"the claim to epoch {epoch} is one to another stream of this name")
            if publisher and claim.publisher == publisher:
                raise Untrusted(f"the claim to epoch {epoch} is the publisher's own")
            return claim

        return self._unreadable.first(epochs, listed, read, bounded=False)
