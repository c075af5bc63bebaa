"""Settings, versions and times that make no sense are refused at once, by an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    MemoryStore,
    Publisher,
    Signer,
    Subscriber,
    audit,
    fold_stream,
    gc_stream,
    verify_stream,
)
from pulse_rl.errors import EmptyStream, InputError
from tests.support.states import Rng, policy

NAN = float("nan")


WRONG: dict[Callable[..., object], list[dict[str, Any]]] = {
    Publisher: [
        {"anchor_ratio": NAN}, {"anchor_ratio": -1}, {"anchor_ratio": "1"}, {"anchor_ratio": None},
        {"anchor_ratio": True}, {"threads": 0}, {"threads": 1.5}, {"signer": "key"},
        {"trusted_keys": "key"},
        {"trusted_keys": None}, {"on_event": "print"},
    ],
    Subscriber: [
        {"cache": 1.5}, {"on_event": "print"}, {"trusted_keys": "key"}, {"trusted_keys": 5},
        {"trusted_keys": [1]},
        {"trusted_keys": []}, {"stream_id": "policy"}, {"stream_id": 7}, {"threads": True},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"), [(kind, of) for kind, wrong in WRONG.items() for of in wrong], ids=str
)
def test_settings_without_sense_are_refused_at_once(
    kind: Callable[..., object], options: dict[str, Any]
) -> None:
    with pytest.raises(InputError) as caught:
        kind(MemoryStore(), stream="policy", **options)
    assert caught.value.hint


def test_versions_and_times_without_sense_are_refused(rng: Rng, store: MemoryStore) -> None:
    Publisher(store, stream="policy").publish(policy(rng))
    subscriber = Subscriber(store, stream="policy")
    for target in (1.5, -1, True, "0", NAN):
        with pytest.raises(InputError, match="whole number"):
            subscriber.sync(target)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="timeout_seconds"):
        next(subscriber.updates(timeout_seconds=NAN))
    with pytest.raises(InputError, match="threads"):
        Subscriber(store, stream="policy", threads=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: list(fold_stream(s, "policy", (0,))), lambda s: list(fold_stream(s, "policy", 8)),
        lambda s: list(fold_stream(s, "policy", threads=0)),
        lambda s: list(verify_stream(s, "policy", threads=0)),
        lambda s: list(verify_stream(s, "policy", stream_id="x")),
        lambda s: gc_stream(s, "policy", keep=True), lambda s: gc_stream(s, "policy", keep=NAN),
        lambda s: gc_stream(s, "policy", keep=0), lambda s: gc_stream(s, "policy", keep=1,
        grace_seconds=NAN),
        lambda s: audit({"w": np.zeros(3, np.float32)}, "root"), lambda s: next(Subscriber(s,
        stream="policy").updates(
            poll_seconds=NAN)),
        lambda s: Signer.load(5), lambda s: Subscriber(s, stream="policy", trusted_keys=b"x" * 32),
    ],
)  # fmt: skip
def test_calls_without_sense_are_refused(call: Callable[[MemoryStore], object], rng: Rng) -> None:
    store = MemoryStore()
    Publisher(store, stream="policy").publish(policy(rng))
    with pytest.raises(InputError) as caught:
        call(store)
    assert caught.value.hint


def test_a_stream_without_versions_has_nothing_to_fold() -> None:
    with pytest.raises(EmptyStream):
        list(fold_stream(MemoryStore(), "policy"))
