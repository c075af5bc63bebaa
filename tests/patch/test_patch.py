"""A patch turns its base into its target bit for bit, or leaves the state as it was; what is
decoded is proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl import Bits, State, codec, patch
from pulse_rl.codec import Changes, Encoded
from pulse_rl.errors import CorruptPatch, DigestMismatch, IntegrityError, StateMismatch, WrongBase
from pulse_rl.ops.diff import BuiltPatch, build_patch
from pulse_rl.patch import apply_patch, parse_patch
from pulse_rl.patch.apply import advance_state
from pulse_rl.patch.blocks import Block, cut
from pulse_rl.patch.build import encode_verified
from pulse_rl.patch.header import check_of
from pulse_rl.patch.history import History, Window, records_of
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.digest import StateDigest, state_digest
from pulse_rl.state.tensors import DTYPES
from tests.support.states import (
    SPECIAL_BITS,
    Rng,
    Tensors,
    bits,
    mutated,
    policy,
    present,
    snapshot,
    weights,
)

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of a leaf's bytes, so that small states have several."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pulse_rl.patch.blocks.BLOCK_ELEMENTS", MIB)
        yield


def built(old: Tensors, new: Tensors, **options: object) -> BuiltPatch:
    state = State.of(old)
    return build_patch(state, State.of(new), state_digest(state), **options)  # type: ignore[arg-type]


def digested(tensors: Tensors) -> tuple[State, StateDigest]:
    state = State.of(tensors).copy()
    return state, state_digest(state)


def undone(
    data: bytes, old: Tensors, error: Any, match: str | None = None, **options: Any
) -> Exception:
    """What the patch is refused with, on a state that is as it was afterwards."""
    state, digest = digested(old)
    with pytest.raises(error, match=match) as caught:
        apply_patch(parse_patch([data], digest), state, digest, **options)
    assert snapshot(state) == snapshot(old)
    found: Exception = caught.value
    return found


def check_round_trip(old: Tensors, new: Tensors, **options: object) -> BuiltPatch:
    before = snapshot(old), snapshot(new)
    made = built(old, new, **options)
    data = made.to_bytes()
    state, digest = digested(old)
    applied = apply_patch(parse_patch([data], digest), state, digest)
    assert snapshot(state) == snapshot(new)
    assert (snapshot(old), snapshot(new)) == before
    assert applied.digest == made.target == state_digest(State.of(new))
    assert len(data) == made.nbytes
    check_changes(old, new, applied)
    return made


def check_changes(old: Tensors, new: Tensors, applied: patch.AppliedPatch) -> None:
    """What a live model is told is exactly what differs."""
    for name in old:
        before, after = old[name].array.reshape(-1), new[name].array.reshape(-1)
        expected = np.flatnonzero(before != after)
        if not len(expected):
            assert name not in applied.changes
            continue
        indices, values = applied.changes[name].indices, applied.changes[name].values
        assert (indices.dtype, values.dtype) == (np.int64, after.dtype)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(values, after[expected])


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("dtype", SPECIAL_BITS)
def test_each_special_value_becomes_each_other(name: str, dtype: str) -> None:
    """-0.0 to 0.0, a NaN payload to another: what float comparison gets wrong."""
    values = np.array(SPECIAL_BITS[dtype], DTYPES[dtype].uint)
    old, new = np.repeat(values, len(values)), np.tile(values, len(values))
    check_round_trip({"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}, codec=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", codec.CODECS)
def test_tensors_of_several_blocks(name: str, rng: Rng) -> None:
    """Changes at the blocks' edges, an untouched block in between, small tensors around."""
    old = {
        "a.small": weights(rng, 100),
        "big": weights(rng, 5, MIB // 2 + 3),
        "bytes": bits(rng, "U8", MIB + 5),
        "c.small": weights(rng, 7),
        "wide": bits(rng, "F32", 2 * MIB),
    }
    new = mutated(rng, {n: t for n, t in old.items() if n != "wide"}, 0.001) | {"wide": old["wide"]}
    flat = new["big"].array.reshape(-1)
    blocks = cut(State.of(old).specs)
    edges = [s.start for b in blocks for s in b.segments if s.spec.name == "big"]
    assert len(edges) == 3
    flat[edges] ^= 1
    flat[np.array(edges[1:]) - 1] ^= 1
    flat[edges[1] + 1 : edges[2] - 1] = old["big"].array.reshape(-1)[edges[1] + 1 : edges[2] - 1]
    made = check_round_trip(old, new, codec=name)
    same = [b for b, e in zip(blocks, made.header.blocks, strict=True) if e.codec_id == codec.SAME]
    assert [b.segments[0].spec.name for b in same].count("wide") == 2


@given(
    seed=st.integers(0, 2**32),
    density=st.sampled_from([0.0, 0.003, 0.1, 1.0]),
    name=st.sampled_from(codec.CODECS),
)
def test_random_states(seed: int, density: float, name: str) -> None:
    rng = np.random.default_rng(seed)
    dtypes = rng.choice(["BF16", "F32", "F8_E4M3", "I64", "U8"], rng.integers(0, 6))
    shapes = [(), (0,), (1,), (7, 3), (2, 3, 4), (300,), (5, 0)]
    old = {
        f"t{k}": bits(rng, str(d), *shapes[rng.integers(len(shapes))]) for k, d in enumerate(dtypes)
    }
    check_round_trip(old, mutated(rng, old, density), codec=name)


def test_a_patch_is_the_same_whatever_the_number_of_threads(rng: Rng) -> None:
    old = policy(rng) | {"big": weights(rng, 3, MIB)}
    new = mutated(rng, old)
    assert len({built(old, new, threads=n).to_bytes() for n in (1, 2, 5)}) == 1


@pytest.mark.parametrize("codec_name", codec.CODECS)
@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
def test_a_baseline_is_advanced_without_decoding(
    codec_name: str, density: float, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What proved the patch leads there, at any density; a journal gets what was there before."""
    old = {"big": weights(rng, MIB + 5), "small": weights(rng, 70), "wide": bits(rng, "F64", 300)}
    state, digest = digested(old)
    new = mutated(rng, old, density)
    made = build_patch(state, State.of(new), digest, codec=codec_name)
    monkeypatch.setattr(codec, "decode_block", lambda *_: pytest.fail("decoded again"))
    blocks = cut(state.specs)
    noted: list[tuple[Block, Changes]] = []
    advance_state(state, blocks, made.changes, journal=lambda *each: noted.append(each), threads=2)
    assert snapshot(state) == snapshot(new)
    assert len(noted) == sum(changes is not None for changes in made.changes)
    for block, changes in noted:
        np.testing.assert_array_equal(changes.values, block.read(State.of(old))[changes.positions])


def test_unchanged_blocks_cost_nothing(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither bytes in the patch nor hashing on either side."""
    old = {f"w{k}": weights(rng, MIB + k) for k in range(8)}
    state, digest = digested(old)
    for hashing in ("leaves_of", "changed_leaves_of"):
        monkeypatch.setattr(
            f"pulse_rl.patch.tree.{hashing}",
            lambda *_: pytest.fail("an unchanged block was hashed"),
        )
    made = build_patch(state, State.of(old), digest)
    assert made.nbytes < 400
    assert made.target == digest
    assert {e.codec_id for e in made.header.blocks} == {codec.SAME}
    applied = apply_patch(parse_patch([made.to_bytes()], digest), state, digest)
    assert applied.changes == {}
    assert applied.digest == digest


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            lambda t: {("new" if n == "steps" else n): v for n, v in t.items()}, id="renamed"
        ),
        pytest.param(lambda t: {n: v for n, v in t.items() if n != "steps"}, id="missing"),
        pytest.param(lambda t: t | {"new": Bits(t["steps"].array.copy(), "I64")}, id="added"),
        pytest.param(
            lambda t: t | {"steps": Bits(t["steps"].array.reshape(1), "I64")}, id="reshaped"
        ),
        pytest.param(lambda t: t | {"steps": Bits(t["steps"].array, "U64")}, id="other-dtype"),
    ],
)
def test_other_tensors_are_a_mismatch_that_names_the_tensor(other: object, rng: Rng) -> None:
    old = policy(rng)
    changed = other(old)  # type: ignore[operator]
    made, made_for = built(old, mutated(rng, old)), state_digest(State.of(old))
    with pytest.raises(StateMismatch, match=r"steps|new"):
        built(old, changed)
    state, digest = digested(changed)
    with pytest.raises(WrongBase):
        apply_patch(parse_patch([made.to_bytes()], digest), state, digest)
    with pytest.raises(StateMismatch, match=r"steps|new"):
        apply_patch(parse_patch([made.to_bytes()], made_for), state, made_for)
    assert snapshot(state) == snapshot(changed)


