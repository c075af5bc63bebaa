"""A folder for each version, as trainers write and engines read them: ``broadcasts/step_12/``, with
a marker.

::

    FOLDER/step_12/STABLE, config.json, model.safetensors …     plain files
    FOLDER/.pulse/000000000003-5f3a0c11/                        what is being written, or removed

A version's folder is written beside the others, its marker last, and takes its name by one rename:
a reader finds it whole or not at all, and so does a process that was killed. It is removed by a
rename first, too.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from .._util.files import disk_error, make_folder, sync_folder
from .._util.settings import checked_count
from ..errors import InputError, PulseError
from ..history.file import beside, save_history, specs_of
from ..patch.blocks import cut
from ..patch.history import History
from ..state.digest import StateDigest
from ..state.tensors import State
from ..stream.manifest import Manifest
from .checkpoint import (
    ADAPTER_NAME,
    CURRENT,
    FILE_NAME,
    INDEX_NAME,
    PRIVATE,
    current_version,
    load,
    save,
)
from .folder import (
    check_file,
    locked,
    metadata_of,
    remove_all_but,
    replace_folder,
    write_checkpoint,
)

LAYOUTS = {
    "prime-rl": "step_{}/STABLE",
    "slime": "weight_v{:06}",
    "areal": "weight_update_v{}",
    "hf": "checkpoint-{}",
}
"""How frameworks name the folder of a version, and the file whose presence says that it is
complete."""
_PLAIN = "[A-Za-z0-9._-]*"
_PATTERN = re.compile(rf"({_PLAIN})\{{(?::0?([1-9]))?\}}({_PLAIN})(?:/([A-Za-z0-9]{_PLAIN}))?")
_VERSION = "pulse.version"


class Layout(NamedTuple):
    """The names of versions' folders: ``before``, a number of at least ``digits`` digits,
    ``after``; and of the ``marker`` in each, "" for none."""

    before: str
    digits: int
    after: str
    marker: str

    @classmethod
    def of(cls, text: str) -> Self:
        """The layout of a framework's name, or of a pattern such as ``step_{}/STABLE`` or
        ``weight_v{:06}``."""
        match = _PATTERN.fullmatch(LAYOUTS.get(text, text))
        if match is None or not (match[1] + match[3]).strip(".") or match[1].startswith("."):
            raise InputError(
                f"{text!r} is no layout",
                hint=f"Give {', '.join(LAYOUTS)}, or a pattern such as step_{{}}/STABLE.",
            )
        return cls(match[1], int(match[2] or 1), match[3], match[4] or "")

    def name(self, number: int) -> str:
        return f"{self.before}{number:0{self.digits}}{self.after}"

    def versions(self, folder: Path) -> Iterator[tuple[int, Path]]:
        """(version, its folder) of those in ``folder`` that pulse wrote."""
        pattern = re.compile(rf"{re.escape(self.before)}\d+{re.escape(self.after)}")
        for entry in folder.iterdir() if folder.is_dir() else ():
            if pattern.fullmatch(entry.name) and not entry.is_symlink():
                version = _version_in(entry)
                if version is not None:
                    yield version, entry


def _version_in(folder: Path) -> int | None:
    """The version that pulse wrote into ``folder``; None where the checkpoint there is another's,
    or damaged."""
    try:
        text = load(folder)[1].get(_VERSION, "")
    except (PulseError, OSError):
        return None
    return int(text) if text.isdecimal() else None


def add_version(
    folder: Path,
    layout: Layout,
    number: int,
    version: int,
    write: Callable[[Path], None],
    *,
    keep: int | None = None,
    force: bool = False,
) -> Path:
    """The folder, in ``folder``, of ``version`` under its ``number``, with what ``write`` puts into
    the empty folder that it is given. Of the folders that pulse wrote the newest ``keep`` stay. One
    process does so at a time; others wait.

    Raises InputError where something else has the name, unless ``force``; what ``write`` raises;
    StoreFull and StoreError. Nothing is in the place of the name then but what was there before.
    """
    private, target = folder / PRIVATE, folder / layout.name(number)
    try:
        make_folder(private)
        if private.is_symlink() or (private / CURRENT).is_symlink():
            raise InputError(f"{folder} is a followed checkpoint", hint="Give a separate folder.")
        with locked(private):
            remove_all_but(private, set())
            _check_target(target, force=force)
            made = _aside(private, version)
            made.mkdir()
            try:
                write(made)
                sync_folder(made)
                if layout.marker:
                    (made / layout.marker).touch()
                    sync_folder(made)
                if os.path.lexists(target):
                    os.rename(target, _aside(private, version))
                os.rename(made, target)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
            sync_folder(folder)
            if keep is not None:
                others = sorted(each for each in layout.versions(folder) if each[1] != target)
                for _, old in others[: max(0, len(others) + 1 - keep)]:
                    os.rename(old, _aside(private, version))
            remove_all_but(private, set())
    except OSError as error:
        raise disk_error(error, f"write {target}") from error
    return target


def _aside(private: Path, version: int) -> Path:
    return private / f"{version:012d}-{secrets.token_hex(4)}"


def _check_target(target: Path, *, force: bool) -> None:
    """Raises InputError where what has the name was not written by pulse, unless ``force``."""
    if force or not os.path.lexists(target):
        return
    for name in (FILE_NAME, ADAPTER_NAME, INDEX_NAME):
        if (target / name).is_file():
            check_file(target / name, force=False)
            return
    raise InputError(
        f"{str(target)[:200]} exists and was not written by this command",
        hint="Choose another folder, or replace it with --force.",
    )


class HeldVersion(NamedTuple):
    """A version that is to be written: its verified ``state`` with the ``digest``, its
    ``manifest``, what is remembered of the versions before, and the ``files`` next to the
    weights."""

    state: State
    digest: StateDigest
    manifest: Manifest
    history: History
    files: Mapping[str, bytes]


def save_version(
    held: HeldVersion,
    path: Path,
    metadata: Mapping[str, str],
    *,
    sharded: bool,
    force: bool,
    layout: str | None,
    keep: int | None,
    earlier: Path | None,
) -> Path | None:
    """Writes a version as `Subscriber.save` says. ``earlier``: where the one before was written,
    whose unchanged files are linked. Returns where this one lies; of a single file, ``earlier``."""
    # 1. What is to be written where.
    state, digest, manifest, history, files = held
    named = None if layout is None else Layout.of(layout)
    if keep is not None and checked_count("keep", keep) and named is None:
        raise InputError(
            "keep is for the folders of a layout", hint="Otherwise the newest version is kept."
        )
    facts = metadata_of(manifest.version, digest.root) | dict(metadata)
    blocks = cut(specs_of(digest))

    def write(into: Path) -> None:
        write_checkpoint(into, state, digest, files, facts, sharded=sharded, earlier=earlier)
        save_history(beside(into), history, blocks, digest.root)

    # 2. One file, the folder that shows the newest version, or a folder of this version's own.
    if path.suffix == ".safetensors" and named is None:
        save_history(beside(path), history, blocks, digest.root)
        save(path, state, facts)
        return earlier
    if named is None:
        replace_folder(path, f"{manifest.version:012d}", write, force=force)
        return current_version(path)
    step = manifest.metadata.get("step")
    number = step if type(step) is int and step >= 0 else manifest.version
    return add_version(path, named, number, manifest.version, write, keep=keep, force=force)
