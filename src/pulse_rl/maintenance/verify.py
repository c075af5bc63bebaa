"""Proof of a whole stream: every version restored, every link checked, every root compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..errors import EmptyStream, PulseError, StoreUnavailable
from ..events import Listener
from ..store import Store, open_store
from ..stream.chain import links_of
from ..stream.signing import TrustedKeys
from ..stream.stream import Stream
from ..sync.host_state import Replica


@dataclass(frozen=True, slots=True)
class VersionReport:
    """What was found of one version. ``links`` were followed and ended at its root; ``problems`` did not."""

    version: int
    root: str | None
    links: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_stream(
    store: Store | str,
    stream: str,
    *,
    trusted_keys: Collection[str] | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Iterator[VersionReport]:
    """Replays a stream from its first version on and yields a report a version.

    Every patch is applied to the version it starts from and every anchor restored by itself; with ``trusted_keys``
    every manifest must be signed by one of them. Raises EmptyStream and StoreUnavailable; whatever is wrong with a
    version is in its report.
    """
    where = Stream(open_store(store), stream, None if trusted_keys is None else TrustedKeys(trusted_keys))
    versions = where.versions()
    if not versions:
        raise EmptyStream(f"stream {stream!r} has no versions")
    listed = set(versions)
    chain = Replica(where, threads=threads, listener=on_event)
    for version in versions:
        good, problems, root = [], [], None
        try:
            manifest = where.manifest(version)
            root = manifest.root
        except StoreUnavailable:
            raise
        except PulseError as error:
            yield VersionReport(version, None, (), (str(error),))
            continue
        for link in links_of(manifest):
            if link.base is not None and link.base not in listed and manifest.anchor:
                continue  # retention took the base; the anchor leads here
            replica = Replica(where, threads=threads, listener=on_event) if link.base is None else chain
            try:
                if link.base is not None and chain.version != link.base:
                    replica = chain = Replica(where, threads=threads, listener=on_event)
                    chain.move_to(link.base)
                replica.follow(link)
                good.append(str(link))
                if chain.version != version:
                    chain = replica
            except StoreUnavailable:
                raise
            except PulseError as error:
                problems.append(f"{link}: {error}")
        if not good and not problems:
            problems.append("nothing leads to it")
        yield VersionReport(version, root, tuple(good), tuple(problems))
