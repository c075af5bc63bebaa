"""Anchors: a full state as safetensors shards, each verified, none larger than promised."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from pulse_rl import State
from pulse_rl._util.files import RangeReader
from pulse_rl.errors import CorruptCheckpoint, DigestMismatch, FormatError
from pulse_rl.follow.checkpoint import serialize
from pulse_rl.state.digest import StateDigest, state_digest
from pulse_rl.state.tensors import TensorSpec
from pulse_rl.stream.anchor import restore
from pulse_rl.stream.manifest import Payload
from tests.support.checkpoints import HOSTILE
from tests.support.states import (
    LIMIT_MEMORY,
    Rng,
    all_dtypes,
    bits,
    policy,
    run_python,
    snapshot,
    weights,
)


def shards_of(state: State, shard_bytes: int = 1 << 30) -> list[tuple[Payload, bytes]]:
    """Files of the state's tensors in their order, about so many bytes of them in each."""
    groups: list[list[TensorSpec]] = [[]]
    for spec in state.specs:
        if groups[-1] and sum(s.nbytes for s in groups[-1]) + spec.nbytes > shard_bytes:
            groups.append([])
        groups[-1].append(spec)
    files = [b"".join(map(bytes, serialize(state, tuple(group)))) for group in groups]
    return [(Payload(sha256(data).hexdigest(), len(data)), data) for data in files]


def reader(data: bytes) -> RangeReader:
    def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(data), "a reader must not be asked for what is not there"
        return data[start:stop]

    return read


def restored(
    shards: list[tuple[Payload, bytes]], state: State, threads: int | None = None
) -> State:
    readers = [(payload, reader(data)) for payload, data in shards]
    return whole(readers, state, threads)[0]


def whole(
    readers: list[tuple[Payload, RangeReader]],
    state: State,
    threads: int | None = None,
    **more: Any,
) -> tuple[State, StateDigest]:
    root = state_digest(state).root
    shape = {"elements": state.elements, "dense_bytes": state.nbytes}
    fresh, tree, nbytes = restore(readers, root=root, threads=threads, **shape, **more)
    assert nbytes == sum(payload.bytes for payload, _ in readers)
    return fresh, tree


@pytest.mark.parametrize("shard_bytes", [1, 300, 1 << 30])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_restored_anchor_is_the_state(shard_bytes: int, threads: int, rng: Rng) -> None:
    state = State.of(all_dtypes(rng))
    assert snapshot(restored(shards_of(state, shard_bytes), state, threads)) == snapshot(state)


@pytest.mark.slow
def test_the_tree_comes_with_the_state(rng: Rng) -> None:
    state = State.of({f"w{k}": weights(rng, (9 << 19) + k) for k in range(3)} | policy(rng))
    for size in (1 << 20, 1 << 30):
        readers = [(payload, reader(data)) for payload, data in shards_of(state, size)]
        fresh, tree = whole(readers, state)
        assert tree == state_digest(state)
        assert snapshot(fresh) == snapshot(state)


def test_another_root_is_refused(rng: Rng) -> None:
    state = State.of(policy(rng))
    readers = [(payload, reader(data)) for payload, data in shards_of(state)]
    with pytest.raises(DigestMismatch, match="root is not its manifest's"):
        restore(readers, root="0" * 64, elements=state.elements, dense_bytes=state.nbytes)


def test_every_shard_is_an_ordinary_safetensors_file(tmp_path: Path, rng: Rng) -> None:
    state = State.of(all_dtypes(rng))
    tensors = {}
    for k, (_, data) in enumerate(shards_of(state, 1000)):
        (tmp_path / f"{k}.safetensors").write_bytes(data)
        tensors |= load_file(tmp_path / f"{k}.safetensors")
    assert snapshot(tensors) == snapshot(state)


@pytest.mark.slow
def test_large_tensors_and_headers_are_read_in_pieces(rng: Rng) -> None:
    """A header beyond the first read, a tensor beyond a chunk; no range may be larger than a
    chunk."""
    state = State.of(
        {f"name.{k:0200}": bits(rng, "U8", 1) for k in range(450)}
        | {"big": bits(rng, "U8", 17 << 20)}
    )
    ((payload, data),) = shards_of(state)
    sizes = []

    def read(start: int, stop: int) -> bytes:
        sizes.append(stop - start)
        return data[start:stop]

    fresh, _ = whole([(payload, read)], state)
    assert snapshot(fresh) == snapshot(state)
    assert sum(sizes) == len(data)
    assert max(sizes) <= 8 << 20


