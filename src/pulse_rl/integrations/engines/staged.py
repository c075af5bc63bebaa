"""What the leader of a node hands to the other workers: an update as one file in shared memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...state.tensors import UIntArray
from ...sync.update import Update


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
    def of(cls, update: Update, sequence: int) -> Staged:
        changes: dict[str, tuple[npt.NDArray[np.int64] | None, UIntArray]] = {}
        if not update.full:
            for tensor in update.tensors:
                # Without indices the values are views of the host state, which moves on.
                values = tensor.values.copy() if tensor.indices is None else tensor.values
                changes[tensor.spec.name] = (tensor.indices, values)
        return cls(sequence, update.version, update.previous, changes)

    def save(self, folder: Path) -> None:
        """Writes the file that `newest` finds, and removes older ones."""
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
        with aside.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for part in parts:
                file.write(part.data)
        aside.rename(folder / f"staged-{self.sequence:012d}")
        for old in sorted(folder.glob("staged-*"))[:-1]:
            old.unlink(missing_ok=True)

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


def newest(folder: Path) -> Staged | None:
    """The update that was staged last."""
    for file in sorted(folder.glob("staged-*"), reverse=True):
        try:
            return Staged.load(file)
        except FileNotFoundError:
            continue  # replaced by a newer one since
    return None
