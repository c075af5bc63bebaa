"""A folder in which a state lives in a mapped file, to be found there by the next process
(notes/design/0036).

A record next to it says which version it is, and a journal has the old bits of what is being
changed. Nothing waits for the disk: the digest shows what a power cut has left.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._util.files import disk_error, make_folder, open_regular, require_posix
from .._util.settings import checked_path
from ..codec import Changes
from ..errors import (
    ConcurrentUse,
    CorruptCheckpoint,
    DigestMismatch,
    InputError,
    PulseError,
    StateMismatch,
    StoreError,
    StoreUnavailable,
)
from ..events import fell_back
from ..history import history_path, load_history, save_history, specs_of
from ..patch.apply import Journal
from ..patch.blocks import Block, cut
from ..patch.history import History
from ..patch.tree import inner_leaves
from ..state import bits
from ..state.digest import StateDigest, state_digest
from ..state.header import header_bytes, parse_header
from ..state.tensors import State, StateSource, TensorSpec
from ..store.base import UNREADABLE
from ..stream.manifest import Manifest
from ..stream.stream import Stream
from ..sync.host_state import HostState
from ..sync.pending import Baseline
from .checkpoint import current_version, in_file_order
from .failover import Failover
from .selection import Selection

_SEARCHED_FOR_BASE = 1000
_LOCK, _RECORD, _JOURNAL = "pulse.lock", "pulse.state.json", "pulse.journal"
_STATE, _HISTORY = "state-", "history-"
# The names that `StateFolder` gives: what others keep in the folder is theirs.
_OURS = re.compile(rf"{_STATE}[0-9a-f]{{16}}\.safetensors|{_HISTORY}[0-9]+-[0-9a-f]{{8}}")
_FORMAT = "pulse.state.1"
_PAGE = 4096
_HEAD = struct.Struct("<Q32s")  # of the journal: the version and the root to which it leads back
# The bytes with this, an element's width, segments, changes, whether all is there.
_ENTRY = struct.Struct("<QIIQ?7x")
_DONE_AT = 24


class Kept(NamedTuple):
    """What the record says of the state in ``file``, and of its ``history`` ("": none)."""

    stream: str
    stream_id: str
    version: int
    root: str
    aliases: dict[str, str]
    file: str
    history: str

    @property
    def names(self) -> tuple[str, str]:
        """Of its files."""
        return self.file, self.history


class _Mapped(NamedTuple):
    """Memory of a state, and where in it each tensor begins."""

    memory: weakref.ref[npt.NDArray[np.uint8]]
    places: Mapping[str, int]


class _Handle:
    """A file that is open until this goes, or is closed."""

    def __init__(self, path: Path, flags: int) -> None:
        self.number = os.open(path, flags, 0o666)
        self.close = weakref.finalize(self, os.close, self.number)


class StateFolder:
    """One folder, used by one object at a time. ``name`` is the argument by which it was given.

    `empty` makes memory for a state in a file of its own; `keep` makes one of these the state that
    is found again. Raises InputError where there is something else, ConcurrentUse where another
    object uses it, StoreFull and StoreError.
    """

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.path = checked_path(path)
        self._name = name
        self._lock: _Handle | None = None
        self._files: dict[str, _Mapped] = {}
        #: What the record says, as it was when the folder was taken or last changed; None where
        #: nothing is kept.
        self.kept: Kept | None = None
        # The files that are not deleted with their memory: what is kept, and what is unfinished.
        self._held: set[str] = set()
        #: The file of a state that was not restored to its end, here or in a process before.
        self.unfinished = ""
        self.open()

    def open(self) -> None:
        """Takes the folder, once; until `close` no other process does."""
        if self._lock:
            return
        require_posix(f"map a state in {self.path}")
        import fcntl  # not on every platform

        hint = (
            f"Give {self._name}= a folder of its own: a new one, an empty one, or one that "
            "was given so before."
        )
        try:
            make_folder(self.path)
            there = os.listdir(self.path)
            if there and _LOCK not in there:
                raise InputError(
                    f"{self.path} holds other files, {sorted(there)[0]!r} say", hint=hint
                )
            lock = _Handle(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"{self.path} is no folder", hint=hint) from None
        except OSError as error:
            raise disk_error(error, f"use the folder {self.path}") from error
        try:
            fcntl.flock(lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            user = os.pread(lock.number, 20, 0).decode(errors="replace").strip()
            raise ConcurrentUse(
                f"{self.path} is used by process {user}",
                hint=f"Give {self._name}= of each process a folder of its own, or end that "
                "process.",
            ) from None
        except OSError as error:
            raise StoreError(
                f"cannot lock {self.path}: {error.strerror}",
                hint="Use a folder on a disk of this machine.",
            ) from error
        with suppress(OSError):  # of a full disk: others only read who has it
            os.ftruncate(lock.number, 0)
            os.pwrite(lock.number, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock
        self.kept = self._read_record()
        self._held.clear()
        if self.kept:
            self._held.add(self.kept.file)
        self._tidy()

    def close(self) -> None:
        """Lets the folder go; what is kept stays."""
        lock, self._lock = self._lock, None
        if lock:
            import fcntl

            # A child of a fork has the same lock, which goes for all of them.
            with suppress(OSError):
                fcntl.flock(lock.number, fcntl.LOCK_UN)
            lock.close()

    # -- memory

    def empty(
        self,
        specs: tuple[TensorSpec, ...],
        aliases: Mapping[str, str] | None = None,
        *,
        resumes: bool = False,
    ) -> State:
        """`State.empty` in a file of its own, which is deleted with its memory unless it is kept.
        Raises StoreFull and StoreError: a page that the disk has no room for would end the process
        when it is written to.

        Where the caller ``resumes`` the file is there for the next one, until something is kept,
        and it may be that of the last one, with whatever it holds."""
        ordered = in_file_order(specs)
        head = _padded(header_bytes(ordered))
        *starts, size = accumulate((spec.nbytes for spec in ordered), initial=len(head))
        placed = list(zip(ordered, starts, strict=True))
        if resumes and (memory := self._mapped_unfinished(head, size)) is not None:
            return self._state(self.unfinished, memory, placed, aliases)
        self._delete_unfinished()  # the disk may have no room for both
        name = f"{_STATE}{token_hex(8)}.safetensors"
        path = self.path / name
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                _lengthen(handle, size)
                os.pwrite(handle, head, 0)
                memory = _mapped(handle, size)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(handle)
        except OSError as error:
            raise disk_error(error, f"map {size} bytes in {self.path}") from error
        if resumes:
            self.unfinished = name
            self._held.add(name)
        return self._state(name, memory, placed, aliases)

    def _mapped_unfinished(self, head: bytes, size: int) -> npt.NDArray[np.uint8] | None:
        """The memory of the unfinished state, if it is one of ``size`` bytes that begin with
        ``head``."""
        used = self._files.get(self.unfinished)
        if not self.unfinished or (used is not None and used.memory() is not None):
            return None
        try:
            memory = _mapped_file(self.path / self.unfinished)
        except (OSError, ValueError):
            return None
        return memory if len(memory) == size and bytes(memory[: len(head)]) == head else None

    def _delete_unfinished(self) -> None:
        name, self.unfinished = self.unfinished, ""
        self._held.discard(name)
        self._delete_unused(name)

    def _delete_unused(self, name: str) -> None:
        """Deletes a file, unless its memory is in use: then it goes with that."""
        if name and (name not in self._files or self._files[name].memory() is None):
            with suppress(OSError):
                os.unlink(self.path / name)

    def _state(
        self,
        name: str,
        memory: npt.NDArray[np.uint8],
        placed: list[tuple[TensorSpec, int]],
        aliases: Mapping[str, str] | None,
    ) -> State:
        self._files = {key: file for key, file in self._files.items() if file.memory() is not None}
        weakref.finalize(memory, _let_go, self.path / name, self._held, os.getpid())
        self._files[name] = _Mapped(weakref.ref(memory), {spec.name: at for spec, at in placed})
        data = {
            spec.name: memory[at : at + spec.nbytes].view(spec.dtype.uint) for spec, at in placed
        }
        return State(tuple(spec for spec, _ in placed), data, aliases)

    def _file_of(self, state: State) -> str | None:
        """The file in which a state is; None where it is elsewhere, or has no elements."""
        first = next((spec for spec in state.specs if spec.elements), None)
        if first is None:
            return None
        at = _address(state.read(first.name, 0, 1))
        for file, used in self._files.items():
            memory = used.memory()
            if memory is not None and at == _address(memory) + used.places.get(first.name, -1):
                return file
        return None

    # -- what is kept

    def load(self, *, threads: int | None = None) -> tuple[State, StateDigest, History]:
        """The kept state, proved by the root of its record, its tree, and what is remembered of the
        versions before. What a process that was killed had begun to change is undone first. Raises
        CorruptCheckpoint, DigestMismatch, and StoreError."""
        kept = self.kept
        assert kept is not None
        path = self.path / kept.file
        used = self._files.get(kept.file)
        is_used = used is not None and used.memory() is not None
        try:
            memory = _mapped_file(path)
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot map {path}: {error}") from error
        placed, _, start = parse_header(memory.data, len(memory))
        if any((start + at) % spec.dtype.width for spec, at in placed):
            raise CorruptCheckpoint(f"the tensors of {path} are not aligned")
        try:
            state = self._state(
                kept.file, memory, [(spec, start + at) for spec, at in placed], kept.aliases
            )
        except InputError as error:
            raise CorruptCheckpoint(f"{path}: {error}") from None
        with suppress(OSError):
            _undo(self.path / _JOURNAL, kept, memory)
        digest = state_digest(state, threads=threads)
        if digest.root != kept.root:
            raise DigestMismatch(
                f"{path} is not version {kept.version} any more: its root is {digest.root[:16]}…"
            )
        history = None
        if kept.history:
            history = load_history(self.path / kept.history, cut(digest.specs), kept.root)
        # An update that is held has views of this very file, which the state must not change.
        return state.copy(self.empty) if is_used else state, digest, history or History()

    def keep(self, state: State, manifest: Manifest, history: History) -> None:
        """Makes ``state``, made by `empty` or `load`, the one that is found again, as the version
        of ``manifest``. Where that cannot be written nothing is found: the state itself does not
        depend on it."""
        file = self._file_of(state)
        if file is None or self._lock is None:
            return
        before, name = self.kept, ""
        try:
            if history.windows:
                name = f"{_HISTORY}{manifest.version}-{token_hex(4)}"
                blocks = cut(state.specs)
                save_history(self.path / name, history, blocks, manifest.root, durable=False)
            of = (manifest.stream, manifest.stream_id, manifest.version, manifest.root)
            kept = Kept(*of, dict(manifest.aliases), file, name)
            self._held.add(file)
            unfinished = self.path / f"{_RECORD}.new"
            unfinished.write_bytes(json.dumps({"format": _FORMAT} | kept._asdict()).encode())
            os.replace(unfinished, self.path / _RECORD)
        except (OSError, PulseError):
            self.drop()
            return
        self.kept = kept
        if self.unfinished == file:
            self.unfinished = ""
        self._delete_unfinished()
        for old in before.names if before else ():
            if old and old not in (file, name):
                self._held.discard(old)
                with suppress(OSError):
                    os.unlink(self.path / old)

    def drop(self) -> None:
        """Nothing is found here any more, until something is kept again. A state that is in use
        stays as it is."""
        kept, self.kept = self.kept, None
        with suppress(OSError):
            os.unlink(self.path / _RECORD)
        self._held.intersection_update({self.unfinished})
        for name in kept.names if kept else ():
            self._delete_unused(name)

    def lengthen(self) -> bool:
        """Gives files that others have cut their length again, and returns whether there was one:
        access to memory behind the end of its file would end the process (SIGBUS). What was cut
        off is lost, which the digest shows. Raises StoreFull and StoreError."""
        cut_off = False
        for name, used in self._files.items():
            memory: Any = used.memory()
            if memory is None or memory.base.obj.size() >= memory.nbytes:
                continue
            path, cut_off = self.path / name, True
            try:
                handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    _lengthen(handle, memory.nbytes)
                finally:
                    os.close(handle)
            except OSError as error:
                raise disk_error(error, f"give {path} its {memory.nbytes} bytes again") from error
            if memory.base.obj.size() < memory.nbytes:
                raise StoreError(f"{path} was cut while it was mapped, and replaced")
        return cut_off

    def prove(self, host: HostState, stores: Failover, *, delivers: bool = False) -> None:
        """Restores the version of ``host`` if the disk has other bits than were written: before
        they are handed out. Where it only ``delivers`` what the last link has changed, or led to,
        that link has proved it. Raises what `Failover.reach` raises."""
        version, last = host.version, host.followed[-1] if host.followed else None
        if version is None:
            return
        if not self.lengthen() and delivers and last:
            owned = host.pending()
            if last.base is None or (last.base, host.state.aliases) == (owned.since, owned.aliases):
                return
        if host.recover(doubted=True):
            error = DigestMismatch("bits of it have changed on the disk")
            fell_back(host.listener, stores.streams[0].name, f"the state in {self.path}", error)
            stores.reach(host, version)

    def check_of(self, base: Baseline) -> Callable[[range], None]:
        """A check of a group of blocks of a ``base`` in here, which raises DigestMismatch if the
        disk has other bits than were written. Ranks of a `ShardedPublisher`, which share leaves,
        hold their slices in memory and have no folder."""
        self.lengthen()

        def check(group: range) -> None:
            some = [base.blocks[index] for index in group]
            for place, digest in inner_leaves(some, lambda s: base.state.read(*s.place)).items():
                if base.leaves[place] != digest:
                    raise DigestMismatch(f"the baseline of {place[0]!r} has changed on the disk")

        return check

    def journal(self, state: State) -> Journal | None:
        """Takes each block of the kept state before it is changed, and its old bits; None
        where ``state`` is another one."""
        self.lengthen()
        kept = self.kept
        if kept is None or self._lock is None or self._file_of(state) != kept.file:
            return None
        try:
            journal = _JournalFile(self.path / _JOURNAL, kept, self._files[kept.file].places)
        except OSError:
            self.drop()
            return None

        def add(block: Block, old: Changes) -> None:
            try:
                if self.kept is kept:
                    journal.add(block, old)
            except OSError:
                # The disk is full, say: what is changed from now on could not be undone.
                self.drop()

        return add

    def _read_record(self) -> Kept | None:
        try:
            with open_regular(self.path / _RECORD) as file:
                said: dict[str, Any] = json.loads(file.read(1 << 26))
            if said.pop("format") != _FORMAT:
                return None
            kept = Kept(**said)
            names = [kept.stream, kept.stream_id, kept.root, kept.file, kept.history]
            fine = all(
                isinstance(text, str) for text in [*names, *kept.aliases, *kept.aliases.values()]
            )
            fine = (
                fine
                and type(kept.version) is int
                and len(bytes.fromhex(kept.root)) == 32
                and all(_OURS.fullmatch(name) for name in kept.names if name)
            )
            return kept if fine and kept.file else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def _tidy(self) -> None:
        """Deletes what processes that were killed have left, but the last state."""
        named = set(self.kept.names) if self.kept else set()
        with suppress(OSError):
            ours = filter(_OURS.fullmatch, os.listdir(self.path))
            left = [name for name in ours if name not in named]
            left.sort(
                key=lambda name: (name.startswith(_STATE), os.lstat(self.path / name).st_mtime_ns)
            )
            self.unfinished = left.pop() if left and left[-1].startswith(_STATE) else ""
            self._held.add(self.unfinished)
            for name in left:
                os.unlink(self.path / name)


class _JournalFile:
    """The old bits of blocks that are being changed, so that they can be put back: one entry a
    block. ``places``: where in the file each tensor begins. An entry's place is written first and
    that it is whole last, so that a kill leaves none that only seems to be."""

    def __init__(self, path: Path, kept: Kept, places: Mapping[str, int]) -> None:
        self._places = places
        self._lock = allocate_lock()
        self._file = _Handle(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._end = _HEAD.size
        os.pwrite(self._file.number, _HEAD.pack(kept.version, bytes.fromhex(kept.root)), 0)

    def add(self, block: Block, old: Changes) -> None:
        width = block.dtype.width
        where = np.array(
            [(self._places[s.spec.name] + s.start * width, s.elements) for s in block.segments],
            np.uint64,
        )
        parts = [where.data, old.positions.data, np.ascontiguousarray(old.values).data]
        size = _ENTRY.size + sum(part.nbytes for part in parts)
        handle = self._file.number
        with self._lock:
            at = self._end
            os.pwrite(
                handle, _ENTRY.pack(size, width, len(block.segments), len(old.positions), False), at
            )
            self._end += size
        if os.pwritev(handle, parts, at + _ENTRY.size) != size - _ENTRY.size:
            raise OSError("the journal was cut short")
        os.pwrite(handle, b"\1", at + _DONE_AT)


def _undo(path: Path, kept: Kept, memory: npt.NDArray[np.uint8]) -> None:
    """Puts back what a journal has, if it leads to the kept version. What is wrong in it, the
    digest tells."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _HEAD.size:
            return
        journal = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    if _HEAD.unpack_from(journal) != (kept.version, bytes.fromhex(kept.root)):
        return
    at = _HEAD.size
    with suppress(ValueError, IndexError, struct.error):
        while at + _ENTRY.size <= size:
            length, width, segments, count, done = _ENTRY.unpack_from(journal, at)
            if length < _ENTRY.size:
                return
            if done:
                body = at + _ENTRY.size
                where = (
                    np.frombuffer(journal, np.uint64, 2 * segments, body).reshape(-1, 2).tolist()
                )
                body += 16 * segments
                # Copies, which are aligned, wherever the entry begins.
                positions = np.frombuffer(journal, np.uint32, count, body).copy()
                values = np.frombuffer(journal, f"<u{width}", count, body + 4 * count).copy()
                base = first = 0
                for start, elements in where:
                    last = int(np.searchsorted(positions, base + elements))
                    target = memory[start : start + elements * width].view(f"<u{width}")
                    bits.put(target, positions[first:last], values[first:last], base)
                    base, first = base + elements, last
            at += length


