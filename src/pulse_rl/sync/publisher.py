"""The trainer's side: one publisher commits the versions of a stream (docs/protocol.md, section
3)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from .._util.collective import Alone, RankGroup
from .._util.serial import Closing, NotCopyable, SerialThread
from .._util.settings import checked_collection, checked_count, checked_number, checked_path
from .._util.threads import checked_threads, weak_callback
from ..errors import ConcurrentUse, InputError, PublisherConflict, PulseError
from ..events import (
    Listener,
    Metadata,
    Published,
    checked_listener,
    failures_to,
    fell_back,
    serialized,
)
from ..state.cast import DTypeLike
from ..state.tensors import StateSource
from ..store import Store, open_store
from ..stream.manifest import Manifest
from ..stream.signing import Signer, keys_of, trusted_by
from ..stream.stream import Stream, checked_stream_id
from ..submit import Submission, Submissions, copied
from .rank import RankPublisher
from .request import Files, LocalState, PublishRequest

if TYPE_CHECKING:
    from ..follow.state_folder import StateFolder
    from ..ops.checkout import Checkout
    from ..quantize.states import Quantize


@dataclass(frozen=True)
class PublisherSettings:
    """The checked settings of `Publisher` and `ShardedPublisher`, which document them.

    Raises InputError.
    """

    anchor_ratio: float = 1.0
    keep: int | None = None
    signer: Signer | None = None
    trusted_keys: Collection[str] = ()
    threads: int | None = None
    on_event: Listener | None = None
    #: All trusted keys, the signer's included; None: every version is trusted.
    keys: frozenset[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        checked_number("anchor_ratio", self.anchor_ratio)
        if self.keep is not None:
            checked_count("keep", self.keep)
        if self.signer is not None and not isinstance(self.signer, Signer):
            raise InputError(
                f"signer must be a Signer, not {self.signer!r}",
                hint="Make one with Signer.load(file).",
            )
        trusted = checked_collection("trusted_keys", self.trusted_keys, "[key]")
        keys = keys_of(self.signer, trusted)
        object.__setattr__(self, "keys", None if keys is None else frozenset(keys))
        checked_threads(self.threads)
        listener = serialized(checked_listener(self.on_event))
        object.__setattr__(self, "on_event", listener)

    def shared(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks, for JSON."""
        return {
            "anchor_ratio": self.anchor_ratio,
            "keep": self.keep,
            "signer": self.signer.public_key if self.signer else None,
            "trusted_keys": sorted(self.keys or ()),
        }


