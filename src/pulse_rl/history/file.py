"""A history on disk, beside the checkpoint of the state at which it ends (not a format that is
exchanged)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np

from .._util.files import disk_error
from ..errors import PulseError
from ..follow.checkpoint import load, save, serialize
from ..patch.blocks import Block
from ..patch.history import MAX_WINDOWS, RECORD_BYTES, History, Records, Window
from ..state.digest import PartDigest, StateDigest
from ..state.tensors import Bits, State, TensorSpec

FILE_NAME = "pulse.history"
_FORMAT = "pulse.history.1"
_ROOT = re.compile(r"[0-9a-f]{64}")


def beside(checkpoint: Path) -> Path:
    """Where the history of a checkpoint is, a file or a folder."""
    return (checkpoint if checkpoint.is_dir() else checkpoint.parent) / FILE_NAME


def save_history(
    path: Path, history: History, blocks: tuple[Block, ...], root: str, *, durable: bool = True
) -> None:
    """Writes ``history``, by these ``blocks`` of the state with this ``root`` at which it ends,
    atomically; removes the file where nothing is remembered. Raises StoreFull and StoreError. Not
    ``durable``: a new file, for which nobody waits; one that is cut short is not loaded. Raises
    OSError, then."""
    if not history.windows:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, f"write {path}") from error
        return
    history = history.of(blocks)
    records = {
        f"{k}.{index}": found
        for k, s in enumerate(history.windows)
        for index, found in s.records.items()
    }
    metadata = {
        "format": _FORMAT,
        "root": root,
        "roots": json.dumps([window.base_root for window in history.windows]),
        "sha256": _digest(records),
    }
    state = State.of({name: Bits(found, "U8") for name, found in records.items()})
    if durable:
        save(path, state, metadata)
        return
    with path.open("xb") as file:
        file.writelines(serialize(state, state.specs, metadata))


def load_history(path: Path, blocks: tuple[Block, ...], root: str) -> History | None:
    """The history by these ``blocks`` that ends at the state with this ``root``; None where the
    file is another's, damaged or missing."""
    try:
        if not path.is_file():
            return None
        state, metadata = load(path)
        if (metadata.get("format"), metadata.get("root")) != (_FORMAT, root):
            return None
        roots = json.loads(metadata["roots"])
        records = {name: state.read(name).copy() for name in state.names}
        if metadata["sha256"] != _digest(records) or not _are_roots(roots):
            return None
        found: list[dict[int, Records]] = [{} for _ in roots]
        for name, data in records.items():
            window, index = map(int, name.split("."))
            if (
                window < 0
                or not 0 <= index < len(blocks)
                or data.dtype != np.uint8
                or data.size % RECORD_BYTES
            ):
                return None
            found[window][index] = data.reshape(-1)
    except (PulseError, OSError, ValueError, KeyError, IndexError, RecursionError):
        return None
    return History(tuple(Window(*each, blocks) for each in zip(roots, found, strict=True)))


def specs_of(digest: StateDigest) -> tuple[TensorSpec, ...]:
    """Those of the whole state."""
    return digest.whole if isinstance(digest, PartDigest) else digest.specs


def _digest(records: dict[str, Records]) -> str:
    def pieces() -> Iterator[bytes]:
        for name in sorted(records):
            yield f"{name} {len(records[name])}\n".encode()
            yield sha256(records[name].data).digest()

    return sha256(b"".join(pieces())).hexdigest()


def _are_roots(roots: object) -> bool:
    return (
        isinstance(roots, list)
        and 0 < len(roots) <= MAX_WINDOWS
        and all(isinstance(root, str) and _ROOT.fullmatch(root) for root in roots)
    )
