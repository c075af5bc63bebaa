"""A checkpoint's folder that changes from one version to the next in one step: its weights, and the
files beside them.

::

    FOLDER/config.json          -> .pulse/current/config.json
    FOLDER/model.safetensors    -> .pulse/current/model.safetensors
    FOLDER/.pulse/current       -> 000000000012-5f3a0c11
    FOLDER/.pulse/000000000012-5f3a0c11/     all files of one version

A version is whole and on disk before ``current``, a symbolic link, is replaced by a rename: at that
moment all files of the folder are the new version's, and a process that is killed leaves the one or
the other. FOLDER itself may be a mount point, and whatever else lies there stays. The version
before stays until the next one is written, for those who opened it by its own path: a loader that
needs several files of one version resolves ``.pulse/current`` first.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .._util.files import disk_error, make_folder, sync_folder, write_atomically
from ..errors import InputError, PulseError
from ..state.digest import StateDigest, root_of
from ..state.tensors import State, TensorSpec
from .checkpoint import ADAPTER_NAME, CURRENT, FILE_NAME, INDEX_NAME, PRIVATE, load, serialize
from .companions import weight_map

_ROOT = "pulse.root"
CHECKPOINT_MARK = f'"{_ROOT}"'.encode()
"""In the metadata, which come first, of every file of weights and every index that pulse writes."""
_HEAD = 4096
_LOCK = "lock"
_OWN = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}|link-[0-9a-f]{8}")
_SHARD_BYTES = 5_000_000_000


def write_checkpoint(
    into: Path,
    state: State,
    digest: StateDigest,
    files: Mapping[str, bytes],
    metadata: Mapping[str, str],
    *,
    sharded: bool,
    earlier: Path | None = None,
) -> None:
    """Puts a checkpoint of ``state`` with this ``digest`` into the folder ``into``: one file of
    weights, or, where it is ``sharded``, those of the index among ``files`` with an index of their
    own; where no index fits the state, files of about 5 GB. With an ``adapter_config.json`` among
    the files it is a PEFT adapter.

    A shard's metadata have the root of its own tensors, the index's those of the whole: one that is
    as it was in ``earlier``, a checkpoint that this process wrote or verified, is a hard link to
    it. Raises StoreFull and StoreError."""
    for name, chunks, own in checkpoint_files(state, digest, files, metadata, sharded=sharded):
        if own is None or earlier is None or not _linked(earlier / name, into / name, own):
            write_atomically(into / name, chunks)


def checkpoint_files(
    state: State,
    digest: StateDigest,
    files: Mapping[str, bytes],
    metadata: Mapping[str, str],
    *,
    sharded: bool,
) -> Iterator[tuple[str, Iterable[bytes | memoryview], dict[str, str] | None]]:
    """The files of the checkpoint that `write_checkpoint` writes: (name, bytes in chunks, a shard's
    metadata)."""
    for name, data in files.items():
        if name != INDEX_NAME:
            yield name, [data], None
    is_adapter = "adapter_config.json" in files and "config.json" not in files
    if is_adapter or not sharded:
        yield (
            ADAPTER_NAME if is_adapter else FILE_NAME,
            serialize(state, state.specs, metadata),
            None,
        )
        return
    shards: dict[str, list[TensorSpec]] = {}
    places = _places(state, weight_map(files))
    for spec in state.specs:
        shards.setdefault(places[spec.name], []).append(spec)
    for file, specs in sorted(shards.items()):
        own = {"format": "pt", _ROOT: root_of(b"".join(digest.tensor(spec) for spec in specs))}
        yield file, serialize(state, tuple(specs), own), own
    whole = {key: text for key, text in metadata.items() if key != "format"}
    index = {
        "metadata": {"total_size": state.nbytes, **whole},
        "weight_map": dict(sorted(places.items())),
    }
    yield INDEX_NAME, [(json.dumps(index, indent=2) + "\n").encode()], None


def metadata_of(version: int, root: str) -> dict[str, str]:
    """What the weights of a version's checkpoint say of themselves."""
    return {"format": "pt", "pulse.version": str(version), _ROOT: root}


def _linked(earlier: Path, file: Path, metadata: Mapping[str, str]) -> bool:
    """Whether ``file`` is now a hard link to the weights ``earlier``, which have the same
    ``metadata``."""
    try:
        if load(earlier)[1] == metadata:
            os.link(earlier, file)
            return True
    except (PulseError, OSError):  # it is gone, is another's, or the file system has no links
        pass
    return False


def check_folder(folder: Path, names: Iterable[str], *, force: bool) -> None:
    """Raises InputError where the files ``names`` cannot take their places in ``folder``: what
    pulse did not write needs ``force``, and other weights beside them would be loaded, too."""
    names = set(names)
    try:
        if not folder.exists():
            return
        for entry in sorted(folder.iterdir()):
            if is_shown(entry):
                continue
            if entry.name == INDEX_NAME and entry.name not in names:
                raise InputError(
                    f"{folder} holds a sharded checkpoint", hint="Give a separate folder."
                )
            if entry.suffix == ".safetensors" and entry.name not in names:
                raise InputError(
                    f"{folder} holds other weights, {entry.name}", hint="Give a separate folder."
                )
            if entry.name in names:
                check_file(entry, force=force)
    except OSError as error:
        raise InputError(
            f"cannot write {str(folder)[:200]}: {error.strerror}", hint="Check the path."
        ) from None


