"""The files beside a checkpoint's weights without which no engine loads them: config, tokenizer,
chat template, index.

A version of a stream carries them (docs/format.md, section 5). They are small, and a version's
files are whole: some follow from nothing that is stored elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._util.files import open_regular
from .._util.settings import checked_path
from ..errors import InputError
from .cast import DTypeLike, compute_dtype_named
from .checkpoint import INDEX_NAME

MAX_FILES = 256
MAX_BYTES = 128 << 20
"""Of all files of a version; the largest tokenizers have a third of it."""
_MAX_NAME = 255

Files = Mapping[str, bytes | str | os.PathLike[str]] | str | os.PathLike[str]
"""What is accepted as a version's files: a mapping of names to their bytes or their paths, or a
checkpoint's folder."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,3}}")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
"""A loader would take such a file for weights, or run what is in it."""
_OURS = "pulse."
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
_TYPES = {"BF16": "bfloat16", "F16": "float16"}


def flaw_of(files: Iterable[tuple[str, int]]) -> str:
    """What is wrong with the names and sizes of a version's files, which are in the order of their
    names; "" if nothing is."""
    total, names = 0, list[str]()
    for name, nbytes in files:
        if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
            return f"has a file {name[:_MAX_NAME]!r}, which is no plain relative name"
        if name.lower().endswith(_WEIGHTS) or name.lower().startswith(_OURS):
            return f"has a file {name!r}: such a name is for weights, or for pulse's own files"
        total += max(nbytes, 0)
        names.append(name)
        if nbytes < 0 or total > MAX_BYTES or len(names) > MAX_FILES:
            return f"has more files than {MAX_FILES}, or more than {MAX_BYTES} bytes of them"
    if names != sorted(names):
        return "has files that are not in the order of their names"
    folded = {name.lower() for name in names}
    folders = {
        "/".join(name.split("/")[:depth])
        for name in folded
        for depth in range(1, name.count("/") + 1)
    }
    if len(folded) < len(names) or folded & folders:
        return "has two files of one name, apart from capitals, or a file where a folder is"
    return ""


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
    room = MAX_BYTES
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
        raise InputError(
            f"cannot read {str(folder)[:200]!r}: {error.strerror}", hint="Check the path."
        ) from None
    taken = [
        name
        for name in [*names, *more]
        if not _NOT_TAKEN.fullmatch(name) and not flaw_of([(name, 0)])
    ]
    return checked_files({name: folder / name for name in taken})


def of_dtype(files: Mapping[str, bytes], dtype: DTypeLike | None) -> dict[str, bytes]:
    """The same with a ``config.json`` that names the compute dtype to which the weights are cast:
    engines compute in what it says."""
    target = None if dtype is None else _TYPES.get(compute_dtype_named(dtype).name)
    try:
        config = json.loads(files["config.json"])
        if target is None or not isinstance(config, dict):
            return dict(files)
    except (KeyError, ValueError, RecursionError):
        return dict(files)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    wide = [
        (part, key)
        for part in parts
        for key in ("dtype", "torch_dtype")
        if part.get(key) in ("float32", "float64")
    ]
    for part, key in wide:
        part[key] = target
    return (
        {**files, "config.json": (json.dumps(config, indent=2) + "\n").encode()}
        if wide
        else dict(files)
    )


def of_quantized(
    files: Mapping[str, bytes], quantization: Mapping[str, Any] | None
) -> dict[str, bytes]:
    """The same with a ``config.json`` that has the model's ``quantization_config``, where it has
    none: a loader would take codes for weights."""
    try:
        config = json.loads(files["config.json"])
        if (
            quantization is None
            or not isinstance(config, dict)
            or config.get("quantization_config")
        ):
            return dict(files)
    except (KeyError, ValueError, RecursionError):
        return dict(files)
    config["quantization_config"] = dict(quantization)
    return {**files, "config.json": (json.dumps(config, indent=2) + "\n").encode()}


def weight_map(files: Mapping[str, bytes]) -> dict[str, str]:
    """Which file each tensor is in, by the index among ``files``; nothing where there is none that
    makes sense."""
    try:
        places = json.loads(files[INDEX_NAME])["weight_map"]
        found = {str(name): str(file) for name, file in places.items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}
    return (
        found
        if all(re.fullmatch(rf"{_PART}\.safetensors", file) for file in found.values())
        else {}
    )


def _read(file: Path, room: int) -> bytes:
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_size > room:
                raise InputError(
                    f"{str(file)[:200]!r} is too large: the files of a version have at most "
                    f"{MAX_BYTES} bytes in all",
                    hint="Name the files that a loader needs.",
                )
            return opened.read(room + 1)
    except OSError as error:
        raise InputError(
            f"cannot read {str(file)[:200]!r}: {error.strerror}", hint="Check the path."
        ) from None