def _lengthen(handle: int, size: int) -> None:
    """Makes a file as long as ``size``, with room on the disk where the system can. Raises
    OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.truncate(handle, size)


def _mapped_file(path: Path) -> npt.NDArray[np.uint8]:
    """All bytes of a file that is there, shared. Raises OSError and ValueError."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return _mapped(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)


def _mapped(handle: int, size: int) -> npt.NDArray[np.uint8]:
    """A file's bytes, shared. Raises OSError and ValueError."""
    mapping = mmap.mmap(handle, size)
    # In large pages each version costs a fault for every 2 MiB, not for every 4 KiB: all of them
    # have changes.
    with suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _padded(head: bytes) -> bytes:
    """A safetensors header that ends with a page."""
    head += b" " * (-len(head) % _PAGE)
    return (len(head) - 8).to_bytes(8, "little") + head[8:]


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _let_go(path: Path, held: set[str], process: int) -> None:
    if path.name not in held and os.getpid() == process:
        with suppress(OSError):
            path.unlink()


def adopt_kept(
    host: HostState,
    stream: Stream,
    manifest_of: Callable[[int], Manifest],
    *,
    newest: int | None = None,
) -> bool:
    """Starts from what the host state's folder keeps, if that is proved to be a version of
    ``stream``, ``newest`` at most; what is not, is dropped. Its owner does not have it yet. Raises
    StoreUnavailable, and then drops nothing."""
    folder = host.folder
    if folder is None or (kept := folder.kept) is None:
        return False
    try:
        if kept.stream != stream.name or stream.stream_id not in (None, kept.stream_id):
            raise StateMismatch(f"it is of stream {kept.stream!r} with the ID {kept.stream_id}")
        if newest is not None and kept.version > newest:
            raise StateMismatch(f"it is version {kept.version}, and the newest is {newest}")
        manifest = manifest_of(kept.version)
        if (manifest.stream_id, manifest.root) != (kept.stream_id, kept.root):
            raise DigestMismatch(f"the stream has another version {kept.version}")
        state, digest, history = folder.load(threads=host.threads)
    except StoreUnavailable:
        raise
    except PulseError as error:
        folder.drop()
        fell_back(host.listener, stream.name, f"the state in {folder.path}", error)
        return False
    host.adopt(manifest, state, digest, history=history, is_new=True)
    return True


