"""What trainers send each other besides entries: handshakes, messages; and who forwards
what."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
import torch

from pulse_rl.errors import CorruptMessage
from pulse_rl.loco import ranks
from pulse_rl.loco.group_rounds import Handshake, outcome_of
from pulse_rl.loco.messages import Message
from pulse_rl.loco.outer import MessageOutcome, specs_digest
from pulse_rl.state.tensors import DTYPES, TensorSpec
from tests.support.entry_blocks import COMPRESSIONS

SETTINGS = {"method": "PulseLoCo", "sync_every": 8, "outer_lr": 0.7}
FIELDS = {
    "settings": SETTINGS,
    "round": 5,
    "root": "aa",
    "momentum": "bb",
    "messages": ["cc", "dd"],
    "specs": "ee",
    "format": 1,
}


def at(number: int, root: str = "root", momentum: str = "momentum") -> Handshake:
    """The handshake of a trainer whose last common round is ``number``."""
    return Handshake(SETTINGS, number, root, momentum, [f"{number}-0", f"{number}-1"], "specs")


LEADER = at(5)  # it holds the messages "5-0" and "5-1"


@pytest.mark.parametrize(
    ("message", "number", "from_checkpoint", "expected"),
    [
        ("5-1", 4, False, MessageOutcome.COUNTED),
        ("lost", 4, False, MessageOutcome.NOT_COUNTED),
        (None, 4, False, MessageOutcome.NOT_COUNTED),
        (
            None,
            2,
            False,
            MessageOutcome.NOT_COUNTED,
        ),  # only this trainer could have sent its local steps
        ("lost", 3, False, MessageOutcome.UNKNOWN),  # the messages of round 4 are forgotten
        ("5-1", 3, False, MessageOutcome.UNKNOWN),  # no message of round 4 is one of round 5
        (None, 4, True, MessageOutcome.UNKNOWN),  # it may have sent one after its checkpoint
        (None, 2, True, MessageOutcome.UNKNOWN),
    ],
)
def test_what_became_of_a_message(
    message: str | None, number: int, from_checkpoint: bool, expected: MessageOutcome
) -> None:
    """The table of docs/loco.md, section 5."""
    assert outcome_of(message, number, LEADER, from_checkpoint=from_checkpoint) is expected


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
    # As the document has it: trainers of two releases must agree on it.
    written = '[[["a","F32",[2,3]],["b","F32",[4]]],[["c","torch.float32",[]]]]'
    assert (
        specs_digest((a, b), [("c", "torch.float32", ())]) == sha256(written.encode()).hexdigest()
    )


# -- messages


def test_a_message_is_read_back() -> None:
    payloads = [b"one", b"", b"\0" * 300]
    message = Message(1 << 40, COMPRESSIONS[1].mantissa, payloads).to_bytes()
    read = Message.parse(message, 3)
    assert (read.round, read.mantissa, [bytes(p) for p in read.payloads]) == (
        1 << 40,
        7,
        payloads,
    )
    assert message[:16].hex() == "504c534c01070000" + "0000000000010000"
    assert message[24:40].hex() == "03000000" + "03000000" + "00000000" + "2c010000"
    assert message != Message(1 << 40, COMPRESSIONS[1].mantissa, payloads).to_bytes(), (
        "the same entries of two trainers are two messages"
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m[:-1],
        lambda m: m + b"\0",
        lambda m: b"",
        lambda m: m[:27],
        lambda m: b"PLSX" + m[4:],
        lambda m: m[:4] + b"\3" + m[5:],
        lambda m: m[:6] + b"\2" + m[7:],
        lambda m: m[:24] + b"\1" + m[25:],
        lambda m: m[:28] + b"\xff\xff\xff\xff" + m[32:],
    ],
)
def test_a_damaged_message_is_refused(damage: object) -> None:
    message = Message(7, COMPRESSIONS[0].mantissa, [b"one", b"two"]).to_bytes()
    with pytest.raises(CorruptMessage):
        Message.parse(damage(message), 2)  # type: ignore[operator]


# -- frozen tensors


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_a_fingerprint_tells_any_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, where it is no SHA-256: changes that cancel in a sum, in any piece, and another
    order."""
    monkeypatch.setattr(ranks, "_PIECE", 1 << 4)
    ranks._weights.cache_clear()
    x = torch.arange(40).to(dtype)
    others = [x.clone() for _ in range(4)]
    others[0][33] = others[0][32]
    others[1][0], others[1][1] = x[1].clone(), x[0].clone()
    others[2][3], others[2][19] = x[19].clone() + 1, x[3].clone() - 1
    others[3] = x.roll(16)
    try:
        found = [
            ranks.fingerprint_on_device(t)
            for t in [x, x.clone(), x.reshape(5, 8).t().contiguous().t(), *others]
        ]
    finally:
        ranks._weights.cache_clear()
    assert found[0] == found[1] == found[2]
    assert len(set(found)) == 1 + len(others)
