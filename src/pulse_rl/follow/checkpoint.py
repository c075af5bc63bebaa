"""Checkpoints on disk: safetensors files, single or sharded with an index as Hugging Face writes
them; and the names of tensors as they have them, without the parts that a module's wrapper adds
(DDP, FSDP, torch.compile)."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._util.files import open_regular, write_atomically
from .._util.settings import checked_path
from ..errors import CorruptCheckpoint, InputError, PulseError
from ..state.bits import UIntArray
from ..state.header import header_bytes, header_length, parse_header
from ..state.tensors import Readable, State, TensorSpec, check_tensor_name

INDEX_NAME = "model.safetensors.index.json"
FILE_NAME = "model.safetensors"
#: A PEFT adapter's weights, beside its ``adapter_config.json``.
ADAPTER_NAME = "adapter_model.safetensors"
#: In the metadata of weights: the aliases that are written in full, each with its stored name.
ALIASES = "pulse.aliases"
#: In a folder that pulse writes: what holds its versions, and the link to the one that is shown
#: (see `folder`).
PRIVATE, CURRENT = ".pulse", "current"
_SAFE_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_SHARD = re.compile(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")
_COPY_BYTES = 64 << 20
# Longer than a tick of the clock that stamps files: what is written after this has a new stamp.
_TICK_NS = 20_000_000
_READ_HINT = "Check the path and its permissions."
_UNFINISHED_HINT = (
    "Wait until it is saved, copy it again, or give an older checkpoint that is whole."
)
_PICKLED_HINT = (
    "Write it with save_pretrained, or with safetensors.torch.save_file what torch.load reads."
)
_OTHER_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp", "global_step*", "*.gguf", "*.h5")

_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_AROUND_ALL = "module"  # DistributedDataParallel's; inside a model it is a name like any other
_AVERAGED = "n_averaged"  # what AveragedModel counts, next to its ``module``
_ADAPTED = re.compile(r"\.base_layer\.|\.lora_[AB]\.\w+\.|\.modules_to_save\.|\.original_module\.")
PEFT_HINT = (
    "The names are those of a PEFT model in memory. Publish the model itself, or "
    "pulse_rl.frameworks.transformers.checkpoint_weights(model): both merge the adapters. "
    "PulseCallback(adapter=True) publishes the adapter alone."
)


def load(path: str | os.PathLike[str]) -> tuple[State, dict[str, str]]:
    """(state, metadata) of a checkpoint folder or a .safetensors file. What an index says of all
    shards counts more than what they say. An alias that pulse has written in full is one again.

    The elements are read when they are asked for, and not mapped: others may write to the files,
    and memory whose file is cut short ends the process. Reading raises CorruptCheckpoint then."""
    specs, data, metadata = stored(path)
    try:
        written = json.loads(metadata[ALIASES])
    except (KeyError, ValueError, RecursionError):
        written = None
    state, known = State(specs, data), {spec.name: spec for spec in specs}
    aliases = {
        alias: name
        for alias, name in (written.items() if isinstance(written, dict) else ())
        if isinstance(name, str) and name not in written
        if _are_same(state, known.get(alias), known.get(name))
    }
    return State(tuple(s for s in specs if s.name not in aliases), data, aliases), metadata


def _are_same(state: State, one: TensorSpec | None, other: TensorSpec | None) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if not one or not other or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    step = _COPY_BYTES // one.dtype.width
    return all(
        np.array_equal(
            state.read(one.name, at, min(at + step, one.elements)),
            state.read(other.name, at, min(at + step, one.elements)),
        )
        for at in range(0, one.elements, step)
    )


def stored(
    path: str | os.PathLike[str],
) -> tuple[tuple[TensorSpec, ...], dict[str, Readable], dict[str, str]]:
    """(all tensors of the files, what reads them, the metadata) of a checkpoint."""
    data: dict[str, Readable] = {}
    specs: list[TensorSpec] = []
    metadata: dict[str, str] = {}
    files, listed, of_all = _files(checked_path(path))
    for file in files:
        for spec, bits in _open_file(file, metadata):
            if spec.name in data:
                raise CorruptCheckpoint(f"tensor {spec.name!r} is in two files of {path}")
            if listed.get(spec.name, file.name) != file.name:
                raise CorruptCheckpoint(
                    f"tensor {spec.name!r} is in {file}, but the index says {listed[spec.name]}: "
                    "the files are of two saves",
                    hint=_UNFINISHED_HINT,
                )
            data[spec.name] = bits
            specs.append(spec)
    metadata.update(of_all)
    for name in sorted(listed.keys() - data.keys()):
        raise CorruptCheckpoint(
            f"the index of {path} lists tensor {name!r}, which its files do not hold"
        )
    return tuple(specs), data, metadata


def current_version(folder: Path) -> Path:
    """The folder of the version that ``folder`` shows, which stays as it is while another one takes
    its place; ``folder`` itself where pulse did not write it."""
    shown = f"{PRIVATE}/{CURRENT}/"
    for name in (FILE_NAME, INDEX_NAME, ADAPTER_NAME):
        with suppress(OSError, ValueError):
            if os.readlink(folder / name) == shown + name and (folder / shown / name).is_file():
                return inside(folder, folder / PRIVATE / CURRENT)
    return folder


def inside(folder: Path, entry: Path) -> Path:
    """The place of a folder's ``entry``, links resolved. Raises InputError where a link leads out
    of the folder: its sender would choose what is read. The cache of the Hub consists of
    links to its ``blobs``. Raises OSError."""
    place, root = entry.resolve(strict=True), folder.resolve()
    blobs = root.parent.parent / "blobs"
    if not place.is_relative_to(root) and not (
        root.parent.name == "snapshots" and place.parent == blobs
    ):
        raise InputError(
            f"{str(entry)[:200]} is a link that leads out of its folder",
            hint="Put the file itself in the place of the link if you trust it.",
        )
    return place


def save(
    path: str | os.PathLike[str], state: State, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file atomically: aside, fsync, rename. Aliases are not written, as
    Hugging Face does it.

    ``metadata`` are strings. Raises InputError, and StoreFull when the disk is full; an existing
    file is then untouched.
    """
    if not isinstance(state, State):
        raise InputError(
            f"{type(state).__name__} is not a State", hint="Make one with State.of(tensors)."
        )
    write_atomically(checked_path(path), serialize(state, state.specs, metadata))


