"""The trainer's side: one publisher commits the versions of a stream (docs/protocol.md, section
3)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypedDict, Unpack

from .. import codec as codecs
from .._util.collective import Alone, RankGroup
from .._util.serial import Closing, NotCopyable, SerialThread
from .._util.settings import checked_collection, checked_count, checked_number, checked_path
from .._util.threads import checked_threads, weak_callback
from ..errors import ConcurrentUse, InputError, PulseError
from ..events import (
    Listener,
    Metadata,
    Published,
    checked_listener,
    failures_to,
    fell_back,
    one_at_a_time,
)
from ..state.checkpoint import StateSource
from ..state.companions import Files
from ..state.quantise import Quantise
from ..store import Store, open_store
from ..stream.manifest import Manifest, begun_from
from ..stream.signing import Signer, keys_of, trusted_by
from ..stream.stream import Stream, checked_stream_id
from .beside import Done, check_beside, publish_beside
from .calls import unlike
from .checkout import Checkout
from .folds import checked_folds
from .polling import jittered
from .rank import RankPublisher, Settings
from .request import LocalState, PublishRequest
from .state_folder import StateFolder
from .submissions import Submission, Submissions

_LOOK_SECONDS = 1.0


def _shared(store: Store | str, stream: Stream, settings: Settings) -> dict[str, Any]:
    """The settings that are the same on all ranks, as JSON has them."""
    return {
        "store": store if isinstance(store, str) else type(store).__name__,
        "stream": stream.name,
        "codec": settings.codec,
        "keep": settings.keep,
        "anchor_ratio": settings.anchor_ratio,
        "folds": list(settings.folds),
        "signer": settings.signer.public_key if settings.signer else None,
        "attest": settings.attest,
        "trusted_keys": list(settings.keys),
    }


class PublisherSettings(TypedDict, total=False):
    """The settings of `Publisher`, by name."""

    codec: str
    anchor_ratio: float
    folds: Collection[int]
    keep: int | None
    signer: Signer | None
    attest: bool
    trusted_keys: Collection[str]
    threads: int | None
    on_event: Listener | None


class Publisher(Closing, NotCopyable):
    """Publishes the states of one policy as versions 0, 1, 2 … of a stream. A context manager (see
    `close`).

    ``store``: a store, or its address (see `open_store`). ``stream``: its name; a stream that
    exists is continued. ``codec``: "auto" or "zstd", the layout of the PULSE paper.
    ``anchor_ratio``: an anchor is stored along with a patch whenever the patches since the last one
    exceed ``anchor_ratio`` times the state's bytes. ``folds``: the spans, in versions, over which
    folds are made in the background, for about 6 bytes of memory for every BF16 weight that changed
    within a span (``pulse fold`` makes them on any machine). ``keep``: the newest versions that
    stay; what they do not need is deleted in the background, as `gc_stream` does, whenever an
    anchor has become old enough (None: all stay). ``signer`` signs every manifest, claim and fold;
    then only what is signed by its key or by one of ``trusted_keys`` (Ed25519, 64 hexadecimal
    digits each) is believed. ``attest``: each anchor has an attestation of its files, signed by a
    key that is derived from the ``signer``'s; a `checkout` has it. ``baseline``: a folder of this
    publisher's own, in which the last version is a mapped file instead of memory; a publisher that
    starts again with it goes on from there, once that is verified. ``threads``: the maximum number
    (None: one per core). ``on_event`` gets the events of `pulse_rl.events`.

    A patch that is no smaller than an anchor is not stored: the version is an anchor alone, and
    `Published.reason` says so.

    A stream has one Publisher at a time: a new one takes over when it first publishes, and the one
    before is refused with PublisherConflict at its next commit; the chain stays whole. Raises
    InputError, StoreError, and ConcurrentUse where another process uses the folder ``baseline``.

    Interrupts do no harm: the work is done on a thread of its own. After one, `head` says whether
    the version was committed. One thread uses it at a time (ConcurrentUse). It cannot be copied,
    pickled, or used in a forked process.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        codec: str = codecs.AUTO,
        anchor_ratio: float = 1.0,
        folds: Collection[int] = (),
        keep: int | None = None,
        signer: Signer | None = None,
        attest: bool = False,
        trusted_keys: Collection[str] = (),
        baseline: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        settings: PublisherSettings = {
            "codec": codec,
            "anchor_ratio": anchor_ratio,
            "folds": folds,
            "keep": keep,
            "signer": signer,
            "attest": attest,
            "trusted_keys": trusted_keys,
            "threads": threads,
            "on_event": one_at_a_time(checked_listener(on_event)),
        }
        self._open(
            RankGroup(Alone()),
            store,
            stream=stream,
            folder=lambda beside: (
                None
                if baseline is None
                else StateFolder(checked_path(baseline) / beside, "baseline")
            ),
            **settings,
        )

    def _open(
        self,
        ranks: RankGroup,
        store: Store | str,
        *,
        stream: str,
        folder: Callable[[str], StateFolder | None],
        also: Callable[[], dict[str, Any]] = dict,
        **given: Unpack[PublisherSettings],
    ) -> None:
        """Checks the settings, together with the other ranks, and opens the stream. ``also`` checks
        others, which are the same on all ranks; ``folder`` takes this rank's, "" or that of a
        stream beside. Raises what the constructor does."""
        opened: list[tuple[Stream, Settings]] = []
        folders: list[StateFolder | None] = []

        def open_stream() -> bytes:
            shared = also()
            opened.append(self._checked(store, stream, **given))
            folders.append(folder(""))
            return (
                b"" if ranks.size == 1 else json.dumps(shared | _shared(store, *opened[0])).encode()
            )

        try:
            said = ranks.run_on_all(open_stream)
            if ranks.size > 1 and (found := unlike([json.loads(message) for message in said])):
                raise InputError(
                    found, hint="Make the publisher with the same arguments on all ranks."
                )
        except BaseException:
            for taken in filter(None, folders):
                taken.close()
            ranks.close()
            raise
        self._stream, settings = opened[0]
        self._threads = settings.threads
        self._listener = given.get("on_event")
        self._serial = SerialThread(type(self).__name__)
        self._together = ranks.size > 1
        self._submissions: Submissions[PublishRequest] = Submissions(
            self._serial, together=self._together
        )
        self._calls = 0
        self._rank = RankPublisher(
            self._stream, ranks, settings, listener=self._listener, folder=folders[0]
        )
        self._others: dict[str, RankPublisher] = {}  # of the streams beside this one
        self._given = ranks, folder, given  # for those

    def _checked(
        self, store: Store | str, stream: str, **given: Unpack[PublisherSettings]
    ) -> tuple[Stream, Settings]:
        for name in given.keys() - PublisherSettings.__annotations__.keys():
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
        codec, threads, keep = (
            given.get("codec", codecs.AUTO),
            given.get("threads"),
            given.get("keep"),
        )
        anchor_ratio, folds = given.get("anchor_ratio", 1.0), given.get("folds", ())
        signer = given.get("signer")
        codecs.check_codec(codec)
        if keep is not None:
            checked_count("keep", keep)
        checked_threads(threads)
        checked_listener(given.get("on_event"))
        checked_number("anchor_ratio", anchor_ratio)
        spans = checked_folds(folds)
        if signer is not None and not isinstance(signer, Signer):
            raise InputError(
                f"signer must be a Signer, not {signer!r}", hint="Make one with Signer.load(file)."
            )
        trusted = checked_collection("trusted_keys", given.get("trusted_keys", ()), "[key]")
        keys = keys_of(signer, trusted)
        attest = given.get("attest", False)
        if not isinstance(attest, bool):
            raise InputError(
                f"attest must be True or False, not {attest!r}", hint="The key is the signer's."
            )
        if attest and signer is None:
            raise InputError(
                "attest needs a signer",
                hint="Give a signer, --sign-key FILE; pulse keygen makes one.",
            )
        opened = Stream(
            open_store(store),
            stream,
            trusted_by(keys),
            signer=signer,
            on_refused=partial(weak_callback(self._refused), stream),
        )
        settings = Settings(
            codec,
            anchor_ratio,
            spans,
            keep,
            tuple(sorted({*(keys or ())})),
            signer,
            attest,
            threads,
        )
        return opened, settings

    def publish(
        self,
        source: StateSource,
        *,
        metadata: Metadata | None = None,
        dtype: str | None = None,
        anchor: bool = False,
        files: Files | None = None,
        on_device: str | None = None,
        after: int | None = None,
        progress: bool = False,
        quantise: Quantise | None = None,
        beside: Mapping[str, Quantise | None] | None = None,
    ) -> Published:
        """Commits a state as the next version and returns what it cost.

        ``source``: a mapping of names to tensors (a ``state_dict``), a `State`, or a checkpoint's
        path; it must not change during the call. ``metadata``: the caller's own data about the
        version, small and flat. ``dtype``: the compute dtype ("BF16", "F16", "F8_E4M3", "F8_E5M2")
        that floating-point tensors wider than it are cast to, rounded to nearest even as
        ``torch.Tensor.to`` does (NaN stays NaN); FP8 without a scale. None: as they are.
        ``anchor``: store an anchor with it, so that a newcomer can start here whatever it trusts or
        can reach of what was before. ``files``: the small files beside the weights that a loader
        needs (config, tokenizer, chat template …), names such as "config.json" to bytes or paths,
        or the folder of a checkpoint whose files they are; at most 256 of 128 MiB in all. They are
        stored once while they do not change. None keeps those of the version before, ``{}`` carries
        none. ``on_device``: what the devices of CUDA tensors have memory for: "copy", for `submit`,
        a copy, until it is on the host, so that training does not wait for the bus; "baseline",
        that, and the last version, so that only what differs crosses the bus; None, nothing.
        ``after``: the version that this one must follow, -1 where the stream must be new; where
        another has come since, PublisherConflict is raised and nothing is published. None: whatever
        is the newest. ``progress``: show a bar for what takes more than half a second, in a
        terminal or a notebook, with the time left. ``quantise``: weights become codes and scales,
        as a checkpoint of a quantised model has them: "fp8_block", "mxfp8", "mxfp4", "nvfp4", the
        model's ``quantization_config``, or a function of a name and its FP32 array that returns the
        tensors in its place, None for itself. ``dtype`` is then for all others, and a config.json
        among ``files`` that has no ``quantization_config`` gets one. ``beside``: other streams of
        the store, by name, that get the state, too, each quantised as this says (None: not), from
        one pass over the weights, with the same metadata, files and settings, and a folder of its
        own in ``baseline``.

        The in-memory baseline moves only after the commit is confirmed: if this raises
        StoreUnavailable or StoreFull, nothing is lost, and whether the version was committed is
        settled by the next call. A state with other names, dtypes or shapes than the last is
        published with an anchor; so is the next one where the head is lost from the store, or was
        signed with another key. Also raises UnsupportedTensor, InputError and PublisherConflict.

        With streams ``beside`` this one, what is wrong with the arguments is raised before anything
        is published. Where the store fails for one stream, the others get their versions all the
        same, which a note of the error names; the same call again gives the one its version, and
        the others one more, in which nothing changes. They go with no ``after``, and no
        ``on_device="baseline"``.
        """
        # An error of a submitted version is raised here first: what follows it would hide it.
        self._raise_unasked()
        with self._call() as number:
            with failures_to(self._listener, self._stream.name, "publish"):
                # In the caller's thread: whose devices must have written the state, and whose
                # arguments are wrong.
                read = partial(self._local, source, dtype, quantise, beside, after, on_device)
                request = self._request(
                    read, metadata, dtype, anchor, files, on_device, PublishRequest.awaited, after
                )
                # All else on the publisher's own thread, which no interrupt reaches.
                done = self._serial.run(
                    lambda: self._publish(request, number=number, progress=progress)
                )
            return done.result()

    def submit(
        self,
        source: StateSource,
        *,
        metadata: Metadata | None = None,
        dtype: str | None = None,
        anchor: bool = False,
        files: Files | None = None,
        on_device: str | None = None,
        replace: bool = False,
        quantise: Quantise | None = None,
        beside: Mapping[str, Quantise | None] | None = None,
    ) -> Submission:
        """Takes a copy of a state and returns; the version is committed behind the caller's work,
        as `publish` does it.

        ``source``, ``metadata``, ``dtype``, ``anchor``, ``files``, ``on_device``, ``quantise`` and
        ``beside`` are as for `publish`; the state may change as soon as this returns. One version
        is in flight and one may wait; for another one this waits for room, or, to ``replace``,
        cancels the one that waits and takes over its memory. Needs the memory of a state for each,
        of codes where it is quantised, of the caller's tensors with streams ``beside`` this one. An
        error that nobody has asked the `Submission` for is raised by the next call, which then does
        nothing else; `close` waits for all. ``Published.blocked_seconds`` tells how long this took.

        CUDA tensors are copied into page-locked memory (as they are: they are cast behind) by a
        stream of their own, after the work that the caller's current stream has been given; what it
        is given later waits on the device for the copy (with ``on_device`` for one within the
        device, where there is memory for that), and the host for neither. Where no memory can be
        page-locked, this returns after the copy.
        """
        self._raise_unasked()
        began = time.perf_counter()
        blocked = 0.0

        def take(spare: PublishRequest | None) -> PublishRequest:
            nonlocal blocked
            into = spare.copy if spare else None
            read = partial(self._local, source, dtype, quantise, beside, None, on_device)
            taken = self._request(
                read,
                metadata,
                dtype,
                anchor,
                files,
                on_device,
                lambda request: request.taken(into, self._threads),
            )
            blocked = time.perf_counter() - began
            return taken

        def publish(
            number: int, taken: PublishRequest | None, submission: Submission
        ) -> tuple[Published, PublishRequest | None]:
            # Cancelled, and its memory taken back. Among ranks each must hear of it in its turn.
            if taken is None and not self._together:
                raise CancelledError
            request = taken or PublishRequest.refusing(CancelledError())
            with failures_to(self._listener, self._stream.name, "publish"):
                done = self._publish(
                    request, number=number, submission=submission, blocked_seconds=blocked
                )
            return done.result(), None if done.kept else taken

        with self._call() as number:
            return self._submissions.submit(take, partial(publish, number), replace)

    def begin_from(self, found: Checkout, *, metadata: Metadata | None = None) -> Published:
        """Begins this stream, which must be new, with the version that ``found``
        (`pulse_rl.checkout`) holds: the same bits, files and metadata, and more ``metadata`` of the
        caller's. What is published next is a patch from there.

        The metadata's ``begun_from`` says from which version of which stream; it is signed with the
        manifest, and `verify_stream` checks it where both streams are in one store. Raises
        PublisherConflict where the stream has versions, and what `publish` raises.
        """
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
        """Waits until what was submitted is published, the background folds are stored, and old
        versions deleted."""
        self._serial.run(self._keep_up)
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
        if isinstance(workers, str) or (isinstance(workers, int) and workers < 0):
            raise InputError("workers must be a number of workers, or a collection of their names")
        if version is None:
            head = self.head()
            version = head.version if head else -1
        oldest = version - checked_number("most_behind", most_behind)
        deadline = time.monotonic() + checked_number("timeout_seconds", timeout_seconds)
        while True:
            held = self._stream.workers()
            there = {worker for worker, (of, _) in held.items() if of >= oldest}
            if isinstance(workers, int):
                missing = max(0, workers - len(there))
                late = [*sorted(held.keys() - there), *["?"] * missing][:missing]
            else:
                late = sorted(set(workers) - there)
            left = deadline - time.monotonic()
            if not late or left <= 0:
                return tuple(late)
            time.sleep(min(jittered(_LOOK_SECONDS), left))

    def close(self) -> None:
        """Waits for what was submitted and for the background folds, and releases the baseline.
        What is committed stays; a version that is not settled is left to the next Publisher. May be
        called twice; publishing afterwards starts as a new Publisher would.
        """
        self._serial.run(self._forget)
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

    def _read(self, source: Any, dtype: str | None, quantise: Quantise | None) -> LocalState:
        """What this rank has of a state that a call was given."""
        return LocalState.of(source, dtype, quantise)

    def _local(
        self,
        source: Any,
        dtype: str | None,
        quantise: Quantise | None,
        beside: Mapping[str, Quantise | None] | None,
        after: int | None,
        on_device: str | None,
    ) -> LocalState:
        """The same, for all streams of a call."""
        if not beside:
            return self._read(source, dtype, quantise)
        check_beside(self._stream.name, beside, after, on_device)
        return self._read(source, dtype, None)._replace(quantise=quantise, beside=beside)

    def _other(self, name: str) -> RankPublisher:
        """The publisher of a stream beside this one."""
        if name not in self._others:
            ranks, folder, given = self._given
            stream, settings = self._checked(self._stream.store, name, **given)
            self._others[name] = RankPublisher(
                stream, ranks, settings, listener=self._listener, folder=folder(name)
            )
        return self._others[name]

    @property
    def _ranks(self) -> list[RankPublisher]:
        """This one's, and those of the streams beside it."""
        return [self._rank, *list(self._others.values())]

    def _publish(self, request: PublishRequest, **given: Any) -> Done:
        """Publishes to all streams. Raises what this one's raises; an error of another one is in
        the result."""
        if not request.beside:
            return Done(*self._rank.publish(request, **given))
        return publish_beside(
            self._rank,
            self._other,
            request,
            listener=self._listener,
            threads=self._threads,
            **given,
        )

    def _keep_up(self) -> None:
        # All, whichever fails: each may be a collective.
        with ExitStack() as all_of_them:
            for rank in self._ranks:
                all_of_them.callback(rank.keep_up)

    def _forget(self) -> None:
        with ExitStack() as all_of_them:
            for rank in self._ranks:
                all_of_them.callback(rank.forget)
            all_of_them.callback(self._keep_up)  # before one of them lets the other ranks go

    def _request(
        self,
        read: Callable[[], LocalState],
        metadata: Metadata | None,
        dtype: str | None,
        anchor: bool,
        files: Files | None,
        on_device: str | None,
        then: Callable[[PublishRequest], PublishRequest],
        after: int | None = None,
    ) -> PublishRequest:
        """The request of a call, looked at in the caller's thread; among several ranks an error is
        kept until all can be told."""
        try:
            mine = files if self._rank.first else None  # rank 0's are the version's
            return then(
                PublishRequest.of(
                    read,
                    metadata=metadata,
                    dtype=dtype,
                    anchor=anchor,
                    files=mine,
                    on_device=on_device,
                    after=after,
                )
            )
        except Exception as error:  # whatever it is: the others wait to be told
            if not self._together:
                raise
            return PublishRequest.refusing(error)

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
        if not self._together:
            self._submissions.raise_unasked()

    @contextmanager
    def _call(self) -> Iterator[int]:
        """The number of a call that all ranks make. What it has made due is folded behind the
        caller's work, or, where that cannot be, as from within a listener, by the next call."""
        self._calls += 1
        try:
            yield self._calls
        except ConcurrentUse:
            self._calls -= 1
            raise
        finally:
            if any(rank.has_upkeep for rank in self._ranks):
                with suppress(PulseError):
                    self._serial.post(self._keep_up)
