"""Patches that are whole, but do not lead where they or their links say."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from pulse_rl import Bits, State
from pulse_rl.ops.diff import build_patch
from pulse_rl.state.digest import state_digest
from pulse_rl.state.tensors import DTYPES
from tests.support.folds import fold_link

from .model import STREAM, Model, Snapshot
from .store import Disk


def false_patch(model: Model, base: int, version: int, rng: Random) -> bytes | None:
    """A patch from the state of ``base`` that claims to end at ``version`` and ends elsewhere, or
    ends at neither; None where the two have other tensors."""
    old = model.states[model.versions[base].root]
    new = model.states[model.versions[version].root]
    if _kinds(old) != _kinds(new):
        return None
    first, second = _state(old), _state(new, rng)
    built = build_patch(first, second, state_digest(first, threads=1), threads=1)
    if rng.random() < 0.3:
        return built.to_bytes()
    header = replace(built.header, target_root=model.versions[version].root)
    return header.to_bytes() + b"".join(built.chunks[1:])


def false_parts(disk: Disk, base: int, version: int, rng: Random) -> tuple[str, bytes]:
    """The name and the content of a link that lists two payloads, which belong to something else,
    as a fold."""
    names = rng.sample(disk.names(f"{STREAM}/payloads"), 2)
    files = [(name.rpartition("/")[2][:64], len(disk.peek(name) or b"")) for name in names]
    return fold_link(STREAM, base, version, *files, nbytes=rng.choice((0, 0, 1)))


def _state(taken: Snapshot, rng: Random | None = None) -> State:
    """A state with these bits, with one of them flipped if there is a ``rng``."""
    flipped = rng.choice([name for name in taken if taken[name][2]]) if rng else None
    tensors: dict[str, Bits] = {}
    for name, (dtype, shape, data) in taken.items():
        raw = bytearray(data)
        if rng and name == flipped:
            raw[rng.randrange(len(raw))] ^= 1
        tensors[name] = Bits(np.frombuffer(bytes(raw), DTYPES[dtype].uint).reshape(shape), dtype)
    return State.of(tensors)


def _kinds(taken: Snapshot) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype, shape) for name, (dtype, shape, _) in taken.items()}
