"""Joint activation: the workers of a group switch to a version together (docs/protocol.md, section 5).

They share only small objects in the store, under ``<stream>/groups/<group>``: each member's note of the round it has
staged, the rounds' targets, each created by whoever proposes it first, and the switches, each created once every live
member has staged its target.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress

from ..errors import AlreadyExists, FormatError, InputError
from ..stream.names import GroupNames, check_word
from .subscriber import Subscriber
from .update import Update

_NUMBER = re.compile(r"[0-9]{1,12}")
DEFAULT_TIMEOUT_SECONDS = 60.0
_KEPT_ROUNDS = 8


class Member:
    """One worker of a group: ``name`` is unique in ``group``, and each member has its own ``subscriber``.

    Call `poll` regularly, at least a few times in ``timeout_seconds``: a member that has not done so for that long (by
    the store's clock) no longer holds up the others. One that comes back joins at the group's version. Raises
    InvalidName.
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
        self._note = self._names.member(name)
        self._timeout = timeout_seconds
        self._staged: Update | None = None
        self._handed: Update | None = None
        self._round = 0
        self.version: int | None = None
        """The version that this member last had to activate."""

    def poll(self) -> Update | None:
        """Takes part in the group's next step. Returns the update that all members scatter now, or None. One that was
        not acknowledged (`Update.acknowledge`) is returned again.

        Raises what `Subscriber.sync` raises: a member that cannot stage a version writes no note, and the others wait
        for it no longer than the timeout.
        """
        if self._handed is not None and self._subscriber.awaits(self._handed):
            return self._handed
        self._handed = None
        number, version = self._current_round()
        if version is None:
            return None
        self._stage(version)
        self._write_note(number)
        if not self._switched(number):
            if not self._all_staged(number):
                return None
            self._create(self._names.switch(number), b"")
            self._tidy(number)
        self._handed, self._staged = self._staged, None
        self._round, self.version = number, version
        return self._handed

    def _current_round(self) -> tuple[int, int | None]:
        """The newest round that is open or that this member has not joined; a new one is proposed for a new version."""
        rounds = self._targets_after(self._round - 1)
        newest = rounds[-1] if rounds else 0
        if newest > self._round or (newest and not self._switched(newest)):
            return newest, self._target(newest)
        versions = self._subscriber.stream.versions(self.version)
        if not versions:
            self._write_note(self._round)  # alive, with nothing to do
            return newest, None
        self._create(self._names.target(newest + 1), str(versions[-1]).encode())
        return newest + 1, self._target(newest + 1)

    def _stage(self, version: int) -> None:
        """Brings the host state to the version and keeps the update until the switch."""
        if self._subscriber.version is not None and self._subscriber.version >= version:
            return
        update = self._subscriber.sync(target=version)
        # A round that was staged but overtaken by the next one: the live model has seen neither.
        self._staged = update if self._staged is None else self._subscriber.full_update()

    def _all_staged(self, number: int) -> bool:
        """Whether every member whose note is fresh has staged this round. Fresh: by the store's own clock, against the
        newest note, which is at most as old as this member's."""
        notes = list(self._store.list(self._names.members))
        newest = max(info.modified for info in notes)
        fresh = [info.name for info in notes if newest - info.modified <= self._timeout]
        return all(self._number(name) >= number for name in fresh)

    def _write_note(self, number: int) -> None:
        self._store.put(self._note, str(number).encode())

    def _switched(self, number: int) -> bool:
        return number in self._switches_after(number - 1)

    def _target(self, number: int) -> int:
        return self._number(self._names.target(number))

    def _number(self, name: str) -> int:
        data = self._store.get(name)
        text = data[:16].decode("ascii", "replace")
        if not _NUMBER.fullmatch(text):
            raise FormatError(f"{name} does not hold a number")
        return int(text)

    def _targets_after(self, number: int) -> list[int]:
        return self._rounds(self._names.targets, self._names.target(max(number, 0)))

    def _switches_after(self, number: int) -> list[int]:
        return self._rounds(self._names.switches, self._names.switch(max(number, 0)))

    def _rounds(self, folder: str, start_after: str) -> list[int]:
        """The rounds of the objects in a folder whose names come after ``start_after``, ascending."""
        rounds = [self._names.round_of(info.name) for info in self._store.list(folder, start_after)]
        return [number for number in rounds if number is not None]

    def _create(self, name: str, data: bytes) -> None:
        """Creates an object of the group unless another member has; which of them does not matter."""
        with suppress(AlreadyExists):
            self._store.put_new(name, data)

    def _tidy(self, number: int) -> None:
        """Deletes the rounds that no member can still be in."""
        for old in self._switches_after(0):
            if old <= number - _KEPT_ROUNDS:
                self._store.delete(self._names.switch(old))
        for old in self._targets_after(0):
            if old <= number - _KEPT_ROUNDS:
                self._store.delete(self._names.target(old))
