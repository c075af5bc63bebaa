"""Reads the notes of a group's members, whoever wrote them (docs/protocol.md, section 5).

A note is an empty object whose name says all. Its age is taken between times of the store's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..store.base import ObjectInfo, Store
from ..stream.names import AWAY, GroupNames, NoteName, StreamNames

DEFAULT_TIMEOUT_SECONDS = 60.0
_FORGOTTEN_TIMEOUTS = 10


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of a group. ``fresh`` were written at most a timeout before or after now, ``forgotten`` (objects'
    names) much earlier or later."""

    fresh: tuple[NoteName, ...]
    forgotten: tuple[str, ...]

    def of_others(self, member: str) -> list[NoteName]:
        """What the members that are to be waited for say, all but ``member``."""
        notes = latest(note for note in self.fresh if note.member != member)
        return [note for note in notes.values() if note.step != AWAY]


def read_notes(listed: Iterable[ObjectInfo], names: GroupNames, now: float, timeout: float) -> Notes:
    """The notes among the ``listed`` objects; ``now`` in Unix seconds by the store's clock, ``timeout`` in seconds.

    Objects that are not spelled as notes are ignored, and so are notes of processes that begin only in the future.
    """
    fresh, forgotten = [], []
    for info in listed:
        note = names.parse(info.name)
        if note is None:
            continue
        age = abs(now - info.modified)
        if age <= timeout and note.claimed <= (now + timeout) * 1000:
            fresh.append(note)
        elif age > _FORGOTTEN_TIMEOUTS * timeout:
            forgotten.append(info.name)
    return Notes(tuple(fresh), tuple(forgotten))


def latest(notes: Iterable[NoteName]) -> Mapping[str, NoteName]:
    """By member: the note of its newest process, and of that the one that says most. A process that writes a new note
    deletes the one before later."""
    found: dict[str, NoteName] = {}
    for note in sorted(notes, key=lambda n: (n.claimed, n.word, -1 if n.version is None else n.version, n.step)):
        found[note.member] = note
    return found


def versions_of_groups(store: Store, names: StreamNames, existing: Iterable[int], *, since: float) -> set[int]:
    """The versions, of those ``existing``, on which the stream's groups stand: of each group the highest one in a note
    that was written at or after ``since`` (Unix seconds)."""
    known = set(existing)
    highest: dict[str, int] = {}
    for info in store.list(names.groups):
        group, note = names.parse_note(info.name) or (None, None)
        if group is not None and note is not None and note.version in known and info.modified >= since:
            highest[group] = max(highest.get(group, note.version), note.version)
    return set(highest.values())