def test_a_wrong_base_is_refused_and_untouched(rng: Rng) -> None:
    old = policy(rng)
    other = mutated(rng, old, 0.001)
    made = built(old, mutated(rng, old))
    refused = str(undone(made.to_bytes(), other, WrongBase))
    assert state_digest(State.of(other)).root[:16] in refused
    assert made.header.base_root[:16] in refused


@pytest.mark.parametrize("threads", [1, 4])
def test_cancelling_at_any_block_leaves_the_state_as_it_was(threads: int, rng: Rng) -> None:
    old = {
        f"{dtype}.{k}": bits(rng, dtype, 50) for k in range(3) for dtype in ("BF16", "F32", "U8")
    }
    new = mutated(rng, old, 0.3)
    made = built(old, new)
    state, digest = digested(old)
    parsed = parse_patch([made.to_bytes()], digest)
    for stop_at in range(len(made.header.blocks)):
        seen: list[int] = []

        def cancel(nbytes: int, stop_at: int = stop_at, seen: list[int] = seen) -> None:
            seen.append(nbytes)
            if len(seen) > stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            apply_patch(parsed, state, digest, threads=threads, progress=cancel)
        assert snapshot(state) == snapshot(old)
    apply_patch(parsed, state, digest, threads=threads)
    assert snapshot(state) == snapshot(new)


