"""Joint activation: the workers of a group switch to a version together (docs/protocol.md, section 5).

All that they share are small objects in the store, below ``<stream>/groups/<group>``: each member's note of the round
it has staged, the rounds' targets, each created by whoever proposes it first, and the switches, each created once every
live member has staged its target.
"""

from __future__ import annotations

import re

from ..errors import AlreadyExists, FormatError, InvalidName
from .subscriber import Subscriber
from .update import Update

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NUMBER = re.compile(r"[0-9]{1,12}")
DEFAULT_TIMEOUT_SECONDS = 60.0
_KEPT_ROUNDS = 8


class Member:
    """One worker of a group.

    Call `poll` regularly, at least a few times in ``timeout_seconds``: a member that has not for that long (by the
    store's clock) does not hold the others. One that comes back joins at the group's version.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        *,
        group: str,
        name: str,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        for word in (group, name):
            if not _NAME.fullmatch(word):
                raise InvalidName(f"{word!r} is not a name for a group or a member")
        self._subscriber = subscriber
        self._store = subscriber.stream.store
        self._folder = f"{subscriber.stream.name}/groups/{group}"
        self._name = name
        self._timeout = timeout_seconds
        self._staged: Update | None = None
        self._round = 0
        self.version: int | None = None
        """The version that this member was last told to activate."""

    def poll(self) -> Update | None:
        """Takes part in the group's next step. Returns the update to scatter now, as all members are told to, or None.

        Raises what `Subscriber.sync` raises: a member that cannot stage a version leaves no note and is waited for no
        longer than the timeout.
        """
        number, version = self._current_round()
        if version is None:
            return None
        self._stage(version)
        self._note(number)
        if not self._switched(number):
            if not self._all_staged(number):
                return None
            self._create(f"switches/{number:012d}", b"")
            self._tidy(number)
        update, self._staged = self._staged, None
        self._round, self.version = number, version
        return update

    def _current_round(self) -> tuple[int, int | None]:
        """The newest round that is open or that this member has not joined; a new one is proposed for a new version."""
        rounds = self._numbers("targets", self._round - 1)
        newest = rounds[-1] if rounds else 0
        if newest > self._round or (newest and not self._switched(newest)):
            return newest, self._target(newest)
        versions = self._subscriber.stream.versions(self.version)
        if not versions:
            self._note(self._round)  # alive, with nothing to do
            return newest, None
        self._create(f"targets/{newest + 1:012d}", str(versions[-1]).encode())
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
        notes = list(self._store.list(f"{self._folder}/members"))
        newest = max(info.modified for info in notes)
        fresh = [info.name for info in notes if newest - info.modified <= self._timeout]
        return all(self._number(name) >= number for name in fresh)

    def _note(self, number: int) -> None:
        self._store.put(f"{self._folder}/members/{self._name}", str(number).encode())

    def _switched(self, number: int) -> bool:
        return number in self._numbers("switches", number - 1)

    def _target(self, number: int) -> int:
        return self._number(f"{self._folder}/targets/{number:012d}")

    def _number(self, name: str) -> int:
        data = self._store.get(name)
        text = data[:16].decode("ascii", "replace")
        if not _NUMBER.fullmatch(text):
            raise FormatError(f"{name} does not hold a number")
        return int(text)

    def _numbers(self, kind: str, after: int) -> list[int]:
        start_after = f"{self._folder}/{kind}/{max(after, 0):012d}"
        names = [info.name.rpartition("/")[2] for info in self._store.list(f"{self._folder}/{kind}", start_after)]
        return [int(name) for name in names if _NUMBER.fullmatch(name)]

    def _create(self, name: str, data: bytes) -> None:
        """Creates an object of the group unless another member has; which of them does not matter."""
        try:
            self._store.put_new(f"{self._folder}/{name}", data)
        except AlreadyExists:
            return

    def _tidy(self, number: int) -> None:
        for kind in ("switches", "targets"):
            for old in self._numbers(kind, 0):
                if old <= number - _KEPT_ROUNDS:
                    self._store.delete(f"{self._folder}/{kind}/{old:012d}")
