"""Commands for the upkeep of a stream: anchor, verify, repair, fold, gc."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._util.settings import counted, format_bytes
from ..follow.checkpoint import current_version, load
from ..ops.compaction import DEFAULT_FOLDS, anchor_stream, fold_stream
from ..ops.gc import DEFAULT_GRACE_SECONDS, gc_stream
from ..ops.repair import Checkpoint, repair_stream
from ..ops.verify import verify_stream
from ..store import LocalStore, Store
from ..stores.cached import CACHE_FOLDER
from .common import (
    COMMON,
    SIGNING,
    STREAM,
    TRUST,
    Console,
    add_command,
    count,
    open_lasting,
    path,
    print_published,
    reading,
    seconds,
    signer_of,
)


def add_parsers(commands: Any) -> None:
    command = add_command(commands, "anchor", anchor, COMMON, STREAM, SIGNING, TRUST)
    text = "read the newest version here: its checkpoint, or another store of the stream"
    command.add_argument("--from", dest="source", type=path, metavar="SOURCE", help=text)

    command = add_command(commands, "repair", repair, COMMON, STREAM, SIGNING, TRUST)
    text = (
        "another copy of the stream (a relay's target, a backup, a cache), or a checkpoint of "
        "one version"
    )
    command.add_argument(
        "--from", dest="source", type=path, required=True, metavar="SOURCE", help=text
    )

    add_command(commands, "verify", verify, COMMON, STREAM, TRUST)

    command = add_command(commands, "fold", fold, COMMON, STREAM, SIGNING, TRUST)
    command.add_argument(
        "--folds",
        type=count,
        nargs="+",
        default=list(DEFAULT_FOLDS),
        metavar="N",
        help="how many versions each fold spans (default: 8 64)",
    )

    command = add_command(commands, "gc", gc, COMMON, STREAM, TRUST)
    text = "number of newest versions to keep"
    command.add_argument("--keep", type=count, required=True, metavar="N", help=text)
    command.add_argument(
        "--grace",
        type=seconds,
        default=DEFAULT_GRACE_SECONDS,
        metavar="SECONDS",
        help="keep payloads written in the last SECONDS (default: 3600)",
    )
    command.add_argument("--dry-run", action="store_true", help="only show what would be deleted")


def anchor(args: argparse.Namespace, console: Console) -> None:
    """Publish the newest version once more, whole, for new workers to start from.

    pulse anchor s3://bucket/run --stream policy
    """
    source = None
    if args.source:
        checkpoint = _checkpoint(args.source)
        source = checkpoint.state if checkpoint else _copy_of(args.source)
    done = anchor_stream(
        open_lasting(args.store),
        args.stream,
        source=source,
        signer=signer_of(args),
        **reading(args, console),
    )
    print_published(done, console)
    if done.reason:
        console.note(done.reason)


def repair(args: argparse.Namespace, console: Console) -> int:
    """Restore damaged and missing objects from another copy of the stream, or from a checkpoint.

    pulse repair s3://bucket/run --stream policy --from /mnt/relay
    """
    found = list(
        repair_stream(
            open_lasting(args.store),
            args.stream,
            _checkpoint(args.source) or _copy_of(args.source),
            signer=signer_of(args),
            trusted_keys=args.trust,
            stream_id=args.stream_id,
            threads=args.threads,
        )
    )
    left = sum(bool(each.problem) for each in found)
    lines = [
        f"{each.name} cannot be restored: {each.problem}"
        if each.problem
        else f"restored {each.name}"
        for each in found
    ]
    restored = counted(len(found) - left, "object")
    lines.append(f"{restored} of {args.stream} restored, {left} still damaged")
    facts = {"stream": args.stream, "restored": len(found) - left, "damaged": left}
    console.result(facts | {"objects": [each._asdict() for each in found]}, *lines)
    return 1 if left else 0


def _checkpoint(source: str) -> Checkpoint | None:
    """The checkpoint at a path; None for a store."""
    where = Path(source)
    if where.is_dir() and not (any(where.glob("*.safetensors")) or (where / ".pulse").exists()):
        return None
    if not where.exists():
        return None
    where = current_version(where)
    return Checkpoint(load(where)[0], where)


def _copy_of(source: str) -> Store:
    """Another store of a stream, or the folder of a cache."""
    cache = Path(source) / CACHE_FOLDER
    return LocalStore(cache) if cache.is_dir() else open_lasting(source)


def verify(args: argparse.Namespace, console: Console) -> int:
    """Replay and check a whole stream.

    pulse verify s3://bucket/run --stream policy
    """
    store = open_lasting(args.store)
    versions = 0
    problems: list[dict[str, Any]] = []
    dependent: dict[int, list[int]] = {}  # on a damaged version
    reached = True
    for report in verify_stream(store, args.stream, **reading(args, console)):
        versions += 1
        reached = bool(report.links)
        if report.depends_on is not None:
            if not report.links:
                dependent.setdefault(report.depends_on, []).append(report.version)
            continue
        problems += [{"version": report.version, "problem": p} for p in report.problems]
    lines = []
    for problem in problems:
        of = dependent.pop(problem["version"], [])
        problem["dependent"] = of
        rest = f"; {_ranges(of)} depend{'s' * (len(of) == 1)} on it" if of else ""
        lines.append(f"version {problem['version']}: {problem['problem']}{rest}")
    verdict = counted(len(problems), "problem") if problems else "all links are valid"
    if not reached:
        lines.append(
            "new workers cannot reach the newest version: see `pulse repair`, or publish one with "
            "an anchor"
        )
    facts = {"stream": args.stream, "versions": versions, "ok": not problems, "problems": problems}
    checked = counted(versions, "version")
    console.result(facts, *lines, f"{checked} of {args.stream} verified: {verdict}")
    return 1 if problems else 0


def _ranges(versions: list[int]) -> str:
    """Ascending versions as text, such as "versions 3 to 59"."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][1] == version - 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    shown = (f"{low} to {high}" if low < high else str(low) for low, high in runs)
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(shown)}"


