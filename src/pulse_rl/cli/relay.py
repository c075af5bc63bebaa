"""The command ``pulse relay``."""

from __future__ import annotations

import argparse

from .._util.units import format_bytes
from ..errors import EmptyStream, InputError, PulseError
from ..events import Relayed
from ..maintenance.relay import Relay
from .output import Console
from .streams import keep_on, open_lasting


def relay(args: argparse.Namespace, console: Console) -> int:
    if len(args.stream) > 1 and args.identity:
        raise InputError("one identity for several streams", hint="Give --identity with a single --stream.")
    source, target = open_lasting(args.source), open_lasting(args.target)
    relays = {
        stream: Relay(
            source,
            target,
            stream=stream,
            keep=args.keep,
            trusted_keys=args.trust,
            identity=args.identity,
            follow_restarts=args.follow_restarts,
            threads=args.threads,
            on_event=console,
        )
        for stream in args.stream
    }

    def sync() -> None:
        """All streams, then the first error, so that one stream does not hold the others up."""
        failed: list[PulseError] = []
        for stream, each in relays.items():
            try:
                done = each.sync()
                if done is not None:
                    _show(done, console)
                elif each.version is None:
                    raise EmptyStream(f"stream {stream!r} has no versions in {args.source}")
                elif args.once:
                    facts = {"stream": stream, "version": each.version, "links": [], "bytes": 0}
                    console.result(facts, [f"version {each.version} of {stream} is the newest"])
            except PulseError as error:
                failed.append(error)
        if failed:
            raise min(failed, key=lambda error: error.retryable)

    return keep_on(sync, args, console)


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
