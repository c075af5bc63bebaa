"""Checkpoints in folders that change from one version to the next in one step: one that shows the
newest, or one for each version, as trainers write and engines read them.

::

    FOLDER/config.json          -> .pulse/current/config.json
    FOLDER/model.safetensors    -> .pulse/current/model.safetensors
    FOLDER/.pulse/current       -> 000000000012-5f3a0c11
    FOLDER/.pulse/000000000012-5f3a0c11/     all files of one version

    FOLDER/step_12/STABLE, config.json, model.safetensors …     plain files
    FOLDER/.pulse/000000000003-5f3a0c11/     what is being written, or removed
    FOLDER/.pulse/earlier/step_90-5f3a0c11/  of a stream that was recreated, without ``keep``

A version is whole and on disk before it is shown by one rename: of ``current``, a symbolic link, or
of the version's folder, its marker last. A process that is killed leaves the one or the other.
FOLDER itself may be a mount point, and whatever else lies there stays. The version before
``current`` stays until the next one is written, for those who opened it by its own path: a loader
that needs several files of one version resolves ``.pulse/current`` first.
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
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from .._util.files import disk_error, make_folder, sync_folder, write_atomically
from .._util.serial import Closing
from .._util.settings import checked_count
from ..errors import ConcurrentUse, InputError, PulseError
from ..history import history_path, save_history, specs_of
from ..patch.blocks import cut
from ..patch.history import History
from ..state.digest import StateDigest, root_of
from ..state.tensors import State, TensorSpec
from ..stream.manifest import Manifest
from .aux_files import are_tied, of_weights, weight_map
from .checkpoint import (
    ADAPTER_NAME,
    ALIASES,
    CURRENT,
    FILE_NAME,
    INDEX_NAME,
    PRIVATE,
    current_version,
    save,
    serialize,
    stored,
)

_VERSION, _ROOT = "pulse.version", "pulse.root"
_STREAM, _ID, _CREATED = "pulse.stream", "pulse.stream_id", "pulse.created"
#: In the metadata, which come first, of every file of weights and every index that pulse writes.
CHECKPOINT_MARK = f'"{_ROOT}"'.encode()
_HEAD = 4096
_LOCK, _EARLIER = "lock", "earlier"
_OWN = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}|link-[0-9a-f]{8}")
_MAX_DIGITS = 18
_SHARD_BYTES = 5_000_000_000
#: How frameworks name the folder of a version, and the file whose presence says that it is
#: complete.
LAYOUTS = {
    "prime-rl": "step_{}/STABLE",
    "slime": "weight_v{:06}",
    "areal": "weight_update_v{}",
    "hf": "checkpoint-{}",
}
_PLAIN = "[A-Za-z0-9._-]*"
_PATTERN = re.compile(rf"({_PLAIN})\{{(?::0?([1-9]))?\}}({_PLAIN})(?:/([A-Za-z0-9]{_PLAIN}))?")


class FolderLayout(NamedTuple):
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
                try:
                    text = stored(entry)[2].get(_VERSION, "")
                except (PulseError, OSError):  # it is another's, or damaged
                    continue
                if text.isdecimal() and len(text) <= _MAX_DIGITS:
                    yield int(text), entry


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
    # 1. The config, and the aliases of which it does not tell a loader: these are written in full.
    known = {spec.name: spec for spec in state.specs}
    shown = {name: state.spec(name) for name in state.names}
    leaves = {name: digest.leaves[spec.name] for name, spec in shown.items()}
    for name, data in of_weights(files, shown, leaves).items():
        if name != INDEX_NAME:
            yield name, [data], None
    full = {
        alias: name for alias, name in state.aliases.items() if not are_tied(files, alias, name)
    }
    known |= {alias: replace(state.spec(alias), name=alias) for alias in full}
    metadata = {**metadata, **_in_full(full)}
    # 2. The weights.
    is_adapter = "adapter_config.json" in files and "config.json" not in files
    if is_adapter or not sharded:
        yield (
            ADAPTER_NAME if is_adapter else FILE_NAME,
            serialize(state, tuple(known.values()), metadata),
            None,
        )
        return
    shards: dict[str, list[TensorSpec]] = {}
    listed = weight_map(files)
    listed |= {alias: listed[name] for alias, name in full.items() if name in listed}
    places = _places(known.values(), listed)
    for spec in known.values():
        shards.setdefault(places[spec.name], []).append(spec)
    for file, specs in sorted(shards.items()):
        root = root_of(b"".join(digest.tensor(spec) for spec in specs if spec.name not in full))
        own = {"format": "pt", _ROOT: root} | _in_full(
            {s.name: full[s.name] for s in specs if s.name in full}
        )
        yield file, serialize(state, tuple(specs), own), own
    whole = {key: text for key, text in metadata.items() if key != "format"}
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in known.values()), **whole},
        "weight_map": dict(sorted(places.items())),
    }
    yield INDEX_NAME, [(json.dumps(index, indent=2) + "\n").encode()], None


def _in_full(aliases: Mapping[str, str]) -> dict[str, str]:
    return {ALIASES: json.dumps(dict(aliases))} if aliases else {}


def metadata_of(version: int, root: str) -> dict[str, str]:
    """What the weights of a version's checkpoint say of themselves."""
    return {"format": "pt", _VERSION: str(version), _ROOT: root}


