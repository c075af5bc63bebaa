"""The side of a sharded trainer: its ranks commit the versions of a stream together (docs/protocol.md, section 10)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from ... import codec as codecs
from ..._util.collective import RankGroup
from ..._util.gloo import GlooTransport
from ..._util.serial import NotCopyable, SerialThread
from ..._util.settings import checked_collection, checked_number
from ..._util.threads import checked_threads
from ..._util.weak import weak_callback
from ...errors import ConcurrentUse, InputError, PulseError
from ...events import Event, FallbackUsed, Listener, Metadata, Published, checked_listener, failures_to
from ...store import Store, open_store
from ...stream.anchor import DEFAULT_SHARD_BYTES
from ...stream.manifest import MAX_NUMBER, Manifest
from ...stream.signing import Signer, TrustedKeys
from ...stream.stream import Stream
from ...sync.folds import checked_folds
from ...sync.submit import Submission, Submissions
from .order import Order
from .rank import RankPublisher


class ShardedPublisher(NotCopyable):
    """Publishes the states of one policy that is sharded over several ranks, none of which gathers it.

    All ranks of ``process_group`` (None: all there are) make one, with the same arguments, and call `publish` with what
    each has: shards as DTensors (``fully_shard``, with replicas, tensor parallelism over rows or columns), and plain
    tensors, whole on one rank (pipeline stages, experts) or on several. Each rank compares, codes, hashes and uploads
    its own slices, and keeps a copy of these alone; then rank 0 commits the version. Readers follow the stream as any
    other, and a `Publisher` or another number of ranks can continue it.

    ``store``, ``stream``, ``codec``, ``anchor_ratio``, ``shard_bytes``, ``folds``, ``signer``,
    ``trusted_keys``, ``stream_id``, ``threads`` (for each rank) and ``on_event`` are those of `pulse_rl.Publisher`. No
    call waits for another rank for longer than ``timeout_seconds``.

    Host memory of a rank: its slices once, the changes of one version, a block (at most 2^24 elements) and its code for
    each thread, and on rank 0 the leaves' digests, 32 bytes for each MiB of the state; with ``folds`` about 6 bytes for
    every BF16 weight of its slices that changed within a span.

    An error of one rank is raised on all. If a rank dies the others raise RankLost, and nothing was committed or all of
    it; start the ranks again. A context manager (see `close`). One thread uses it at a time (ConcurrentUse). Making one
    is a collective. Raises InputError, InvalidName and RankLost.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        process_group: dist.ProcessGroup | None = None,
        codec: str = codecs.AUTO,
        anchor_ratio: float = 1.0,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        folds: Collection[int] = (),
        signer: Signer | None = None,
        trusted_keys: Collection[str] = (),
        stream_id: str | None = None,
        threads: int | None = None,
        timeout_seconds: float = 600.0,
        on_event: Listener | None = None,
    ) -> None:
        codecs.check_codec(codec)
        checked_threads(threads)
        checked_listener(on_event)
        checked_number("anchor_ratio", anchor_ratio)
        checked_number("shard_bytes", shard_bytes, least=1, most=MAX_NUMBER)
        checked_number("timeout_seconds", timeout_seconds)
        checked_folds(folds)
        if signer is not None and not isinstance(signer, Signer):
            raise InputError(f"signer must be a Signer, not {signer!r}", hint="Make one with Signer.load(file).")
        trusted = checked_collection("trusted_keys", trusted_keys, "[key]")
        keys = [*([signer.public_key] if signer else ()), *trusted]
        ranks = RankGroup(GlooTransport(process_group, timeout_seconds, owner="ShardedPublisher"))
        opened: list[Stream] = []

        def open_stream() -> bytes:
            trusted = TrustedKeys(keys) if keys else None
            where = open_store(store)
            refused = weak_callback(self._refused)
            opened.append(Stream(where, stream, trusted, signer=signer, stream_id=stream_id, on_refused=refused))
            return b""

        try:
            ranks.run_on_all(open_stream)
        except BaseException:
            ranks.close()
            raise
        self._stream = opened[0]
        self._listener = on_event
        self._threads = threads
        self._serial = SerialThread("ShardedPublisher")
        self._submissions: Submissions[Order] = Submissions(self._serial, together=True)
        self._calls = 0
        self._rank = RankPublisher(
            self._stream,
            ranks,
            codec=codec,
            anchor_ratio=anchor_ratio,
            shard_bytes=shard_bytes,
            folds=folds,
            signer=signer,
            threads=threads,
            listener=on_event,
        )

    def publish(
        self,
        source: Mapping[str, Any],
        *,
        metadata: Metadata | None = None,
        dtype: str | None = None,
        anchor: bool = False,
    ) -> Published:
        """Commits a state as the next version; all ranks call this, each with its ``source``, a ``state_dict``, and all
        return what the version cost.

        ``metadata`` and ``anchor`` are those of `Publisher.publish`, and count on rank 0; ``dtype``, too, the same on
        all ranks. The tensors must not change during the call. Of several ranks with the same slice the lowest
        publishes it.

        A state of which the ranks publish other slices than of the version before is published with an anchor and no
        patch. Raises what `Publisher.publish` raises, StateMismatch where the ranks do not have each element once, and
        RankLost.
        """
        with self._call() as number, failures_to(self._listener, self._stream.name, "publish"):
            order = Order.of(source, metadata, dtype, anchor).awaited()
            return self._serial.run(lambda: self._rank.publish(order, number=number))

    def submit(
        self,
        source: Mapping[str, Any],
        *,
        metadata: Metadata | None = None,
        dtype: str | None = None,
        anchor: bool = False,
        replace: bool = False,
    ) -> Submission:
        """Takes a copy of this rank's part of a state and returns; the ranks commit the version behind the caller's
        work, as `publish` does it. All ranks call this, in the same order as `publish`.

        ``source``, ``metadata``, ``dtype`` and ``anchor`` are those of `publish`. What this copies, waits for, and
        needs is that of `Publisher.submit`, each rank for its own part. A version that one rank cancels, or gives up to
        ``replace`` it, is cancelled on all. An error is in the `Submission` of every rank, and a `CallFailed`; if
        nobody has asked for it, `wait` and `close` raise it.
        """
        began = time.perf_counter()
        blocked = 0.0

        def take(spare: Order | None) -> Order:
            nonlocal blocked
            taken = Order.of(source, metadata, dtype, anchor).taken(spare, self._threads)
            blocked = time.perf_counter() - began
            return taken

        def publish(number: int, taken: Order | None, submission: Submission) -> tuple[Published, Order | None]:
            order = taken or Order(None, {}, anchor)
            with failures_to(self._listener, self._stream.name, "publish"):
                return self._rank.publish(order, number=number, submission=submission, blocked_seconds=blocked), taken

        with self._call() as number:
            return self._submissions.submit(take, partial(publish, number), replace)

    def head(self) -> Manifest | None:
        """The newest committed version that can be read and trusted, None while there is none. Each rank may ask for
        itself."""
        return self._serial.run(self._head)

    @property
    def stream_id(self) -> str | None:
        """The stream's ID, 32 hexadecimal digits, for subscribers to pin; None before the first publish."""
        return self._stream.stream_id

    def wait(self) -> None:
        """Waits until what was submitted is published, and the background folds are stored."""
        self._serial.run(self._rank.make_folds)
        self._submissions.raise_unasked()

    def close(self) -> None:
        """Waits for what was submitted and for the background folds, and releases the baseline and the ranks' group.
        What is committed stays; a version that is not settled is left to the next publisher. May be called twice."""
        self._serial.run(self._rank.forget)
        self._submissions.forget()
        self._submissions.raise_unasked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PulseError:
            if error is None:  # an error that is on its way out is not hidden by one that came before it
                raise

    def _head(self) -> Manifest | None:
        found = self._stream.newest()
        if found.error:
            raise found.error
        return found.manifest

    def _refused(self, version: int, error: PulseError) -> None:
        self._tell(FallbackUsed(self._stream.name, f"version {version}", str(error), error.kind))

    def _tell(self, event: Event) -> None:
        if self._listener:
            self._listener(event)

    @contextmanager
    def _call(self) -> Iterator[int]:
        """The number of a call that all ranks make. What it has made due is folded behind the caller's work, or, where
        that cannot be, as from within a listener, by the next call."""
        self._calls += 1
        try:
            yield self._calls
        except ConcurrentUse:
            self._calls -= 1
            raise
        finally:
            with suppress(PulseError):
                self._serial.post(self._rank.make_folds)
