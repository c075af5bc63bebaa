"""What the leader of a node hands to the other workers: an update as one file in shared memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...state.bits import differing
from ...state.tensors import State, UIntArray
from ...sync.update import TensorUpdate, Update

_PIECE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Staged:
    """The step from version ``previous`` (None: from anything) to ``version``, verified on the host.

    ``changes``: flat indices (int64, ascending; None: all elements) and new bits by the checkpoint tensor's name.
    Empty for a whole state, which is written from the host state. ``sequence`` grows with each staged update.
    """

    sequence: int
    version: int
    previous: int | None
    changes: dict[str, tuple[npt.NDArray[np.int64] | None, UIntArray]]

    @classmethod
    def of(cls, update: Update, sequence: int, before: State | None = None) -> Staged:
        """``before``: the state that the update starts from, where it is at hand. Of a tensor that has got another name
        since, which an update has as a whole, only what differs is staged then."""
        changes: dict[str, tuple[npt.NDArray[np.int64] | None, UIntArray]] = {}
        for tensor in update.tensors if not update.full else ():
            name, indices, values = tensor.spec.name, tensor.indices, tensor.values
            if indices is None and before is not None and name in before and before.spec(name) == tensor.spec:
                indices = _differing(before, tensor)
                values = values[indices]
            elif indices is None:
                values = values.copy()  # a view of the host state, which moves on
            if len(values):
                changes[name] = (indices, values)
        return cls(sequence, update.version, update.previous, changes)

    def write(self, folder: Path) -> Path:
        """Writes the file for `show` and returns it."""
        parts: list[npt.NDArray[np.uint8]] = []
        entries = []
        offset = 0
        for name, (indices, values) in self.changes.items():
            places = []
            for array in (indices, values):
                places.append(None if array is None else offset)
                if array is not None:
                    raw = array.view(np.uint8)
                    parts += [raw, np.zeros(-len(raw) % 8, np.uint8)]
                    offset += len(raw) + len(parts[-1])
            entries.append((name, len(values), values.itemsize, *places))
        header = json.dumps((self.sequence, self.version, self.previous, entries)).encode()
        header += b" " * (-len(header) % 8)
        aside = folder / f".{self.sequence:012d}"
        try:
            with aside.open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                for part in parts:
                    file.write(part.data)
        except BaseException:
            aside.unlink(missing_ok=True)  # shared memory that is full must not stay so
            raise
        return aside

    @classmethod
    def load(cls, file: Path) -> Staged:
        """The update in ``file``, its arrays mapped from there."""
        raw = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(bytes(raw[:8]), "little")
        sequence, version, previous, entries = json.loads(bytes(raw[8:start]))
        changes: dict[str, tuple[npt.NDArray[np.int64] | None, UIntArray]] = {}
        for name, count, width, at, values_at in entries:
            indices = None if at is None else np.asarray(raw[start + at : start + at + 8 * count]).view(np.int64)
            values = np.asarray(raw[start + values_at : start + values_at + width * count]).view(f"<u{width}")
            changes[name] = (indices, values)
        return cls(sequence, version, previous, changes)


def show(file: Path) -> None:
    """Lets `newest` find what was written, and removes older ones; what is mapped stays so."""
    file.rename(file.with_name(f"staged-{file.name[1:]}"))
    for old in sorted(file.parent.glob("staged-*"))[:-1]:
        old.unlink(missing_ok=True)


def newest(folder: Path) -> Staged | None:
    """The update that was staged last."""
    for file in sorted(folder.glob("staged-*"), reverse=True):
        try:
            return Staged.load(file)
        except FileNotFoundError:
            continue  # replaced by a newer one since
    return None


def _differing(before: State, tensor: TensorUpdate) -> npt.NDArray[np.int64]:
    pieces = [np.empty(0, np.int64)]
    for start in range(0, tensor.values.size, _PIECE_ELEMENTS):
        now = tensor.values[start : start + _PIECE_ELEMENTS]
        found = differing(before.read(tensor.spec.name, start, start + now.size), now)
        pieces.append(found.astype(np.int64) + start)
    return np.concatenate(pieces)
