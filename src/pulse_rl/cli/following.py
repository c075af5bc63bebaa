"""Commands that go on until they are stopped: follow, into a folder or a live engine; watch, out of
one; relay. And replay, which moves a live engine, too."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .._util.retry import Backoff, jittered
from .._util.settings import counted, format_bytes
from ..engines import sglang, vllm
from ..engines.handle import EngineHandle, EngineSync
from ..engines.rollouts import Replay, Rollout
from ..engines.sglang import is_sglang
from ..engines.transport import SubscriberOptions
from ..errors import (
    ConcurrentUse,
    EmptyStream,
    FormatError,
    InputError,
    PublisherConflict,
    PulseError,
    StoreUnavailable,
    UnsupportedTensor,
)
from ..events import Synced
from ..follow.checkpoint import FILE_NAME, current_version, load
from ..follow.folder import FolderLayout, InUse, check_folder
from ..hints import empty
from ..metrics import PUBLISHER, RELAY, SUBSCRIBER, Heartbeat
from ..ops.relay import Relay
from ..sync.subscriber import Subscriber
from .common import (
    COMMON,
    LAYOUT,
    NAMED,
    READABLE,
    SIGNING,
    STREAM,
    TRUST,
    WRITING,
    Console,
    add_command,
    add_poll,
    count,
    facts_of,
    open_lasting,
    options,
    path,
    print_published,
    reading,
)
from .monitor import MONITORED, Monitor
from .streams import of_version, open_publisher, version_options

_MIN_WAIT, _MAX_WAIT = 0.1, 15.0
# A store that is away costs nobody anything, and when it is back workers are to go on soon.
_MAX_AWAY = 4.0
_LOOK_SECONDS = 30.0
_MAX_DIGITS = 16


def add_parsers(commands: Any) -> None:
    watched = options()  # before the store
    text = "where the trainer writes a folder for each step"
    watched.add_argument("folder", metavar="FOLDER", help=text)
    parents = (COMMON, watched, STREAM, version_options(), SIGNING, TRUST, MONITORED)
    command = add_command(commands, "watch", watch, *parents, timed=True)
    text = "the names of those folders, such as step_* (default: *)"
    command.add_argument("--pattern", default="*", metavar="GLOB", help=text)
    text = "the file that the trainer writes last, such as STABLE"
    command.add_argument("--done", required=True, metavar="FILE", help=text)
    add_poll(command, "looks", "publish what is there")

    shared = (COMMON, NAMED, TRUST, WRITING, LAYOUT, MONITORED)
    command = add_command(commands, "follow", follow, *shared, timed=True)
    text = f"{READABLE}; several in order of preference, the stream's own last"
    command.add_argument("store", metavar="STORE", nargs="+", help=text)
    kept = command.add_mutually_exclusive_group(required=True)
    text = "a folder that engines load, replaced atomically"
    kept.add_argument("--out", type=path, metavar="DIR", help=text)
    kept.add_argument("--engine", metavar="URL", help="a vLLM or SGLang server, started for pulse")
    command.add_argument(
        "--layout",
        metavar="NAME",
        help="a folder in DIR for each version, as trainers write them: prime-rl, slime, areal, "
        "hf, or a pattern such as step_{}/STABLE, the folder and the file that is written last",
    )
    text = "keep the newest N folders of the layout (default: all)"
    command.add_argument("--keep", type=count, metavar="N", help=text)
    command.add_argument(
        "--in-flight",
        choices=["keep", "abort", "wait"],
        default="keep",
        help="what becomes of an engine's requests at an update (default: keep)",
    )
    text = "only the tensors with this name, or one like 'layers.0.*'; may be repeated"
    command.add_argument("--select", action="append", metavar="PATTERN", help=text)
    text = "if the stream is recreated, or its store goes back in time, follow what is there"
    command.add_argument("--allow-recreated", action="store_true", help=text)
    add_poll(command, "polls of the store", "sync once")
    text = "keep downloaded payloads in this folder"
    command.add_argument("--cache", type=path, metavar="DIR", help=text)
    text = "report in the store which version this worker holds, every 30 s (see status)"
    command.add_argument("--name", metavar="W", help=text)

    command = add_command(commands, "relay", relay, COMMON, TRUST, MONITORED, timed=True)
    text = "the store to copy from: a folder, or a URL as for STORE"
    command.add_argument("source", metavar="SOURCE", help=text)
    text = "the store to copy to, to which nobody else publishes"
    command.add_argument("target", metavar="TARGET", help=text)
    text = "a stream's name; may be repeated"
    command.add_argument("--stream", required=True, action="append", metavar="S", help=text)
    text = "keep the newest N versions of the target restorable (default: all)"
    command.add_argument("--keep", type=count, metavar="N", help=text)
    text = "if a stream is deleted and recreated, or its source goes back in time, copy the new one"
    command.add_argument("--allow-recreated", action="store_true", help=text)
    add_poll(command, "polls of the source", "copy what is there")
    text = "report in the source which version this relay holds (see status)"
    command.add_argument("--name", metavar="R", help=text)

    command = add_command(commands, "replay", replay, COMMON, TRUST)
    text = "a file of rollout records (docs/replay.md)"
    command.add_argument("records", metavar="RECORDS", help=text)
    text = "the store that has their streams"
    command.add_argument("--store", required=True, metavar="STORE", help=text)
    text = "a vLLM or SGLang server, started for pulse (default: a vLLM of its own)"
    command.add_argument("--engine", metavar="URL", help=text)


def follow(args: argparse.Namespace, console: Console) -> None:
    """Keep a checkpoint or a live engine up to date with a stream.

    pulse follow s3://bucket/run --stream policy --out policy
    """
    if args.engine is None:
        if args.keep and not args.layout:
            raise InputError(
                "--keep is for the folders of a --layout",
                hint="Otherwise the newest version is kept.",
            )
        with _monitored(args, console) as monitor:
            _follow_into_a_folder(args, console, monitor)
        return
    if args.layout or args.keep:
        raise InputError(
            "an engine has no --layout", hint="Leave --layout and --keep out, or give --out."
        )
    if len(args.store) > 1:
        raise InputError("an engine follows one store", hint="Give the nearest one.")
    if args.select:
        raise InputError(
            "an engine needs all tensors of its model", hint="Leave --select out, or give --out."
        )
    if args.store[0].startswith("memory:"):
        raise InputError(
            "an engine cannot open a memory:// store", hint="Give a folder or an object store."
        )
    with _monitored(args, console) as monitor:
        _follow_into_an_engine(args, console, monitor)


@contextmanager
def _monitored(args: argparse.Namespace, console: Console) -> Iterator[Monitor]:
    """The monitor of a worker, with its heartbeat. A worker that ends in order is none any more."""
    with Monitor(args, console, SUBSCRIBER, "sync", [args.stream]) as monitor:
        if args.name:
            monitor.beat(Heartbeat(args.store[-1], args.name), leave=not args.once)
        yield monitor


def _follow_into_an_engine(args: argparse.Namespace, console: Console, monitor: Monitor) -> None:
    handle: EngineHandle | None = None

    def sync() -> None:
        nonlocal handle
        try:
            handle = handle or _connect(
                args.engine,
                store=args.store[0],
                stream=args.stream,
                trusted_keys=args.trust,
                stream_id=args.stream_id,
                allow_recreated=args.allow_recreated,
                cache=args.cache,
                in_flight=args.in_flight,
            )
            done = handle.sync()
        except ConcurrentUse:
            handle = None  # taken over: once the other is silent, another session is begun
            raise
        if done is not None:
            how = "all weights" if done.full else f"from version {done.previous}"
            proved = "" if done.audit_seconds is None else ", live weights proved"
            line = (
                f"version {done.version} is live ({how}): {format_bytes(done.fetched_bytes)} "
                f"fetched, paused {1e3 * done.pause_seconds:.0f} ms{proved}"
            )
            console.result(facts_of(done, *EngineSync.__slots__), line)
            monitor.record(_synced(args.stream, done))
        monitor.succeeded(args.stream, handle.version)
        if done is None and args.once:
            version = handle.version
            line = f"version {version} is the newest, and live"
            console.result({"version": version, "changed": False}, line)

    def pause(seconds: float) -> None:
        if handle is not None:
            handle.wait_for_version(seconds)
        else:
            _sleep(seconds)

    def may_pass(error: PulseError) -> bool:
        # Whoever was killed while it drove the engine is forgotten after some seconds.
        return error.retryable or isinstance(error, ConcurrentUse)

    try:
        keep_on(sync, args, console, monitor, pause, may_pass)
    finally:
        if handle is not None:
            handle.close()


def _connect(engine: Any, **settings: Any) -> EngineHandle:
    """A handle on the server at a URL, or on a vLLM of this process."""
    at_sglang = isinstance(engine, str) and is_sglang(engine, _LOOK_SECONDS)
    return (sglang.connect if at_sglang else vllm.connect)(engine, **settings)


def _synced(stream: str, done: EngineSync) -> Synced:
    """The event of an engine's move, whose own processes have synced. They do not say by which
    links they came."""
    seconds = done.fetch_seconds + done.verify_seconds + done.pause_seconds
    phases = {"fetch": done.fetch_seconds, "apply": done.verify_seconds}
    moved = (done.version, done.previous, done.root, (), done.fetched_bytes)
    lag = math.nan if done.lag_seconds is None else done.lag_seconds
    return Synced(stream, *moved, seconds, lag, phases)


def _follow_into_a_folder(args: argparse.Namespace, console: Console, monitor: Monitor) -> None:
    out = Path(args.out)
    layout = FolderLayout.of(args.layout) if args.layout else None
    if layout is None:
        check_folder(out, [FILE_NAME], force=args.force)
    base, written = _left_in(out, layout)
    subscriber = Subscriber(
        [open_lasting(store) for store in args.store],
        stream=args.stream,
        base=None if args.select else base,  # a part of a state has no version's root
        cache=args.cache,
        select=args.select,
        **reading(args, monitor),
    )
    subscriber.allow_recreated = args.allow_recreated
    use = InUse(out)

    def sync() -> None:
        nonlocal written
        update = subscriber.sync()
        if subscriber.version is None:
            monitor.succeeded(args.stream, None)
            raise empty(open_lasting(args.store[-1]), args.stream)
        use.take()
        if update is not None or written not in (None, subscriber.version):
            # Without an update: the same weights, with other files.
            subscriber.save(
                out, sharded=args.sharded, force=args.force, layout=args.layout, keep=args.keep
            )
            written = subscriber.version
            console.note_files(subscriber.files())
        if update is not None:
            names = ("version", "previous", "root", "changed", "payload_bytes", "seconds")
            line = (
                f"version {update.version}: {format_bytes(update.payload_bytes)} fetched, root "
                f"{update.root} verified"
            )
            console.result(facts_of(update, *names), line)
            update.acknowledge()
        elif args.once:
            line = f"version {subscriber.version} is the newest, root {subscriber.root} verified"
            facts = facts_of(subscriber, "version", "root")
            console.result(facts | {"changed": 0, "payload_bytes": 0}, line)
        monitor.succeeded(args.stream, subscriber.version)

    with use:
        keep_on(sync, args, console, monitor, subscriber.wait_for_new)


def _left_in(out: Path, layout: FolderLayout | None) -> tuple[Path | None, int | None]:
    """(the newest checkpoint of an earlier run, its version); None where there is none or it is
    damaged: then the state comes from an anchor."""
    if layout is not None:
        version, shown = max(layout.versions(out), default=(None, None))
        return shown, version
    shown = current_version(out)
    try:
        said = load(shown)[1].get("pulse.version", "")
    except (FormatError, UnsupportedTensor, InputError):
        return None, None
    return shown, int(said) if said.isdecimal() and len(said) < _MAX_DIGITS else None


def _sleep(seconds: float) -> None:
    time.sleep(jittered(seconds))


def keep_on(
    work: Callable[[], None],
    args: argparse.Namespace,
    console: Console,
    monitor: Monitor,
    pause: Callable[[float], None] = _sleep,
    may_pass: Callable[[PulseError], bool] = lambda error: error.retryable,
) -> None:
    """Does ``work`` once, or again after a ``pause`` of ``args.poll`` seconds. At an error that
    ``may_pass`` it says so once, and tries again after ever longer."""
    backoff = Backoff(max(2 * args.poll, _MIN_WAIT), max(_MAX_WAIT, args.poll))
    while True:
        try:
            work()
            console.note_counts()
            console.forget_notes()
            monitor.ended(None)
        except PulseError as error:
            monitor.ended(error)
            console.note_counts()
            if args.once or not may_pass(error):
                raise
            console.note(f"{error} ({error.hint}); retrying")
            # What is missing or damaged is fetched again at each try.
            if not isinstance(error, EmptyStream):
                wait = backoff.wait()
                if isinstance(error, StoreUnavailable):
                    wait = min(wait, jittered(max(_MAX_AWAY, args.poll)))
                time.sleep(wait)
                continue
        if args.once:
            return
        backoff.reset()
        pause(args.poll)


def replay(args: argparse.Namespace, console: Console) -> int:
    """Generate rollouts again, with the exact weights that they came from.

    pulse replay rollouts.jsonl --store s3://bucket/run --engine http://localhost:8000
    """

    def by_version(numbered: tuple[int, Rollout]) -> tuple[str, int, int]:
        """An engine moves forward."""
        weights = numbered[1].weights
        return numbered[1].stream, weights[0].version, weights[-1].version

    rollouts = sorted(enumerate(Rollout.read(args.records), 1), key=by_version)
    if not rollouts:
        raise InputError(
            f"{args.records} has no rollouts", hint="docs/replay.md says what writes them."
        )
    same = tokens = 0
    trusted: SubscriberOptions = {"trusted_keys": args.trust, "stream_id": args.stream_id}
    for stream, numbered in groupby(rollouts, key=lambda each: each[1].stream):
        group = list(numbered)
        with (
            _engine(args, stream, group[0][1].weights[0].version) as engine,
            _connect(engine, store=args.store, stream=stream, **trusted) as handle,
        ):
            for number, rollout in group:
                done = handle.replay(rollout)
                same += done.same
                tokens += len(rollout.token_ids)
                _show_replayed(number, done, console)
    console.result(
        {"rollouts": len(rollouts), "same": same, "tokens": tokens},
        f"{same} of {counted(len(rollouts), 'rollout')} the same to the last bit; "
        f"{counted(tokens, 'token')} in all",
    )
    return 0 if same == len(rollouts) else 1


@contextmanager
def _engine(args: argparse.Namespace, stream: str, version: int) -> Iterator[Any]:
    """The engine to replay with: ``args.engine``, or a vLLM within this process that begins at
    ``version``."""
    if args.engine is not None:
        yield args.engine
        return
    vllm.require()
    with TemporaryDirectory(prefix="pulse-replay-") as folder:
        with Subscriber(
            args.store, stream=stream, trusted_keys=args.trust, stream_id=args.stream_id
        ) as subscriber:
            subscriber.sync(version)
            subscriber.save(folder)
        yield vllm.start(folder)


def _show_replayed(number: int, done: Replay, console: Console) -> None:
    rollout = done.rollout
    versions = [weights.version for weights in rollout.weights]
    if done.reason:
        how = f"not all of it can be generated again: {done.reason}"
    elif done.same:
        how = f"{counted(len(rollout.token_ids), 'token')}, all the same"
    else:
        how = f"{len(done.differing)} of {counted(len(rollout.token_ids), 'token')} differ"
        if done.engine_version != rollout.engine_version:
            how += (
                f"; {rollout.engine} was {rollout.engine_version}, and is {done.engine_version} "
                "here"
            )
    lines = [f"rollout {number} of version {' to '.join(map(str, versions))}: {how}"]
    for index in done.differing:
        was, now = ((of.token_ids[index], of.logprobs[index]) for of in (rollout, done))
        lines.append(f"  token {index} was {was[0]} with {was[1]}, and is {now[0]} with {now[1]}")
    facts = facts_of(done, "same", "differing", "reason", "engine_version")
    console.result({"rollout": number, "versions": versions, **facts}, *lines)


def relay(args: argparse.Namespace, console: Console) -> None:
    """Mirror streams into another store, for the workers near that one.

    pulse relay s3://bucket/run /near --stream policy
    """
    if len(args.stream) > 1 and args.stream_id:
        raise InputError(
            "one stream ID for several streams", hint="Give --stream-id with a single --stream."
        )
    with Monitor(args, console, RELAY, "relay", args.stream) as monitor:
        if args.name:
            monitor.beat(Heartbeat(args.source, args.name), leave=not args.once)
        _relay(args, console, monitor)


def _relay(args: argparse.Namespace, console: Console, monitor: Monitor) -> None:
    source, target = open_lasting(args.source), open_lasting(args.target)
    relays = {
        stream: Relay(
            source,
            target,
            stream=stream,
            keep=args.keep,
            allow_recreated=args.allow_recreated,
            **reading(args, monitor),
        )
        for stream in args.stream
    }

    def sync() -> None:
        """All streams by turns, a shard each, then the first error: one stream does not hold the
        others up."""
        failed: list[PulseError] = []
        moved, waiting = set[str](), list(relays)
        while waiting:
            for stream in tuple(waiting):
                each = relays[stream]
                try:
                    done = each.sync(shards=None if len(relays) == 1 else 1)
                    if done is not None:
                        moved.add(stream)
                        facts = facts_of(done, "stream", "version", "previous", "links", "seconds")
                        line = f"version {done.version} of {done.stream}"
                        line += f": {format_bytes(done.nbytes)} copied"
                        console.result(facts | {"bytes": done.nbytes}, line)
                        continue
                    monitor.succeeded(stream, each.version)
                    if each.version is None:
                        raise empty(source, stream)
                    if args.once and stream not in moved:
                        facts = {"stream": stream, "version": each.version, "links": [], "bytes": 0}
                        console.result(facts, f"version {each.version} of {stream} is the newest")
                except PulseError as error:
                    failed.append(error)
                waiting.remove(stream)
        if failed:
            raise min(failed, key=lambda error: error.retryable)

    keep_on(sync, args, console, monitor)


def watch(args: argparse.Namespace, console: Console) -> None:
    """Publish the checkpoints that a trainer writes into a folder, each once, in the order of their
    steps.

    pulse watch broadcasts s3://bucket/run --stream policy --pattern 'step_*' --done STABLE
    """
    folder = Path(args.folder)
    if not folder.is_dir():
        raise InputError(
            f"{args.folder} is no folder",
            hint="Make it, or name the one that the trainer writes into.",
        )
    with (
        Monitor(args, console, PUBLISHER, "publish", [args.stream]) as monitor,
        open_publisher(args, monitor) as publisher,
    ):

        def work() -> None:
            head = publisher.head()
            newest = -1 if head is None else head.metadata.get("step")
            if not isinstance(newest, int):
                raise InputError(
                    f"the newest version of {args.stream!r} does not say which step it is",
                    hint="Watch into a stream of its own, or publish with --metadata step=N.",
                )
            after = known = -1 if head is None else head.version
            for step, found in _complete(folder, args.pattern, args.done):
                if step > newest:
                    after = publish(step, found, after)
            if args.once and after == known:
                facts = (
                    {"version": after, "step": newest} if head else {"version": None, "step": None}
                )
                than = f" than step {newest}" if head else ""
                console.result(facts, f"no checkpoint in {args.folder} is newer{than}")
            monitor.succeeded(args.stream, after if after >= 0 else None)

        def publish(step: int, found: Path, after: int) -> int:
            """The newest version."""
            try:
                given = of_version(args, found, folder=found.name, step=step)
                done = publisher.publish(load(found)[0], after=after, **given)
            except PublisherConflict:
                head = publisher.head()
                if head is None or head.metadata.get("step") != step:
                    raise
                return head.version  # another watcher was faster
            except (FormatError, UnsupportedTensor, InputError, FileNotFoundError) as error:
                if found.exists():  # it was not deleted meanwhile, as trainers delete what is old
                    console.note(f"{found.name} is passed over: {error}")
                return after
            print_published(done, console)
            return done.version

        keep_on(work, args, console, monitor)


def _complete(folder: Path, pattern: str, done: str) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints that a trainer has written to their end, in the order of
    their steps, which are the last numbers in their names."""
    found = []
    for each in folder.glob(pattern):
        numbers = re.findall(r"\d+", each.name)
        if numbers and len(numbers[-1]) < _MAX_DIGITS and (each / done).is_file():
            found.append((int(numbers[-1]), each))
    return sorted(found)
