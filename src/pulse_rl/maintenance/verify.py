"""Verifies a whole stream: restores every version, checks every link, compares every root."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .._util.threads import checked_threads
from ..errors import EmptyStream, PulseError, StoreUnavailable
from ..events import Listener, checked_listener
from ..store import Store, open_store
from ..stream.chain import Link, links_of
from ..stream.signing import trusted_by
from ..stream.stream import Stream
from ..sync.catch_up import catch_up, follow_link
from ..sync.host_state import HostState


@dataclass(frozen=True, slots=True)
class VersionReport:
    """The result for ``version``. ``links`` were followed and led to its ``root`` (None if its manifest is unreadable);
    ``problems`` lists what failed.
    """

    version: int
    root: str | None
    links: tuple[str, ...]
    problems: tuple[str, ...]

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
    """Replays the stream ``stream`` of ``store`` from its first version and yields one report per version.

    Every patch is applied to its base version and every anchor is restored on its own; with ``trusted_keys`` (Ed25519
    public keys, 64 hexadecimal digits each) every manifest must be signed by one of them, and all must be of the stream
    ``stream_id``, or of the newest one's where that is not given. ``threads``: the maximum number (None: one per core);
    ``on_event`` gets the events of the replay. Raises InputError; while it yields EmptyStream and StoreUnavailable.
    Problems with a version are in its report.
    """
    checked_threads(threads)
    checked_listener(on_event)
    where = Stream(open_store(store), stream, trusted_by(trusted_keys), stream_id=stream_id)
    return _verify(where, threads, on_event)


def _verify(where: Stream, threads: int | None, on_event: Listener | None) -> Iterator[VersionReport]:
    where.stream_id = where.stream_id or _stream_id(where)
    versions = where.versions()
    if not versions:
        raise EmptyStream(f"stream {where.name!r} has no versions")
    listed = set(versions)
    folds = [link for link in where.links() if link.base in listed]

    def reached_by(link: Link, chain: HostState) -> HostState:
        """A host state at the link's version: ``chain`` itself where it can be led on."""
        host = chain
        if link.base is None or link.base != chain.version:
            host = HostState(threads=threads, listener=on_event)
        if link.base is not None:
            catch_up(host, where, link.base)
        follow_link(host, where, link)
        return host

    chain = HostState(threads=threads, listener=on_event)
    for version in versions:
        try:
            manifest = where.manifest(version)
        except StoreUnavailable:
            raise
        except PulseError as error:
            yield VersionReport(version, None, (), (str(error),))
            continue
        good: list[str] = []
        problems: list[str] = []
        named = links_of(manifest)
        if manifest.patch and manifest.patch.base not in listed:
            # The base was collected as garbage, and the anchor leads here; or a relay took a fold in the patch's place.
            folded = [link for link in folds if link.version == version]
            named = [*(link for link in named if link.base is None), *folded] or named
        for link in named:
            try:
                host = reached_by(link, chain)
            except StoreUnavailable:
                raise
            except PulseError as error:
                problems.append(f"{link}: {error}")
            else:
                good.append(str(link))
                chain = host if chain.version != version else chain
        if not good and not problems:
            problems.append("no link leads to it")
        yield VersionReport(version, manifest.root, tuple(good), tuple(problems))


def _stream_id(stream: Stream) -> str | None:
    newest = stream.newest().manifest
    return newest.stream_id or None if newest else None
