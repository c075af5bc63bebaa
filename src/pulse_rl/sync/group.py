"""Joint activation: the members of a group switch to a version together (docs/protocol.md, section
5).

They share only notes: empty objects whose names say how far each member is. A member stages the
highest version that any note names, and switches to it once all notes name it.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from .._util.serial import NotCopyable
from ..errors import InputError, MemberConflict, NotFound, StoreError
from ..store.base import ObjectInfo, Store
from ..stream.names import (
    AWAY,
    EMPTY,
    STAGED,
    SWITCHED,
    GroupNames,
    NoteName,
    StreamNames,
    check_word,
)
from .planner import BROKEN_LINK
from .subscriber import Subscriber
from .update import Update

DEFAULT_TIMEOUT_SECONDS = 60.0
_FORGOTTEN_TIMEOUTS = 10
_TIDIED_PER_LOOK = 16
_MAX_CLAIMED = 10**15 - 1


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of a group. ``fresh`` were written at most a timeout before or after now,
    ``forgotten`` (objects' names) much earlier or later."""

    fresh: tuple[NoteName, ...]
    forgotten: tuple[str, ...]

    def of_others(self, member: str) -> list[NoteName]:
        """What the members that are to be waited for say, all but ``member``."""
        notes = latest(note for note in self.fresh if note.member != member)
        return [note for note in notes.values() if note.step != AWAY]