def check_file(file: Path, *, force: bool, mark: bytes = CHECKPOINT_MARK) -> None:
    """Raises InputError unless ``file``, which is there, may be replaced: a regular file with
    ``mark`` near its beginning, or, with ``force``, any. Raises OSError."""
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise InputError(f"{str(file)[:200]} is a folder", hint="Give the path of a file.")
    if not stat.S_ISREG(mode):
        raise InputError(
            f"{str(file)[:200]} is not a regular file", hint="Give the path of a file."
        )
    if force:
        return
    with file.open("rb") as opened:
        start = opened.read(_HEAD)
    if mark not in start:
        raise InputError(
            f"{str(file)[:200]} exists and was not written by this command",
            hint="Choose another path, or replace it with --force.",
        )


def is_shown(entry: Path) -> bool:
    """Whether an entry of a folder is a link to the same name of the folder's current version."""
    return entry.is_symlink() and os.readlink(entry) == f"{PRIVATE}/{CURRENT}/{entry.name}"


def replace_folder(
    folder: Path, label: str, write: Callable[[Path], None], *, force: bool = False
) -> None:
    """Makes what ``write`` puts into the empty folder that it is given what ``folder`` shows, in
    one step. ``label``, 12 hexadecimal digits, begins its private name. One process does so at a
    time; others wait.

    Raises InputError as `check_folder`, what ``write`` raises, StoreFull and StoreError; the folder
    then shows what it did before.
    """
    private = folder / PRIVATE
    try:
        make_folder(private)
        if private.is_symlink() or (
            (private / CURRENT).exists() and not (private / CURRENT).is_symlink()
        ):
            raise InputError(
                f"{private} is not a folder that pulse made", hint="Give a separate folder."
            )
        with locked(private):
            before = _target(private)
            remove_all_but(private, {before})
            made = private / f"{label}-{secrets.token_hex(4)}"
            made.mkdir()
            try:
                write(made)
                names = sorted(entry.name for entry in made.iterdir())
                check_folder(folder, names, force=force)
                sync_folder(made)
                sync_folder(private)
                # A new name leads nowhere until the next line: as if the file was not there.
                for name in names:
                    with suppress(FileExistsError):
                        (folder / name).symlink_to(f"{PRIVATE}/{CURRENT}/{name}")
                _replace_link(private / CURRENT, made.name, private)
            except BaseException:
                if _target(private) != made.name:
                    shutil.rmtree(made, ignore_errors=True)
                raise
            sync_folder(private)
            for name in names:
                if not is_shown(
                    folder / name
                ):  # a file that pulse wrote at another time, or that may be replaced
                    _replace_link(folder / name, f"{PRIVATE}/{CURRENT}/{name}", private)
            for entry in folder.iterdir():
                if is_shown(entry) and entry.name not in names:
                    entry.unlink()
            sync_folder(folder)
            remove_all_but(private, {before, made.name})
    except OSError as error:
        raise disk_error(error, f"write {folder}") from error


@contextmanager
def locked(private: Path) -> Iterator[None]:
    """Held by one process at a time, and by none that was killed."""
    with (private / _LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _target(private: Path) -> str:
    """The name of the current version; "" where there is none."""
    try:
        return os.readlink(private / CURRENT)
    except OSError:
        return ""


def _replace_link(link: Path, target: str, private: Path) -> None:
    """Makes ``link`` a symbolic link to ``target``, atomically."""
    aside = private / f"link-{secrets.token_hex(4)}"
    aside.symlink_to(target)
    try:
        os.replace(aside, link)
    finally:
        aside.unlink(missing_ok=True)


def remove_all_but(private: Path, kept: set[str]) -> None:
    """Removes older versions, and what was left by a process that was killed. Anything else is
    somebody else's."""
    for entry in private.iterdir():
        if entry.name in kept or not _OWN.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _places(state: State, index: Mapping[str, str]) -> dict[str, str]:
    """The file of each tensor."""
    if index and all(name in index for name in (spec.name for spec in state.specs)):
        return {spec.name: index[spec.name] for spec in state.specs}
    groups: list[list[str]] = [[]]
    room = _SHARD_BYTES
    for spec in state.specs:
        if spec.nbytes > room and groups[-1]:
            groups.append([])
            room = _SHARD_BYTES
        groups[-1].append(spec.name)
        room -= spec.nbytes
    return {
        name: f"model-{k:05d}-of-{len(groups):05d}.safetensors"
        for k, names in enumerate(groups, 1)
        for name in names
    }