def in_file_order(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Wider types first: each tensor then starts at a multiple of its width, so that a mapped file
    can be viewed."""
    return tuple(sorted(specs, key=lambda s: -s.dtype.width))


def serialize(
    state: State, specs: tuple[TensorSpec, ...], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file of some tensors of a state, as chunks of bounded size."""
    specs = in_file_order(specs)
    yield header_bytes(specs, metadata)
    for spec in specs:
        step = _COPY_BYTES // spec.dtype.width
        for start in range(0, spec.elements, step):
            yield state.read(spec.name, start, min(start + step, spec.elements)).view(np.uint8).data


def _files(path: Path) -> tuple[list[Path], dict[str, str], dict[str, str]]:
    """(the files of the checkpoint; of its index, if it has one, the file of each tensor and what
    it states about all)."""
    listed, facts = dict[str, str](), dict[str, str]()
    try:
        folder = current_version(path)
        if not folder.is_dir():
            files = [folder] if folder.is_file() else []
        elif (folder / INDEX_NAME).is_file():
            listed, facts = _indexed(inside(folder, folder / INDEX_NAME))
            files = [folder / name for name in sorted(set(listed.values()))]
            if (folder / FILE_NAME).is_file() and folder / FILE_NAME not in files:
                raise CorruptCheckpoint(
                    f"{folder} has two checkpoints: {FILE_NAME}, and the files of {INDEX_NAME}",
                    hint="Remove the one that is older, or give the path of the file.",
                )
        else:
            files = _not_indexed(folder)
        for file in files if folder.is_dir() else ():
            if file.is_symlink():
                inside(folder, file)
    except PulseError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)[:200]!r}: {error}", hint=_READ_HINT) from None
    if not files:
        found = [file for kind in _OTHER_FILES for file in sorted(path.glob(kind))]
        if found:
            what = (
                f"{path} has no .safetensors file, but {found[0].name}, which is pickled or another"
            )
            raise InputError(f"{what} format", hint=_PICKLED_HINT)
        hint = f"Give a .safetensors file, or a folder with {FILE_NAME} or {INDEX_NAME}."
        raise InputError(f"no checkpoint at {path}", hint=hint)
    return files, listed, facts