@pytest.mark.slow
def test_every_flipped_bit_of_a_shard_is_noticed(rng: Rng) -> None:
    """In the header it may be malformed, elsewhere the digest tells; an error of another kind would
    stop a subscriber that could have taken another path."""
    state = State.of({"a": bits(rng, "BF16", 20), "b": bits(rng, "F32", 3)})
    ((payload, data),) = shards_of(state)
    for flip in range(8 * len(data)):
        broken = bytearray(data)
        broken[flip // 8] ^= 1 << flip % 8
        with pytest.raises((FormatError, DigestMismatch)):
            restored([(payload, bytes(broken))], state)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_shards_are_refused(data: bytes, rng: Rng) -> None:
    """Under their own right digest, so that only the strict reading stands in the way."""
    with pytest.raises(CorruptCheckpoint):
        restored([(Payload(sha256(data).hexdigest(), len(data)), data)], State.of(policy(rng)))


def test_a_state_of_another_size_than_promised_is_refused(rng: Rng) -> None:
    state = State.of(policy(rng))
    shards = shards_of(state, 3000)
    for other in (shards[:-1], [*shards, *shards_of(State.of({"more": weights(rng, 1)}))], []):
        with pytest.raises(CorruptCheckpoint, match="manifest"):
            restored(other, state)


def test_a_tensor_in_two_shards_is_refused(rng: Rng) -> None:
    state = State.of({"a": weights(rng, 10), "b": weights(rng, 10)})
    twice = shards_of(State.of({"a": weights(rng, 10)}))
    with pytest.raises(CorruptCheckpoint, match="twice"):
        restored([*twice, *twice], state)


def test_a_shard_of_another_state_is_noticed(rng: Rng) -> None:
    """With the same names and shapes, so that only the root tells."""
    state, other = (State.of({"a": weights(rng, 10), "b": weights(rng, 10)}) for _ in range(2))
    (first, one), (second, two) = shards_of(state, 1)
    (_, wrong), _ = shards_of(other, 1)
    assert snapshot(restored([(first, two), (second, one)], state)) == snapshot(
        state
    )  # whichever holds which
    with pytest.raises(DigestMismatch, match=f"shard {first.sha256[:16]}"):
        restored([(first, wrong), (second, two)], state)


@pytest.mark.slow
def test_a_shard_that_claims_terabytes_allocates_nothing() -> None:
    done = run_python(
        LIMIT_MEMORY
        + """
import json
from pulse_rl.stream.anchor import restore
from pulse_rl.errors import CorruptCheckpoint
from pulse_rl.stream.manifest import Payload
size = 1 << 42
text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
head = len(text).to_bytes(8, "little") + text
limit_memory(64 << 20)
try:
    restore([(Payload("0" * 64, len(head) + size), lambda a, b: head[a:b])], root='', elements=10, dense_bytes=20)
except CorruptCheckpoint:
    print("refused")
"""  # noqa: E501
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_the_rebuilt_state_is_writable_and_its_own(rng: Rng) -> None:
    state = State.of({"a": np.zeros(5, np.float32)})
    fresh = restored(shards_of(state), state)
    fresh.read("a")[0] = 7
    assert state.read("a")[0] == 0


@pytest.mark.parametrize("missing", [1, 2])
def test_a_header_that_arrives_without_its_last_spaces_is_damage(missing: int) -> None:
    """It makes sense by itself; the data was then read from where the spaces are, and ran out of
    tensors."""
    state = State.of({"a": np.zeros(64, np.uint8), "bc": np.zeros(7, np.uint8)})
    ((payload, data),) = shards_of(state)
    end = 8 + int.from_bytes(data[:8], "little")
    assert data[end - missing : end].isspace()

    def read(start: int, stop: int) -> bytes:
        return data[start : min(stop, end - missing) if start < end else stop]

    with pytest.raises(CorruptCheckpoint, match="header ends too early"):
        whole([(payload, read)], state, 1)
