"""Checkpoints on disk: safetensors files, single or sharded with an index as Hugging Face writes
them; and the names of tensors as they have them, without the parts that a module's wrapper adds
(DDP, FSDP, torch.compile)."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .._util.files import open_regular, write_atomically
from .._util.settings import checked_path
from ..errors import CorruptCheckpoint, InputError, PulseError
from ..state.bits import UIntArray
from ..state.header import header_bytes, parse_header
from ..state.tensors import State, TensorSpec, check_tensor_name

INDEX_NAME = "model.safetensors.index.json"
FILE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_model.safetensors"
"""A PEFT adapter's weights, beside its ``adapter_config.json``."""
PRIVATE, CURRENT = ".pulse", "current"
"""In a folder that pulse writes: what holds its versions, and the link to the one that is shown
(see `folder`)."""
_SAFE_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_COPY_BYTES = 64 << 20
_READ_HINT = "Check the path and its permissions."

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
    """(state mapped read-only from disk, metadata) of a checkpoint folder or a .safetensors file.
    What an index says of all shards counts more than what they say."""
    data: dict[str, UIntArray] = {}
    specs: list[TensorSpec] = []
    metadata: dict[str, str] = {}
    files, listed, of_all = _files(checked_path(path))
    for file in files:
        for spec, bits in _map_file(file, metadata):
            if spec.name in data:
                raise CorruptCheckpoint(f"tensor {spec.name!r} is in two files of {path}")
            data[spec.name] = bits
            specs.append(spec)
    metadata.update(of_all)
    for name in sorted(listed - data.keys()):
        raise CorruptCheckpoint(
            f"the index of {path} lists tensor {name!r}, which its files do not hold"
        )
    return State(tuple(specs), data), metadata


def current_version(folder: Path) -> Path:
    """The folder of the version that ``folder`` shows, which stays as it is while another one takes
    its place; ``folder`` itself where pulse did not write it."""
    shown = f"{PRIVATE}/{CURRENT}/"
    for name in (FILE_NAME, INDEX_NAME, ADAPTER_NAME):
        with suppress(OSError, ValueError):
            if os.readlink(folder / name) == shown + name and (folder / shown / name).is_file():
                return (folder / PRIVATE / CURRENT).resolve(strict=True)
    return folder


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


def _files(path: Path) -> tuple[list[Path], set[str], dict[str, str]]:
    """(the checkpoint's files; the names that its index lists, and what it says of all, if it has
    one)."""
    path = current_version(path)
    try:
        if path.is_file():
            return [path], set(), {}
        if (path / INDEX_NAME).is_file():
            return _indexed(path / INDEX_NAME)
        if (path / FILE_NAME).is_file():
            return [path / FILE_NAME], set(), {}
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)[:200]!r}: {error}", hint=_READ_HINT) from None
    if not files:
        raise InputError(
            f"no checkpoint at {path}",
            hint=f"Give a .safetensors file, or a folder with {FILE_NAME} or {INDEX_NAME}.",
        )
    return files, set(), {}


def _indexed(index: Path) -> tuple[list[Path], set[str], dict[str, str]]:
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
    facts = {key: text for key, text in said if isinstance(text, str)}
    return [index.parent / name for name in names], set(places), facts


def _map_file(file: Path, metadata: dict[str, str]) -> Iterator[tuple[TensorSpec, UIntArray]]:
    try:
        with open_regular(file) as handle:
            size = os.fstat(handle.fileno()).st_size
            view = memoryview(
                mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            )
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}", hint=_READ_HINT) from None
    try:
        placed, file_metadata, start = parse_header(view, size)
    except PulseError as error:
        raise type(error)(f"{file}: {error}", hint=error.hint) from None
    metadata.update(file_metadata)
    for spec, offset in placed:
        raw = np.frombuffer(view, np.uint8, spec.nbytes, start + offset)
        aligned = raw if (start + offset) % spec.dtype.width == 0 else raw.copy()
        yield spec, aligned.view(spec.dtype.uint)


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
    return [
        spec.name
        for spec in specs
        if len(spec.shape) == 3 and spec.name.split(".")[-2:-1] == ["experts"]
    ]


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
