"""Payloads of the groups codec that are damaged or made up: refused, or changes in order and in range."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pulse_rl._native._testing import use_rans_vectors
from pulse_rl.codec import Layout, Run
from pulse_rl.errors import CorruptPatch
from pulse_rl.state.tensors import DTYPES, UIntArray
from tests.support import sparse_oracle as oracle
from tests.support.gaps_oracle import Writer, row_ends
from tests.support.sparse_blocks import GROUPS, changed, check_decoded, encoded, kind_of, refused, weights
from tests.support.sparse_payload import Parts, cut, joined
from tests.support.table_oracle import varint


@pytest.fixture(autouse=True)
def vectors_as_they_were() -> Iterator[None]:
    yield
    use_rans_vectors(True)


SMALL_RUNS = (Run(700, 50, 7), Run(900, 900, 0))
SMALL = Layout(DTYPES["BF16"], SMALL_RUNS)
OLD = weights(np.random.default_rng(5), "BF16", 1600)


def small(steps: str, density: float = 0.3, seed: int = 1) -> tuple[UIntArray, oracle.Head]:
    """New elements, and a head that allows any."""
    new = changed(np.random.default_rng(seed), OLD, density, steps)
    new[3] = OLD[3] ^ 1
    head = oracle.Head(0, [30] * 256, [20] * 256, [(22, 24)] * 286, [24, 26, 28, *[28] * 9], [2, -3])
    return new, head


def small_payload(steps: str, seed: int = 1) -> bytes:
    new, head = small(steps, seed=seed)
    payload = oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head)
    check_decoded(payload, OLD, new, SMALL)
    return payload


def test_whatever_is_cut_off_is_missed() -> None:
    for steps in ("one", "any"):
        payload = small_payload(steps)
        for size in [*range(0, len(payload) - 40, 3), *range(len(payload) - 40, len(payload))]:
            refused(payload[:size], OLD, SMALL)


def test_whatever_is_added_is_noticed() -> None:
    for steps in ("one", "any"):
        payload = small_payload(steps)
        parts = cut(payload)
        for more in (bytes(1), bytes(2), b"\xff\xff", bytes(64), bytes(1000)):
            refused(payload + more, OLD, SMALL, "longer or shorter")
            refused(joined(parts._replace(plain=parts.plain + more)), OLD, SMALL, "plain|behind")
            longer = parts._replace(head=parts.head + bytes(8) + more)
            refused(joined(longer), OLD, SMALL, "the head is longer or shorter")


def test_other_plain_bits() -> None:
    new, head = small("any")
    payload = oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head)
    parts = cut(payload)
    assert len(parts.plain) > 10
    for less in (1, 2, len(parts.plain)):
        refused(joined(parts._replace(plain=parts.plain[:-less])), OLD, SMALL, "plain bits end too early")


def with_end(change: Callable[[list[int]], None], steps: str, seed: int = 1) -> bytes:
    """A payload whose decoder comes to other states at its end."""
    new, head = small(steps, seed=seed)
    parts = cut(oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head))
    side = oracle.StateWriter()
    ordered = [kind_of("BF16").ordered(x) for x in (*OLD.tolist(), *new.tolist())]
    ups = [(b - a + 32768) % 65536 - 32768 for a, b in zip(ordered[:1600], ordered[1600:], strict=True)]
    wanted = {at: up for at, up in enumerate(ups) if up}
    chances = oracle.Chances(head, OLD.tolist(), kind_of("BF16"), SMALL_RUNS)
    found = oracle.code_changes(side, chances, list(row_ends(list(SMALL_RUNS))), wanted)
    states = oracle.states_of(oracle.plain_bytes({at: abs(up) for at, up in wanted.items()}, found))
    change(states)
    words = side.finish(states)
    return joined(parts._replace(states=states, words=words))


def test_states_at_the_end() -> None:
    def none(states: list[int]) -> None:
        pass

    def large(states: list[int]) -> None:
        states[17] += 1 << 17

    def bit_behind(states: list[int]) -> None:
        states[63] |= 1 << 15

    assert with_end(none, "one") == small_payload("one")
    for steps in ("one", "small"):
        refused(with_end(large, steps), OLD, SMALL, "longer or shorter")
        refused(with_end(bit_behind, steps), OLD, SMALL, "bits behind the last size are not 0")


def test_bits_behind_the_last_plain_one_and_behind_the_last_state() -> None:
    checked = [0, 0]
    for seed in range(5):
        payload = small_payload("any", seed)
        parts = cut(payload)
        if sum(x.bit_length() + 3 for x in parts.states) % 8:
            at = len(payload) - len(parts.words) - 1
            refused(
                payload[:at] + bytes([payload[at] | 128]) + payload[at + 1 :], OLD, SMALL, "bits behind the last state"
            )
            checked[0] += 1
        if plain_bits(parts) % 8:
            bad = joined(parts._replace(plain=parts.plain[:-1] + bytes([parts.plain[-1] | 128])))
            refused(bad, OLD, SMALL, "bits behind the last size")
            checked[1] += 1
    assert min(checked) > 1


def plain_bits(parts: Parts) -> int:
    """How many there are, those of the states included."""
    head, kind = oracle.read_head(joined(parts), SMALL_RUNS), kind_of("BF16")
    side = oracle.StateReader(list(parts.states), parts.words)
    chances = oracle.Chances(head, OLD.tolist(), kind, SMALL_RUNS)
    found = oracle.code_changes(side, chances, list(row_ends(list(SMALL_RUNS))), {})
    return sum(step.plain for step in found.values())


def test_wrong_numbers_of_changes() -> None:
    parts = cut(small_payload("one"))
    for count, match in (
        (0, "number of changes"),
        (1, "more changes"),
        (parts.changed - 1, "more changes"),
        (parts.changed + 1, "fewer changes"),
        (len(OLD), "fewer changes"),
        (len(OLD) + 1, "number of changes"),
        (1 << 32, "number"),
        (1 << 62, "number"),
    ):
        refused(joined(parts._replace(changed=count)), OLD, SMALL, match)
    refused(b"\x80" * 20, OLD, SMALL)


def test_heads_that_cannot_be() -> None:
    payload = small_payload("one")
    parts = cut(payload)
    refused(joined(parts._replace(first=1)), OLD, SMALL, "out of range")
    integers = Layout(DTYPES["U16"], SMALL_RUNS)
    refused(payload, OLD, integers, "out of range")
    for huge in (b"\xff\xff\x03", b"\xff" * 4 + b"\x7f"):
        refused(payload[:4] + huge + parts.head, OLD, SMALL, "inside its head")
        behind = payload[: 4 + len(varint(len(parts.head))) + len(parts.head)]
        refused(behind + huge + payload[len(behind) + 1 :], OLD, SMALL, "inside its plain bits")
    never = oracle.Head(0, [None] * 256, [], [], [24] * 12, [0, 0])
    refused(joined(parts._replace(head=oracle.head_bytes(never, SMALL_RUNS))), OLD, SMALL, "fewer changes")


def test_more_lengths_than_there_can_be() -> None:
    """The number counts as the most; what is read of a head is never behind its tables."""

    class Boaster(Writer):
        def plain(self, value: int, k: int) -> int:
            return super().plain(511, k)

    new, head = small("any")
    side = Boaster()
    assert oracle.code_head(side, head, head.first, len(head.rarities), SMALL_RUNS) == head
    payload = oracle.encode(OLD.tolist(), new.tolist(), kind_of("BF16"), SMALL_RUNS, head)
    boasting = joined(cut(payload)._replace(head=side.finish()))
    assert boasting != payload
    check_decoded(boasting, OLD, new, SMALL)


def outcome(payload: bytes, old: UIntArray, layout: Layout) -> tuple[bytes, bytes] | None:
    try:
        found = GROUPS.decode(memoryview(payload), old, layout)
    except CorruptPatch:
        return None
    assert (np.diff(found.positions.astype(np.int64)) > 0).all()
    assert found.positions[-1] < len(old)
    assert (old[found.positions] != found.values).all()
    return found.positions.tobytes(), found.values.tobytes()


def test_any_byte_may_be_another(rng: np.random.Generator) -> None:
    """Refused, or read as other changes of the same block; the same with and without vectors."""
    refusals = 0
    old = weights(rng, "BF16", 70_000)
    large = encoded(old, changed(rng, old, 0.061, "small"), Layout.flat(DTYPES["BF16"], len(old)))
    for payload, before, layout in (
        (small_payload("any"), OLD, SMALL),
        (large, old, Layout.flat(DTYPES["BF16"], len(old))),
    ):
        for at in range(min(len(payload), 450)):
            bad = bytearray(payload)
            bad[at] ^= int(rng.integers(1, 256))
            outcomes = []
            for use in (False, True):
                use_rans_vectors(use)
                outcomes.append(outcome(bytes(bad), before, layout))
            assert outcomes[0] == outcomes[1]
            refusals += outcomes[0] is None
    assert refusals > 300