def _not_indexed(folder: Path) -> list[Path]:
    """All files of weights. Raises CorruptCheckpoint unless its shards are all those of one save,
    and nothing is with them: a save that was killed leaves some, and those of the save before."""
    files = sorted(folder.glob("*.safetensors"))
    if folder / FILE_NAME in files:
        # Files of other names, such as consolidated.safetensors, are other forms of the weights.
        files = [file for file in files if re.fullmatch(r"model(-\d+-of-\d+)?", file.stem)]
    shards = [found for file in files if (found := _SHARD.fullmatch(file.name))]
    numbers = sorted(int(found[2]) for found in shards)
    if shards and not (
        {(found[1], int(found[3])) for found in shards} == {(shards[0][1], len(files))}
        and numbers in (list(range(len(files))), list(range(1, len(files) + 1)))
    ):
        raise CorruptCheckpoint(
            f"the files of {folder} are not one whole checkpoint, and it has no {INDEX_NAME}: "
            f"{', '.join(file.name for file in files[:8])}",
            hint=_UNFINISHED_HINT,
        )
    return files


def _indexed(index: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(the file of each tensor, what the index says of all)."""
    try:
        read = json.loads(index.read_text())
        places = read["weight_map"]
        names = sorted(set(places.values()))
        said = (read.get("metadata") or {}).items()
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{index} is not an index of shards: {error}") from None
    if not names:
        raise CorruptCheckpoint(f"{index} lists no tensors")
    for name in names:
        if not isinstance(name, str) or not _SAFE_FILE.fullmatch(name):
            raise CorruptCheckpoint(f"{index} names the file {name!r}")
    return places, {key: text for key, text in said if isinstance(text, str)}


class _OpenFile:
    """A file that is read in parts, and in which nothing changes meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_regular(path) as file:
            self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)
        self._opened = os.fstat(self._handle)
        if 0 <= time.time_ns() - self._opened.st_mtime_ns < _TICK_NS:
            # A change within this tick would not show in the file's time.
            threading.Event().wait(_TICK_NS / 1e9)
            self._opened = os.fstat(self._handle)
        self.nbytes = self._opened.st_size

    def read(self, start: int, stop: int) -> UIntArray:
        """Bytes [start, stop). Raises CorruptCheckpoint if the file has changed."""
        data = np.empty(stop - start, np.uint8)
        done = 0
        while done < len(data):
            count = os.preadv(self._handle, [data[done:].data], start + done)
            if count == 0:
                break
            done += count
        now = os.fstat(self._handle)
        was = self._opened
        if done < len(data) or (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns):
            raise CorruptCheckpoint(
                f"{self._path} was written while it was read",
                hint="Read it when it is whole: write it aside and rename it, or watch for a file "
                "that is written last.",
            )
        data.flags.writeable = False
        return data


class _Stored(NamedTuple):
    """A tensor of a file, from the byte ``offset``."""

    file: _OpenFile
    offset: int
    spec: TensorSpec

    def read(self, start: int, stop: int) -> UIntArray:
        width = self.spec.dtype.width
        data = self.file.read(self.offset + start * width, self.offset + stop * width)
        return data.view(self.spec.dtype.uint)


