"""What a publisher decodes must be what it compared, and what the tensors hold."""

from __future__ import annotations

import numpy as np
import pytest

from pulse_rl import State, codec
from pulse_rl.codec import Changes, Encoded
from pulse_rl.errors import CorruptPatch, IntegrityError
from pulse_rl.patch.blocks import Block, cut
from pulse_rl.patch.build import encode_proved
from pulse_rl.patch.history import records_of
from pulse_rl.state.tensors import UIntArray
from tests.support.states import Rng, mutated, weights

MANY = 300_000


def changed_block(rng: Rng, elements: int) -> tuple[Block, UIntArray, UIntArray]:
    """A block, its old elements, and new ones, which may be written to."""
    old = {"w": weights(rng, elements)}
    (block,) = cut(State.of(old).specs)
    return block, block.read(State.of(old)), block.read(State.of(mutated(rng, old, 0.03))).copy()


def there_and_back(block: Block, before: UIntArray, after: UIntArray) -> codec.Past:
    """What is remembered if the version before changed the same elements."""
    at = np.flatnonzero(before != after).astype(np.uint32)
    records = records_of(block.dtype, at, after[at], before[at])
    assert records is not None
    return ((records, 1),)


@pytest.mark.parametrize("elements", [5000, MANY])
@pytest.mark.parametrize("name", ["auto", "history", "zstd"])
@pytest.mark.parametrize("what", ["value", "position", "count", "tensor"])
def test_what_differs_is_refused(
    what: str, name: str, elements: int, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that saw something else, and a trainer that wrote after it was looked at."""
    block, before, after = changed_block(rng, elements)
    past = there_and_back(block, before, after)
    honest = codec.encode_block

    def lying(*arguments: object, **how: object) -> Encoded:
        found = honest(*arguments, **how)  # type: ignore[arg-type]
        if what == "tensor":
            after[:] ^= 1
        if what == "count":
            return found._replace(changed=found.changed - 1)
        if found.found is None or what == "tensor":
            return found
        positions, values = found.found.positions.copy(), found.found.values.copy()
        (values if what == "value" else positions)[7] ^= 1
        return found._replace(found=Changes(positions, values))

    def prove() -> str:
        known, chosen = (past if name == "history" else ()), "zstd" if name == "zstd" else codec.AUTO
        encoded, _ = encode_proved(block, before, after, known, codec=chosen, stride=16)
        by = codec.codec_name(encoded.codec_id)
        return "auto" if by in ("gaps", "sparse") else by

    assert prove() == name
    monkeypatch.setattr("pulse_rl.codec.encode_block", lying)
    if name == "zstd" and what in ("value", "position"):
        assert prove() == name  # it keeps nothing that could differ
        return
    with pytest.raises(IntegrityError, match="does not decode"):
        prove()


def test_a_payload_that_decodes_to_something_else_is_refused(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the encoder has decoded it."""
    block, before, after = changed_block(rng, MANY)
    past = there_and_back(block, before, after)
    honest = codec.encode_block

    def decoding_wrongly(*arguments: object, **how: object) -> Encoded:
        found = honest(*arguments, **how)  # type: ignore[arg-type]
        assert found.decoded is not None
        found.decoded.values[-1] ^= 1
        return found

    monkeypatch.setattr("pulse_rl.codec.encode_block", decoding_wrongly)
    with pytest.raises(IntegrityError, match="does not decode"):
        encode_proved(block, before, after, past, stride=16)


@pytest.mark.parametrize("name", ["auto", "history"])
def test_a_payload_that_does_not_decode_is_refused(name: str, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the encoder may make one of elements that are written to meanwhile."""
    block, before, after = changed_block(rng, 5000)
    past = there_and_back(block, before, after)
    honest = codec.encode_block

    def damaging(*arguments: object, **how: object) -> Encoded:
        found = honest(*arguments, **how)  # type: ignore[arg-type]
        if found.decoded is not None:
            raise CorruptPatch("the block ends inside its head")
        return found._replace(payload=found.payload[:2])

    monkeypatch.setattr("pulse_rl.codec.encode_block", damaging)
    with pytest.raises(IntegrityError, match="does not decode"):
        encode_proved(block, before, after, past if name == "history" else ())


def test_a_copy_is_looked_at_everywhere(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the trainer's own tensors one change in 16 is looked at again, of others all."""
    block, before, after = changed_block(rng, MANY)
    honest = codec.encode_block

    def then_written(*arguments: object, **how: object) -> Encoded:
        found = honest(*arguments, **how)  # type: ignore[arg-type]
        after[np.flatnonzero(before != after)[1]] ^= 2
        return found

    monkeypatch.setattr("pulse_rl.codec.encode_block", then_written)
    encode_proved(block, before, after, stride=16)
    with pytest.raises(IntegrityError):
        encode_proved(block, before, after)
