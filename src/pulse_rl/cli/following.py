"""Commands that go on until they are stopped: follow, into a folder or a live engine; watch, out of
one; relay. And replay, which moves a live engine, too."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .._util.retry import Backoff, jittered
from .._util.settings import format_bytes
from ..engines import sglang, vllm
from ..engines.handle import EngineHandle, EngineSync
from ..engines.replay import Replay
from ..engines.rollouts import Rollout
from ..engines.sglang import is_sglang
from ..engines.transport import SubscriberOptions
from ..errors import (
    ConcurrentUse,
    EmptyStream,
    FormatError,
    InputError,
    PublisherConflict,
    PulseError,
    UnsupportedTensor,
)
from ..events import Relayed
from ..follow.folder import Layout, check_folder
from ..hints import absence
from ..metrics import Heartbeat, fan_out
from ..ops.relay import Relay
from ..state.checkpoint import FILE_NAME, current_version, load
from ..sync.subscriber import Subscriber
from ..sync.update import Update
from .arguments import READABLE, Shared, add_poll, count, options, path
from .output import Console
from .streams import (
    files_beside,
    open_lasting,
    open_publisher,
    print_published,
    version_options,
)

_MIN_WAIT, _MAX_WAIT = 0.1, 60.0
_LOOK_SECONDS = 30.0
_MAX_DIGITS = 16


def add_follow(commands: Any, shared: Shared) -> None:
    command = commands.add_parser(
        "follow",
        parents=[shared.common, shared.named, shared.trust, shared.writing, shared.layout],
        help="keep a checkpoint or a live engine up to date with a stream",
    )
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
    command.add_argument("--once", action="store_true", help="sync once, then exit")
    text = "if the stream is deleted and recreated, follow the new one"
    command.add_argument("--allow-recreated", action="store_true", help=text)
    add_poll(command, "polls of the store")
    text = "keep downloaded payloads in this folder"
    command.add_argument("--cache", type=path, metavar="DIR", help=text)
    text = "tell in the store which version this worker holds (see status)"
    command.add_argument("--name", metavar="W", help=text)
    command.set_defaults(run=follow)


def follow(args: argparse.Namespace, console: Console) -> int:
    if args.engine is None:
        if args.keep and not args.layout:
            raise InputError(
                "--keep is for the folders of a --layout",
                hint="Otherwise the newest version is kept.",
            )
        return _follow_into_a_folder(args, console)
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
    return _follow_into_an_engine(args, console)


def _follow_into_an_engine(args: argparse.Namespace, console: Console) -> int:
    heartbeat = Heartbeat(args.store[0], args.name) if args.name else None
    handle: EngineHandle | None = None

    def sync() -> None:
        nonlocal handle
        try:
            handle = handle or _connect(args)
            done = handle.sync()
        except ConcurrentUse:
            handle = None  # taken over: once the other is silent, another session is begun
            raise
        if done is not None:
            _show_live(done, console)
            if heartbeat:
                heartbeat.beat(args.stream, done.version)
        elif args.once:
            version = handle.version
            console.result(
                {"version": version, "changed": False},
                [f"version {version} is the newest, and live"],
            )

    def pause(seconds: float) -> None:
        if handle is not None:
            handle.wait_for_version(seconds)
        else:
            _sleep(seconds)

    def may_pass(error: PulseError) -> bool:
        # Whoever was killed while it drove the engine is forgotten after some seconds.
        return error.retryable or isinstance(error, ConcurrentUse)

    try:
        return keep_on(sync, args, console, pause, may_pass)
    finally:
        if handle is not None:
            handle.close()


def _connect(args: argparse.Namespace) -> EngineHandle:
    connect = sglang.connect if is_sglang(args.engine, _LOOK_SECONDS) else vllm.connect
    return connect(
        args.engine,
        store=args.store[0],
        stream=args.stream,
        trusted_keys=args.trust,
        stream_id=args.stream_id,
        allow_recreated=args.allow_recreated,
        cache=args.cache,
        in_flight=args.in_flight,
    )


def add_replay(commands: Any, shared: Shared) -> None:
    command = commands.add_parser(
        "replay",
        parents=[shared.common, shared.trust],
        help="generate rollouts again, with the exact weights that they came from",
    )
    text = "a file of rollout records (docs/replay.md)"
    command.add_argument("records", metavar="RECORDS", help=text)
    text = "the store that has their streams"
    command.add_argument("--store", required=True, metavar="STORE", help=text)
    text = "a vLLM or SGLang server, started for pulse (default: a vLLM of its own)"
    command.add_argument("--engine", metavar="URL", help=text)
    command.set_defaults(run=replay)


def replay(args: argparse.Namespace, console: Console) -> int:
    """In the order of versions, so that an engine moves forward; exit status 1 unless all is the
    same."""

    def by_version(numbered: tuple[int, Rollout]) -> tuple[str, int, int]:
        weights = numbered[1].weights
        return numbered[1].stream, weights[0].version, weights[-1].version

    rollouts = sorted(enumerate(Rollout.read(args.records), 1), key=by_version)
    if not rollouts:
        raise InputError(
            f"{args.records} has no rollouts", hint="docs/replay.md says what writes them."
        )
    same = tokens = 0
    for stream, numbered in groupby(rollouts, key=lambda each: each[1].stream):
        group = list(numbered)
        with _engine(args, stream, group[0][1].weights[0].version) as engine:
            connect = (
                sglang.connect
                if args.engine and is_sglang(args.engine, _LOOK_SECONDS)
                else vllm.connect
            )
            options: SubscriberOptions = {"trusted_keys": args.trust, "stream_id": args.stream_id}
            with connect(engine, store=args.store, stream=stream, **options) as handle:
                for number, rollout in group:
                    done = handle.replay(rollout)
                    same += done.same
                    tokens += len(rollout.token_ids)
                    _show_replayed(number, done, console)
    facts = {"rollouts": len(rollouts), "same": same, "tokens": tokens}
    console.result(
        facts,
        [
            f"{same} of {len(rollouts)} rollouts are the same to the last bit; {tokens} tokens "
            "in all"
        ],
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
    facts = {
        "rollout": number,
        "versions": versions,
        "same": done.same,
        "differing": done.differing,
    }
    lines = [f"rollout {number} of version {' to '.join(map(str, versions))}: "]
    if done.reason:
        lines[0] += f"not all of it can be generated again: {done.reason}"
    elif done.same:
        lines[0] += f"{len(rollout.token_ids)} tokens are the same"
    else:
        lines[0] += f"{len(done.differing)} of {len(rollout.token_ids)} tokens differ"
        if done.engine_version != rollout.engine_version:
            lines[0] += (
                f"; {rollout.engine} was {rollout.engine_version}, and is {done.engine_version} "
                "here"
            )
    for index in done.differing:
        was, now = ((of.token_ids[index], of.logprobs[index]) for of in (rollout, done))
        lines.append(f"  token {index} was {was[0]} with {was[1]}, and is {now[0]} with {now[1]}")
    console.result(facts | {"reason": done.reason, "engine_version": done.engine_version}, lines)


def _show_live(done: EngineSync, console: Console) -> None:
    facts = {name: getattr(done, name) for name in EngineSync.__slots__}
    how = "all weights" if done.full else f"from version {done.previous}"
    proved = "" if done.audit_seconds is None else ", live weights proved"
    line = (
        f"version {done.version} is live ({how}): {format_bytes(done.fetched_bytes)} fetched, "
        f"paused {1e3 * done.pause_seconds:.0f} ms{proved}"
    )
    console.result(facts, [line])


def _follow_into_a_folder(args: argparse.Namespace, console: Console) -> int:
    out = Path(args.out)
    layout = Layout.of(args.layout) if args.layout else None
    if layout is None:
        check_folder(out, [FILE_NAME], force=args.force)
    base, written = _left_in(out, layout)
    subscriber = Subscriber(
        [open_lasting(store) for store in args.store],
        stream=args.stream,
        base=None if args.select else base,  # a part of a state has no version's root
        cache=args.cache,
        trusted_keys=args.trust,
        stream_id=args.stream_id,
        select=args.select,
        threads=args.threads,
        on_event=fan_out(console, Heartbeat(args.store[-1], args.name)) if args.name else console,
    )
    subscriber.allow_recreated = args.allow_recreated

    def save() -> None:
        subscriber.save(
            out, sharded=args.sharded, force=args.force, layout=args.layout, keep=args.keep
        )

    def sync() -> None:
        nonlocal written
        update = subscriber.sync()
        if (
            update is None
            and subscriber.version is not None
            and written not in (None, subscriber.version)
        ):
            save()  # the same weights, with other files
            written = subscriber.version
        if update is not None:
            save()
            written = update.version
            _show_written(update, console)
            update.acknowledge()
        elif subscriber.version is None:
            raise EmptyStream(
                f"stream {args.stream!r}: {absence(open_lasting(args.store[-1]), args.stream)}"
            )
        elif args.once:
            facts = {
                "version": subscriber.version,
                "root": subscriber.root,
                "changed": 0,
                "payload_bytes": 0,
            }
            console.result(
                facts,
                [f"version {subscriber.version} is the newest, root {subscriber.root} verified"],
            )

    return keep_on(sync, args, console, subscriber.wait_for_new)


def _sleep(seconds: float) -> None:
    time.sleep(jittered(seconds))


def keep_on(
    work: Callable[[], None],
    args: argparse.Namespace,
    console: Console,
    pause: Callable[[float], None],
    may_pass: Callable[[PulseError], bool] = lambda error: error.retryable,
) -> int:
    """Does ``work`` once, or again after a ``pause`` of ``args.poll`` seconds. At an error that
    ``may_pass`` it says so once, and tries again after ever longer."""
    backoff = Backoff(max(2 * args.poll, _MIN_WAIT), max(_MAX_WAIT, args.poll))
    while True:
        try:
            work()
        except PulseError as error:
            if args.once or not may_pass(error):
                raise
            console.note(f"{error} ({error.hint}); retrying")
            if not isinstance(
                error, EmptyStream
            ):  # what is missing or damaged is fetched again at each try
                time.sleep(backoff.wait())
                continue
        else:
            console.forget_notes()
        if args.once:
            return 0
        backoff.reset()
        pause(args.poll)


def _left_in(out: Path, layout: Layout | None) -> tuple[Path | None, int | None]:
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
    return shown, int(said) if said.isdecimal() else None


def _show_written(update: Update, console: Console) -> None:
    facts = {
        "version": update.version,
        "previous": update.previous,
        "root": update.root,
        "changed": update.changed,
        "payload_bytes": update.payload_bytes,
        "seconds": round(update.seconds, 6),
    }
    line = (
        f"version {update.version}: {format_bytes(update.payload_bytes)} fetched, root "
        f"{update.root} verified"
    )
    console.result(facts, [line])


def add_relay(commands: Any, shared: Shared) -> None:
    command = commands.add_parser(
        "relay",
        parents=[shared.common, shared.trust],
        help="mirror streams into another store, for the workers near that one",
    )
    text = "the store to copy from: a folder, or a URL as for STORE"
    command.add_argument("source", metavar="SOURCE", help=text)
    text = "the store to copy to, to which nobody else publishes"
    command.add_argument("target", metavar="TARGET", help=text)
    text = "a stream's name; may be repeated"
    command.add_argument("--stream", required=True, action="append", metavar="S", help=text)
    text = "keep the newest N versions of the target restorable (default: all)"
    command.add_argument("--keep", type=count, metavar="N", help=text)
    command.add_argument("--once", action="store_true", help="copy what is there, then exit")
    text = "if a stream is deleted and recreated, copy the new one instead"
    command.add_argument("--allow-recreated", action="store_true", help=text)
    add_poll(command, "polls of the source")
    command.set_defaults(run=relay)


def relay(args: argparse.Namespace, console: Console) -> int:
    if len(args.stream) > 1 and args.stream_id:
        raise InputError(
            "one stream ID for several streams", hint="Give --stream-id with a single --stream."
        )
    source, target = open_lasting(args.source), open_lasting(args.target)
    relays = {
        stream: Relay(
            source,
            target,
            stream=stream,
            keep=args.keep,
            trusted_keys=args.trust,
            stream_id=args.stream_id,
            allow_recreated=args.allow_recreated,
            threads=args.threads,
            on_event=console,
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
                        _show_relayed(done, console)
                        continue
                    if each.version is None:
                        raise EmptyStream(f"stream {stream!r}: {absence(source, stream)}")
                    if args.once and stream not in moved:
                        facts = {"stream": stream, "version": each.version, "links": [], "bytes": 0}
                        console.result(facts, [f"version {each.version} of {stream} is the newest"])
                except PulseError as error:
                    failed.append(error)
                waiting.remove(stream)
        if failed:
            raise min(failed, key=lambda error: error.retryable)

    return keep_on(sync, args, console, _sleep)


def add_watch(commands: Any, shared: Shared) -> None:
    watched = options()
    text = "where the trainer writes a folder for each step"
    watched.add_argument("folder", metavar="FOLDER", help=text)
    parents = [watched, shared.stream, version_options(), shared.signing, shared.trust]
    command = commands.add_parser(
        "watch",
        parents=[shared.common, *parents],
        help="publish the checkpoints that a trainer writes into a folder, each once, in the "
        "order of their steps",
    )
    text = "the names of those folders, such as step_* (default: *)"
    command.add_argument("--pattern", default="*", metavar="GLOB", help=text)
    text = "the file that the trainer writes last, such as STABLE"
    command.add_argument("--done", required=True, metavar="FILE", help=text)
    command.add_argument("--once", action="store_true", help="publish what is there, then exit")
    add_poll(command, "looks")
    command.set_defaults(run=watch)


def watch(args: argparse.Namespace, console: Console) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise InputError(
            f"{args.folder} is no folder",
            hint="Make it, or name the one that the trainer writes into.",
        )
    publisher = open_publisher(args, console)

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
            facts = {
                "version": None if head is None else after,
                "step": None if head is None else newest,
            }
            console.result(
                facts,
                [
                    f"no checkpoint in {args.folder} is newer"
                    + (f" than step {newest}" if head else "")
                ],
            )

    def publish(step: int, found: Path, after: int) -> int:
        """The newest version."""
        try:
            done = publisher.publish(
                load(found)[0],
                dtype=args.dtype,
                quantize=args.quantize,
                anchor=args.anchor,
                metadata={**dict(args.metadata or ()), "folder": found.name, "step": step},
                files=files_beside(args, found),
                after=after,
            )
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

    with publisher:
        return keep_on(work, args, console, _sleep)


def _complete(folder: Path, pattern: str, done: str) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints that a trainer has written to their end, in the order of
    their steps, which are the last numbers in their names."""
    found = []
    for each in folder.glob(pattern):
        numbers = re.findall(r"\d+", each.name)
        if numbers and len(numbers[-1]) < _MAX_DIGITS and (each / done).is_file():
            found.append((int(numbers[-1]), each))
    return sorted(found)


def _show_relayed(done: Relayed, console: Console) -> None:
    facts = {
        "stream": done.stream,
        "version": done.version,
        "previous": done.previous,
        "links": list(done.links),
        "bytes": done.nbytes,
        "seconds": round(done.seconds, 6),
    }
    console.result(
        facts, [f"version {done.version} of {done.stream}: {format_bytes(done.nbytes)} copied"]
    )