def _open_file(file: Path, metadata: dict[str, str]) -> Iterator[tuple[TensorSpec, _Stored]]:
    try:
        opened = _OpenFile(file)
    except OSError as error:
        hint = _UNFINISHED_HINT if isinstance(error, FileNotFoundError) else _READ_HINT
        raise InputError(f"cannot read {file}: {error.strerror}", hint=hint) from None
    begin = opened.read(0, min(opened.nbytes, 32)).tobytes()
    try:
        head = opened.read(0, 8 + header_length(begin, opened.nbytes))
        placed, file_metadata, start = parse_header(head.data, opened.nbytes)
    except PulseError as error:
        if begin.startswith((b"PK", b"\x80")):
            raise InputError(
                f"{file} is pickled, no safetensors file", hint=_PICKLED_HINT
            ) from None
        if begin.startswith(b"version https://git-lfs"):
            raise InputError(
                f"{file} is a pointer of Git LFS", hint="Run `git lfs pull`."
            ) from None
        raise type(error)(f"{file}: {error}", hint=error.hint) from None
    metadata.update(file_metadata)
    for spec, offset in placed:
        yield spec, _Stored(opened, start + offset, spec)


def unwrapped(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """``tensors``, such as a ``state_dict``, under the names of the model without its wrappers.

    Removed are ``_orig_mod`` (torch.compile), ``_fsdp_wrapped_module`` and
    ``_checkpoint_wrapped_module`` wherever they are in a name, ``module`` (DistributedDataParallel,
    DataParallel, AveragedModel) in front of all names, and the tensor ``n_averaged`` of an
    AveragedModel. The tensors are the same objects, in the same
    order; names without such parts stay. A trainer passes the result to `Publisher.publish`, a
    worker to `pulse_rl.frameworks.torch.apply_`. Raises InputError where two names become one.
    """
    if not isinstance(tensors, Mapping):
        raise InputError(
            f"unwrapped() takes a mapping of names to tensors, not a {type(tensors).__name__}",
            hint="Pass model.state_dict().",
        )
    for name in tensors:
        check_tensor_name(name)
    names = _plain_names(tensors)
    result: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in names:
            continue
        if names[name] in result:
            raise InputError(
                f"two tensors would be called {names[name]!r} without the wrappers' parts of "
                "their names",
                hint="Keep these names, or rename the tensors yourself.",
            )
        result[names[name]] = tensor
    return result


def is_wrapped(names: Iterable[str]) -> bool:
    """Whether `unwrapped` would change any of these names of one state."""
    names = tuple(names)
    plain = _plain_names(names)
    return any(plain.get(name) != name for name in names)


def adapter_names(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that only a PEFT model in memory has: its checkpoints have others."""
    return [name for name in names if _ADAPTED.search(f".{name}")]


def without_wrappers(path: str) -> str:
    """The name of a module or tensor without the parts that wrappers add inside of a model."""
    return ".".join(part for part in path.split(".") if part not in _ANYWHERE)


def fused_experts(specs: Iterable[TensorSpec]) -> list[str]:
    """The names that look as if transformers had fused the experts of a layer: one tensor of three
    dimensions among ``experts``, in place of a module for each. Some models' checkpoints have such
    tensors."""
    names = (spec.name for spec in specs if len(spec.shape) == 3)
    return [name for name in names if name.split(".")[-2:-1] == ["experts"]]


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the parts that wrappers add; none for what a wrapper counts."""
    paths = {name: name.split(".") for name in names}
    if len(paths) > 1 and all(
        (path[0] == _AROUND_ALL) == (name != _AVERAGED) for name, path in paths.items()
    ):
        paths.pop(_AVERAGED, None)
    for name, path in paths.items():
        paths[name] = [*(part for part in path[:-1] if part not in _ANYWHERE), path[-1]]
    while paths and all(len(path) > 1 and path[0] == _AROUND_ALL for path in paths.values()):
        paths = {name: path[1:] for name, path in paths.items()}
    return {name: ".".join(path) for name, path in paths.items()}
