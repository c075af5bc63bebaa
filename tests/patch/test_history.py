"""Patches with a history: coded by what changed before, named only where that makes a patch
smaller, and refused by who remembers anything else."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest

from pulse_rl import Bits, State
from pulse_rl.codec import HISTORY, SAME, Changes, element_kind
from pulse_rl.errors import CorruptPatch, DigestMismatch, InputError, WrongBase, WrongHistory
from pulse_rl.ops.diff import BuiltPatch, build_patch
from pulse_rl.patch import apply_patch, parse_patch
from pulse_rl.patch.blocks import cut
from pulse_rl.patch.header import (
    BlockEntry,
    PatchHeader,
    check_of,
    closed_header,
    open_header,
    parse_header,
)
from pulse_rl.patch.history import MAX_WINDOWS, History, HistoryName, Recorder, Window
from pulse_rl.state.bits import UIntArray
from pulse_rl.state.digest import StateDigest, state_digest
from pulse_rl.state.tensors import DTYPES, DType
from tests.support import history_oracle as oracle
from tests.support.gaps_oracle import Kind
from tests.support.parts import part
from tests.support.parts import slices_of as cut_among
from tests.support.states import Rng, Tensors, bits, snapshot, weights

MIB = 1 << 20
ROOTS = [f"{k:064x}" for k in range(9)]
BLOCKS = cut(
    State.of({"v": Bits(np.zeros(9, np.uint8), "U8"), "w": Bits(np.zeros(9, np.uint8), "I8")}).specs
)


def chain(rng: Rng, versions: int) -> list[State]:
    """Versions in which the same elements go on by a step; one tensor is of a dtype that the codec
    does not take, one never changes."""
    tensors: Tensors = {
        "a": weights(rng, 50, 200),
        "b": weights(rng, 700),
        "f": bits(rng, "F32", 4000),
    }
    tensors |= {"d": bits(rng, "F64", 300), "still": bits(rng, "I8", 90)}
    drift = {
        name: (rng.random(t.array.shape) < 0.04) * rng.choice([-1, 1], t.array.shape)
        for name, t in tensors.items()
    }
    drift["still"][:] = 0
    states = [State.of(tensors).copy()]
    for _ in range(versions - 1):
        for name, t in tensors.items():
            goes_on = rng.random(t.array.shape) < 0.7
            step = (drift[name] * goes_on).astype(np.int64).astype(t.array.dtype)
            tensors[name] = Bits(t.array + step, t.dtype)
        states.append(State.of(tensors).copy())
    return states


def followed(states: list[State]) -> tuple[list[BuiltPatch], History]:
    """The patches of a chain, each with all the history before it, and the history at its end."""
    history, patches = History(), []
    for old, new in pairwise(states):
        digest = state_digest(old)
        patches.append(build_patch(old, new, digest, max_records=1 << 40, history=history))
        history = history.then(Window(digest.root, patches[-1].records, cut(old.specs)))
    return patches, history


def before(history: History, version: int) -> History:
    """What a history of single versions was at one of them."""
    return History(history.windows[:version])


def digested(state: State) -> tuple[State, StateDigest]:
    copy = state.copy()
    return copy, state_digest(copy)


def same_records(one: History, other: History) -> bool:
    return one.name == other.name and all(
        a.records.keys() == b.records.keys()
        and all(np.array_equal(a.records[k], b.records[k]) for k in a.records)
        for a, b in zip(one.windows, other.windows, strict=True)
    )


def test_a_chain_is_followed_by_a_reader_that_remembers(rng: Rng) -> None:
    states = chain(rng, 5)
    patches, known = followed(states)
    state, digest = digested(states[0])
    history = History()
    for k, built in enumerate(patches):
        parsed = parse_patch([built.to_bytes()], digest)
        assert parsed.header.files == (built.header,)
        assert built.header.history == history.name
        assert (HISTORY in {entry.codec_id for entry in built.header.blocks}) == (k > 0)
        root = digest.root
        applied = apply_patch(parsed, state, digest, history=history, max_records=1 << 20)
        assert snapshot(state) == snapshot(states[k + 1])
        assert applied.records is not None
        history = history.then(Window(root, applied.records, parsed.header.cuts))
        digest = applied.digest
    assert same_records(history, known)
    plain = build_patch(states[3], states[4], state_digest(states[3]))
    assert patches[-1].nbytes < plain.nbytes


def test_a_patch_that_needs_no_history_names_none(rng: Rng) -> None:
    """Nothing was remembered, nothing helps, or the codec has none."""
    states = chain(rng, 3)
    _, history = followed(states)
    digest = state_digest(states[2])
    elsewhere = State.of(
        {s.name: bits(rng, s.dtype.name, *s.shape) for s in states[2].specs}
    ).copy()
    nothing = History((Window(ROOTS[0], {}, ()),))
    for new, known, options in (
        (states[1], History(), {}),
        (states[1], None, {}),
        (states[1], nothing, {}),
        (elsewhere, history, {}),
    ):
        built = build_patch(
            states[2], new, digest, **({"max_records": 1 << 40, "history": known} | options)
        )
        assert built.header.history is None
        state, tree = digested(states[2])
        apply_patch(parse_patch([built.to_bytes()], tree), state, tree)
        assert snapshot(state) == snapshot(new)


@pytest.mark.parametrize("ranks", [2, 5])
def test_patches_in_parts_are_coded_by_any_ranks_history(ranks: int, rng: Rng) -> None:
    """A history is the same by whatever cut it was recorded: one patch has the parts of some ranks,
    the next one those of others."""
    states = chain(rng, 5)
    _, whole = followed(states)
    state, digest = digested(states[0])
    history, by_history = History(), 0
    for k, new in enumerate(states[1:]):
        files = [
            part(states[k], new, segments, before(whole, k))
            for segments in cut_among(state, rng, ranks)
        ]
        patch = parse_patch(files, digest)
        by_history += sum(file.history is not None for file in patch.header.files)
        applied = apply_patch(patch, state, digest, history=history, max_records=1 << 20)
        assert snapshot(state) == snapshot(new)
        history = history.after(
            Window(digest.root, applied.records, patch.header.cuts), k + 1, 1 << 20
        )
        assert same_records(history.of(cut(state.specs)), before(whole, k + 1))
        digest = applied.digest
    assert by_history > ranks


def test_parts_that_name_different_histories_are_refused(rng: Rng) -> None:
    states = chain(rng, 4)
    _, history = followed(states)
    first, second = cut_among(states[0], rng, 2)
    known = before(history, 2)
    files = [
        part(states[2], states[3], first, known),
        part(states[2], states[3], second, known.last(1)),
    ]
    with pytest.raises(CorruptPatch, match="different histories"):
        parse_patch(files, state_digest(states[2]))


def test_another_history_is_refused_before_anything_is_changed(rng: Rng) -> None:
    states = chain(rng, 4)
    patches, history = followed(states)
    patch = parse_patch([patches[-1].to_bytes()], state_digest(states[2]))
    base = History(history.windows[:2])
    assert patch.header.history == base.name
    state, digest = digested(states[2])
    before = snapshot(state)
    first, second = base.windows
    for wrong in (
        None,
        History(),
        history,
        History((second,)),
        History((first._replace(base_root=ROOTS[1]), second)),
        History((second, first)),
    ):
        with pytest.raises(WrongHistory, match="the last 2 versions") as caught:
            apply_patch(patch, state, digest, history=wrong)
        assert isinstance(caught.value, WrongBase)
        assert snapshot(state) == before
    with pytest.raises(WrongBase) as caught:
        apply_patch(patch, *digested(states[1]), history=base)
    assert not isinstance(caught.value, WrongHistory)
    older = History((Window(ROOTS[2], {}, ()), *base.windows))
    apply_patch(patch, state, digest, history=older)
    assert snapshot(state) == snapshot(states[3])


def test_a_failure_leaves_the_state_as_it_was(rng: Rng) -> None:
    states = chain(rng, 3)
    patches, _ = followed(states)
    base = followed(states[:2])[1]
    state, digest = digested(states[1])
    before = snapshot(state)
    body = b"".join(patches[1].chunks[1:])
    false = parse_patch(
        [replace(patches[1].header, target_root=ROOTS[3]).to_bytes() + body], digest
    )
    with pytest.raises(DigestMismatch):
        apply_patch(false, state, digest, history=base)
    assert snapshot(state) == before
    lies = {index: np.roll(records, 3) for index, records in base.windows[0].records.items()}
    with pytest.raises((CorruptPatch, DigestMismatch)):
        apply_patch(
            parse_patch([patches[1].to_bytes()], digest),
            state,
            digest,
            history=History((base.windows[0]._replace(records=lies),)),
        )
    assert snapshot(state) == before


def test_a_block_by_windows_that_remember_nothing_of_it_is_refused(rng: Rng) -> None:
    """U counts the history's windows, also those without records of the block; then nothing is
    remembered that could change, which is refused before anything is."""
    states = chain(rng, 3)
    patches, _ = followed(states)
    history = followed(states[:2])[1]
    state, digest = digested(states[1])
    blocks = cut(state.specs)
    index = next(k for k, block in enumerate(blocks) if block.dtype.name == "I8")
    assert all(index not in window.records for window in history.windows)
    old = blocks[index].read(state)
    new = old.copy()
    new[[3, 40]] += 1
    chosen = oracle.Choices(used=1, count=1)
    chosen.levels[0] = 20
    before = snapshot(state)
    kind, runs = Kind(*element_kind(blocks[index].dtype)), list(blocks[index].layout.runs)
    payload = oracle.encode(old.tolist(), new.tolist(), kind, runs, [{}], chosen)
    entries, bodies = list(patches[1].header.blocks), list(patches[1].chunks[1:])
    assert entries[index].codec_id == SAME
    entries[index] = BlockEntry(HISTORY, 2, len(payload), check_of(payload))
    bodies[index] = payload
    target = states[2].copy()
    blocks[index].read(target)[:] = new
    header = replace(
        patches[1].header, blocks=tuple(entries), target_root=state_digest(target).root
    )
    with pytest.raises(CorruptPatch, match="no element that is remembered changes"):
        apply_patch(
            parse_patch([header.to_bytes() + b"".join(bodies)], digest),
            state,
            digest,
            history=history,
        )
    assert snapshot(state) == before


def records(*steps: int) -> np.ndarray:
    return np.frombuffer(oracle.records(dict(enumerate(steps))), np.uint8)


def windows(count: int) -> History:
    """Each with two steps in the first block, the last one in the second block, too."""
    found = [Window(ROOTS[k], {0: records(1, k + 1)}, BLOCKS) for k in range(count)]
    found[-1] = found[-1]._replace(records={**found[-1].records, 1: records(7)})
    return History(tuple(found))


def test_names_and_parts_of_a_history() -> None:
    history = windows(4)
    digest = sha256(b"".join(map(bytes.fromhex, ROOTS[2:4]))).digest()[:8]
    last = History(history.windows[2:])
    assert last.name == HistoryName(2, digest)
    assert history.named(last.name, BLOCKS) == last
    assert history.named(history.name, BLOCKS) == history
    assert history.named(None, BLOCKS) == History()
    assert History().name is None
    for count in (1, 3, 4):
        with pytest.raises(WrongHistory):
            history.named(HistoryName(count, digest), BLOCKS)
    with pytest.raises(WrongHistory, match="the last 5 versions; the reader knows those of 4"):
        history.named(HistoryName(5, digest), BLOCKS)
    with pytest.raises(WrongHistory):
        history.named(HistoryName(2, bytes(32)), BLOCKS)
    with pytest.raises(WrongHistory):
        History().named(last.name, BLOCKS)


def test_the_past_of_a_block_and_what_it_takes() -> None:
    history = windows(2)
    assert [r.tolist() for r in history.past(0)] == [records(1, 1).tolist(), records(1, 2).tolist()]
    assert [r.tolist() for r in history.past(1)] == [[], records(7).tolist()]
    assert [r.tolist() for r in history.past(5)] == [[], []]
    assert History().past(0) == ()
    assert history.nbytes == 4 * 5
    assert History().nbytes == 0
    longer = history.then(Window(ROOTS[7], {0: records(1)}, BLOCKS))
    assert (len(longer.windows), len(history.windows), longer.nbytes) == (3, 2, 24)


def test_a_reader_keeps_what_the_manifest_remembers() -> None:
    window = Window(ROOTS[7], {0: records(1)}, BLOCKS)
    history = windows(3)
    assert history.after(window, 4, 1 << 20) == history.then(window)
    assert history.after(window, 9, 1 << 20) == history.then(window)
    assert history.after(window, 2, 1 << 20) == History((history.windows[2], window))
    assert history.after(window, 4, 4 * 4) == History((history.windows[2], window))
    assert history.after(window, 0, 1 << 20) == history.after(None, 4, 1 << 20) == History()


def plain_of(header: PatchHeader) -> bytes:
    return open_header(memoryview(header.to_bytes()))[0]


def a_header(rng: Rng) -> PatchHeader:
    states = chain(rng, 3)
    return followed(states)[0][1].header


@pytest.mark.parametrize(
    ("windows", "words"), [(bytes([MAX_WINDOWS + 1]), "more than 64"), (b"\x81\x00", "padded")]
)
def test_histories_that_cannot_be(windows: bytes, words: str, rng: Rng) -> None:
    plain = plain_of(a_header(rng))
    assert plain[64:65] == b"\x01"
    good = plain[:64] + b"\x40" + plain[65:]
    assert parse_header(memoryview(closed_header(good))).header.history == HistoryName(
        64, plain[65:73]
    )
    with pytest.raises(CorruptPatch, match=words):
        parse_header(memoryview(closed_header(plain[:64] + windows + plain[65:])))


def test_a_header_that_ends_within_its_history(rng: Rng) -> None:
    plain = plain_of(a_header(rng))
    for end in (64, 65, 72):
        with pytest.raises(CorruptPatch, match="ends too early"):
            parse_header(memoryview(closed_header(plain[:end])))


def test_a_block_of_this_codec_without_a_history(rng: Rng) -> None:
    header = a_header(rng)
    plain = plain_of(header)
    assert parse_header(memoryview(closed_header(plain))).header == header
    with pytest.raises(CorruptPatch, match="that the patch does not name"):
        parse_header(memoryview(closed_header(plain[:64] + b"\0" + plain[73:])))


def test_histories_that_cannot_be_read_are_not_written(rng: Rng) -> None:
    header = a_header(rng)
    for windows in (0, -1, MAX_WINDOWS + 1):
        with pytest.raises(InputError, match="1 to 64 windows"):
            replace(header, history=HistoryName(windows, bytes(8))).to_bytes()
    most = HistoryName(MAX_WINDOWS, bytes(8))
    assert parse_header(memoryview(replace(header, history=most).to_bytes())).header.history == most


# -- costs

#: The number of windows and the check (docs/format.md, section 3), and what they cost when a header
#: is compressed.
NAME_BYTES = 16


@pytest.mark.parametrize("recurs", [0.1, 1.0])
def test_a_history_costs_a_small_patch_its_name_at_most(rng: Rng, recurs: float) -> None:
    flat, history = weights(rng, 20_000).array.copy(), History()
    moving = rng.choice(flat.size, 100, replace=False)
    old = State.of({"w": Bits(flat.copy(), "BF16")})
    named = []
    for _ in range(6):
        keeps = rng.random(100) < recurs
        moving = np.where(keeps, moving, rng.choice(flat.size, 100, replace=False))
        flat[moving] += 1
        new, digest = State.of({"w": Bits(flat.copy(), "BF16")}), state_digest(old)
        built = build_patch(old, new, digest, max_records=1 << 40, history=history)
        assert built.nbytes <= build_patch(old, new, digest).nbytes + NAME_BYTES
        parsed = parse_patch([built.to_bytes()], digest)
        assert parsed.header.history in (None, history.name)
        state, known = old.copy(), state_digest(old)
        assert (
            apply_patch(parsed, state, known, history=history).digest.root == state_digest(new).root
        )
        named.append(built.header.history is not None)
        assert built.records is not None
        history, old = history.then(Window(digest.root, built.records, cut(old.specs))), new
    assert any(named)


def test_a_recorder_keeps_all_or_none() -> None:
    def changes(count: int, dtype: str) -> tuple[DType, Changes, UIntArray]:
        kind = DTYPES[dtype]
        before = np.zeros(count, kind.uint)
        return kind, Changes(np.arange(count, dtype=np.uint32), np.ones(count, kind.uint)), before

    kept = Recorder(40)
    kept.add(0, *changes(6, "BF16"))
    kept.add(1, *changes(50, "F64"))  # of which nothing is remembered
    kept.add(2, *changes(4, "U8"))
    assert kept.records is not None
    assert {index: len(found) for index, found in kept.records.items()} == {0: 24, 2: 16}
    kept.add(3, *changes(1, "F32"))
    assert kept.records is None
    kept.add(4, *changes(1, "F32"))
    assert kept.records is None
