"""Joint activation: members switch together, and one that vanishes holds nobody for long."""

from __future__ import annotations

import pytest

from pulse_rl import InvalidName, Member, MemoryStore, Publisher, StoreUnavailable, Subscriber, state_root
from pulse_rl.store import memory
from tests.support.states import TinyTrainer


class Clock:
    """The store's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(memory.time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def member(store: MemoryStore, name: str) -> Member:
    return Member(Subscriber(store, stream="s", threads=1), group="g", name=name, timeout_seconds=60)


def test_nobody_switches_before_all_have_staged(clock: Clock) -> None:
    store, trainer = MemoryStore(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    first, second = member(store, "first"), member(store, "second")
    assert first.poll() is None
    assert second.poll() is None
    for version in range(3):
        trainer.step()
        publisher.publish(trainer.state)
        assert first.poll() is None, "the second has not staged"
        assert first.poll() is None
        update = second.poll()
        assert update is not None
        assert (update.version, update.root) == (version, state_root(trainer.state))
        update = first.poll()
        assert update is not None
        assert (update.version, first.version, second.version) == (version, version, version)
        assert first.poll() is None


def test_a_version_that_comes_later_waits_for_the_next_round(clock: Clock) -> None:
    store, trainer = MemoryStore(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    publisher.publish(trainer.state)
    one, two = member(store, "one"), member(store, "two")
    assert two.poll() is not None, "alone in the group"
    assert one.poll() is not None
    for _ in range(2):
        trainer.step()
        publisher.publish(trainer.state)
    assert one.poll() is None
    trainer.step()
    publisher.publish(trainer.state)
    agreed = [two.poll(), one.poll()]
    assert [u.version for u in agreed if u] == [2, 2]
    assert one.poll() is None
    agreed = [two.poll(), one.poll()]
    assert [u.version for u in agreed if u] == [3, 3]


def test_a_member_that_vanishes_holds_the_others_for_the_timeout_only(clock: Clock) -> None:
    store, trainer = MemoryStore(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    publisher.publish(trainer.state)
    stays, vanishes = member(store, "stays"), member(store, "vanishes")
    stays.poll()
    vanishes.poll()
    trainer.step()
    publisher.publish(trainer.state)
    clock.now += 59
    assert stays.poll() is None
    clock.now += 2
    update = stays.poll()
    assert update is not None
    assert update.version == 1
    trainer.step()
    publisher.publish(trainer.state)
    update = stays.poll()
    assert update is not None
    assert update.version == 2
    back = vanishes.poll()
    assert back is not None
    assert (back.version, back.root, back.previous) == (2, state_root(trainer.state), 0)


def test_a_newcomer_joins_at_the_groups_version(clock: Clock) -> None:
    store, trainer = MemoryStore(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    publisher.publish(trainer.state)
    old = member(store, "old")
    old.poll()
    trainer.step()
    publisher.publish(trainer.state)
    new = member(store, "new")
    update = new.poll()
    assert update is not None
    assert update.version == 0, "the group has not agreed on version 1 yet"
    new.poll()
    assert old.poll() is not None
    assert new.poll() is not None
    assert old.version == new.version == 1


def test_a_member_that_cannot_stage_is_not_waited_for(clock: Clock) -> None:
    class Broken(MemoryStore):
        away = False

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            if self.away and "payloads" in name:
                raise StoreUnavailable("away")
            return super().get(name, start, stop)

    store, trainer = Broken(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    publisher.publish(trainer.state)
    good, bad = member(store, "good"), member(store, "bad")
    good.poll()
    bad.poll()
    trainer.step()
    publisher.publish(trainer.state)
    clock.now += 61
    store.away = True
    with pytest.raises(StoreUnavailable):
        bad.poll()
    store.away = False
    assert good.poll() is not None
    assert bad.poll() is not None


def test_old_rounds_are_tidied(clock: Clock) -> None:
    store, trainer = MemoryStore(), TinyTrainer()
    publisher = Publisher(store, stream="s", threads=1)
    alone = member(store, "alone")
    for _ in range(20):
        publisher.publish(trainer.state)
        assert alone.poll() is not None
    assert len(list(store.list("s/groups/g/targets"))) <= 9
    late = member(store, "late")
    update = late.poll()
    assert update is not None
    assert update.version == 19


def test_names_are_checked() -> None:
    subscriber = Subscriber(MemoryStore(), stream="s")
    with pytest.raises(InvalidName):
        Member(subscriber, group="../x", name="a")
    with pytest.raises(InvalidName):
        Member(subscriber, group="x", name="")