class AdoptedBase(NamedTuple):
    """Whether a base was ``looked`` up among the versions; the ``place`` of a checkpoint that is
    one."""

    looked: bool
    place: Path | None = None


def adopt_base(
    base: StateSource,
    stores: Failover,
    host: HostState,
    selection: Selection | None,
    *,
    threads: int | None,
) -> AdoptedBase:
    """Starts from the caller's state where its root is that of a recent version; not ``looked`` up
    while there are none. Raises what `State.of` raises, and StoreError."""
    stream, versions = stores.versions()
    if not versions:
        return AdoptedBase(looked=False)
    # 1. A copy, unless a part of it is copied anyhow, and its root.
    state = State.of(base)
    own = state if selection else host.empty(state.specs, state.aliases)
    digest = state_digest(own, source=None if own is state else state, threads=threads)
    for version in reversed(versions[-_SEARCHED_FOR_BASE:]):
        try:
            manifest = stream.manifest(version)
        except UNREADABLE:
            continue
        if manifest.root != digest.root:
            continue
        # 2. What the worker has is what it loaded, under the names that it knows: aliases that the
        # version adds are delivered with the next update.
        if selection:
            own, digest = selection.part_of(own, digest, manifest.aliases, threads=threads)
        stores.adopt_id(stores.streams[0].stream_id or manifest.stream_id)
        # 3. What was remembered where the checkpoint was written.
        history, place = History(), None
        if isinstance(base, str | os.PathLike):
            at = history_path(Path(base))
            history = load_history(at, cut(specs_of(digest)), digest.root) or history
            place = current_version(Path(base))
        host.adopt(manifest, own, digest, history=history)
        return AdoptedBase(looked=True, place=place)
    return AdoptedBase(looked=True)
