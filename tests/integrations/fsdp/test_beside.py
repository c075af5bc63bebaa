"""Several streams of a sharded policy, from one call on each rank: each as its own ShardedPublisher
makes it."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_rl import LocalStore, Subscriber, verify_stream
from pulse_rl.errors import InputError, PulseError, RankLost, StoreUnavailable
from pulse_rl.events import BaselineRestored, CallFailed, Event, Folded, Published
from pulse_rl.integrations.fsdp import ShardedPublisher
from pulse_rl.store import Data, Store
from tests.integrations.fsdp.test_quantised import GIVEN, MODELOPT, parts, weights
from tests.support.trainers import Trainer, each, together

pytestmark = pytest.mark.slow
BESIDE: dict[str, Any] = {"policy-fp8": "fp8_block", "policy-fp4": MODELOPT}
STREAMS: dict[str, Any] = {"policy": None, **BESIDE}


def newest(store: Store, stream: str) -> tuple[int | None, str | None, dict[str, bytes]]:
    with Subscriber(store, stream=stream) as worker:
        worker.sync()
        return worker.version, worker.root, worker.files()


def as_alone(trainer: Trainer) -> None:
    """Root for root and byte for byte, published and submitted, with folds, and from folders at a
    restart."""
    for how in ("rows", "ranges", "stages"):
        store, other = (
            LocalStore(trainer.folder / f"{name}-{how}") for name in ("together", "alone")
        )
        events, settings = list[Event](), {"threads": 1, "folds": (2,)}
        for seeds in (range(3), range(3, 4)):
            given = {
                "baseline": trainer.folder / f"{how}-baseline",
                "on_event": events.append,
                **settings,
            }
            alone = {
                name: ShardedPublisher(
                    other, stream=name, baseline=trainer.folder / f"{how}-{name}", **settings
                )
                for name in STREAMS
            }
            with ShardedPublisher(store, stream="policy", **given) as ranks:
                for seed in seeds:
                    mine, call = (
                        parts(trainer, how, weights(seed)),
                        {**GIVEN, "metadata": {"step": seed}},
                    )
                    publish: Any = (
                        (lambda *a, **k: ranks.submit(*a, **k).result())
                        if seed % 2
                        else ranks.publish
                    )
                    done = publish(mine, beside=BESIDE, **call)
                    assert (done.stream, [*done.beside]) == ("policy", [*BESIDE])
                    for name, each in {"policy": done, **done.beside}.items():
                        own = alone[name].publish(mine, quantise=STREAMS[name], **call)
                        facts = [
                            (e.version, e.root, e.changed, e.patch_bytes, e.metadata)
                            for e in (each, own)
                        ]
                        assert facts[0] == facts[1], (how, name, facts)
            for publisher in alone.values():
                publisher.close()
        if trainer.rank == 0:
            for name in STREAMS:
                assert newest(store, name) == newest(other, name)
                assert not [
                    report.problems for report in verify_stream(store, name) if report.problems
                ]
        assert {event.stream for event in events if isinstance(event, Folded)} == {*STREAMS}
        restored = {event.stream for event in events if isinstance(event, BaselineRestored)}
        assert restored == {*STREAMS}


def failures(trainer: Trainer) -> None:
    """A store that fails on one rank for one stream: the others have their version on all ranks,
    the same call again mends it. A listener that fails on one rank parts nobody."""
    for fails in STREAMS:
        store, events = OneStreamFails(trainer, fails), list[Event]()

        def listen(event: Event, events: list[Event] = events, fails: str = fails) -> None:
            events.append(event)
            if (
                isinstance(event, Published)
                and event.version == 2
                and event.stream == fails
                and trainer.rank == 1
            ):
                raise ValueError("a listener's")

        with ShardedPublisher(store, stream="policy", threads=1, on_event=listen) as publisher:
            publisher.publish(parts(trainer, "rows", weights(0)), beside=BESIDE, **GIVEN)
            store.away = trainer.rank == 1
            with pytest.raises(StoreUnavailable) as caught:
                publisher.publish(parts(trainer, "rows", weights(1)), beside=BESIDE, **GIVEN)
            store.away = False
            note = "".join(caught.value.__notes__)
            assert [name for name in STREAMS if f"of {name!r}" in note] == [
                name for name in STREAMS if name != fails
            ]
            assert [event.stream for event in events if isinstance(event, CallFailed)] == [fails]
            done = publisher.publish(parts(trainer, "rows", weights(1)), beside=BESIDE, **GIVEN)
            made = {"policy": done, **done.beside}
            assert {name: each.version for name, each in made.items()} == {
                n: 1 + (n != fails) for n in STREAMS
            }
            assert all(bool(made[name].changed) == (name == fails) for name in STREAMS)
            if trainer.rank == 1:
                with pytest.raises(ValueError, match="a listener's"):
                    publisher.publish(parts(trainer, "rows", weights(1)), beside=BESIDE, **GIVEN)
            else:
                publisher.publish(parts(trainer, "rows", weights(1)), beside=BESIDE, **GIVEN)
            assert (
                publisher.publish(
                    parts(trainer, "rows", weights(1)), beside=BESIDE, **GIVEN
                ).changed
                == 0
            )


class OneStreamFails(LocalStore):
    """Payloads of that stream cannot be stored while it is ``away``."""

    def __init__(self, trainer: Trainer, stream: str) -> None:
        super().__init__(trainer.folder / f"store-where-{stream}-fails")
        self.away, self._stream = False, f"{stream}/"

    def put(self, name: str, data: Data) -> None:
        if self.away and name.startswith(self._stream):
            raise StoreUnavailable(f"{name}: away")
        super().put(name, data)


def refusals(trainer: Trainer) -> None:
    """On all ranks, before any stream gets a version; and the next call comes."""
    store, rows = (
        LocalStore(trainer.folder / "store-of-refusals"),
        parts(trainer, "rows", weights(0)),
    )
    first, columns = trainer.rank == 0, parts(trainer, "columns", weights(0))
    with ShardedPublisher(store, stream="policy", threads=1) as publisher:
        swapped = dict([*BESIDE.items()][:: 1 if first else -1])
        for given, words in (
            ({"beside": swapped}, "beside is"),
            ({"beside": BESIDE if first else None}, "beside is"),
            ({"beside": {"policy-fp8": "fp8_block" if first else None}}, "beside is"),
            ({"beside": {"policy-fp8": "fp9" if first else "fp8_block"}}, "fp9"),
            ({"beside": {"policy-fp8": lambda name, weight: None}}, "by a function"),
            ({"beside": {"policy": None}}, "other streams"),
            ({"beside": BESIDE, "after": -1}, "after="),
        ):
            with pytest.raises(InputError, match=words):
                publisher.publish(rows, **given)
        with pytest.raises(InputError, match="part of a group of 32"):
            publisher.submit(columns, beside={"policy-fp8": "fp8_block", "b": "mxfp8"}).result()
        taken = [publisher.submit(rows, beside=BESIDE, dtype="BF16") for _ in range(2)]
        if not first and not taken[1].cancel():
            taken = taken[:1]  # it was faster
        assert taken[0].result().version == 0
    trainer.barrier("refused", tuple(range(trainer.size)))
    assert not list(store.list("b")), "a stream beside one that is refused"


def parted(trainer: Trainer) -> None:
    """A rank that is at another of the call's streams is not taken for one of this one."""
    rows = parts(trainer, "rows", weights(0))
    with ShardedPublisher(
        LocalStore(trainer.folder / "store-of-parted"), stream="policy", threads=1
    ) as publisher:
        publisher.publish(rows, beside={"b": None})
        if trainer.rank:
            publisher._rank = publisher._others["b"]
        with pytest.raises(PulseError) as caught:
            publisher.publish(rows)
        assert isinstance(caught.value, RankLost)


def ranks_program(trainer: Trainer) -> None:
    trainer.connect("ranks")
    failed = each(trainer, (as_alone, failures, refusals, parted), trainer.size)
    assert not failed, "\n".join(failed)


def test_two_ranks() -> None:
    together(ranks_program, 2)


def one_rank(trainer: Trainer) -> None:
    trainer.connect("ranks")
    as_alone(trainer)


def test_one_rank() -> None:
    together(one_rank, 1)
