"""Commands on a stream: publish, anchor, attest, verify, repair, fold, gc, keygen; and on a store:
serve, store-check."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._util.settings import format_bytes
from ..errors import InputError, PulseError
from ..events import Listener, Published
from ..follow.aux_files import checked_files, files_of, of_dtype
from ..follow.checkpoint import current_version, load
from ..ops.attest import BUNDLE, AttestationKey, make_statement
from ..ops.checkout import Checkout, checkout
from ..ops.compaction import DEFAULT_FOLDS, anchor_stream, fold_stream
from ..ops.gc import DEFAULT_GRACE_SECONDS, gc_stream
from ..ops.repair import Checkpoint, repair_stream
from ..ops.verify import verify_stream
from ..state.cast import COMPUTE_DTYPES
from ..store import Data, LocalStore, ObjectInfo, Store, open_store
from ..stores.cached import CACHE_FOLDER
from ..stream.signing import Signer
from ..sync.publisher import Publisher
from ..testing import StoreConformance
from .common import (
    A_CHECKPOINT,
    COMMON,
    LAYOUT,
    SIGNING,
    STREAM,
    TRUST,
    WRITING,
    Console,
    add_command,
    add_file_to_write,
    add_metadata,
    add_quantize,
    check_output,
    compute_dtype,
    count,
    fact,
    facts_of,
    number,
    options,
    path,
    port,
    seconds,
    write_output,
)
from .monitor import MONITORED, Monitor

DEFAULT_PORT = 8734
# A folder's name comes on top.
_TOO_LONG_HERE = "test_the_longest_name"
_OF_CREATES = {
    "a second create is refused",
    "what was put cannot be created",
    "of racing creates one wins",
}


_ADDRESS = re.compile(r"(?P<store>.+)#(?P<stream>[^#@/]+)(?:@(?P<version>.+))?")


def version_at(source: str, args: argparse.Namespace, console: Console) -> Checkout | None:
    """The version that ``source`` names, STORE#STREAM@VERSION: its number, or KEY=VALUE of its
    metadata; without @VERSION the newest. None for any other name, and where there is such a file
    or folder. Raises InputError, and what `checkout` raises."""
    named = _ADDRESS.fullmatch(source)
    if named is None or Path(source).exists():
        return None
    which, said = named["version"], dict[str, Any]()
    if which is not None and which.isdecimal():
        said = {"version": int(which)}
    elif which is not None:
        try:
            said = {"metadata": dict([fact(which)])}
        except argparse.ArgumentTypeError:
            raise InputError(
                f"{source!r} names no version",
                hint="Name it STORE#STREAM@VERSION: the version's number, or KEY=VALUE of its "
                "metadata.",
            ) from None
    return checkout(
        open_lasting(named["store"]),
        named["stream"],
        **said,
        trusted_keys=args.trust,
        threads=args.threads,
        on_event=console,
    )


def reading(args: argparse.Namespace, listener: Listener) -> dict[str, Any]:
    """What the library's functions on a stream are given by every command."""
    return {
        "trusted_keys": args.trust,
        "stream_id": args.stream_id,
        "threads": args.threads,
        "on_event": listener,
    }


def add_parsers(commands: Any) -> None:
    checkpoint = options()  # before the store
    text = f"{A_CHECKPOINT}, with which a new stream begins"
    checkpoint.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
    parents = (COMMON, checkpoint, STREAM, version_options(), SIGNING, TRUST)
    command = add_command(commands, "publish", publish, *parents)
    text = "then make folds (see fold)"
    command.add_argument("--folds", type=count, nargs="+", metavar="N", help=text)

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

    command = add_command(commands, "attest", attest, COMMON, STREAM, TRUST, LAYOUT, WRITING)
    text = "the version's number (default: the newest)"
    command.add_argument("--version", type=number, metavar="N", help=text)
    text = "sign with this private key of P-256, P-384 or P-521 in PEM"
    command.add_argument("--key", metavar="FILE", required=True, help=text)
    add_file_to_write(command, "FILE", "the file to write (default: print it)", required=False)

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

    command = add_command(commands, "serve", serve, COMMON, MONITORED, timed=True)
    text = "the store's folder, such as a relay's target"
    command.add_argument("folder", metavar="FOLDER", help=text)
    text = "this machine's address to listen at (default: 127.0.0.1)"
    command.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = f"port to listen at; 0: a free one (default: {DEFAULT_PORT})"
    command.add_argument("--port", type=port, default=DEFAULT_PORT, metavar="N", help=text)

    command = add_command(commands, "keygen", keygen, COMMON)
    text = "file to write the private key to; must not exist"
    command.add_argument("file", metavar="FILE", help=text)

    command = add_command(commands, "store-check", store_check, COMMON)
    text = "a folder, or a file://, hf://, s3://, gs:// or az:// URL"
    command.add_argument("store", metavar="STORE", help=text)


