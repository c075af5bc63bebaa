"""Publishers that do at once, and of small states, what others do of large ones."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from pulse_rl import Published, Publisher, fold_stream
from pulse_rl.events import PhaseTimer
from pulse_rl.ops.compaction import anchor_stream as anchor_stream
from pulse_rl.sync.commit import HeadState
from pulse_rl.sync.request import LocalState


class FoldingPublisher(Publisher):
    """A publisher with somebody beside it who makes the folds that a version has made due."""

    def __init__(self, store: Any, *, folds: Collection[int] = (), **settings: Any) -> None:
        super().__init__(store, **settings)
        self._spans = tuple(sorted(folds))
        if self._spans:
            self._rank.history.span = self._spans[0]
        self._fold = partial(
            fold_stream,
            self._stream.store,
            self._stream.name,
            signer=settings.get("signer"),
            trusted_keys=settings.get("trusted_keys"),
            threads=settings.get("threads"),
            on_event=settings.get("on_event"),
        )

    def publish(self, source: Any, **arguments: Any) -> Published:
        done = super().publish(source, **arguments)
        if any(done.version and done.version % span == 0 for span in self._spans):
            list(self._fold(self._spans))
        return done


def tuned(
    store: Any,
    *,
    kind: Any = None,
    history: bool | None = None,
    shard_bytes: int | None = None,
    stream_id: str | None = None,
    **settings: Any,
) -> Publisher:
    """A publisher of this stream with these ``settings`` that always codes by what changed before,
    or never, and whose anchors have shards of so many bytes."""
    kind = kind or (FoldingPublisher if "folds" in settings else Publisher)
    publisher: Publisher = kind(store, **settings)
    if stream_id is not None:
        publisher.stream_id = stream_id
    if history is not None:
        publisher._rank.history.forced = history
    if shard_bytes is not None:
        publisher._rank.shard_bytes = shard_bytes
    return publisher


def staging(store: Any, *, copy_on_device: bool, **settings: Any) -> Publisher:
    """A publisher that is given this ``copy_on_device`` with all that is submitted."""
    publisher: Any = Publisher(store, **settings)
    publisher.submit = partial(publisher.submit, copy_on_device=copy_on_device)
    return publisher  # type: ignore[no-any-return]


def took_over(publisher: Publisher, source: Any) -> None:
    """The publisher claims its stream and finds the head, which ``source`` may be, as its first
    publish would."""
    rank, local = publisher._rank, LocalState.of(source, None)

    def take() -> None:
        found: HeadState = rank._committer.find(None)
        rank._recover(local, found, PhaseTimer())

    publisher._serial.run(take)
