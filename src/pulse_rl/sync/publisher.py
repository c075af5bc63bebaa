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
from types import TracebackType
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
    one_at_a_time,
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
    """The settings that `Publisher` and `ShardedPublisher` have in common, checked; they are
    documented there. Raises InputError."""

    anchor_ratio: float = 1.0
    keep: int | None = None
    signer: Signer | None = None
    trusted_keys: Collection[str] = ()
    threads: int | None = None
    on_event: Listener | None = None
    keys: frozenset[str] | None = field(init=False, default=None)
    """All that are trusted, the signer's own included; None: every version is."""

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
        listener = one_at_a_time(checked_listener(self.on_event))
        object.__setattr__(self, "on_event", listener)

    def shared(self) -> dict[str, Any]:
        """Those that are the same on all ranks, as JSON has them."""
        return {
            "anchor_ratio": self.anchor_ratio,
            "keep": self.keep,
            "signer": self.signer.public_key if self.signer else None,
            "trusted_keys": sorted(self.keys or ()),
        }


class Publisher(Closing, NotCopyable):
    """Publish the states of one policy as versions 0, 1, 2 … of a stream.

    A stream that exists is continued, which is logged once. It has one Publisher at a time: a new
    one takes over when it first publishes, and the one before is refused with PublisherConflict at
    its next commit; the chain stays whole. A patch that is no smaller than an anchor is not stored:
    the version is an anchor alone, and `Published.reason` says so. A context manager (see `close`).

    Interrupts do no harm: the work is done on a thread of its own. After one, `head` says whether
    the version was committed. One thread uses it at a time (ConcurrentUse). It cannot be copied,
    pickled, or used in a forked process.

    Args:
        store: A store, or its address (see `open_store`).
        stream: The stream's name.
        anchor_ratio: An anchor is stored along with a patch whenever the patches since the last
            anchor exceed this multiple of the state's bytes.
        keep: How many of the newest versions stay. What they do not need is deleted in the
            background, as `gc_stream` does, whenever an anchor has become old enough. None: all.
        signer: Signs every manifest and claim; then only what is signed by its key or by one of
            ``trusted_keys`` is believed.
        trusted_keys: Ed25519 public keys, 64 hexadecimal digits each.
        baseline: A folder of this publisher's own, in which the last version is a mapped file
            instead of memory; a publisher that starts again with it goes on from there, once that
            is verified.
        new: Whether the stream must not have versions yet.
        threads: The maximum number of threads. None: one per core.
        on_event: Gets the events of `pulse_rl.events`.

    Raises:
        InputError: A setting makes no sense.
        PublisherConflict: The stream must be ``new``, and has versions.
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
        """Opens the stream, which ``make`` (a `RankPublisher`) publishes."""
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
        """Commit a state as the next version, and return what it cost.

        The in-memory baseline moves only after the commit is confirmed: if this raises
        StoreUnavailable or StoreFull, nothing is lost, and whether the version was committed is
        settled by the next call. A state with other names, dtypes or shapes than the last is
        published with an anchor; so is the next one where the head is lost from the store, or was
        signed with another key.

        Args:
            source: A torch.nn.Module, a mapping of names to tensors (a ``state_dict``), a `State`,
                or a checkpoint's path (see `as_state`). It must not change during the call.
            metadata: The caller's own data about the version, small and flat, such as
                ``{"step": 10}``.
            dtype: The compute dtype that floating-point tensors wider than it are cast to, rounded
                to nearest even as ``torch.Tensor.to`` does (NaN stays NaN); FP8 without a scale.
                torch.bfloat16, "bfloat16" or "BF16", and so for float16, float8_e4m3fn and
                float8_e5m2. None: as they are.
            anchor: Whether an anchor is stored in any case, so that a new worker can start here
                whatever it trusts or can reach of the versions before.
            files: The small files that a loader needs next to the weights (config, tokenizer, chat
                template …): names such as "config.json" to bytes or paths, or the folder of a
                checkpoint whose files they are; at most 256 of 128 MiB in all. They are stored once
                while they do not change. None keeps those of the version before, ``{}`` carries
                none.
            after: The version that this one must follow, -1 where the stream must be new; where
                another has come since, nothing is published. None: whatever is the newest.
            progress: Whether a bar is shown, with the time left, for what takes more than half a
                second, in a terminal or a notebook.
            quantize: How weights become codes and scales, as a checkpoint of a quantized model has
                them: "fp8_block", "mxfp8", "mxfp4", "nvfp4", the model's ``quantization_config``,
                or a function of a name and its FP32 array that returns the tensors in its place,
                None for itself. ``dtype`` is then for all others, and a config.json among ``files``
                that has no ``quantization_config`` gets one.

        Returns:
            What the version cost.

        Raises:
            InputError: An argument makes no sense.
            UnsupportedTensor: A tensor has a dtype or a layout that cannot be published.
            PublisherConflict: Another publisher has taken the stream over, or ``after`` is not its
                newest version.
            StoreUnavailable, StoreFull, StoreError: The store failed.
        """
        # An error of a submitted version is raised here first: what follows it would hide it.
        self._raise_unasked()
        with self._call() as number:
            with failures_to(self._listener, self._stream.name, "publish"):
                # In the caller's thread: whose devices must have written the state, and whose
                # arguments are wrong.
                request = self._request(
                    lambda: PublishRequest.of(
                        self._read(source, dtype, quantize),
                        metadata=metadata,
                        dtype=dtype,
                        anchor=anchor,
                        files=files if self._rank.first else None,  # rank 0's are the version's
                        after=after,
                    ).awaited()
                )
                # All else on the publisher's own thread, which no interrupt reaches.
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
        another one this waits for room. Needs the memory of a state for each. An error that nobody
        has asked the `Submission` for is raised by the next call, which then does nothing else;
        `close` waits for all. ``Published.blocked_seconds`` tells how long this took.

        CUDA tensors are copied into page-locked memory (as they are: they are cast later) by a
        stream of their own, after the work that the caller's current stream has been given; what it
        is given later waits on the device for the copy, and the host for neither. Where no memory
        can be page-locked, this returns after the copy.

        Args:
            source: As for `publish`.
            metadata: As for `publish`.
            dtype: As for `publish`.
            anchor: As for `publish`.
            files: As for `publish`.
            copy_on_device: Whether CUDA tensors are first copied within their device, where there
                is memory for that, so that training does not wait for the bus.
            replace: Whether the version that waits, if there is one, is cancelled in favor of this
                one, which takes over its memory.
            quantize: As for `publish`.

        Returns:
            A future of what the version cost.

        Raises:
            InputError: An argument makes no sense.
            UnsupportedTensor: A tensor has a dtype or a layout that cannot be published.
        """
        self._raise_unasked()
        began = time.perf_counter()
        with self._call() as number:
            if self._submissions is None:
                self._submissions = Submissions(self._serial, together=self._together)
            # 1. Room: the memory of a version that is published or cancelled, or new memory.
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
            # 3. The rest on the publisher's own thread.
            return self._submissions.post(request, partial(self._publish_taken, number, blocked))

    def _publish_taken(
        self,
        number: int,
        blocked_seconds: float,
        taken: PublishRequest | None,
        submission: Submission,
    ) -> tuple[Published, PublishRequest | None]:
        """Publishes what was submitted; the second is the request whose memory is free again."""
        # Cancelled, and its memory taken back. Among ranks each must hear of it in its turn.
        if taken is None and not self._together:
            raise CancelledError
        request = taken or PublishRequest.refusing(CancelledError())
        with failures_to(self._listener, self._stream.name, "publish"):
            published, kept = self._rank.publish(
                request, number=number, submission=submission, blocked_seconds=blocked_seconds
            )
        return published, None if kept else taken

    def begin_from(self, found: Checkout, *, metadata: Metadata | None = None) -> Published:
        """Begins this stream, which must be new, with the version that ``found``
        (`pulse_rl.checkout`) holds: the same bits, files and metadata, and more ``metadata`` of the
        caller's. What is published next is a patch from there.

        The metadata's ``begun_from`` says from which version of which stream; it is signed with the
        manifest, and `verify_stream` checks it where both streams are in one store. Raises
        PublisherConflict where the stream has versions, and what `publish` raises.
        """
        from ..ops.checkout import begun_from

        facts = found.metadata | begun_from(found.manifest) | (metadata or {})
        return self.publish(found.state, metadata=facts, files=found.files(), after=-1)

    def head(self) -> Manifest | None:
        """The newest committed version that can be read and trusted, None while there is none. Its
        metadata tells a restarted trainer where it was."""
        return self._serial.run(self._head)

    @property
    def stream_id(self) -> str | None:
        """The stream's ID, 32 hexadecimal digits, for subscribers to pin; None before the first
        publish. Where the caller knows it, it may be set before the first publish: versions of
        another stream of this name, which somebody has put there, are then passed over. Setting it
        raises InputError for what is no ID, or for another than the stream's."""
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
        """Wait until what was submitted is published, and old versions are deleted."""
        self._serial.run(self._collect)
        if self._submissions:
            self._submissions.raise_unasked()

    def wait_for(
        self,
        version: int | None = None,
        *,
        workers: int | Collection[str],
        most_behind: int = 0,
        timeout_seconds: float = 600.0,
    ) -> tuple[str, ...]:
        """Waits until workers hold ``version`` (None: the newest of now), or one that is at most
        ``most_behind`` older: a bound on staleness.

        ``workers``: how many, or their names, as they say themselves in the store
        (`pulse_rl.metrics.Heartbeat`, or ``pulse follow --name``). Returns those that are still
        behind after ``timeout_seconds``, of a number those that were heard of and as many "?" as
        were not: none, if all is well. Looks about once a second. Whoever can write to the store
        can say what is not so. Raises InputError, and what `head` raises.
        """
        from ..metrics import wait_for_workers

        if version is None:
            head = self.head()
            version = head.version if head else -1
        return wait_for_workers(
            self._stream,
            version,
            workers,
            most_behind=checked_number("most_behind", most_behind),
            timeout_seconds=checked_number("timeout_seconds", timeout_seconds),
        )

    def close(self) -> None:
        """Wait for what was submitted, and release the baseline.

        What is committed stays; a version that is not settled is left to the next Publisher. May be
        called twice; publishing afterwards starts as a new Publisher would.
        """
        self._serial.run(self._forget)
        if self._submissions:
            self._submissions.forget()
            self._submissions.raise_unasked()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._stream.name!r} in {self._stream.store!r}>"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except PulseError:
            if (
                error is None
            ):  # an error that is on its way out is not hidden by one that came before it
                raise

    def _read(self, source: Any, dtype: DTypeLike | None, quantize: Quantize | None) -> LocalState:
        """What this rank has of a state that a call was given."""
        return LocalState.of(source, dtype, quantize)

    def _request(self, made: Callable[[], PublishRequest]) -> PublishRequest:
        """The request of a call, looked at in the caller's thread; among several ranks an error is
        kept until all can be told."""
        try:
            return made()
        except Exception as error:  # whatever it is: the others wait to be told
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
        """Raises an error that nobody has asked for. Ranks, which would part, leave that to `wait`
        and `close`."""
        if self._submissions and not self._together:
            self._submissions.raise_unasked()

    @contextmanager
    def _call(self) -> Iterator[int]:
        """The number of a call that all ranks make. What it has made superfluous is deleted behind
        the caller's work."""
        self._calls += 1
        try:
            yield self._calls
        except ConcurrentUse:
            self._calls -= 1
            raise
        finally:
            if self._rank.retention:
                with suppress(PulseError):
                    self._serial.post(self._collect)