class Publisher(Closing, NotCopyable):
    """Publish the states of one policy as versions 0, 1, 2 … of a stream.

    An existing stream is continued, which is logged once. It has one Publisher at a time: a new one
    takes over at its first publish, and the earlier one gets PublisherConflict at its next commit;
    no version is lost. If a patch would be no smaller than an anchor, the version is an anchor
    alone, and `Published.reason` says so. An interrupt does no harm, because the work is done on a
    thread of its own; `head` says afterwards whether the version was committed. One thread at a
    time may use a Publisher (ConcurrentUse). It cannot be copied, pickled, or used in a forked
    process. It is a context manager (see `close`).

    Args:
        store: A store, or its address (see `open_store`).
        stream: The stream's name.
        anchor_ratio: Store an anchor with a patch when the patches since the last anchor exceed
            this multiple of the state's bytes. Default: 1.0.
        keep: How many of the newest versions stay. Objects that they do not need are deleted in the
            background, as `gc_stream` does, when an anchor has become old enough. Default: all
            versions stay.
        signer: Signs every manifest and claim. Then only objects that its key or one of
            ``trusted_keys`` has signed are believed. Default: no signatures.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each. Default: none.
        baseline: A folder of this publisher's own, in which the last version is a mapped file
            instead of memory. A publisher that starts again with it continues from there, once the
            file is verified. Default: memory.
        new: Whether the stream must not have versions yet. Default: False.
        threads: The maximum number of threads. Default: one per core.
        on_event: Called with the events of `pulse_rl.events`. Default: nobody.

    Raises:
        InputError: A setting is out of range.
        PublisherConflict: The stream must be ``new`` but has versions.
        ConcurrentUse: Another process uses the folder ``baseline``.
        StoreError: The store cannot be opened.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        anchor_ratio: float = 1.0,
        keep: int | None = None,
        signer: Signer | None = None,
        trusted_keys: Collection[str] = (),
        baseline: str | os.PathLike[str] | None = None,
        new: bool = False,
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        settings = PublisherSettings(anchor_ratio, keep, signer, trusted_keys, threads, on_event)
        folder = None
        if baseline is not None:
            from ..follow.state_folder import StateFolder

            folder = StateFolder(checked_path(baseline), "baseline")
        # A folder is locked when it is opened; an error must release it, or a retry would be
        # refused.
        try:
            self._open(RankPublisher, RankGroup(Alone()), store, stream, settings, folder)
        except BaseException:
            if folder:
                folder.close()
            raise
        self._rank.new = new
        if new and (head := self.head()) is not None:
            self.close()
            raise PublisherConflict(
                f"the stream {stream!r} has versions up to {head.version}, and new=True wants none",
                hint="Give the run another name, or leave new=True out to continue the stream.",
            )

    def _open(
        self,
        make: Callable[..., RankPublisher],
        ranks: RankGroup,
        store: Store | str,
        stream: str,
        settings: PublisherSettings,
        folder: StateFolder | None = None,
    ) -> None:
        """Open the stream with a `RankPublisher` from ``make``."""
        self._stream = Stream(
            open_store(store),
            stream,
            trusted_by(settings.keys),
            signer=settings.signer,
            on_refused=partial(weak_callback(self._refused), stream),
        )
        self._threads = settings.threads
        self._listener = settings.on_event
        self._serial = SerialThread(type(self).__name__)
        self._together = ranks.size > 1
        self._submissions: Submissions[PublishRequest] | None = None
        self._calls = 0
        self._rank = make(self._stream, ranks, settings, folder=folder)
        if self._rank.first:
            from ..ops.fleet import StuckWorkers

            self._rank.stuck_workers = StuckWorkers(self._stream)
        if settings.keep is not None and self._rank.first:
            from ..ops.gc import Retention

            self._rank.retention = Retention(
                self._stream, settings.keep, settings.keys or (), self._listener
            )

    def publish(
        self,
        source: StateSource,
        *,
        metadata: Metadata | None = None,
        dtype: DTypeLike | None = None,
        anchor: bool = False,
        files: Files | None = None,
        after: int | None = None,
        progress: bool = False,
        quantize: Quantize | None = None,
    ) -> Published:
        """Commit a state as the next version and return what it cost.

        The baseline in memory moves only after the commit is confirmed. If this raises
        StoreUnavailable or StoreFull nothing is lost; the next call settles whether the version was
        committed. A state whose names, dtypes or shapes differ from the last version's is published
        with an anchor. So is the next version after the store has lost the head, or if another key
        signed the head.

        Args:
            source: A torch.nn.Module, a mapping of names to tensors (a ``state_dict``), a `State`,
                or a checkpoint's path (see `State.of`). It must not change during the call.
            metadata: The caller's own data about the version, small and flat, such as ``{"step":
                10}``. Default: none.
            dtype: The compute dtype to cast wider floating-point tensors to: torch.bfloat16,
                "bfloat16" or "BF16", and likewise float16, float8_e4m3fn and float8_e5m2. Numbers
                round to nearest even as in ``torch.Tensor.to``; NaN stays NaN; FP8 has no scale.
                Default: as they are.
            anchor: Store an anchor in any case. A new worker can start at this version, even if it
                cannot trust or reach earlier ones. Default: False.
            files: The small files that a loader needs next to the weights (config, tokenizer, chat
                template …): names such as "config.json" to bytes or paths, or the folder of a
                checkpoint. At most 256 files of 128 MiB in all; unchanged ones are stored once.
                Default: those of the version before; ``{}``: none.
            after: The version that this one must follow, or -1 if the stream must be new. If the
                newest version is another one, nothing is published. Default: any.
            progress: Show a bar, with the time left, in a terminal or a notebook for work of more
                than half a second. Default: False.
            quantize: Turn weights into codes and scales, as in a checkpoint of a quantized model:
                "fp8_block", "mxfp8", "mxfp4", "nvfp4", or the model's ``quantization_config``. Or a
                function of a name and its FP32 array that returns the tensors in its place, or None
                to leave it. ``dtype`` then applies to all other tensors. A config.json in ``files``
                without a ``quantization_config`` gets one. Default: no quantization.

        Returns:
            What the version cost.

        Raises:
            InputError: An argument is out of range.
            UnsupportedTensor: A tensor has a dtype or a layout that cannot be published.
            PublisherConflict: Another publisher has taken over the stream, or ``after`` is not its
                newest version.
            StoreUnavailable, StoreFull, StoreError: The store failed.
        """
        # Errors of submitted versions are raised first: the next version would hide them.
        self._raise_unasked()
        with self._call() as number:
            with failures_to(self._listener, self._stream.name, "publish"):
                # 1. In the caller's thread: check the arguments, and wait for the caller's device
                # streams.
                request = self._request(
                    lambda: PublishRequest.of(
                        self._read(source, dtype, quantize),
                        metadata=metadata,
                        dtype=dtype,
                        anchor=anchor,
                        files=files if self._rank.first else None,  # rank 0's are stored
                        after=after,
                    ).awaited()
                )
                # 2. All else on the publisher's own thread, which no interrupt reaches.
                published, _ = self._serial.run(
                    lambda: self._rank.publish(request, number=number, progress=progress)
                )
            return published

    def submit(
        self,
        source: StateSource,
        *,
        metadata: Metadata | None = None,
        dtype: DTypeLike | None = None,
        anchor: bool = False,
        files: Files | None = None,
        copy_on_device: bool = False,
        replace: bool = False,
        quantize: Quantize | None = None,
    ) -> Submission:
        """Copy a state and return; a background thread commits the version as `publish` does.

        The state may change as soon as this returns. One version is in flight and one may wait; for
        a third this waits. Each copy needs the memory of a state. The next call raises an error of
        which nobody has asked the `Submission`, and does nothing else; `close` waits for all
        versions. CUDA tensors are copied uncast into page-locked memory by a stream of their own,
        after the work on the caller's current stream. Later work on that stream waits on the device
        for the copy; the host waits for neither. If no memory can be page-locked, this returns
        after the copy.

        Args:
            source: As for `publish`.
            metadata: As for `publish`.
            dtype: As for `publish`.
            anchor: As for `publish`.
            files: As for `publish`.
            copy_on_device: Copy CUDA tensors within their device first, if its memory suffices, so
                that training does not wait for the bus. Default: False.
            replace: Cancel the version that waits, if there is one, and reuse its memory. Default:
                False.
            quantize: As for `publish`.

        Returns:
            A future of what the version cost. ``Published.blocked_seconds`` is the duration of this
                call.

        Raises:
            InputError: An argument is out of range.
            UnsupportedTensor: A tensor has a dtype or a layout that cannot be published.
        """
        self._raise_unasked()
        began = time.perf_counter()
        with self._call() as number:
            if self._submissions is None:
                self._submissions = Submissions(self._serial, together=self._together)
            # 1. Room: the memory of a version that is published or cancelled, or None for new
            # memory.
            spare = self._submissions.make_room(replace)
            # 2. The copy, in the caller's thread.
            request = self._request(
                lambda: copied(
                    PublishRequest.of(
                        self._read(source, dtype, quantize),
                        metadata=metadata,
                        dtype=dtype,
                        anchor=anchor,
                        files=files if self._rank.first else None,
                    ),
                    spare.copy if spare else None,
                    staged=copy_on_device,
                    threads=self._threads,
                )
            )
            blocked = time.perf_counter() - began

            # 3. The rest on the publisher's own thread. It also returns the request whose memory is
            # free again.
            def publish_taken(
                taken: PublishRequest | None, submission: Submission
            ) -> tuple[Published, PublishRequest | None]:
                # Cancelled, and its memory was reclaimed. Among ranks each rank must report that in
                # its turn, so the call goes on.
                if taken is None and not self._together:
                    raise CancelledError
                sent = taken or PublishRequest.refusing(CancelledError())
                with failures_to(self._listener, self._stream.name, "publish"):
                    published, kept = self._rank.publish(
                        sent, number=number, submission=submission, blocked_seconds=blocked
                    )
                return published, None if kept else taken

            return self._submissions.post(request, publish_taken)

    def begin_from(self, found: Checkout, *, metadata: Metadata | None = None) -> Published:
        """Start this stream, which must be new, with a version of another stream.

        The first version has the same bits, files and metadata; the next publish is a patch from
        it. The metadata's ``begun_from`` names the version and its stream. It is signed with the
        manifest, and `verify_stream` checks it if both streams are in one store.

        Args:
            found: The version to start from (`pulse_rl.checkout`).
            metadata: More metadata of the caller. Default: none.
        Returns: What the version cost.
        Raises:
            PublisherConflict: The stream has versions.
            PulseError: What `publish` raises.
        """
        from ..ops.checkout import begun_from

        facts = found.metadata | begun_from(found.manifest) | (metadata or {})
        return self.publish(found.state, metadata=facts, files=found.files(), after=-1)

    def head(self) -> Manifest | None:
        """Return the newest committed version that can be read and trusted.

        Its metadata tells a restarted trainer where it was.

        Returns: The manifest, or None if there is no version.
        Raises:
            Untrusted: No version has a trusted signature.
            CorruptManifest: No version can be read.
            StoreError: The store failed.
        """
        return self._serial.run(self._head)

    @property
    def stream_id(self) -> str | None:
        """The stream's ID, 32 hexadecimal digits, for subscribers to pin.

        It is None before the first publish. A caller that knows the ID may set it before that.
        Versions of another stream of this name are then skipped. Setting it raises InputError for
        anything but an ID, and for another ID than the stream's.
        """
        return self._stream.stream_id

    @stream_id.setter
    def stream_id(self, stream_id: str | None) -> None:
        if self._stream.stream_id not in (None, stream_id):
            raise InputError(
                f"the stream {self._stream.name!r} is {self._stream.stream_id}, not {stream_id!r}",
                hint="Set the ID before the first publish.",
            )
        self._stream.stream_id = None if stream_id is None else checked_stream_id(stream_id)

    def wait(self) -> None:
        """Wait until all submitted versions are published and old versions are deleted.

        Raises: The first error of a submitted version of which nobody has asked its `Submission`.
        """
        self._serial.run(self._collect)
        if self._submissions:
            self._submissions.raise_unasked()

    def wait_for(
        self,
        version: int | None = None,
        *,
        workers: int | Collection[str],
        max_lag: int = 0,
        timeout_seconds: float = 600.0,
    ) -> tuple[str, ...]:
        """Wait until workers hold a version: a bound on staleness.

        Workers report their versions in the store (`pulse_rl.metrics.Heartbeat`, or ``pulse follow
        --name``); this polls them about once a second. Anyone who can write to the store can report
        a false version.

        Args:
            version: The version to wait for. Default: the newest one at the time of the call.
            workers: The names of the workers, or how many of them to wait for.
            max_lag: How many versions a worker may be behind ``version``. Default: 0.
            timeout_seconds: Seconds to wait. Default: 600.
        Returns: The names of the workers that are still behind; empty if none is. For a number of
            workers, those known and one "?" for each unknown one.
        Raises:
            InputError: An argument is out of range.
            StoreError: The store failed.
        """
        from ..ops.fleet import wait_for_workers

        if version is None:
            head = self.head()
            version = head.version if head else -1
        return wait_for_workers(
            self._stream,
            version,
            workers,
            max_lag=checked_number("max_lag", max_lag),
            timeout_seconds=checked_number("timeout_seconds", timeout_seconds),
        )

    def close(self) -> None:
        """Wait for submitted versions, and release the baseline.

        Committed versions stay. The next Publisher settles a version whose commit is not confirmed.
        This may be called twice; publishing afterwards starts as a new Publisher would.
        """
        self._serial.run(self._forget)
        if self._submissions:
            self._submissions.forget()
            self._submissions.raise_unasked()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._stream.name!r} in {self._stream.store!r}>"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except PulseError:
            if error is None:  # an error of the block must not be hidden by an earlier one
                raise

    def _read(self, source: Any, dtype: DTypeLike | None, quantize: Quantize | None) -> LocalState:
        """This rank's part of the state that a call was given."""
        return LocalState.of(source, dtype, quantize)

    def _request(self, made: Callable[[], PublishRequest]) -> PublishRequest:
        """The request of a call, checked in the caller's thread.

        Among several ranks an error is kept until it can be reported to all of them.
        """
        try:
            return made()
        except Exception as error:  # of any kind: the other ranks wait for a report
            if not self._together:
                raise
            return PublishRequest.refusing(error)

    def _collect(self) -> None:
        if self._rank.retention:
            self._rank.retention.collect()

    def _forget(self) -> None:
        self._collect()
        self._rank.forget()

    def _head(self) -> Manifest | None:
        with self._stream.limited():
            found = self._stream.newest()
        if found.error:
            raise found.error
        return found.manifest

    def _refused(self, stream: str, version: int, error: PulseError) -> None:
        fell_back(self._listener, stream, f"version {version}", error)

    def _raise_unasked(self) -> None:
        """Raise an error of which nobody has asked.

        Ranks, which must stay in step, leave that to `wait` and `close`.
        """
        if self._submissions and not self._together:
            self._submissions.raise_unasked()

    @contextmanager
    def _call(self) -> Iterator[int]:
        """The number of a call that all ranks make. Afterwards old versions are deleted in the
        background."""
        self._calls += 1
        try:
            yield self._calls
        except ConcurrentUse:
            # The call was refused before the ranks could meet, so it has no number.
            self._calls -= 1
            raise
        finally:
            if self._rank.retention:
                with suppress(PulseError):
                    self._serial.post(self._collect)
