"""The files that commands read and write: no output replaces what Pulse did not write, no input is a device."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._util.files import write_atomically
from ..errors import InputError
from ..patch.header import MAGIC as PATCH_MAGIC

PAGE_MARK = b'<meta name="generator" content="pulse-rl'
"""In the head of every page of `pulse_rl.report`."""
CHECKPOINT_MARK = b'"pulse.root":"'
"""In the metadata, which come first, of every checkpoint that `apply` and `follow` write."""
_HEAD = 4096


def check_output(out: Path, *, force: bool) -> None:
    """Every file that a command writes is checked by this first. It may be replaced if it is what the command makes
    again: a patch, a page, or a checkpoint that `apply` or `follow` wrote. Anything else needs ``force``. Raises
    InputError.
    """
    try:
        mode = out.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # writing has an error for the second
        return
    except OSError as error:
        raise InputError(f"cannot write {_short(out)}: {error.strerror}", hint="Check the path.") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{_short(out)} is a folder", hint="Give the path of a file.")
    if not stat.S_ISREG(mode):
        raise InputError(f"{_short(out)} is not a regular file", hint="Give the path of a file.")
    if not force and not _is_own(out):
        raise InputError(
            f"{_short(out)} exists and was not written by this command",
            hint="Choose another path, or replace it with --force.",
        )


def write_output(out: Path, chunks: Iterable[bytes | memoryview], *, force: bool) -> None:
    """Puts a file at ``out`` whole or not at all. Raises InputError as `check_output`, StoreFull and StoreError."""
    check_output(out, force=force)
    write_atomically(out, chunks)


def checked_input(path: Path) -> Path:
    """``path``, if it is a regular file. A FIFO or a device might never end. Raises InputError."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path
        reason = "it is not a regular file"
    except OSError as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    raise InputError(f"cannot read {_short(path)}: {reason}", hint="Check the path.")


def read_study(path: Path) -> Any:
    """The JSON of a study. Raises InputError."""
    try:
        return json.loads(checked_input(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        hint = "Give the output of `pulse study --json`."
        raise InputError(f"cannot read {_short(path)}: {error}", hint=hint) from None


def _is_own(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            start = opened.read(_HEAD)
    except OSError as error:
        raise InputError(f"cannot read {_short(file)}: {error.strerror}", hint="Check the path.") from None
    return start.startswith(PATCH_MAGIC) or PAGE_MARK in start or CHECKPOINT_MARK in start


def _short(path: Path) -> str:
    return str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}…"