def folds_made(args: argparse.Namespace, console: Console) -> Iterator[tuple[int, int]]:
    store, folds = open_lasting(args.store), tuple(args.folds)
    return fold_stream(store, args.stream, folds, signer=signer_of(args), **reading(args, console))


def fold(args: argparse.Namespace, console: Console) -> None:
    """Make patches that span many versions, for workers that are far behind.

    pulse fold s3://bucket/run --stream policy --folds 8 64
    """
    made = list(folds_made(args, console))
    lines = [f"fold {base}->{version}" for base, version in made]
    facts = {"stream": args.stream, "folds": [{"base": b, "version": v} for b, v in made]}
    console.result(facts, *lines, f"{counted(len(made), 'fold')} made")


def gc(args: argparse.Namespace, console: Console) -> None:
    """Delete what the kept versions do not need.

    pulse gc s3://bucket/run --stream policy --keep 100 --dry-run
    """
    plan = gc_stream(
        open_lasting(args.store),
        args.stream,
        keep=args.keep,
        grace_seconds=args.grace,
        dry_run=args.dry_run,
        trusted_keys=args.trust,
        stream_id=args.stream_id,
    )
    facts = {
        "stream": args.stream,
        "oldest": plan.oldest,
        "versions": len(plan.versions),
        "objects": len(plan.names),
        "bytes": plan.nbytes,
        "dry_run": args.dry_run,
        "wanted": plan.wanted,
        "young_bytes": plan.young,
        "unfinished_bytes": plan.unfinished,
    }
    verb = "would be deleted" if args.dry_run else "deleted"
    lines = [
        f"{counted(len(plan.names), 'object')} {verb}, {format_bytes(plan.nbytes)}, "
        f"{counted(len(plan.versions), 'version')}; version {plan.oldest} is the oldest kept"
    ]
    if plan.unfinished:
        lines.append(f"{format_bytes(plan.unfinished)} of unfinished files deleted")
    if plan.oldest < plan.wanted:
        lines.append(
            f"version {plan.wanted}, the oldest of the newest {args.keep}, is restored from the "
            f"anchor of version {plan.oldest}, so what is between stays (`pulse anchor` publishes "
            "a newer anchor)"
        )
    if plan.young:
        lines.append(
            f"{format_bytes(plan.young)} that nothing names stay for now: written in the last "
            "--grace seconds"
        )
    console.result(facts, *lines)
