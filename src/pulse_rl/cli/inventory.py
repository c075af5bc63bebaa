"""Commands that show what is in a store: list, log, and status, who follows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from .._util.settings import counted, format_bytes, format_duration, format_percent
from ..errors import PulseError
from ..events import Metadata
from ..hints import empty, streams_in
from ..ops.fleet import workers_of
from ..store import Store
from ..stream.manifest import anchor_bytes, patch_bytes
from ..stream.names import AnchorName, VersionName
from ..stream.signing import trusted_by
from ..stream.stream import Stream
from .common import (
    COMMON,
    NAMED,
    READABLE,
    TRUST,
    Console,
    add_command,
    facts_of,
    number,
    open_lasting,
    options,
    seconds,
)

_SHOWN_ANCHORS = 5


def add_parsers(commands: Any) -> None:
    store = options()
    store.add_argument("store", metavar="STORE", help=READABLE)

    add_command(commands, "list", show_streams, COMMON, TRUST, store)

    command = add_command(commands, "log", log, COMMON, TRUST, store, NAMED)
    text = "the newest N versions (default: 20); 0: all of them"
    command.add_argument("--last", type=number, default=20, metavar="N", help=text)

    command = add_command(commands, "status", status, COMMON, TRUST, store)
    command.add_argument("--stream", metavar="S", help="of this stream only")
    text = "exit with status 1 if a worker was not seen for so long, such as 5m"
    command.add_argument("--stale", type=seconds, metavar="DURATION", help=text)


def show_streams(args: argparse.Namespace, console: Console) -> None:
    """Show the streams of a store.

    pulse list s3://bucket/run
    """
    store = open_lasting(args.store)
    found = [_facts_of(opened_stream(store, name, args)) for name in streams_in(store)]
    rows = [
        (
            each["stream"],
            _range(each),
            _age(each["age_seconds"]),
            format_bytes(each["bytes"]),
            format_bytes(each["dense_bytes"]) if each["dense_bytes"] is not None else "?",
            _few(each["anchors"]),
            each["problem"] or _metadata(each["metadata"]),
        )
        for each in found
    ]
    heads = ("stream", "versions", "age", "stored", "state", "anchors", "metadata")
    lines = _table([heads, *rows]) if rows else [f"{args.store} has no streams"]
    console.result({"store": args.store, "streams": found}, *lines)


def log(args: argparse.Namespace, console: Console) -> None:
    """Show the versions of a stream.

    pulse log s3://bucket/run --stream policy --last 5
    """
    stream = opened_stream(open_lasting(args.store), args.stream, args)
    versions = versions_of(stream)
    found = [_version_facts(stream, version) for version in versions[-args.last :]]
    rows = [
        (
            str(each["version"]),
            _age(each["age_seconds"]),
            "full" if each["density"] is None else format_percent(each["density"]),
            format_bytes(each["patch_bytes"]) if each["patch_bytes"] else "",
            format_bytes(each["anchor_bytes"]) if each["anchor_bytes"] else "",
            _metadata(each["metadata"]),
        )
        if not each["problem"]
        else (str(each["version"]), "", "", "", "", each["problem"])
        for each in reversed(found)
    ]
    lines = _table([("version", "age", "changed", "patch", "anchor", "metadata"), *rows])
    if more := len(versions) - len(found):
        lines.append(f"(and {more} older ones: --last 0)")
    facts = {"stream": args.stream, "stream_id": stream.stream_id, "versions": found}
    console.result(facts, *lines)


def status(args: argparse.Namespace, console: Console) -> int:
    """Show which version each worker of a store holds, and when it was last seen.

    pulse status s3://bucket/run
    """
    store = open_lasting(args.store)
    names = [args.stream] if args.stream else streams_in(store)
    found = [_followers(opened_stream(store, name, args)) for name in names]
    lines, gone = [], []
    for each in found:
        workers, newest = each["workers"], each["newest"]
        known = counted(len(workers), "worker") if workers else "no worker"
        lines.append(f"{each['stream']}: version {newest}, {known}")
        rows = [
            (
                f"  {worker['worker']}",
                "no version" if worker["version"] is None else f"version {worker['version']}",
                "newest" if worker["behind"] == 0 else f"{worker['behind']} behind",
                f"seen {_age(worker['seen_seconds'])} ago",
                _trouble(worker),
            )
            for worker in workers
        ]
        lines += _table(rows)
        if args.stale is not None:
            gone += [worker for worker in workers if worker["seen_seconds"] > args.stale]
    if not any(each["workers"] for each in found):
        lines.append(
            "no worker says what it holds: pulse follow --name W, or pulse_rl.metrics.Heartbeat"
        )
    if gone:
        listed = ", ".join(worker["worker"] for worker in gone)
        lines.append(f"{len(gone)} not seen for {format_duration(args.stale)}: {listed}")
    stale = [worker["worker"] for worker in gone]
    console.result({"store": args.store, "streams": found, "stale": stale}, *lines)
    return 1 if gone else 0


def opened_stream(store: Store, name: str, args: argparse.Namespace) -> Stream:
    return Stream(store, name, trusted_by(args.trust), stream_id=args.stream_id)


def versions_of(stream: Stream) -> list[int]:
    """All listed versions, ascending. Raises EmptyStream."""
    versions = stream.versions()
    if not versions:
        raise empty(stream.store, stream.name)
    return versions


def _facts_of(stream: Stream) -> dict[str, Any]:
    head, problem = None, ""
    try:
        found = stream.newest()
        head, problem = found.manifest, str(found.error or "")
    except PulseError as error:
        problem = str(error)
    names = stream.names
    listed = [names.parse(info.name) for info in stream.store.list(names.versions)]
    versions = [name.version for name in listed if isinstance(name, VersionName)]
    links = (names.parse(info.name) for info in stream.store.list(names.links))
    return {
        "stream": stream.name,
        "stream_id": stream.stream_id or (head.stream_id if head else None),
        "versions": len(versions),
        "oldest": min(versions, default=None),
        "newest": head.version if head else None,
        "age_seconds": _since(head.created) if head else None,
        "bytes": sum(info.nbytes for info in stream.store.list(names.payloads)),
        "dense_bytes": head.dense_bytes if head else None,
        "anchors": sorted(name.version for name in links if isinstance(name, AnchorName)),
        "publisher": head.publisher if head else None,
        "epoch": head.epoch if head else None,
        "key": head.signature.key if head and head.signature else None,
        "metadata": head.metadata if head else {},
        "problem": problem,
    }


def _version_facts(stream: Stream, version: int) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(
        ("age_seconds", "root", "density", "patch_bytes", "anchor_bytes", "dense_bytes", "epoch")
    )
    facts |= {"version": version, "metadata": {}}
    try:
        manifest = stream.manifest(version)
    except PulseError as error:
        return facts | {"problem": f"cannot be read: {error}"}
    stream.stream_id = stream.stream_id or manifest.stream_id
    patch = manifest.patch
    facts |= facts_of(manifest, "root", "dense_bytes", "epoch", "metadata")
    return facts | {
        "age_seconds": _since(manifest.created),
        "density": patch.changed / max(manifest.elements, 1) if patch else None,
        "patch_bytes": patch_bytes(manifest),
        "anchor_bytes": anchor_bytes(manifest),
        "problem": "",
    }


def _followers(stream: Stream) -> dict[str, Any]:
    """What the workers of a stream have said last, those that are farthest behind first."""
    newest = versions_of(stream)[-1]
    workers: list[dict[str, Any]] = [
        {
            "worker": worker,
            "version": state.version,
            "behind": max(newest - (-1 if state.version is None else state.version), 0),
            "seen_seconds": _since(state.seen),
            "errors": state.errors,
            "kind": state.kind,
            "reason": state.reason,
        }
        for worker, state in workers_of(stream).items()
    ]
    workers.sort(key=lambda each: (-each["behind"], each["worker"]))
    return {"stream": stream.name, "newest": newest, "workers": workers}


def _since(unix_seconds: float) -> float:
    return round(max(time.time() - unix_seconds, 0.0), 3)


def _age(seconds: float | None) -> str:
    return "?" if seconds is None else format_duration(max(round(seconds), 1))


def _range(each: dict[str, Any]) -> str:
    if each["newest"] is None:
        return f"{each['versions']}, none readable"
    return f"{each['oldest']} to {each['newest']}"


def _few(anchors: list[int]) -> str:
    shown = [str(version) for version in anchors[-_SHOWN_ANCHORS:]]
    return ", ".join(["…"] * (len(anchors) > _SHOWN_ANCHORS) + shown)


def _metadata(metadata: Metadata) -> str:
    shown = (
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in metadata.items()
    )
    return " ".join(text if len(text) < 60 else f"{text[:57]}…" for text in shown)


def _trouble(worker: dict[str, Any]) -> str:
    errors = worker["errors"]
    return f"{counted(errors, 'error')}: {worker['reason']}" if errors else ""


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
