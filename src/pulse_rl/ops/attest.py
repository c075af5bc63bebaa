"""The statement about a version that is in a store, to be signed (docs/attestations.md)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..events import Listener
from ..follow.checkpoint import INDEX_NAME
from ..store import Store
from ..stream.manifest import Manifest
from ..stream.signing import TrustedKeys
from ..sync.subscriber import Subscriber
from .attestation import statement_of


def make_statement(
    store: Store | str,
    stream: str,
    version: int | None = None,
    *,
    sharded: bool = False,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> dict[str, Any]:
    """The in-toto statement of ``version`` of the stream ``stream`` (None: the newest), which is
    fetched and verified. ``sharded`` as for `Subscriber.save`. Raises InputError, Untrusted for a
    signature that is none, and what `Subscriber.sync` raises."""
    with Subscriber(
        store,
        stream=stream,
        trusted_keys=trusted_keys,
        stream_id=stream_id,
        threads=threads,
        on_event=on_event,
    ) as subscriber:
        subscriber.sync(version)
        key = _signing_key(subscriber.manifest)
        files = (
            subscriber.files()
            if any(file.name == INDEX_NAME for file in subscriber.manifest.files)
            else None
        )
        return statement_of(
            subscriber.manifest,
            subscriber.state,
            subscriber.digest,
            key=key,
            files=files,
            sharded=sharded,
        )


def _signing_key(manifest: Manifest) -> str | None:
    """The key that has signed a manifest, whoever trusts it, None without one. Raises Untrusted."""
    if manifest.signature is None:
        return None
    TrustedKeys([manifest.signature.key]).check(manifest)
    return manifest.signature.key
