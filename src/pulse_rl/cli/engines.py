"""``pulse follow --engine``: drives a running engine along a stream, from beside it."""

from __future__ import annotations

import argparse
import time

from .._util.settings import format_bytes
from .._util.timing import jittered
from ..errors import ConcurrentUse, InputError, PulseError
from ..integrations import sglang, vllm
from ..integrations.engines.handle import EngineHandle, EngineSync
from ..integrations.sglang.connection import is_sglang
from . import streams
from .output import Console

_MOST_WAIT = 30.0
_LOOK_SECONDS = 30.0


def follow(args: argparse.Namespace, console: Console) -> int:
    if args.engine is None:
        return streams.follow(args, console)
    if len(args.store) > 1:
        raise InputError("an engine follows one store", hint="Give the nearest one.")
    if args.select:
        raise InputError("an engine needs all tensors of its model", hint="Leave --select out, or give --out.")
    if args.store[0].startswith("memory:"):
        raise InputError("an engine cannot open a memory:// store", hint="Give a folder or an object store.")
    handle: EngineHandle | None = None
    wait = args.poll
    try:
        while True:
            try:
                handle = handle or _connect(args)
                done = handle.sync()
                if done is not None:
                    _show(done, console)
                elif args.once:
                    version = handle.version
                    console.result(
                        {"version": version, "changed": False}, [f"version {version} is the newest, and live"]
                    )
            except PulseError as error:
                # Whoever was killed while it drove the engine is forgotten after some seconds.
                if args.once or not (error.retryable or isinstance(error, ConcurrentUse)):
                    raise
                if isinstance(error, ConcurrentUse):
                    handle = None  # taken over: once the other is silent, another session is begun
                console.note(f"{error}; retrying")
                wait = min(2 * max(wait, 0.1), _MOST_WAIT)
            else:
                console.forget_notes()
                wait = args.poll
            if args.once:
                return 0
            if handle is not None and wait == args.poll:
                handle.wait_for_version(wait)
            else:
                time.sleep(jittered(wait))
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


def _show(done: EngineSync, console: Console) -> None:
    facts = {name: getattr(done, name) for name in EngineSync.__slots__}
    how = "all weights" if done.full else f"from version {done.previous}"
    proved = "" if done.audit_seconds is None else ", live weights proved"
    line = (
        f"version {done.version} is live ({how}): {format_bytes(done.fetched_bytes)} fetched, "
        f"paused {1e3 * done.pause_seconds:.0f} ms{proved}"
    )
    console.result(facts, [line])
