"""An anchor on demand: the newest version once more, whole (docs/protocol.md, section 3)."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import EmptyStream
from ..events import Listener, Published
from ..store import Store, open_store
from ..stream.signing import Signer
from ..sync.publisher import Publisher
from ..sync.subscriber import Subscriber


def anchor_stream(
    store: Store | str,
    stream: str,
    *,
    signer: Signer | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Published:
    """Publishes the newest version of ``stream`` in ``store`` once more, as it is, with an anchor, and returns what it
    cost: newcomers start there, whatever was lost or signed by a key that they do not trust before it.

    ``signer`` signs it; then only versions that its key or one of ``trusted_keys`` (Ed25519, 64 hexadecimal digits
    each) has signed are taken. ``stream_id``: the stream's, where it is known. ``threads``: the maximum number (None:
    one per core); ``on_event`` gets the events of restoring and publishing. This takes the stream over: a trainer that
    still publishes to it is refused at its next commit; one that is about to start need not call it, since
    ``publish(anchor=True)`` does the same. Raises EmptyStream, and what `Subscriber.sync` and `Publisher.publish`
    raise.
    """
    opened = open_store(store)
    keys = [*([signer.public_key] if signer else ()), *(trusted_keys or ())]
    reader = Subscriber(
        opened, stream=stream, trusted_keys=keys or None, stream_id=stream_id, threads=threads, on_event=on_event
    )
    newest = reader.sync()
    if newest is None:
        raise EmptyStream(f"stream {stream!r} has no versions")
    with Publisher(
        opened,
        stream=stream,
        signer=signer,
        trusted_keys=trusted_keys or (),
        stream_id=reader.stream_id,
        threads=threads,
        on_event=on_event,
    ) as publisher:
        return publisher.publish(reader.state, metadata=newest.metadata, anchor=True)
