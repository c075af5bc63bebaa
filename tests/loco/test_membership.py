"""What trainers decide when they meet: who leads, who is behind, whether states diverged, which messages counted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pulse_rl.errors import CorruptMessage, Diverged, InputError, StateMismatch
from pulse_rl.loco.membership import (
    Delivery,
    Handshake,
    delivery_of,
    find_behind,
    find_leader,
    require_no_divergence,
    require_same_model_and_settings,
    specs_digest,
)
from pulse_rl.state.tensors import DTYPES, TensorSpec

SETTINGS = {"method": "PulseLoCo", "sync_every": 8, "outer_lr": 0.7}
FIELDS = {
    "settings": SETTINGS,
    "round": 5,
    "root": "aa",
    "momentum": "bb",
    "messages": ["cc", "dd"],
    "specs": "ee",
    "format": 1,
    "site": "here",
}


def at(number: int, root: str = "root", momentum: str = "momentum") -> Handshake:
    """The handshake of a trainer whose last common round is ``number``."""
    return Handshake(SETTINGS, number, root, momentum, [f"{number}-0", f"{number}-1"], "specs", "")


def test_the_lowest_rank_in_the_latest_round_leads() -> None:
    assert find_leader([at(0)]) == 0
    assert find_leader([at(0, "a"), at(0, "b")]) == 0
    assert find_leader([at(4), at(5), at(3), at(5)]) == 1


def test_whoever_holds_another_state_than_the_leader_is_behind() -> None:
    assert find_behind([at(5), at(5), at(5)], 0) == []
    assert find_behind([at(4), at(5), at(3), at(5)], 1) == [0, 2]
    # The same bits in another round are another state: its residual must catch up.
    assert find_behind([at(5), at(4), at(5)], 0) == [1]
    assert find_behind([at(0, "a"), at(0, "b"), at(0, "a")], 0) == [1]
    assert find_behind([at(0), at(0, momentum="other")], 0) == [1]


@pytest.mark.parametrize("other", [at(5, "other"), at(5, momentum="other")])
def test_two_states_in_one_later_round_are_a_divergence(other: Handshake) -> None:
    with pytest.raises(Diverged, match=r"round 5 the state of trainers \[1, 3\] is not that of trainer 0"):
        require_no_divergence([at(5), other, at(5), other], 0)


def test_before_the_first_round_and_in_earlier_rounds_states_may_differ() -> None:
    require_no_divergence([at(0, "a"), at(0, "b")], 0)
    require_no_divergence([at(4, "a"), at(5, "b"), at(4, "c"), at(5, "b")], 1)


def test_all_trainers_have_the_same_model_and_settings() -> None:
    fine = [at(5), at(0), at(3, "other", "other")]
    require_same_model_and_settings(fine, 0)
    with pytest.raises(StateMismatch, match="trainer 3"):
        require_same_model_and_settings([*fine, replace(at(5), specs="other")], 0)
    slow = replace(at(5), settings=SETTINGS | {"sync_every": 4})
    with pytest.raises(InputError, match="trainer 3") as caught:
        require_same_model_and_settings([*fine, slow], 0)
    assert not isinstance(caught.value, StateMismatch)
    with pytest.raises(InputError, match="trainer 0"):  # as trainer 3 sees it
        require_same_model_and_settings([*fine, slow], 3)


def test_all_trainers_have_a_site_or_none_has() -> None:
    somewhere = [replace(at(5), site=name) for name in "aab"]
    require_same_model_and_settings(somewhere, 0)
    for own in range(4):
        with pytest.raises(InputError, match=r"trainers \[3\] have no site"):
            require_same_model_and_settings([*somewhere, at(5)], own)


LEADER = at(5)  # it holds the messages "5-0" and "5-1"


@pytest.mark.parametrize(
    ("message", "number", "from_checkpoint", "expected"),
    [
        ("5-1", 4, False, Delivery.COUNTED),
        ("lost", 4, False, Delivery.NOT_COUNTED),
        (None, 4, False, Delivery.NOT_COUNTED),
        (None, 2, False, Delivery.NOT_COUNTED),  # only this trainer could have sent its local steps
        ("lost", 3, False, Delivery.UNKNOWN),  # the messages of round 4 are forgotten
        ("5-1", 3, False, Delivery.UNKNOWN),  # no message of round 4 is one of round 5
        (None, 4, True, Delivery.UNKNOWN),  # it may have sent one after its checkpoint
        (None, 2, True, Delivery.UNKNOWN),
    ],
)
def test_what_became_of_a_message(message: str | None, number: int, from_checkpoint: bool, expected: Delivery) -> None:
    """The table of docs/loco.md, section 5."""
    assert delivery_of(message, number, LEADER, from_checkpoint=from_checkpoint) is expected


def test_a_handshake_is_the_json_that_the_document_describes() -> None:
    handshake = Handshake(**FIELDS)
    assert json.loads(handshake.to_bytes()) == FIELDS
    assert Handshake.parse(handshake.to_bytes()) == handshake
    assert Handshake.parse(json.dumps(FIELDS | {"later": 1}).encode()) == handshake


@pytest.mark.parametrize("data", [b"", b"\xff", b"{", b"null", b"[]", b"{}"])
def test_what_is_no_handshake_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptMessage, match="handshake"):
        Handshake.parse(data)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [None, 1.5])
def test_a_handshake_with_a_field_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(CorruptMessage, match="handshake"):
        Handshake.parse(json.dumps(FIELDS | {name: value}).encode())


def test_the_digest_of_the_parameters_knows_names_dtypes_shapes_and_order() -> None:
    a, b = TensorSpec("a", DTYPES["F32"], (2, 3)), TensorSpec("b", DTYPES["F32"], (4,))
    others = [
        (b, a),
        (a,),
        (TensorSpec("c", DTYPES["F32"], (2, 3)), b),
        (TensorSpec("a", DTYPES["BF16"], (2, 3)), b),
        (TensorSpec("a", DTYPES["F32"], (3, 2)), b),
    ]
    assert len({specs_digest(specs) for specs in [(a, b), *others]}) == 1 + len(others)
    # Trainers of two releases must agree on it.
    assert specs_digest((a, b)) == "6a1e594b0b53286dd178df0036a1dfd4e7d7c9807bd4da4263b5d467152dac0b"
