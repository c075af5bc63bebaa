"""Publishers that do at once, and of small states, what others do of large ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from pulse_rl import Publisher
from pulse_rl.events import PhaseTimer
from pulse_rl.sync.request import LocalState


def tuned(
    store: Any,
    *,
    kind: Any = Publisher,
    history: bool | None = None,
    shard_bytes: int | None = None,
    stream_id: str | None = None,
    **settings: Any,
) -> Publisher:
    """A publisher of this stream with these ``settings`` that always codes by what changed before,
    or never, and whose anchors have shards of so many bytes."""
    publisher: Publisher = kind(store, **settings)
    if stream_id is not None:
        publisher.stream_id = stream_id
    if history is not None:
        publisher._rank.history.forced = history
    if shard_bytes is not None:
        publisher._rank.shard_bytes = shard_bytes
    return publisher


def resident(store: Any, *, on_device: str | None, **settings: Any) -> Publisher:
    """A publisher all of whose calls are given this ``on_device``."""
    publisher: Any = Publisher(store, **settings)
    publisher.publish = partial(publisher.publish, on_device=on_device)
    publisher.submit = partial(publisher.submit, on_device=on_device)
    return publisher  # type: ignore[no-any-return]


def took_over(publisher: Publisher, source: Any) -> None:
    """The publisher claims its stream and finds the head, which ``source`` may be, as its first
    publish would."""
    rank, local = publisher._rank, LocalState.of(source, None)

    def take() -> None:
        found, seen = rank._resume(), rank._scan(local)
        rank._take_up(local, seen, found, PhaseTimer())

    publisher._serial.run(take)