def _linked(earlier: Path, file: Path, metadata: Mapping[str, str]) -> bool:
    """Whether ``file`` is now a hard link to the weights ``earlier``, which have the same
    ``metadata``."""
    try:
        if stored(earlier)[2] == metadata:
            os.link(earlier, file)
            return True
    except (PulseError, OSError):  # it is gone, is another's, or the file system has no links
        pass
    return False


def check_folder(folder: Path, names: Iterable[str], *, force: bool) -> None:
    """Raises InputError where the files ``names`` cannot take their places in ``folder``: what
    pulse did not write needs ``force``, and other weights next to them would be loaded, too."""
    names = set(names)
    try:
        if not folder.exists():
            return
        for entry in sorted(folder.iterdir()):
            if is_shown(entry):
                continue
            if entry.name in names:
                check_file(entry, force=force)
            elif entry.name == INDEX_NAME or entry.suffix == ".safetensors":
                raise InputError(
                    f"{folder} holds other weights, {entry.name}", hint="Give a separate folder."
                )
    except OSError as error:
        raise InputError(
            f"cannot write {str(folder)[:200]}: {error.strerror}", hint="Check the path."
        ) from None


def check_file(file: Path, *, force: bool, mark: bytes = CHECKPOINT_MARK) -> None:
    """Raises InputError unless ``file``, which is there, may be replaced: a regular file with
    ``mark`` near its beginning, or, with ``force``, any. Raises OSError."""
    mode = file.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise InputError(f"{str(file)[:200]} is {kind}", hint="Give the path of a file.")
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
    with _locked(folder) as private:
        with _written(private, label, write) as made:
            names = sorted(entry.name for entry in made.iterdir())
            check_folder(folder, names, force=force)
            sync_folder(private)
            # A new name leads nowhere until the next line: as if the file was not there.
            for name in names:
                with suppress(FileExistsError):
                    (folder / name).symlink_to(f"{PRIVATE}/{CURRENT}/{name}")
            _replace_link(private / CURRENT, made.name, private)
        sync_folder(private)
        for name in names:
            # A file that pulse wrote at another time, or that may be replaced.
            if not is_shown(folder / name):
                _replace_link(folder / name, f"{PRIVATE}/{CURRENT}/{name}", private)
        for entry in folder.iterdir():
            if is_shown(entry) and entry.name not in names:
                entry.unlink()
        sync_folder(folder)


def add_version(
    folder: Path,
    layout: FolderLayout,
    number: int,
    facts: Mapping[str, str],
    write: Callable[[Path], None],
    *,
    keep: int | None = None,
    force: bool = False,
) -> Path:
    """The folder, in ``folder``, of the version of which the weights say ``facts``, under its
    ``number``, with what ``write`` puts into the empty folder that it is given. Of the folders that
    it made, and that hold nothing else, the newest ``keep`` stay. Those of an earlier stream of the
    name, or of a history that its store has lost, leave the readers' sight. One process does so at
    a time; others wait.

    Raises InputError where something else has the name, unless ``force``; what ``write`` raises;
    StoreFull and StoreError. Nothing is in the place of the name then but what was there before.
    """
    target, label = folder / layout.name(number), f"{int(facts[_VERSION]):012d}"
    if (folder / PRIVATE / CURRENT).is_symlink():
        raise InputError(f"{folder} is a followed checkpoint", hint="Give a separate folder.")
    with _locked(folder) as private:
        ours = _made_in(private)
        if not force and os.path.lexists(target) and not _is_ours(target, ours):
            raise InputError(
                f"{str(target)[:200]} exists and was not written by this command",
                hint="Choose another folder, or replace it with --force.",
            )
        with _written(private, label, write) as made:
            if layout.marker:
                (made / layout.marker).touch()
                sync_folder(made)
            ours = {name: found for name, found in ours.items() if (folder / name).is_dir()}
            ours[target.name] = _contents(made)
            with (private / _LOCK).open("r+b") as lock:
                lock.write(json.dumps(ours).encode() + b"\n")
                lock.truncate()
            if os.path.lexists(target):
                os.rename(target, _aside(private, label))
            os.rename(made, target)
        sync_folder(folder)
        for _, old in list(layout.versions(folder)):
            if old != target and _is_overtaken(old, facts):
                gone = _aside(private, label)
                if keep is None or not _is_ours(old, ours):  # then nothing is deleted
                    make_folder(private / _EARLIER)
                    gone = private / _EARLIER / f"{old.name}-{secrets.token_hex(4)}"
                os.rename(old, gone)
        if keep is not None:
            others = sorted(
                each
                for each in layout.versions(folder)
                if each[1] != target and _is_ours(each[1], ours)
            )
            for _, old in others[: max(0, len(others) + 1 - keep)]:
                os.rename(old, _aside(private, label))
    return target