def test_a_patch_that_does_not_lead_to_its_target_root_is_undone(rng: Rng) -> None:
    old = policy(rng)
    made = built(old, mutated(rng, old))
    lying = dataclasses.replace(made.header, target_root="0" * 64)
    data = lying.to_bytes() + made.to_bytes()[-lying.body_bytes :]
    undone(data, old, DigestMismatch, "0000000000000000")


def test_a_block_of_another_patch_under_its_own_digest_is_undone(rng: Rng) -> None:
    """Each block is checked, but only the root tells that they belong together."""
    old = {"a": weights(rng, 500), "b": bits(rng, "F32", 500)}
    one, two = built(old, mutated(rng, old)), built(old, mutated(rng, old))
    mixed = dataclasses.replace(one.header, blocks=(one.header.blocks[0], two.header.blocks[1]))
    undone(mixed.to_bytes() + one.chunks[1] + two.chunks[2], old, DigestMismatch)


def test_a_wrong_count_of_changes_is_refused_and_undone(rng: Rng) -> None:
    old = {"a": weights(rng, 500), "b": bits(rng, "F32", 500)}
    made = built(old, mutated(rng, old))
    first, last = made.header.blocks
    lying = dataclasses.replace(
        made.header, blocks=(first, last._replace(changed=last.changed + 1))
    )
    words = r"block 1 \(b\[0:500\]\): 5 changes, but the header says 6"
    undone(lying.to_bytes() + b"".join(made.chunks[1:]), old, CorruptPatch, words)


@pytest.mark.parametrize("codec_id", [1, 2, 3, 5, 6, 7, 99])
def test_a_payload_that_its_codec_cannot_decode_is_refused_and_undone(
    codec_id: int, rng: Rng
) -> None:
    old = {"a": weights(rng, 500), "b": bits(rng, "F32", 500)}
    made = built(old, mutated(rng, old))
    junk = b"\xff" * 40
    entry = made.header.blocks[1]._replace(
        codec_id=codec_id, length=len(junk), check=check_of(junk)
    )
    known = History((Window("0" * 64, {}, ()),) if codec_id == codec.HISTORY else ())
    lying = dataclasses.replace(
        made.header, blocks=(made.header.blocks[0], entry), history=known.name
    )
    data, either = lying.to_bytes() + made.chunks[1] + junk, (CorruptPatch, DigestMismatch)
    refused = undone(data, old, either, history=known, threads=1)
    assert isinstance(refused, DigestMismatch) or "block 1 (b[0:500])" in str(refused)


def many_blocks(rng: Rng) -> Tensors:
    """Blocks of one leaf and of several, of two dtypes; some blocks have many tensors."""
    large = {"a": weights(rng, 9 * MIB), "c": bits(rng, "F32", 3 * MIB)}
    small = {f"b{k}": weights(rng, MIB - 7 * k) for k in range(5)}
    return large | small | {f"d{k}": weights(rng, 1000) for k in range(5)}


