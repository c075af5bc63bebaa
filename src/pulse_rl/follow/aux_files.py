"""The files beside a checkpoint's weights without which no engine loads them: config, tokenizer,
chat template, index.

A version of a stream carries them (docs/format.md, section 5). They are small, and a version's
files are whole: some follow from nothing that is stored elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._util.files import open_regular
from .._util.settings import checked_path
from ..errors import InputError
from ..state.cast import DTypeLike, compute_dtype_named
from ..state.tensors import TensorSpec
from ..stream.names import FILE_NAME_PART, MAX_FILES, MAX_FILES_BYTES, flaw_of
from .checkpoint import INDEX_NAME, inside

_TAKEN = (
    ".json",
    ".jinja",
    ".model",
    ".txt",
    ".tiktoken",
    ".spm",
    ".vocab",
    ".py",
    ".yaml",
    ".yml",
)
_NOT_TAKEN = re.compile(r"trainer_state\.json|(?!model\.safetensors\.).*\.index\.json")
_TEMPLATES = "additional_chat_templates"
_NO_LAYER = r"(?:(?!\d+\.)[^.]+\.)*"
_HEAD = re.compile(rf"{_NO_LAYER}(?:lm_head|embed_out)\.weight")
_EMBEDDING = re.compile(
    rf"{_NO_LAYER}(?:embed_tokens|word_embeddings|tok_embeddings|embed_in|wte|shared)\.weight"
)
# The tensors that ``tie_word_embeddings`` may tie: of no layer, as those have numbers.
_TIED = re.compile(
    rf"{_HEAD.pattern}|{_EMBEDDING.pattern}|cls\.predictions\.(?:decoder\.)?(?:weight|bias)"
)
_TYPES = {"BF16": "bfloat16", "F16": "float16"}


def checked_files(files: object) -> dict[str, bytes]:
    """The bytes of ``files`` by name, in the order of the names. Raises InputError."""
    if isinstance(files, str | os.PathLike):
        return files_of(checked_path(files))
    if not isinstance(files, Mapping):
        raise InputError(
            f"files must map names to bytes or paths, not be a {type(files).__name__}",
            hint="Such as {'config.json': b'{}'}, or a checkpoint's folder.",
        )
    if len(files) > MAX_FILES:
        raise InputError(
            f"{len(files)} files are more than {MAX_FILES}", hint="Name those that a loader needs."
        )
    found: dict[str, bytes] = {}
    room = MAX_FILES_BYTES
    for name in sorted(files, key=str):
        given = files[name]
        if not isinstance(name, str) or not isinstance(
            given, bytes | bytearray | memoryview | str | os.PathLike
        ):
            raise InputError(f"file {name!r} must be bytes or a path, not a {type(given).__name__}")
        found[name] = (
            _read(checked_path(given), room)
            if isinstance(given, str | os.PathLike)
            else bytes(given)
        )
        room -= len(found[name])
    if flaw := flaw_of((name, len(data)) for name, data in found.items()):
        raise InputError(f"the version {flaw}")
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    """What lies beside the weights in a checkpoint's ``folder`` and a loader may need: JSON,
    templates, a tokenizer's files, a model's own code, and the index of sharded weights; no
    weights, and nothing of a trainer's state. Raises InputError."""
    try:
        names = [file.name for file in folder.iterdir() if file.suffix in _TAKEN and file.is_file()]
        more = [
            f"{_TEMPLATES}/{file.name}"
            for file in (folder / _TEMPLATES).glob("*.jinja")
            if file.is_file()
        ]
    except OSError as error:
        raise _unreadable(folder, error) from None
    taken = [
        name
        for name in [*names, *more]
        if not _NOT_TAKEN.fullmatch(name) and not flaw_of([(name, 0)])
    ]
    try:
        return checked_files({name: inside(folder, folder / name) for name in taken})
    except OSError as error:  # it is gone
        raise _unreadable(folder, error) from None


