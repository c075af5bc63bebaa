"""Members of a group on a stream of tiny states, and a store's clock that is moved by hand."""

from __future__ import annotations

import pytest

from pulse_rl import GroupMember, MemoryStore, Publisher, Store, Subscriber, Update
from pulse_rl.errors import StoreUnavailable
from pulse_rl.store import local
from tests.faults.groups import MEMBERS
from tests.support.states import TinyTrainer


class Clock:
    """The store's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(local.time, "time", lambda: self.now)


class Prompt(GroupMember):
    """A member whose live model has each update as soon as it is polled."""

    def poll(self) -> Update | None:
        if update := super().poll():
            update.acknowledge()
        return update


def member(
    store: Store, name: str, kind: type[GroupMember] = Prompt, **options: object
) -> GroupMember:
    subscriber = Subscriber(store, stream="s", threads=1, **options)
    return kind(subscriber, group="g", name=name, timeout_seconds=60)


class KeepsAll(MemoryStore):
    """Where members may write, but not delete."""

    def delete(self, name: str) -> None:
        raise StoreUnavailable("not allowed")


class Stream:
    """A stream of tiny states."""

    def __init__(self, store: Store, **options: object) -> None:
        self.trainer = TinyTrainer()
        self.publisher = Publisher(store, stream="s", threads=1, **options)

    def publish(self, count: int = 1) -> str:
        for _ in range(count):
            self.trainer.step()
            root = self.publisher.publish(self.trainer.state).root
        return root


def rounds(members: list[GroupMember], count: int = 3) -> list[int | None]:
    """The members' versions after they have all polled so often."""
    for _ in range(count):
        for each in members:
            each.poll()
    return [each.version for each in members]


def note(name: str, step: str, claimed: int = 1) -> str:
    return f"{MEMBERS}/{name}-{claimed:015d}-{'f' * 16}-{step}"