class InUse(Closing):
    """``folder`` kept for one command at a time, from `take` to `close`: a program that it runs may
    read there for as long. Nothing is made before `take`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None

    def take(self) -> None:
        """Raises ConcurrentUse where another command has the folder, and StoreError."""
        private = self._folder / PRIVATE
        if self._handle is not None or self._folder.suffix == ".safetensors":
            return
        try:
            make_folder(private)
            self._handle = os.open(private, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise disk_error(error, f"write {self._folder}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConcurrentUse(
                f"another command uses the folder {self._folder}",
                hint="Give each command a folder of its own.",
            ) from None
        except OSError:  # NFS locks files alone, which are written to
            pass

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _is_overtaken(old: Path, facts: Mapping[str, str]) -> bool:
    """Whether a version's folder is of a stream that the one of ``facts`` has taken the place of,
    or of a history of it that was lost: it has a higher number, and was published before."""
    said = stored(old)[2]
    try:
        before = float(said[_CREATED]) < float(facts[_CREATED])
        other, ahead = said[_ID] != facts[_ID], int(said[_VERSION]) > int(facts[_VERSION])
    except (KeyError, ValueError):  # of a release that did not say it
        return False
    return said.get(_STREAM) == facts[_STREAM] and before and (other or ahead)


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The private folder of ``folder``, held by one process at a time, and by none that was killed.
    What is not shown goes before and after. Raises InputError where pulse did not make it,
    StoreFull and StoreError."""
    private = folder / PRIVATE
    current = private / CURRENT
    try:
        make_folder(private)
        if private.is_symlink() or (current.exists() and not current.is_symlink()):
            raise InputError(
                f"{private} is not a folder that pulse made", hint="Give a separate folder."
            )
        with (private / _LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = _target(private)
            _remove_all_but(private, {before})
            yield private
            _remove_all_but(private, {before, _target(private)})
    except OSError as error:
        raise disk_error(error, f"write {folder}") from error


@contextmanager
def _written(private: Path, label: str, write: Callable[[Path], None]) -> Iterator[Path]:
    """A new private folder, whole and on disk, with what ``write`` puts into it. It goes where an
    error keeps it from being shown."""
    made = _aside(private, label)
    made.mkdir()
    try:
        write(made)
        sync_folder(made)
        yield made
    except BaseException:
        if _target(private) != made.name:
            shutil.rmtree(made, ignore_errors=True)
        raise


def _aside(private: Path, label: str) -> Path:
    return private / f"{label}-{secrets.token_hex(4)}"


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


def _remove_all_but(private: Path, kept: set[str]) -> None:
    """Removes older versions, and what was left by a process that was killed. Anything else is
    somebody else's."""
    for entry in private.iterdir():
        if entry.name in kept or not _OWN.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _made_in(private: Path) -> dict[str, list[object]]:
    """What `_contents` was of each folder of a version, by name, when it was made: the first line
    of the lock. Where that cannot be read, none is removed."""
    try:
        read = json.loads((private / _LOCK).read_bytes().partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _contents(folder: Path) -> list[object]:
    """The inode of a folder, which a copy does not have, and the names of all in it."""
    return [folder.stat().st_ino, *(str(each.relative_to(folder)) for each in folder.rglob("*"))]


def _is_ours(folder: Path, made: Mapping[str, list[object]]) -> bool:
    """Whether a folder is one that was ``made`` here, and nobody has put anything into it."""
    known = made.get(folder.name)
    return (
        isinstance(known, list) and folder.is_dir() and all(x in known for x in _contents(folder))
    )


def _places(specs: Iterable[TensorSpec], index: Mapping[str, str]) -> dict[str, str]:
    """The file of each tensor."""
    specs = list(specs)
    if index and all(spec.name in index for spec in specs):
        return {spec.name: index[spec.name] for spec in specs}
    groups: list[list[str]] = [[]]
    room = _SHARD_BYTES
    for spec in specs:
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
    named = None if layout is None else FolderLayout.of(layout)
    if keep is not None and checked_count("keep", keep) and named is None:
        raise InputError(
            "keep is for the folders of a layout", hint="Otherwise the newest version is kept."
        )
    own = metadata_of(manifest.version, digest.root)
    if named is not None:
        own |= {_STREAM: manifest.stream, _ID: manifest.stream_id}
        own[_CREATED] = repr(manifest.created)
    facts = own | dict(metadata)
    blocks = cut(specs_of(digest))

    def write(into: Path) -> None:
        write_checkpoint(into, state, digest, files, facts, sharded=sharded, earlier=earlier)
        save_history(history_path(into), history, blocks, digest.root)

    # 2. One file, the folder that shows the newest version, or a folder of this version's own.
    if path.suffix == ".safetensors" and named is None:
        save_history(history_path(path), history, blocks, digest.root)
        save(path, state, facts)
        return earlier
    if named is None:
        replace_folder(path, f"{manifest.version:012d}", write, force=force)
        return current_version(path)
    step = manifest.metadata.get("step")
    number = step if type(step) is int and step >= 0 else manifest.version
    return add_version(path, named, number, own, write, keep=keep, force=force)
