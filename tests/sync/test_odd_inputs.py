"""Settings, versions and times that make no sense are refused at once, by an error that says so."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_rl import InputError, Member, MemoryStore, Publisher, Subscriber
from tests.support.states import Rng, policy

NAN = float("nan")


@pytest.mark.parametrize(
    "options",
    [
        {"folds": (0,)}, {"folds": (1, 8)}, {"folds": (2.5,)}, {"folds": (True,)}, {"folds": 8}, {"folds": None},
        {"anchor_ratio": NAN}, {"anchor_ratio": -1}, {"anchor_ratio": "1"}, {"anchor_ratio": None},
        {"anchor_ratio": True}, {"shard_bytes": 0}, {"shard_bytes": NAN}, {"shard_bytes": "1GB"},
        {"shard_bytes": float("inf")}, {"threads": 0}, {"threads": 1.5}, {"signer": "key"}, {"trusted_keys": "key"},
        {"trusted_keys": None}, {"on_event": "print"}, {"mode": "auto", "bandwidth": None},
        {"mode": "auto", "bandwidth": True}, {"mode": "auto", "bandwidth": []}, {"mode": "auto", "bandwidth": NAN},
        {"codec": None}, {"mode": []},
    ],
    ids=str,
)  # fmt: skip
def test_settings_without_sense_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        Publisher(MemoryStore(), stream="policy", **options)
    assert caught.value.hint


@pytest.mark.parametrize("metadata", [0, "", [], {"loss": NAN}, {"step": 1 << 63}, {"x": None}, {1: 1}], ids=str)
def test_metadata_without_sense_is_refused(metadata: Any, rng: Rng) -> None:
    with pytest.raises(InputError, match="metadata"):
        Publisher(MemoryStore(), stream="policy").publish(policy(rng), metadata=metadata)


def test_versions_and_times_without_sense_are_refused(rng: Rng) -> None:
    store = MemoryStore()
    Publisher(store, stream="policy").publish(policy(rng))
    subscriber = Subscriber(store, stream="policy")
    for target in (1.5, -1, True, "0", NAN):
        with pytest.raises(InputError, match="whole number"):
            subscriber.sync(target)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="timeout_seconds"):
        next(subscriber.updates(timeout_seconds=NAN))
    with pytest.raises(InputError, match="threads"):
        Subscriber(store, stream="policy", threads=0)
    with pytest.raises(InputError, match="timeout_seconds"):
        Member(subscriber, group="g", name="n", timeout_seconds=0)
