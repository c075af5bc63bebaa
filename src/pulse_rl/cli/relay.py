"""The command ``pulse relay``."""

from __future__ import annotations

import argparse

from .._util.settings import format_bytes
from ..errors import EmptyStream, InputError, PulseError
from ..events import Relayed
from ..maintenance.relay import Relay
from ..sync.pause import Pause
from .output import Console
from .streams import keep_on, open_lasting


def relay(args: argparse.Namespace, console: Console) -> int:
    if len(args.stream) > 1 and args.stream_id:
        raise InputError("one stream ID for several streams", hint="Give --stream-id with a single --stream.")
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
        """All streams by turns, a shard each, then the first error: one stream does not hold the others up."""
        failed: list[PulseError] = []
        moved, waiting = set[str](), list(relays)
        while waiting:
            for stream in tuple(waiting):
                each = relays[stream]
                try:
                    done = each.sync(shards=None if len(relays) == 1 else 1)
                    if done is not None:
                        moved.add(stream)
                        _show(done, console)
                        continue
                    if each.version is None:
                        raise EmptyStream(f"stream {stream!r} has no versions in {args.source}")
                    if args.once and stream not in moved:
                        facts = {"stream": stream, "version": each.version, "links": [], "bytes": 0}
                        console.result(facts, [f"version {each.version} of {stream} is the newest"])
                except PulseError as error:
                    failed.append(error)
                waiting.remove(stream)
        if failed:
            raise min(failed, key=lambda error: error.retryable)

    pause = Pause(source)
    return keep_on(
        sync, args, console, lambda poll: pause.take([each.source.last_accepted for each in relays.values()], poll)
    )


def _show(done: Relayed, console: Console) -> None:
    facts = {
        "stream": done.stream,
        "version": done.version,
        "previous": done.previous,
        "links": list(done.links),
        "bytes": done.nbytes,
        "seconds": round(done.seconds, 6),
    }
    console.result(facts, [f"version {done.version} of {done.stream}: {format_bytes(done.nbytes)} copied"])
