"""The files that commands read and write: no output replaces what Pulse did not write, no input is a device."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._util.files import open_regular, write_atomically
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
        raise InputError(f"cannot write {shortened(out)}: {error.strerror}", hint="Check the path.") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{shortened(out)} is a folder", hint="Give the path of a file.")
    if not stat.S_ISREG(mode):
        raise InputError(f"{shortened(out)} is not a regular file", hint="Give the path of a file.")
    if not force and not _is_own(out):
        raise InputError(
            f"{shortened(out)} exists and was not written by this command",
            hint="Choose another path, or replace it with --force.",
        )


def write_output(out: Path, chunks: Iterable[bytes | memoryview], *, force: bool) -> None:
    """Puts a file at ``out`` whole or not at all. Raises InputError as `check_output`, StoreFull and StoreError."""
    check_output(out, force=force)
    write_atomically(out, chunks)


def read_study(path: Path) -> Any:
    """The JSON of a study. Raises InputError."""
    try:
        with open_regular(path) as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        hint = "Give the output of `pulse study --json`."
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read {shortened(path)}: {reason}", hint=hint) from None


def _is_own(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            start = opened.read(_HEAD)
    except OSError as error:
        raise InputError(f"cannot read {shortened(file)}: {error.strerror}", hint="Check the path.") from None
    return start.startswith(PATCH_MAGIC) or PAGE_MARK in start or CHECKPOINT_MARK in start


def shortened(path: Path | str) -> str:
    """For a message: a path that is too long for a file is too long for a line, too."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}…"