def of_dtype(files: Mapping[str, bytes], dtype: DTypeLike | None) -> dict[str, bytes]:
    """The same with a ``config.json`` that names the compute dtype to which the weights are cast:
    engines compute in what it says."""
    target = None if dtype is None else _TYPES.get(compute_dtype_named(dtype).name)
    config, parts = _config(files)
    for part in parts if target else ():
        for key in ("dtype", "torch_dtype"):
            if part.get(key) in ("float32", "float64"):
                part[key] = target
    return _with_config(files, config)


def of_quantized(
    files: Mapping[str, bytes], quantization: Mapping[str, Any] | None
) -> dict[str, bytes]:
    """The same with a ``config.json`` that has the model's ``quantization_config``, where it has
    none: a loader would take codes for weights."""
    config, parts = _config(files)
    if parts and quantization is not None and not config.get("quantization_config"):
        config["quantization_config"] = dict(quantization)
    return _with_config(files, config)


def of_weights(
    files: Mapping[str, bytes], specs: Mapping[str, TensorSpec], leaves: Mapping[str, bytes]
) -> dict[str, bytes]:
    """The same with a ``config.json`` that agrees with the tensors, aliases among them, whose
    digests are ``leaves``: a head with bits of its own is not tied, and the vocabulary has the rows
    of the embedding. Both may change while a model is trained."""
    config, parts = _config(files)
    heads = [name for name in specs if _HEAD.fullmatch(name)]
    inputs = [name for name in specs if _EMBEDDING.fullmatch(name)]
    tied = [part for part in parts if part.get("tie_word_embeddings") is True]
    sizes = [part for part in parts if type(part.get("vocab_size")) is int]
    rows = {specs[name].shape[:1] for name in [*heads, *inputs]}
    if len(heads) == 1 and inputs and all(leaves[heads[0]] != leaves[name] for name in inputs):
        for part in tied:
            part["tie_word_embeddings"] = False
    # The embeddings of some models have more rows than the vocabulary, and their heads have not.
    if inputs and (heads or tied) and len(rows) == 1 and rows != {()}:
        for part in sizes if len(sizes) == 1 else ():
            (part["vocab_size"],) = next(iter(rows))
    return _with_config(files, config)


def are_tied(files: Mapping[str, bytes], alias: str, name: str) -> bool:
    """Whether the config ties two tensors, so that a loader makes one of the other."""
    return any(part.get("tie_word_embeddings") is True for part in _config(files)[1]) and all(
        _TIED.fullmatch(each) for each in (alias, name)
    )


def _config(files: Mapping[str, bytes]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The config, and a list of it and of those of the model's parts; nothing where it is none."""
    try:
        config = json.loads(files["config.json"])
    except (KeyError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        return {}, []
    return config, [config, *(part for part in config.values() if isinstance(part, dict))]


def _with_config(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, bytes]:
    """``files``, with this config if it is another."""
    if config == _config(files)[0]:
        return dict(files)
    return {**files, "config.json": (json.dumps(config, indent=2) + "\n").encode()}


def weight_map(files: Mapping[str, bytes]) -> dict[str, str]:
    """Which file each tensor is in, by the index among ``files``; nothing where there is none that
    makes sense."""
    try:
        places = json.loads(files[INDEX_NAME])["weight_map"]
        found = {str(name): str(file) for name, file in places.items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}
    name = re.compile(rf"{FILE_NAME_PART}\.safetensors")
    return found if all(map(name.fullmatch, found.values())) else {}


def _read(file: Path, room: int) -> bytes:
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_size > room:
                raise InputError(
                    f"{str(file)[:200]!r} is too large: the files of a version have at most "
                    f"{MAX_FILES_BYTES} bytes in all",
                    hint="Name the files that a loader needs.",
                )
            return opened.read(room + 1)
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read {str(path)[:200]!r}: {error.strerror}", hint="Check the path.")