def read_notes(
    listed: Iterable[ObjectInfo], names: GroupNames, now: float, timeout: float
) -> Notes:
    """The notes among the ``listed`` objects; ``now`` in Unix seconds by the store's clock,
    ``timeout`` in seconds.

    Objects that are not spelled as notes are ignored, and so are notes of processes that begin only
    in the future.
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
    """By member: the note of its newest process, and of that the one that says most. A process that
    writes a new note deletes the one before later."""
    found: dict[str, NoteName] = {}
    for note in sorted(
        notes, key=lambda n: (n.claimed, n.word, -1 if n.version is None else n.version, n.step)
    ):
        found[note.member] = note
    return found


def versions_of_groups(
    store: Store, names: StreamNames, existing: Iterable[int], *, since: float
) -> set[int]:
    """The versions, of those ``existing``, on which the stream's groups stand: of each group the
    highest one in a note that was written at or after ``since`` (Unix seconds)."""
    known = set(existing)
    highest: dict[str, int] = {}
    for info in store.list(names.groups):
        group, note = names.parse_note(info.name) or (None, None)
        if (
            group is not None
            and note is not None
            and note.version in known
            and info.modified >= since
        ):
            highest[group] = max(highest.get(group, note.version), note.version)
    return set(highest.values())


class _Staged(NamedTuple):
    """The version in host memory, and the update that leads the live model there; None where it
    needs none."""

    version: int | None
    update: Update | None


class GroupMember(NotCopyable):
    """One worker of a group: ``name`` is unique in ``group``, and each member has its own
    ``subscriber``.

    Call `poll` regularly, at least a few times in ``timeout_seconds``, which is the same for all
    members: one that has not done so for that long (by the store's clock) no longer holds up the
    others. One that comes back joins at the group's version. A restarted process takes its name
    over from the one before. Raises InputError.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        *,
        group: str,
        name: str,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        check_word(name, "a member")
        if not 0 < timeout_seconds < math.inf:
            raise InputError(f"timeout_seconds must be a positive number, not {timeout_seconds}")
        self._subscriber = subscriber
        self._store = subscriber.stream.store
        self._names = GroupNames(subscriber.stream.names, group)
        self._name = name
        self._timeout = timeout_seconds
        self._process = os.getpid()
        self._word = secrets.token_hex(8)
        self._claimed = 0
        self._written = ""
        self._now = 0.0
        self._seen: dict[str, list[ObjectInfo]] = {}
        self._late_since: float | None = None
        self._found_nothing = False
        self._staged = _Staged(None, None)
        self._switched: int | None = None
        self.version: int | None = None
        """The version that the live model holds once it has applied what `poll` returned last, or
        that it held already, such as the subscriber's ``base``. Never falls. None: no version
        yet."""

    def __repr__(self) -> str:
        held = "nothing yet" if self.version is None else f"version {self.version}"
        return f"<GroupMember {self._name!r} of {self._names.group!r}: {held}>"

    def poll(self) -> Update | None:
        """Takes part in the group's next step. Returns the update that all members scatter now, or
        None. It is returned again, and nothing newer before, until it is acknowledged
        (`Update.acknowledge`).

        Raises MemberConflict while a newer process uses the member's name, and what
        `Subscriber.sync` raises: a member that cannot stage the group's version, nor a newer one,
        holds the others up no longer than the timeout. It may be called again after any error or
        interrupt.
        """
        if os.getpid() != self._process:
            raise InputError(
                "this GroupMember was made in another process",
                hint="Make one in each process, after the fork.",
            )
        handed = self._handed()
        if handed is not None and handed.acknowledged:
            self._staged = self._staged._replace(update=None)
        if handed is None or handed.acknowledged:
            self._take_part()
        update = self._handed()
        if update is not None or self._staged.update is None:
            self.version = self._staged.version
        return update

    def _handed(self) -> Update | None:
        """The update that was last given out, until the live model has taken it over, or the owner
        synced past it."""
        held = self._staged.version
        return self._staged.update if self._switched == held and not self._ahead_of(held) else None

    def _ahead_of(self, held: int | None) -> bool:
        """Whether the owner has synced by itself."""
        version = self._subscriber.version
        return version is not None and (held is None or version > held)

    def _take_part(self) -> None:
        others = self._look().of_others(self._name)
        if self._stage_what_is_due(others):
            others = self._look().of_others(self._name)
        version = self._staged.version
        if version is not None and self._switched != version and _agreed(version, others):
            self._switched = version
        if self._note() != self._written:
            self._write_note()

    # -- what the group says

    def _look(self) -> Notes:
        """Writes this member's note, and reads all. Raises MemberConflict."""
        self._write_note()
        try:
            info = self._store.head(self._written)
        except NotFound:  # deleted by a newer process of this name, which the listing then shows
            self._write_note()
            info = self._store.head(self._written)
        self._now = now = info.modified
        notes = read_notes(self._list_members(now), self._names, now, self._timeout)
        mine = [note for note in notes.fresh if note.member == self._name]
        namesakes = [note for note in mine if note.word != self._word]
        if not 0 < self._claimed <= (now + self._timeout) * 1000:
            newest = max([int(now * 1000), *(note.claimed + 1 for note in namesakes)])
            self._claimed = min(max(newest, 1), _MAX_CLAIMED)
        if any((note.claimed, note.word) > (self._claimed, self._word) for note in namesakes):
            raise MemberConflict(
                f"a newer process is the member {self._name!r} of group {self._names.group!r}"
            )
        outdated = [*(self._names.note(note) for note in mine), *notes.forgotten]
        with suppress(StoreError):  # the next look tries again
            for name in [name for name in outdated if name != self._written][:_TIDIED_PER_LOOK]:
                self._store.delete(name)
        return notes

    def _list_members(self, now: float) -> list[ObjectInfo]:
        """What is listed, and for members of which nothing is, what was seen of them last while
        that counts: a listing may miss a note that is replaced meanwhile, and the one that replaces
        it."""
        listed: dict[str, list[ObjectInfo]] = {}
        for info in self._store.list(self._names.members):
            if note := self._names.parse(info.name):
                listed.setdefault(note.member, []).append(info)
        self._seen = {
            member: infos
            for member, infos in {**self._seen, **listed}.items()
            if member in listed or any(abs(now - info.modified) <= self._timeout for info in infos)
        }
        return [info for infos in self._seen.values() for info in infos]

    def _write_note(self) -> None:
        self._written = self._note()
        self._store.put(self._written, b"")

    def _note(self) -> str:
        """The name of this member's note as things are."""
        version = self._staged.version
        if self._late_since is not None and self._now - self._late_since > self._timeout:
            step, version = AWAY, None
        elif version is None:
            step = EMPTY if self._found_nothing else AWAY
        else:
            step = SWITCHED if self._switched == version else STAGED
        return self._names.note(NoteName(self._name, self._claimed, self._word, step, version))

    # -- what this member does about it

    def _stage_what_is_due(self, others: list[NoteName]) -> bool:
        """Stages the version that is due, if any: the highest that others name, or else the newest
        once all are done with this one. Returns whether the host state has moved."""
        held = self._staged.version
        if self._ahead_of(held):
            self._sync(self._subscriber.version)
            return True
        named = [
            n.version
            for n in others
            if n.version is not None and (held is None or n.version > held)
        ]
        all_done = self._switched == held and all(
            (n.step, n.version) == (SWITCHED, held) for n in others
        )
        if named:
            self._late_since = self._now if self._late_since is None else self._late_since
            self._stage(max(named))
        elif held is None or all_done:
            self._sync(None)
        reached = self._staged.version
        self._found_nothing = reached is None
        if not named or (reached is not None and reached >= max(named)):
            self._late_since = None
        return reached != held

    def _stage(self, version: int) -> None:
        """Stages ``version``; the newest one where that does not exist, or not any more, or cannot
        be reached."""
        if not self._subscriber._failover.has_version(version, self._staged.version):
            self._sync(None)
            return
        try:
            self._sync(version)
        except BROKEN_LINK:
            self._sync(None)
            if self._staged.version is None or self._staged.version < version:
                raise

    def _sync(self, target: int | None) -> None:
        """Moves the host state to the target, and keeps what the live model lacks since it was last
        given an update."""
        before = self._staged
        update = self._subscriber.sync(target)
        version = self._subscriber.version
        # A subscriber that was closed, or lost its state, may come to an older version than the
        # live model holds.
        if version is not None and (before.version is None or version >= before.version):
            self._staged = _Staged(version, update)


def _agreed(version: int, others: list[NoteName]) -> bool:
    """Whether the group switches to ``version``: all members hold it, or one has seen that they
    did."""
    all_hold = all(note.version == version for note in others)
    return all_hold or any((note.step, note.version) == (SWITCHED, version) for note in others)