def version_options() -> argparse.ArgumentParser:
    """What a command that publishes is given of a version."""
    version = options()
    text = "cast wider floating-point tensors to this compute dtype (default: as they are)"
    names = list(COMPUTE_DTYPES)
    version.add_argument("--dtype", type=compute_dtype, choices=names, help=text)
    add_quantize(
        version,
        "publish codes and scales in place of weights: {formats}, or the config.json of a "
        "quantized model, whose quantization_config says how and what is left out",
    )
    text = "store the whole state, too, for new workers to start from"
    version.add_argument("--anchor", action="store_true", help=text)
    beside = version.add_mutually_exclusive_group()
    beside.add_argument(
        "--file",
        action="append",
        metavar="FILE",
        help="a small file that goes with the weights, in place of the config, tokenizer and "
        "templates in CHECKPOINT; may be repeated",
    )
    beside.add_argument("--no-files", action="store_true", help="publish the weights alone")
    add_metadata(version, "say this of the version, such as step=40")
    text = "then keep the newest N versions (see gc)"
    version.add_argument("--keep", type=count, metavar="N", help=text)
    return version


def publish(args: argparse.Namespace, console: Console) -> None:
    """Publish a checkpoint as the next version.

    pulse publish step-100 s3://bucket/run --stream policy --dtype BF16 --metadata step=100
    """
    if found := version_at(args.checkpoint, args, console):
        if args.dtype or args.quantize or args.file or args.no_files:
            raise InputError(
                "a version begins another stream as it is",
                hint="Leave --dtype, --quantize and files out.",
            )
        with found, open_publisher(args, console) as publisher:
            print_published(
                publisher.begin_from(found, metadata=dict(args.metadata or ())), console
            )
        return
    state, _ = load(args.checkpoint)
    with open_publisher(args, console) as publisher:
        done = publisher.publish(state, **of_version(args, Path(args.checkpoint)))
    if args.folds:
        list(_folds(args, console))
    print_published(done, console)


def open_publisher(args: argparse.Namespace, listener: Listener) -> Publisher:
    """Raises InputError for a signed stream without a key."""
    publisher = Publisher(
        open_lasting(args.store),
        stream=args.stream,
        keep=args.keep,
        signer=_signer(args),
        trusted_keys=args.trust or (),
        threads=args.threads,
        on_event=listener,
    )
    if args.stream_id:
        publisher.stream_id = args.stream_id
    head = publisher.head()
    if head is not None and head.signature and not args.sign_key:
        raise InputError(
            f"stream {args.stream!r} is signed",
            hint="Give the key with --sign-key, or another stream.",
        )
    return publisher


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
        signer=_signer(args),
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
            signer=_signer(args),
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
    lines.append(f"{len(found) - left} objects of {args.stream} restored, {left} still damaged")
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


