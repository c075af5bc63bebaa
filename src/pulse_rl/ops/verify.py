"""Verifies what is there: a whole stream (restores every version, checks every link, compares every
root), and what a live model holds (rehashes its tensors and compares them with a version's)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from .._util.threads import checked_threads
from ..errors import ChainGap, EmptyStream, InputError, PulseError, StoreUnavailable
from ..events import Listener, checked_listener
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..store import Store, open_store
from ..store.base import UNREADABLE
from ..stream.manifest import Link, Manifest, is_digest, links_of
from ..stream.names import FILE, PATCH
from ..stream.signing import trusted_by
from ..stream.stream import Stream
from ..sync.host_state import HostState, catch_up, follow_link
from .checkout import origin_of


@dataclass(frozen=True, slots=True)
class VersionReport:
    """The result for ``version``. ``links`` were followed and led to its ``root`` (None if its
    manifest is unreadable); ``problems`` lists what failed. ``depends_on`` is the
    damaged version without which some of the links cannot be tried, where these are whole.
    """

    version: int
    root: str | None
    links: tuple[str, ...]
    problems: tuple[str, ...]
    depends_on: int | None = None

    @property
    def ok(self) -> bool:
        """Whether everything that leads to the version is valid."""
        return not self.problems


def verify_stream(
    store: Store | str,
    stream: str,
    *,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Iterator[VersionReport]:
    """Replay a stream from its first version, and yield one report per version.

    Every patch is applied to its base version, and every anchor is restored on its own. Every fold
    is read, and applied where there is no patch; so is every file next to the weights. A version
    that was begun from one of another stream in the store must have its root. Problems with a
    version are in its report.

    Args:
        store: The store, or its address.
        stream: The stream's name.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each: one of them must have signed
            each manifest.
        stream_id: The ID that all manifests must have. Default: that of the newest version.
        threads: The maximum number of threads. Default: one per core.
        on_event: Called with the events of the replay.
    Returns: The reports, in the order of the versions.
    Raises:
        InputError: An argument makes no sense.
        EmptyStream: There is no version, while it yields.
        StoreUnavailable: The store cannot be reached, while it yields.
    """
    checked_threads(threads)
    checked_listener(on_event)
    where = Stream(open_store(store), stream, trusted_by(trusted_keys), stream_id=stream_id)
    return _verify(where, threads, on_event)


def _verify(
    where: Stream, threads: int | None, on_event: Listener | None
) -> Iterator[VersionReport]:
    with where.limited():
        if newest := where.newest().manifest:
            where.adopt(newest)
        versions = where.versions()
        if not versions:
            raise EmptyStream(f"stream {where.name!r} has no versions")
        listed = set(versions)
        folds = [link for link in where.links() if link.base in listed]
    chain = HostState(threads=threads, listener=on_event)
    checked: dict[str, str] = {}
    # The versions that no link reaches, with the damaged version that each of them depends on.
    cut_off: dict[int, int] = {}

    def report(version: int) -> VersionReport:
        nonlocal chain
        try:
            manifest = where.manifest(version)
        except StoreUnavailable:
            raise
        except PulseError as error:
            cut_off[version] = version
            return VersionReport(version, None, (), (str(error),))
        good: list[str] = []
        problems = [*_check_files(where, manifest, checked), *_check_origin(where, manifest)]
        named = links_of(manifest)
        folded = [link for link in folds if link.version == version]
        if manifest.patch and manifest.patch.base not in listed:
            # The base was collected as garbage, and the anchor leads here; or a relay took a fold
            # in the patch's place.
            named = [*(link for link in named if link.base is None), *folded] or named
        else:
            problems += _check_folds(where, folded)
        failed: dict[Link, str] = {}
        waiting: dict[Link, int] = {}
        for link in named:
            # The state that goes from version to version, where it is at the link's base.
            host = chain
            if link.base is None or link.base != chain.version:
                host = HostState(threads=threads, listener=on_event)
            try:
                if link.base in cut_off:
                    # The patch cannot be applied. Whether it is whole is seen all the same.
                    for part in where.resolved(link).payloads or ():
                        where.fetch(part, PATCH)
                    waiting[link] = cut_off[link.base]
                    continue
                if link.base is not None:
                    catch_up(host, where, link.base)
                follow_link(host, where, link)
            except StoreUnavailable:
                raise
            except PulseError as error:
                failed[link] = f"{link} is damaged: {error}"
            else:
                good.append(str(link))
                chain = host if chain.version != version else chain
        # Anybody may list a fold: a false one is no damage where another link leads here.
        excused = [link for link in failed if good and link.is_fold]
        problems += [text for link, text in failed.items() if link not in excused]
        problems += _check_folds(where, excused)
        if not good and not named:
            problems.append("no link leads to it")
        if not good and folded:
            # A fold may pass over what is damaged.
            host = HostState(threads=threads, listener=on_event)
            with suppress(ChainGap, *UNREADABLE):
                catch_up(host, where, version)
                good, chain = [str(link) for link in host.followed[-1:]], host
        depends_on = max(waiting.values(), default=None)
        if good:
            cut_off.pop(version, None)
        else:
            cut_off[version] = version if depends_on is None else depends_on
        if problems:
            depends_on = None  # it has damage of its own
        problems += [
            f"{link} depends on version {of}, which is damaged" for link, of in waiting.items()
        ]
        return VersionReport(version, manifest.root, tuple(good), tuple(problems), depends_on)

    for version in versions:
        with where.limited():
            found = report(version)
            # A publisher that keeps the newest versions deletes others meanwhile, and what only
            # they need: what is left is looked at again.
            while found.problems and (gone := listed.difference(there := where.versions())):
                if there and version in gone and version < there[0]:
                    break
                listed -= gone
                folds = [link for link in where.links() if link.base in listed]
                found = report(version)
            else:
                yield found


def _check_folds(where: Stream, folds: list[Link]) -> list[str]:
    """Which of the folds that nobody needs here have payloads that are damaged: not what their
    names promise. A link that promises something else may be anybody's."""
    problems = []
    for link in folds:
        with suppress(*UNREADABLE, ChainGap):
            for payload in where.resolved(link).payloads or ():
                name = where.names.payload(payload.sha256, PATCH)
                stored = where.store.head(name).nbytes
                if stored > payload.bytes:
                    continue
                if sha256(where.store.get(name, 0, stored)).hexdigest() != payload.sha256:
                    problems.append(f"{link}: {name} is damaged")
    return problems


