"""Commands on a stream: publish, anchor, verify, fold, gc; and keygen."""

from __future__ import annotations

import argparse

from .._util.settings import format_bytes
from ..errors import InputError
from ..events import Published
from ..maintenance.compaction import anchor_stream, fold_stream
from ..maintenance.gc import gc_stream
from ..maintenance.verify import verify_stream
from ..state.checkpoint import load
from ..store import Store, open_store
from ..stream.signing import Signer
from ..sync.publisher import Publisher
from .output import Console


def publish(args: argparse.Namespace, console: Console) -> int:
    state, _ = load(args.checkpoint)
    publisher = Publisher(
        open_lasting(args.store),
        stream=args.stream,
        codec=args.codec,
        signer=_signer(args),
        trusted_keys=args.trust or (),
        stream_id=args.stream_id,
        threads=args.threads,
        on_event=console,
    )
    head = publisher.head()
    if head is not None and head.signature and not args.sign_key:
        raise InputError(f"stream {args.stream!r} is signed", hint="Give the key with --sign-key, or another stream.")
    done = publisher.publish(state, dtype=args.dtype, anchor=args.anchor)
    _print_published(done, console)
    return 0


def anchor(args: argparse.Namespace, console: Console) -> int:
    done = anchor_stream(
        open_lasting(args.store),
        args.stream,
        signer=_signer(args),
        trusted_keys=args.trust or (),
        stream_id=args.stream_id,
        threads=args.threads,
        on_event=console,
    )
    _print_published(done, console)
    return 0


def verify(args: argparse.Namespace, console: Console) -> int:
    versions, problems = 0, []
    reports = verify_stream(
        open_lasting(args.store),
        args.stream,
        trusted_keys=args.trust,
        stream_id=args.stream_id,
        threads=args.threads,
        on_event=console,
    )
    for report in reports:
        versions += 1
        problems += [{"version": report.version, "problem": p} for p in report.problems]
    lines = [f"version {p['version']}: {p['problem']}" for p in problems]
    verdict = f"{len(problems)} problems" if problems else "all links are valid"
    facts = {"stream": args.stream, "versions": versions, "ok": not problems, "problems": problems}
    console.result(facts, [*lines, f"{versions} versions of {args.stream} verified: {verdict}"])
    return 1 if problems else 0


def fold(args: argparse.Namespace, console: Console) -> int:
    folds = fold_stream(
        open_lasting(args.store),
        args.stream,
        tuple(args.folds),
        signer=_signer(args),
        trusted_keys=args.trust,
        stream_id=args.stream_id,
        threads=args.threads,
        on_event=console,
    )
    made = list(folds)
    lines = [f"fold {base}->{version}" for base, version in made]
    console.result(
        {"stream": args.stream, "folds": [{"base": b, "version": v} for b, v in made]},
        [*lines, f"{len(made)} folds made"],
    )
    return 0


def gc(args: argparse.Namespace, console: Console) -> int:
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
    }
    verb = "would be deleted" if args.dry_run else "deleted"
    line = f"{len(plan.names)} objects {verb}, {format_bytes(plan.nbytes)}, {len(plan.versions)} versions"
    console.result(facts, [f"{line}; version {plan.oldest} is the oldest kept"])
    return 0


def keygen(args: argparse.Namespace, console: Console) -> int:
    signer = Signer.generate()
    signer.save(args.file)
    console.result({"public_key": signer.public_key, "file": args.file}, [signer.public_key])
    return 0


def _print_published(done: Published, console: Console) -> None:
    facts = {
        "stream": done.stream,
        "stream_id": done.stream_id,
        "version": done.version,
        "root": done.root,
        "elements": done.elements,
        "changed": done.changed,
        "density": done.density,
        "dense_bytes": done.dense_bytes,
        "patch_bytes": done.patch_bytes,
        "anchor_bytes": done.anchor_bytes,
        "ratio": done.ratio,
        "reason": done.reason,
        "seconds": round(done.seconds, 6),
    }
    if done.changed is None:
        cost = f"an anchor of {format_bytes(done.anchor_bytes)}"
        if done.reason:
            cost += f" ({done.reason.removeprefix('anchor: ')})"
    else:
        cost = f"{format_bytes(done.patch_bytes)} for {format_bytes(done.dense_bytes)}, {done.ratio:.1f} times smaller"
    console.result(facts, [f"version {done.version} of {done.stream}: {cost}, root {done.root}"])


def _signer(args: argparse.Namespace) -> Signer | None:
    return Signer.load(args.sign_key) if args.sign_key else None


def open_lasting(address: str) -> Store:
    """The store at an address that outlives the command; raises InputError for another."""
    if address.startswith("memory:"):
        raise InputError("a memory:// store is lost when the command ends", hint="Give a folder or an object store.")
    return open_store(address)