def attest(args: argparse.Namespace, console: Console) -> None:
    """The signed statement about the files of a version's checkout, as model_signing verifies it.

    pulse attest s3://bucket/run --stream policy --version 40 --key trainer.key -o policy-40.sig
    """
    key = AttestationKey(args.key)
    if args.output:
        check_output(Path(args.output), BUNDLE.encode(), force=args.force)
    store = open_lasting(args.store)
    statement = make_statement(
        store, args.stream, args.version, sharded=args.sharded, **reading(args, console)
    )
    bundle = key.bundle(statement)
    if not args.output:
        console.result(bundle, json.dumps(bundle))
        return
    predicate = statement["predicate"]
    text = f"{json.dumps(bundle)}\n".encode()
    write_output(Path(args.output), [text], BUNDLE.encode(), force=args.force)
    facts = predicate["pulse"] | {"files": len(predicate["resources"]), "output": args.output}
    line = (
        f"{args.output}: version {facts['version']} of {args.stream}, {facts['files']} files, "
        f"root {facts['root']}"
    )
    console.result(facts, line)


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
    plural = "" if len(problems) == 1 else "s"
    verdict = f"{len(problems)} problem{plural}" if problems else "all links are valid"
    if not reached:
        lines.append(
            "new workers cannot reach the newest version: see `pulse repair`, or publish one with "
            "an anchor"
        )
    facts = {"stream": args.stream, "versions": versions, "ok": not problems, "problems": problems}
    console.result(facts, *lines, f"{versions} versions of {args.stream} verified: {verdict}")
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


def _folds(args: argparse.Namespace, console: Console) -> Iterator[tuple[int, int]]:
    store, folds = open_lasting(args.store), tuple(args.folds)
    return fold_stream(store, args.stream, folds, signer=_signer(args), **reading(args, console))


def fold(args: argparse.Namespace, console: Console) -> None:
    """Make patches that span many versions, for workers that are far behind.

    pulse fold s3://bucket/run --stream policy --folds 8 64
    """
    made = list(_folds(args, console))
    lines = [f"fold {base}->{version}" for base, version in made]
    facts = {"stream": args.stream, "folds": [{"base": b, "version": v} for b, v in made]}
    console.result(facts, *lines, f"{len(made)} folds made")


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
        f"{len(plan.names)} objects {verb}, {format_bytes(plan.nbytes)}, {len(plan.versions)} "
        f"versions; version {plan.oldest} is the oldest kept"
    ]
    if plan.unfinished:
        lines.append(f"{format_bytes(plan.unfinished)} of unfinished files deleted")
    if plan.oldest < plan.wanted:
        lines.append(
            f"version {plan.wanted}, the oldest of the newest {args.keep}, is restored from the "
            "anchor of version "
            f"{plan.oldest}, so what is between stays (`pulse anchor` publishes a newer anchor)"
        )
    if plan.young:
        lines.append(
            f"{format_bytes(plan.young)} that nothing names stay for now: written in the last "
            "--grace seconds"
        )
    console.result(facts, *lines)


def keygen(args: argparse.Namespace, console: Console) -> None:
    """Make a private key and print its public key.

    pulse keygen trainer.key
    """
    signer = Signer.generate()
    signer.save(args.file)
    console.result({"public_key": signer.public_key, "file": args.file}, signer.public_key)


def print_published(done: Published, console: Console) -> None:
    names = "stream stream_id version root elements changed density dense_bytes patch_bytes "
    names += "anchor_bytes ratio reason seconds"
    facts = facts_of(done, *names.split())
    console.result(facts, f"{done}, root {done.root}")


def of_version(args: argparse.Namespace, checkpoint: Path, **facts: Any) -> dict[str, Any]:
    """What `Publisher.publish` is given of the version that is made of a checkpoint, by
    `version_options`, with ``facts`` among its metadata."""
    return {
        "dtype": args.dtype,
        "quantize": args.quantize,
        "anchor": args.anchor,
        "metadata": dict(args.metadata or ()) | facts,
        "files": _files_beside(args, checkpoint),
    }


def _files_beside(args: argparse.Namespace, checkpoint: Path) -> dict[str, bytes] | None:
    """What goes with the weights: those of the version before where a file of weights is published
    alone."""
    if args.no_files:
        return {}
    if args.file:
        return of_dtype(checked_files({Path(file).name: file for file in args.file}), args.dtype)
    return (
        of_dtype(files_of(current_version(checkpoint)), args.dtype) if checkpoint.is_dir() else None
    )


def _signer(args: argparse.Namespace) -> Signer | None:
    return Signer.load(args.sign_key) if args.sign_key else None