def _check_origin(where: Stream, manifest: Manifest) -> list[str]:
    """What is wrong with the version from which this one says that it was begun, where the store
    has its stream."""
    if (origin := origin_of(manifest)) is None:
        return []
    stream, version, stream_id = origin
    with suppress(*UNREADABLE, InputError):
        if Stream(where.store, stream, stream_id=stream_id).manifest(version).root != manifest.root:
            return [f"it was begun from version {version} of {stream!r}, which has another root"]
    return []


def _check_files(where: Stream, manifest: Manifest, checked: dict[str, str]) -> list[str]:
    """What is wrong with the files of a version; ``checked`` are those of the versions before, by
    digest."""
    for file in manifest.files:
        if file.sha256 not in checked:
            checked[file.sha256] = ""
            try:
                where.fetch(file.payload, FILE)
            except StoreUnavailable:
                raise
            except PulseError as error:
                checked[file.sha256] = str(error)
    return [
        f"{file.name}: {checked[file.sha256]}" for file in manifest.files if checked[file.sha256]
    ]


class Module(Protocol):
    """Anything with a ``state_dict``, such as a torch module."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors by name."""
        ...


@dataclass(frozen=True, slots=True)
class AuditReport:
    """``ok`` if the live tensors, with root ``root``, are those of the version with root
    ``expected_root``. ``differing`` names tensors with different bits, dtypes or shapes,
    ``missing`` and ``unexpected`` those that only the version or only the model has; all are empty
    if only a root was given.
    """

    ok: bool
    root: str
    expected_root: str
    differing: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def audit(
    model: Module | Mapping[str, Any] | State,
    version: StateDigest | Manifest | str,
    *,
    threads: int | None = None,
) -> AuditReport:
    """Read all live weights of a model again, and compare them with a version.

    Tied tensors are compared once.

    Args:
        model: A module, a mapping of names to tensors, or a `State`.
        version: The digest tree of a host state (`Subscriber.digest`), which shows which tensors
            differ; or a manifest or a root, which only shows whether any differ.
        threads: The maximum number of threads. Default: one per core.
    Returns: The report.
    Raises:
        InputError: ``version`` or ``model`` is none of these.
    """
    state = State.of(model.state_dict() if hasattr(model, "state_dict") else model)
    live = state_digest(state, threads=checked_threads(threads))
    if isinstance(version, StateDigest):
        return _compare(live, version, state.aliases)
    if not isinstance(version, Manifest | str):
        raise InputError(
            f"{type(version).__name__} is not a version", hint="Pass subscriber.digest or a root."
        )
    expected = version.root if isinstance(version, Manifest) else version
    if not is_digest(expected):
        raise InputError(f"{expected!r} is not a root", hint="A root has 64 hexadecimal digits.")
    return AuditReport(live.root == expected, live.root, expected, (), (), ())


def _compare(live: StateDigest, expected: StateDigest, aliases: dict[str, str]) -> AuditReport:
    # The model may store a tied tensor under another of its names than the trainer did.
    stored = {s.name: s.name for s in live.specs} | aliases
    specs = {s.name: s for s in live.specs}
    differing, missing, met = [], [], set()
    for spec in expected.specs:
        own = stored.get(spec.name)
        if own is None:
            missing.append(spec.name)
            continue
        met.add(own)
        same_kind = (specs[own].dtype, specs[own].shape) == (spec.dtype, spec.shape)
        if not same_kind or live.leaves[own] != expected.leaves[spec.name]:
            differing.append(spec.name)
    unexpected = [name for name in specs if name not in met]
    ok = not (differing or missing or unexpected)
    return AuditReport(
        ok, live.root, expected.root, tuple(differing), tuple(missing), tuple(unexpected)
    )