def stepped(rng: Rng, tensors: Tensors) -> Tensors:
    """With other bits in one of 128 elements."""
    mask = rng.integers(0, 128, max(t.array.size for t in tensors.values()), np.uint8) == 0
    return {name: Bits(t.array ^ mask[: t.array.size], t.dtype) for name, t in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_patch_as_block_by_block(
    rng: Rng, copied: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks in which nothing changed among them. A trainer's tensors lie anywhere
    (``copied``, for blocks of several), those of a state in one piece."""
    old = many_blocks(rng)
    new = stepped(rng, old) | {name: old[name] for name in ("b1", "b2", "b4", "c")}
    before = State.of(old).copy()
    after = State.of(new) if copied else State.of(new).copy()
    digest = state_digest(before)
    alone = build_patch(before, after, digest, threads=threads)
    monkeypatch.setattr("pulse_rl.patch.tree._ROUNDS", 0)
    made = build_patch(before, after, digest, threads=threads)
    assert made.to_bytes() == alone.to_bytes()
    assert made.target == alone.target == state_digest(State.of(new))
    applied = apply_patch(parse_patch([made.to_bytes()], digest), before, digest, threads=threads)
    assert applied.digest == made.target
    assert snapshot(before) == snapshot(new)


@pytest.mark.slow
def test_a_damaged_block_in_the_middle_of_a_group_is_undone(
    rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_rl.patch.tree._ROUNDS", 0)  # however little there is to do
    old = many_blocks(rng)
    made = built(old, stepped(rng, old))
    payload = sum(len(chunk) for chunk in made.chunks[:6])
    data = bytearray(made.to_bytes())
    data[payload - 1] ^= 1
    undone(bytes(data), old, CorruptPatch, "block 4", threads=2)


# -- what a publisher decodes must be what it compared, and what the tensors hold


MANY = 300_000


def changed_block(rng: Rng, elements: int) -> tuple[Block, UIntArray, UIntArray]:
    """A block, its old elements, and new ones, which may be written to."""
    old = {"w": weights(rng, elements)}
    (block,) = cut(State.of(old).specs)
    return block, block.read(State.of(old)), block.read(State.of(mutated(rng, old, 0.03))).copy()


def there_and_back(block: Block, before: UIntArray, after: UIntArray) -> codec.Past:
    """What is remembered if the version before changed the same elements."""
    at = np.flatnonzero(before != after).astype(np.uint32)
    records = present(records_of(block.dtype, at, after[at], before[at]))
    return (records,)


Encoder = Callable[[Callable[[Encoded], Encoded]], None]


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """Has the encoder return what a function makes of what it has made."""
    honest = codec.encode_block

    def become(change: Callable[[Encoded], Encoded]) -> None:
        monkeypatch.setattr(codec, "encode_block", lambda *of, **how: change(honest(*of, **how)))

    return become


@pytest.mark.parametrize("elements", [5000, MANY])
@pytest.mark.parametrize("name", ["auto", "history", "zstd"])
@pytest.mark.parametrize("what", ["value", "position", "count", "tensor"])
def test_what_differs_is_refused(
    what: str, name: str, elements: int, rng: Rng, encoder: Encoder
) -> None:
    """An encoder that saw something else, and a trainer that wrote after it was looked at."""
    block, before, after = changed_block(rng, elements)
    past = there_and_back(block, before, after)

    def lying(found: Encoded) -> Encoded:
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
        known = past if name == "history" else ()
        chosen = "zstd" if name == "zstd" else codec.AUTO
        encoded, _ = encode_verified(block, before, after, known, codec=chosen, stride=16)
        by = codec.codec_name(encoded.codec_id)
        return "auto" if by in ("gaps", "sparse") else by

    assert prove() == name
    encoder(lying)
    if name == "zstd" and what in ("value", "position"):
        assert prove() == name  # it keeps nothing that could differ
        return
    with pytest.raises(IntegrityError, match="does not decode"):
        prove()


def test_a_payload_that_decodes_to_something_else_is_refused(rng: Rng, encoder: Encoder) -> None:
    """Also where the encoder has decoded it."""
    block, before, after = changed_block(rng, MANY)
    past = there_and_back(block, before, after)

    def decoding_wrongly(found: Encoded) -> Encoded:
        assert found.decoded is not None
        found.decoded.values[-1] ^= 1
        return found

    encoder(decoding_wrongly)
    with pytest.raises(IntegrityError, match="does not decode"):
        encode_verified(block, before, after, past, stride=16)


@pytest.mark.parametrize("name", ["auto", "history"])
def test_a_payload_that_does_not_decode_is_refused(name: str, rng: Rng, encoder: Encoder) -> None:
    """As the encoder may make one of elements that are written to meanwhile."""
    block, before, after = changed_block(rng, 5000)
    past = there_and_back(block, before, after)

    def damaging(found: Encoded) -> Encoded:
        if found.decoded is not None:
            raise CorruptPatch("the block ends inside its head")
        return found._replace(payload=found.payload[:2])

    encoder(damaging)
    with pytest.raises(IntegrityError, match="does not decode"):
        encode_verified(block, before, after, past if name == "history" else ())


def test_a_copy_is_looked_at_everywhere(rng: Rng, encoder: Encoder) -> None:
    """Of the trainer's own tensors one change in 16 is looked at again, of others all."""
    block, before, after = changed_block(rng, MANY)

    def then_written(found: Encoded) -> Encoded:
        after[np.flatnonzero(before != after)[1]] ^= 2
        return found

    encoder(then_written)
    encode_verified(block, before, after, stride=16)
    with pytest.raises(IntegrityError):
        encode_verified(block, before, after)