def open_lasting(address: str) -> Store:
    """The store at an address that outlives the command; raises InputError for another."""
    if address.startswith("memory:"):
        raise InputError(
            "a memory:// store is lost when the command ends",
            hint="Give a folder or an object store.",
        )
    return open_store(address)


def serve(args: argparse.Namespace, console: Console) -> None:
    """Show a folder to readers over HTTP, for workers without credentials; take their heartbeats.

    pulse serve /near --bind 0.0.0.0
    """
    from ..stores.server import FolderServer

    with (
        Monitor(args, console, "server", "serve") as monitor,
        FolderServer(args.folder, bind=args.bind, port=args.port, on_event=monitor) as server,
    ):
        monitor.ready = True
        facts = {"url": server.url, "folder": args.folder}
        console.result(facts, f"{args.folder} is served at {server.url}")
        threading.Event().wait()


def store_check(args: argparse.Namespace, console: Console) -> int:
    """Check that a store is safe to publish to.

    pulse store-check s3://bucket/run
    """
    store = open_store(args.store)
    if isinstance(store, LocalStore) and not store.root.is_dir():
        raise InputError(
            f"there is no folder {store.root}", hint="Check the path, or create the folder first."
        )
    findings = check(store)
    safe = all(held for _, held, _ in findings)
    lines = [
        f"{'ok  ' if held else 'FAIL'} {guarantee}{f': {seen}' * bool(seen)}"
        for guarantee, held, seen in findings
    ]
    lines.append(f"{args.store} is {'safe' if safe else 'NOT safe'} to publish to")
    if not safe and all(held or guarantee in _OF_CREATES for guarantee, held, _ in findings):
        lines.insert(
            -1, "one publisher alone may use it, by convention: it would not notice a second one"
        )
    names = ("guarantee", "held", "seen")
    facts = {"safe": safe, "findings": [dict(zip(names, each, strict=True)) for each in findings]}
    console.result(facts, *lines)
    return 0 if safe else 1


def check(store: Store) -> list[tuple[str, bool, str]]:
    """(guarantee, whether it held, what was seen) of each test of the suite. Some S3-compatible
    servers ignore If-None-Match and let both of two creates succeed: there a second publisher could
    overwrite a version unseen.

    Its objects are removed by their names: lists may be what does not work. Raises StoreError if
    the store cannot be used at all.
    """
    suite = _Suite(store)
    names = [name for name in vars(StoreConformance) if name.startswith("test_")]
    names.remove(_TOO_LONG_HERE)
    findings = []
    try:
        suite.new_store().put("reachable", b"")
        for name in names:
            try:
                getattr(suite, name)()
                seen = ""
            except (AssertionError, PulseError) as error:
                seen = " ".join(str(error).split()) or type(error).__name__
            findings.append((name.removeprefix("test_").replace("_", " "), not seen, seen))
    finally:
        for written in sorted(suite.written):
            with suppress(InputError):  # a test tries such names, too
                store.delete(written)
    return findings


class _Suite(StoreConformance):
    many_objects = 103

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = f"pulse-store-check/{secrets.token_hex(8)}"
        self._folders = 0
        self.written = set[str]()

    def new_store(self) -> Store:
        self._folders += 1
        return _Folder(self._store, f"{self._root}/{self._folders}", self.written)


class _Folder:
    """A folder of a store as a store of its own, which notes what it has written."""

    def __init__(self, store: Store, folder: str, written: set[str]) -> None:
        self._store = store
        self._folder = folder
        self._written = written

    def _inside(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _writing(self, name: str) -> str:
        self._written.add(self._inside(name))
        return self._inside(name)

    def put(self, name: str, data: Data) -> None:
        self._store.put(self._writing(name), data)

    def put_new(self, name: str, data: bytes) -> None:
        self._store.put_new(self._writing(name), data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._store.get(self._inside(name), start, stop)

    def head(self, name: str) -> ObjectInfo:
        return self._own(self._store.head(self._inside(name)))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        after = None if start_after is None else self._inside(start_after)
        return map(
            self._own, self._store.list(self._inside(folder) if folder else self._folder, after)
        )

    def delete(self, name: str) -> None:
        self._store.delete(self._inside(name))

    def _own(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(name=info.name.removeprefix(f"{self._folder}/"))
